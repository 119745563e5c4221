"""Measures decode steps of rows that share prompts, with and without group attention, on a CUDA machine.

    PYTHONPATH=.:kernels python -m scripts.bench.group_steps --out FILE
        [--shape qwen3-8b] [--works 32x16384n8 64x4096n8 32x4096n1] [--tile 64 4]

A work is rows, tokens of a prompt, completions of each prompt. All rows decode together for `--new` tokens; the time is
that of a decode step with all rows, device and wall. Both engines run in turn in the same process.

`--tile` replaces the tile of rows that share pages (`SHARED_TILES`) by another number of query heads and of warps. A
tile of 32 holds 4 rows of Qwen3-30B-A3B, so groups of 8 rows read their shared KV twice; a tile of 64 holds all 8:

    ... --shape qwen3-30b-a3b --works 32x16384n8 64x4096n8 32x4096n1 --out tile_32.json
    ... --shape qwen3-30b-a3b --works 32x16384n8 64x4096n8 32x4096n1 --out tile_64.json --tile 64 4

The wider tile pays if the steps of n8 become shorter, and the steps of n1, where rows share nothing, hardly longer.
"""

from __future__ import annotations

import argparse
import gc
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rollout_kernels.attention.segments import SHARED_TILES, SharedTile

from scripts.bench.output import print_table, write_results
from scripts.bench.peers.job import Job
from scripts.bench.peers.ours_engine import OursEngine
from scripts.bench.peers.workloads import Work, nested_prompts


def parse(work: str) -> tuple[int, int, int]:
    """Rows, tokens of a prompt, completions of a prompt."""
    found = re.fullmatch(r"(\d+)x(\d+)n(\d+)", work)
    if found is None:
        raise ValueError(f"work {work!r} is not like 32x16384n8")
    rows, prompt, n = map(int, found.groups())
    return rows, prompt, n


def measure(args: argparse.Namespace, group_attention: bool) -> list[dict[str, Any]]:
    """The steps of all works by one engine."""
    works = [parse(work) for work in args.works]
    rows, longest = max(work[0] for work in works), max(work[1] for work in works)
    job = Job(shape=args.shape, rows=(rows,), prompt=longest, new=args.new)
    changes = {"group_attention": group_attention, "kv_dtype": args.kv_dtype}
    engine = OursEngine(job, depth=2, changes=changes)
    found = []
    for count, prompt, n in works:
        prompts = nested_prompts(count // n, prompt, prompt, engine.vocab)
        work = Work([prompts[i // n] for i in range(count)], [args.new] * count)
        engine.generate(work)  # leaves the prompts in the prefix cache
        engine.generate(work)
        steps = engine.last_steps()
        row = {"rows": count, "prompt": prompt, "n": n, "group_attention": group_attention, **steps}
        found.append(row)
        print({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}, flush=True)
    engine.close()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both engines, print the rows and write them."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.group_steps", description=__doc__)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--works", nargs="+", default=["32x16384n8", "64x4096n8", "32x4096n1"])
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tile", nargs=2, type=int, metavar=("HEADS", "WARPS"), help="of rows that share pages")
    args = parser.parse_args(argv)
    if args.tile is not None:
        SHARED_TILES[args.kv_dtype != "auto"] = SharedTile(*args.tile)
    rows = []
    for group_attention in (False, True):
        rows += measure(args, group_attention)
        gc.collect()
        torch.cuda.empty_cache()
    print_table(f"decode steps of {args.shape}, ms", rows)
    facts = {"shape": args.shape, "kv_dtype": args.kv_dtype, "tile": args.tile}
    write_results(args.out, rows, **facts)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
