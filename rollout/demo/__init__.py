"""The demo: a tiny model that counts, and the check that its completions count without a mistake."""
