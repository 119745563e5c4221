"""Benchmarks; each module runs alone (`python -m scripts.bench.NAME`), says what it measures, and writes JSON."""
