"""`python -m scripts.bench.peers.child JOB`: measures one engine in its own process.

Lines on stdout that begin with `ROW ` are for the parent: a JSON object each. Other lines are output of the engine.
"""

import contextlib
import importlib.util
import json
import os
import sys
import time
import traceback
from typing import Any

from scripts.bench.peers.experiments import Engine, run_job
from scripts.bench.peers.job import SHARDED, SPECULATING, VLLM, Job

PREFIX = "ROW "
_ERROR_CHARS = 500


def make_engine(job: Job) -> Engine:
    """The engine of a job, ready to generate. The modules of other engines are not imported."""
    if job.gpus > 1 and job.engine not in SHARDED:
        raise ValueError(f"{job.engine} runs on one GPU: with {job.gpus} take {' or '.join(SHARDED)}")
    if "repeats" in job.experiments and (job.gpus > 1 or len(job.experiments) > 1):
        raise ValueError("repeats has weights of its own, on one GPU: run it without other experiments")
    if job.workers > 1 and job.engine != "service":
        raise ValueError(f"{job.engine} has no workers: with {job.workers} take service")
    if job.engine in ("ours", "ours-blocking", "ours-apart", "ours-fallback"):
        from scripts.bench.peers.ours_engine import OursEngine, keep_shared_apart

        if job.engine == "ours-apart":
            keep_shared_apart()
        fallback = job.engine == "ours-fallback"
        return OursEngine(job, depth=1 if job.engine == "ours-blocking" else 2, fallback=fallback)
    if job.engine in SPECULATING:
        from scripts.bench.peers.ours_engine import OursEngine, speculation_changes

        changes = speculation_changes(job.engine.removeprefix("ours-"), job.most_rows, job.drafts)
        return OursEngine(job, depth=2, changes=changes)
    if job.engine == "service":
        from scripts.bench.peers.service_engine import ServiceEngine

        return ServiceEngine(job)  # type: ignore[return-value]  # no `serve`, no `repeat`
    if job.engine in VLLM:
        from scripts.bench.peers.vllm_engine import VllmEngine

        return VllmEngine(job)
    if job.engine == "transformers":
        from scripts.bench.peers.transformers_engine import TransformersEngine

        return TransformersEngine(job)  # type: ignore[return-value]  # no `serve`, no `repeat`
    raise ValueError(f"no engine is called {job.engine}")


def measure_ceilings() -> dict[str, Any]:
    """Name and bandwidths of this machine's GPU."""
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
    """Send a row to the parent."""
    print(PREFIX + json.dumps(row), flush=True)


def measure(job: Job) -> int:
    """Make the engine, run its experiments, send every row; returns the exit status."""
    began_s = time.perf_counter()
    if job.engine in VLLM and importlib.util.find_spec("vllm") is None:
        say({"skipped": "vllm is not importable"})
        return 0
    engine = make_engine(job)
    say({"facts": {**engine.facts(), "ready_s": time.perf_counter() - began_s}})
    try:
        for row in run_job(engine, job):
            say(row)
    # Also after Ctrl-C: our worker holds the GPU that the next engine needs.
    except BaseException:
        with contextlib.suppress(Exception):  # the first error counts
            engine.close()
        raise
    engine.close()
    return 0


def main(argv: list[str]) -> int:
    """Run the job. An error becomes a row, and its trace goes to stderr."""
    try:
        if argv == ["ceilings"]:
            say({"ceilings": measure_ceilings()})
            return 0
        return measure(Job.from_json(argv[0]))
    # A peer may raise any error; the others must still be measured.
    except Exception as error:
        traceback.print_exc()
        say({"error": f"{type(error).__name__}: {error}"[:_ERROR_CHARS]})
        return 1


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # some engines take long to shut down, or leave threads running
