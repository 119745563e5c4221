"""The engine: from a request to its tokens, two steps in flight."""
