"""Orders of trainers to all workers: pauses, sleep, adapters, weights, and how a restarted worker catches up."""
