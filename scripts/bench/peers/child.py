"""`python -m scripts.bench.peers.child JOB`: one engine in a process of its own; says what it finds on stdout.

Lines that begin with `ROW ` are for the parent: a JSON object each. Everything else is the engine's own talk.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import time
import traceback
from typing import Any

from scripts.bench.peers.experiments import Engine, run_job
from scripts.bench.peers.job import Job

PREFIX = "ROW "
_ERROR_CHARS = 500


def make_engine(job: Job) -> Engine:
    """The engine that a job names, ready to generate. Imports nothing of the others."""
    if job.engine in ("ours", "ours-blocking", "ours-grouped"):
        from scripts.bench.peers.ours_engine import OursEngine, group_experts

        if job.engine == "ours-grouped":
            group_experts()
        return OursEngine(job, depth=1 if job.engine == "ours-blocking" else 2)
    if job.engine == "service":
        from scripts.bench.peers.service_engine import ServiceEngine

        return ServiceEngine(job)
    if job.engine == "vllm":
        from scripts.bench.peers.vllm_engine import VllmEngine

        return VllmEngine(job)
    if job.engine == "transformers":
        from scripts.bench.peers.transformers_engine import TransformersEngine

        return TransformersEngine(job)
    raise ValueError(f"no engine is called {job.engine}")


def measure_ceilings() -> dict[str, Any]:
    """Bandwidths of this machine's GPU, and what it is."""
    import torch

    if not torch.cuda.is_available():
        return {}
    from scripts.bench.cuda_timing import read_bandwidth, sum_bandwidth

    return {
        "read_tbps": read_bandwidth() / 1e12,
        "sum_tbps": sum_bandwidth() / 1e12,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def say(row: dict[str, Any]) -> None:
    """Tell the parent."""
    print(PREFIX + json.dumps(row), flush=True)


def measure(job: Job) -> int:
    """Make the engine, run its experiments, tell every row; returns the exit status."""
    began_s = time.perf_counter()
    if job.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        say({"skipped": "vllm is not importable"})
        return 0
    engine = make_engine(job)
    say({"facts": {**engine.facts(), "ready_s": time.perf_counter() - began_s}})
    try:
        for row in run_job(engine, job):
            say(row)
    # Also after Ctrl-C: a worker of ours holds the GPU that the next engine needs.
    except BaseException:
        with contextlib.suppress(Exception):  # what went wrong first counts
            engine.close()
        raise
    engine.close()
    return 0


def main(argv: list[str]) -> int:
    """Do what the job says; an error is told as a row, and its trace goes to stderr."""
    try:
        if argv == ["ceilings"]:
            say({"ceilings": measure_ceilings()})
            return 0
        return measure(Job.from_json(argv[0]))
    # Whatever a peer may raise: the others are still to be measured.
    except Exception as error:
        traceback.print_exc()
        say({"error": f"{type(error).__name__}: {error}"[:_ERROR_CHARS]})
        return 1


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # some engines take long to take themselves apart, or leave threads behind
