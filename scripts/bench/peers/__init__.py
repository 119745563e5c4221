"""Engines side by side: ours, the service around it, vLLM and transformers, given the same work one after the other.

    workloads     prompts and lengths, the same for every engine
    experiments   what is asked of an engine and what is reported; knows no engine
    floors        what the bytes alone would cost
    *_engine      one engine each, behind `experiments.Engine`
    child         one engine in a process of its own, so that its memory is given back before the next one starts

`scripts/bench/compare_peers.py` runs them. What a child of another Python imports (vLLM's may be one) is the
standard library
and numpy, besides the engine itself.
"""
