"""Runs the demo with the blocking loop and with the pipeline, in turns, in one run.

Each turn is a worker process and a trainer process, as in `rollout demo`; every token is checked. On a CPU the model
shares its cores with the host's bookkeeping, so the gain is a lower bound for a GPU.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.bench.output import print_table, write_results


def measure(depth: int, tokens: int, n: int) -> dict[str, Any]:
    """One turn of the demo at a pipeline depth."""
    from rollout.cli.main import main as rollout

    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--out", folder, "--tokens", str(tokens), "--n", str(n), "--no-wandb"]
        if rollout(["demo", *arguments, "--pipeline-depth", str(depth)]) != 0:
            raise RuntimeError("the demo failed; see its output above")
        report = json.loads((Path(folder) / "report.json").read_text())
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    busy = [line for line in lines if line["rollout/rows"] >= n and not line.get("final")]
    return {
        "depth": depth,
        "tokens_per_s": report["tokens"] / report["seconds"],
        "active_pct": statistics.median(line["gpu/active_pct"] for line in busy),
        "decode_ms": statistics.median(line["step/decode_ms"] for line in busy),
        "bookkeeping_ms": statistics.median(line["step/bookkeeping_ms"] for line in busy),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.pipeline", description=__doc__)
    parser.add_argument("--tokens", type=int, default=16_400)
    parser.add_argument("--n", type=int, default=4, help="completions of each of the three prompts")
    parser.add_argument("--turns", type=int, default=2, help="turns of each depth")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args(argv)
    turns = [depth for _ in range(args.turns) for depth in (1, 2)]
    results = []
    for number, depth in enumerate(turns, start=1):  # no progress bar: each turn has its own
        print(f"turn {number} of {len(turns)}: depth {depth}", file=sys.stderr, flush=True)
        results.append(measure(depth, args.tokens, args.n))
    print_table("the demo, blocking (depth 1) and pipelined (depth 2)", results)
    rate = {d: statistics.median(row["tokens_per_s"] for row in results if row["depth"] == d) for d in (1, 2)}
    print(f"pipelined over blocking: {rate[2] / rate[1]:.3f}", file=sys.stderr)
    if args.out is not None:
        write_results(args.out, results, pipelined_over_blocking=rate[2] / rate[1])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
