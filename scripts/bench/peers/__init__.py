"""Engines for a comparison: ours, the service around it, vLLM and transformers, in turn on the same work.

    workloads     prompts and lengths, the same for every engine
    experiments   the work for an engine and the results; independent of the engines
    floors        the time to read the bytes
    *_engine      one engine each, behind `experiments.Engine`
    child         one engine in its own process, so that its memory is free before the next one starts

`scripts.bench.compare_peers` runs them. A child may run in another Python (vLLM's, for example), so it imports only the
standard library, numpy and its engine.
"""
