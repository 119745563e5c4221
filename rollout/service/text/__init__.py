"""Text: the tokenizer, its process, text out of tokens, stop strings."""
