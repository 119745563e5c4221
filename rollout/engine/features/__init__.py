"""Optional features of steps: a folder each. `all.py` lists them."""
