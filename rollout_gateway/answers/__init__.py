"""Turns the tokens of a completion into the fields of an answer: text, reasoning, calls, log-probs, experts."""
