"""Measures the resident memory of a worker over two million tokens. It should be flat after the start.

A worker process serves the counting checkpoint. A client requests groups of completions again and again, and
acknowledges the results. The worker's resident set is read from /proc after each group. The exit status is 1 if it
grows by more than `MOST_GROWTH` over the second half.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout.process.progress import stage
from scripts.bench.output import DEFAULT_FOLDER, print_table, write_results
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import start_worker

#: Allowed growth, MiB per million tokens.
MOST_GROWTH = 3.0


def resident_mib(pid: int) -> float:
    """Resident set of a process, MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the results."""
    from rollout.demo.run import CHECKPOINTS

    parser = argparse.ArgumentParser(prog="python -m scripts.bench.memory", description=__doc__)
    parser.add_argument("--tokens", type=int, default=2_000_000, help="tokens to generate in total")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a completion")
    parser.add_argument("--out", type=Path, default=DEFAULT_FOLDER / "memory.json")
    args = parser.parse_args(argv)
    wave = args.rows * args.length
    waves = -(-args.tokens // wave)
    rows: list[dict[str, Any]] = []
    with stage("starting a worker"):
        started = start_worker(
            CHECKPOINTS / "ones", max_rows=args.rows, max_context_tokens=args.length + 64, wandb=False
        )
    with started as worker:
        with RolloutClient(worker.endpoint, timeout_s=600) as client, stage("generating") as advance:
            for i in range(waves):
                requests = [
                    {
                        "prompt": f"{17 + 13 * (i * args.rows + j)}:",
                        "n": 4,
                        "max_tokens": args.length,
                        "sampling": {"seed": j},
                    }
                    for j in range(args.rows // 4)
                ]
                results = client.generate_many(requests)
                assert all(len(c.token_ids) == args.length for result in results for c in result.completions)
                client.ack([result.id for result in results])  # otherwise the worker keeps them
                rows.append({"tokens": (i + 1) * wave, "resident_mib": resident_mib(worker.pid)})
                advance(i + 1, waves)
    print_table("resident memory of the worker", rows)
    later = rows[len(rows) // 2 :]
    slope = float(np.polyfit([r["tokens"] for r in later], [r["resident_mib"] for r in later], 1)[0]) * 1e6
    print(f"growth over the second half: {slope:.2f} MiB per million tokens")
    write_results(args.out, [rows[0], rows[-1]], growth_mib_per_million_tokens=slope)
    return 0 if slope <= MOST_GROWTH else 1


if __name__ == "__main__":
    raise SystemExit(main())
