"""What a completion may be: constraints on its tokens, step by step.

- `spec`: what a client asks for, as plain data;
- `compiler`: a spec made ready for one tokenizer; may take seconds, is kept for the next request;
- `matcher`: where one completion stands in its constraint: which tokens may come next.
"""
