"""From the tokens of a completion to what an answer shows: text, reasoning, calls, log-probs, experts."""
