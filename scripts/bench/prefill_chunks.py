"""Measures how large a prefill step should be: tokens/s of prompts, and the gaps of rows that decode meanwhile.

    PYTHONPATH=.:kernels python -m scripts.bench.prefill_chunks --out FILE
        [--shape qwen3-8b] [--chunks 1024 2048 4096 8192] [--arrivals-per-s 6 12]

One engine for all sizes: it is built for the largest. The experiments are `prefill` and `arrivals` of `compare_peers`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from scripts.bench.output import print_table, write_results
from scripts.bench.peers.experiments import run_job
from scripts.bench.peers.job import Job
from scripts.bench.peers.ours_engine import OursEngine

_COLUMNS = ("chunk_tokens", "experiment", "scale", "prefill_tokens_per_s", "latency_s", "first_token_s", "gap_p99_ms")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every size, print the rows and write them."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.prefill_chunks", description=__doc__)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--chunks", nargs="+", type=int, default=[1024, 2048, 4096, 8192])
    parser.add_argument("--requests", type=int, default=48, help="of prefill")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens, of prefill")
    parser.add_argument("--arrivals-per-s", nargs="*", type=float, default=[6.0, 12.0])
    parser.add_argument("--arrivals-s", type=float, default=12.0)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    job = Job(
        shape=args.shape,
        device=args.device,
        experiments=("prefill", "arrivals") if args.arrivals_per_s else ("prefill",),
        repeats=2,
        prefill_requests=args.requests,
        prefill_prompt=args.prompt,
        arrivals_per_s=tuple(args.arrivals_per_s),
        arrivals_s=args.arrivals_s,
        job_rows=args.rows,
    )
    engine, rows = OursEngine(job, depth=2, changes={"prefill_chunk_tokens": max(args.chunks)}), []
    scheduler = engine.engine.scheduler
    for tokens in args.chunks:
        scheduler.limits = replace(scheduler.limits, chunk_tokens=tokens)
        for row in run_job(engine, replace(job, seeds_from=1000 * tokens)):
            rows.append({"chunk_tokens": tokens, **row})
            print(rows[-1], flush=True)
    engine.close()
    print_table(f"prefill steps of {args.shape}", [{name: row.get(name) for name in _COLUMNS} for row in rows])
    write_results(args.out, rows, shape=args.shape)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
