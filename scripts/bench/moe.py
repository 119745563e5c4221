"""Finds the number of tokens up to which decoding a layer of experts by output is faster on this machine.

Needs a CUDA device. It measures both paths in microseconds per layer, in a CUDA graph that rotates over 8 layers with
new routing for each. The floor only reads the chosen experts. `scripts.bench.moe_kernels` measures more;
`scripts.tune.moe` searches for better plans and writes the table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rollout_kernels.moe.dispatch import MoEShape, run_experts
from rollout_kernels.moe.formats import FORMATS, Format

from scripts.bench.cuda_timing import graph_us
from scripts.bench.moe_layers import SHAPES, floor_us, make_layers, make_tokens, plans
from scripts.bench.output import DEFAULT_FOLDER, write_results

LAYERS = 8
TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every shape and format, print the rows and the crossovers, and write them."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.moe", description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["qwen3-30b-a3b"])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["plain"])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--out", type=Path, default=DEFAULT_FOLDER / "moe_crossover.json")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("scripts.bench.moe needs a CUDA device; on a CPU the kernels are only interpreted", file=sys.stderr)
        return 1
    rows: list[Row] = []
    for name in args.shapes:
        for format in args.formats:
            found = measure(SHAPES[name], format, sorted(args.tokens))
            told = [{"shape": name, "format": format, **row} for row in found]
            rows += told
            print(f"{name} {format}: {verdict(told)}", flush=True)
            write_results(args.out, rows, device=torch.cuda.get_device_name())
    return 0


def measure(shape: MoEShape, format: Format, counts: Iterable[int]) -> list[Row]:
    """A row for each number of tokens: microseconds a layer by each path, the floor, and the path of the table."""
    layers, rows = make_layers(shape, format, LAYERS), []
    for tokens in counts:
        batches = [make_tokens(shape, tokens, seed=1000 * i + tokens) for i in range(LAYERS)]
        chosen = plans(shape, format, tokens)
        row: Row = {"tokens": tokens, "floor_us": floor_us(layers, batches), "chosen": chosen["chosen"].path}
        row["distinct"] = sum(batch.distinct for batch in batches) / LAYERS
        pairs = list(zip(layers, batches, strict=True)) * (4 if tokens <= 8 else 1)
        for path in ("warp", "grouped"):
            if (plan := chosen.get(path)) is not None:
                works = [
                    lambda p=plan, a=layer, b=batch: run_experts(b.x_TH, b.routing, a.gate_up, a.down, p)  # type: ignore[misc]
                    for layer, batch in pairs
                ]
                row[f"{path}_us"] = graph_us(*works)
        rows.append(row)
        print({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    return rows


def verdict(rows: Sequence[Row]) -> str:
    """The number of tokens up to which the path by output is faster, and whether the table agrees."""
    both = [row for row in rows if "warp_us" in row and "grouped_us" in row]
    faster = [row["warp_us"] < row["grouped_us"] for row in both]
    last = next((i for i, by_output in enumerate(faster) if not by_output), len(faster))
    if not both:
        return "nothing to compare"
    said = f"by output up to {both[last - 1]['tokens']} tokens" if last else "never by output"
    if last < len(both):
        said += f", by expert from {both[last]['tokens']}"
    others = [
        row["tokens"] for row, by_output in zip(both, faster, strict=True) if (row["chosen"] == "warp") != by_output
    ]
    return said + (f"; the table chooses the slower path at {others}" if others else "; the table agrees")


if __name__ == "__main__":
    sys.exit(main())
