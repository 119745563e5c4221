"""Measures decode attention of rows that share a prefix, on a CUDA machine: microseconds per layer, and the floor.

    PYTHONPATH=.:kernels python -m scripts.bench.group_attention --out scripts/bench/results/group_attention.json
        [--heads 32/8 32/4] [--shapes 32x16K+2Kn8 256x4K+512n8] [--block-m 16 32 64] [--fp8]

A shape is rows, positions that the rows of a group share, positions of each row alone, rows of a group. `n1` shares
nothing: there the cost of sharing is that of a larger plan. The floor reads every page once at the bandwidth of the
same run; `alone` is the same kernel when nothing is said of what rows share.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rollout_kernels.attention.segments import make_segments, no_segments
from rollout_kernels.attention.triton_decode import decode_attention, default_decode_config
from rollout_kernels.attention.triton_decode_plan import DecodeConfig, DecodeWork, plan_decode_work

from rollout.engine.step.shared_pages import LEAST_POSITIONS
from scripts.bench.attention import DIM, Problem, relative
from scripts.bench.cuda_timing import graph_us, read_bandwidth
from scripts.bench.output import write_results

SHAPES = (
    "8x16K+2Kn8", "32x16K+2Kn8", "128x4K+1Kn8", "8x4K+2Kn8", "32x4K+2Kn8", "32x4K+2Kn2", "32x512+512n2", "32x256+1Kn8",
    "32x1K+3Kn32", "32x6K+0n1", "8x18K+0n1", "256x512+512n1",
)  # fmt: skip
_ROTATED_BYTES = 240e6


def parse(shape: str) -> tuple[int, int, int, int]:
    """Rows, shared positions, positions alone, rows of a group."""
    found = re.fullmatch(r"(\d+)x(\d+)(K?)\+(\d+)(K?)n(\d+)", shape)
    if found is None:
        raise ValueError(f"shape {shape!r} is not like 32x16K+2Kn8")
    rows, shared, shared_k, own, own_k, group = found.groups()
    return int(rows), int(shared) << 10 * bool(shared_k), int(own) << 10 * bool(own_k), int(group)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every shape, print the rows and write them."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.group_attention", description=__doc__)
    parser.add_argument("--heads", nargs="+", default=["32/8", "32/4"])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--block-m", nargs="+", type=int, default=[16, 32])
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--fp8", action="store_true", help="KV as e4m3 codes with scales")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    bandwidth, rows = read_bandwidth(), []
    for heads in args.heads:
        for shape in args.shapes:
            rows.append({"heads": heads, "shape": shape, "fp8": args.fp8, **measure(args, heads, shape, bandwidth)})
            found = rows[-1]
            times = "  ".join(
                f"{name} {entry['us']:.1f} (plan {entry['plan_us']:.1f})" for name, entry in found["us"].items()
            )
            print(
                f"{heads:5} {shape:>14}  floor {found['floor_us']:7.1f}  {times}  error {found['error']:.1e}",
                flush=True,
            )
    write_results(args.out, rows, device=torch.cuda.get_device_name(), read_tbps=bandwidth / 1e12)
    return 0


def measure(args: argparse.Namespace, heads_of: str, shape: str, bandwidth: float) -> dict[str, Any]:
    """One shape: microseconds a layer alone and shared, by the height of a tile."""
    heads, kv_heads = map(int, heads_of.split("/"))
    rows, shared, own, n = parse(shape)
    distinct = (rows * own + rows // n * shared) if n > 1 else rows * (own + shared)
    distinct_bytes = distinct * kv_heads * 2 * (DIM + 4 if args.fp8 else 2 * DIM)
    layers = min(64, max(2, math.ceil(_ROTATED_BYTES / distinct_bytes)))
    problem = Problem([shared + own] * rows, heads, kv_heads, args.page_size, layers, args.fp8)
    pages = shared // args.page_size
    common = []
    for row in range(1, rows):
        same = n > 1 and row % n
        common.append(shared if same else 0)
        if same:
            problem.table[row, :pages] = problem.table[row - 1, :pages]
    base = default_decode_config(DIM, torch.bfloat16, rows, args.fp8)
    q = problem.queries(rows)
    alone, plan_us = time_of(problem, base, None, q)
    expected = attend(problem, 0, plan(problem, base, None), q).double()
    times = {"alone": {"us": alone, "plan_us": plan_us}}
    worst = 0.0
    for block_m in args.block_m:
        config = dataclasses.replace(base, block_m=block_m, block_own=base.block_m)
        at_once = config.rows_at_once(heads // kv_heads)
        if at_once < 2:
            continue
        segments = make_segments(common, rows, at_once, LEAST_POSITIONS)
        words = torch.from_numpy(no_segments(rows) if segments is None else segments).cuda()
        us, plan_us = time_of(problem, config, words, q)
        times[f"m{block_m}"] = {"us": us, "plan_us": plan_us, "rows_at_once": at_once}
        worst = max(worst, relative(attend(problem, 0, plan(problem, config, words), q), expected))
    return {"floor_us": distinct_bytes / bandwidth * 1e6, "us": times, "error": worst}


def plan(problem: Problem, config: DecodeConfig, segments: torch.Tensor | None) -> DecodeWork:
    """The plan of one step."""
    group = problem.heads // problem.kv_heads
    return plan_decode_work(
        problem.lens, problem.kv_heads, group=group, window=None, config=config, segments_SW=segments
    )


def attend(problem: Problem, layer: int, work: DecodeWork, q: torch.Tensor) -> torch.Tensor:
    """One layer."""
    (k, v), scales = problem.kv[layer], problem.scales[layer]
    return decode_attention(
        q, k, v, problem.table, problem.lens, scale=problem.scale, window=None, scales_P2GS=scales, work=work
    )


def time_of(
    problem: Problem, config: DecodeConfig, segments: torch.Tensor | None, q: torch.Tensor
) -> tuple[float, float]:
    """Microseconds of a layer, and of the plan."""
    work = plan(problem, config, segments)

    def layers() -> None:
        for layer in range(len(problem.kv)):
            attend(problem, layer, work, q)

    return graph_us(layers) / len(problem.kv), graph_us(lambda: plan(problem, config, segments))


if __name__ == "__main__":
    raise SystemExit(main())
