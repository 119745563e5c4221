"""Drafts: next tokens of a row that a step verifies; which rows get them, who makes them, what they cost."""
