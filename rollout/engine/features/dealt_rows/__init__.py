"""Rows dealt to ranks: says whose prompts are in a step."""
