"""Text of a model: its tokenizer and chat template, and text out of tokens. The worker and the gateway use it."""
