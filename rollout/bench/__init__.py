"""Benchmarks of the service; each module runs alone (`rollout bench NAME`), says what it measures, and writes JSON."""
