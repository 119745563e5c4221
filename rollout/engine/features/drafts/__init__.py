"""Drafts: next tokens of a row that a step verifies; draft rows, drafters, and costs of steps."""
