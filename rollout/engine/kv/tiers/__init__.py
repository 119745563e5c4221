"""Tiers of KV beside the pool: host memory and a folder on disk. `rollout/engine/kv/tier.py` is the seam to them."""
