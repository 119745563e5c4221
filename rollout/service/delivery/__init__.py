"""Delivery: completions, results that are kept, streams, replies."""
