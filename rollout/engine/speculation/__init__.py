"""Guesses of the next tokens: drafters, which know a sequence's committed tokens and no engine."""
