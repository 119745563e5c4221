"""Drafts: next tokens of a row that a step verifies; their rows, their drafters, their costs."""
