"""Measure the few-row matrix products on a CUDA machine and choose a configuration for each shape and row count.

    PYTHONPATH=.:kernels python scripts/tune_linear.py --out docs/results/linear.json [--shapes 8b] [--rows 1 8 32]
        [--ways gemv streamed]

For every shape and number of rows: cuBLAS, the table's configuration and each candidate, in CUDA graphs that go through
several copies of the weights, so that none of them is read from the L2 cache. Reports microseconds beside the floor,
the bytes of the weights over the read bandwidth measured in the same run, and the best of each split of K: one split is
chosen for all numbers of rows. Every candidate is checked against float64 once.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from rollout_kernels.linear_table import Config, Kind, linear_config
from rollout_kernels.triton_gemv import MOST_ROWS, GemvConfig
from rollout_kernels.triton_linear import LinearConfig, gate_up_silu, linear_parts

from rollout.bench.cuda_timing import graph_us, read_bandwidth

# name: (outputs, inputs, kind); gate_up outputs count both halves.
SHAPES: dict[str, dict[str, tuple[int, int, Kind]]] = {
    "8b": {
        "qkv": (6144, 4096, "parts"),
        "o": (4096, 4096, "parts"),
        "gate_up": (24576, 4096, "silu"),
        "down": (4096, 12288, "parts"),
        "head": (151936, 4096, "whole"),
    },
    "30b-a3b": {"qkv": (5120, 2048, "parts"), "o": (2048, 4096, "parts"), "head": (151936, 2048, "whole")},
    "1.7b": {
        "qkv": (4096, 2048, "parts"),
        "o": (2048, 2048, "parts"),
        "gate_up": (12288, 2048, "silu"),
        "down": (2048, 6144, "parts"),
    },
    "0.6b": {
        "qkv": (4096, 1024, "parts"),
        "o": (1024, 2048, "parts"),
        "gate_up": (6144, 1024, "silu"),
        "down": (1024, 3072, "parts"),
    },
}
_CACHE_BYTES = 400e6  # weights in rotation, several times the L2


def candidates(outputs: int, inputs: int, rows: int, kind: Kind, ways: list[str]) -> list[Config]:
    """Configurations worth a try, of the kernels named in `ways`."""
    return [config for way in ways for config in WAYS[way](outputs, inputs, rows, kind)]


def _pipelined(outputs: int, inputs: int, rows: int, kind: Kind) -> Sequence[Config]:
    """Enough items for the chip, tiles that fit in shared memory."""
    found = []
    for block_n, block_k, split, stages, programs in itertools.product(
        (64, 128), (64, 128), (1, 2, 4, 8), (4, 6, 8), (132, 192)
    ):
        outputs_a_tile = block_n // 2 if kind == "silu" else block_n
        items = (outputs // 2 if kind == "silu" else outputs) // outputs_a_tile * split
        tile_bytes = 2 * block_k * (block_n + max(16, rows))
        if inputs % (block_k * split) or (kind != "parts" and split > 1) or inputs // (block_k * split) < 3:
            continue
        if items < 64 or items < programs - 60 or tile_bytes * stages * (1 if programs == 132 else 2) > 220_000:
            continue
        found.append(LinearConfig(block_n, block_k, split, 4, stages, programs))
    return found


def _streamed(outputs: int, inputs: int, rows: int, kind: Kind) -> Sequence[Config]:
    """One or two rings of tiles a multiprocessor, as large as leaves room for other kernels or not."""
    found = []
    for (block_n, warps), block_k, split, programs, ring in itertools.product(
        ((64, 4), (128, 4), (192, 4), (128, 8), (256, 4), (256, 8)),
        (64, 128),
        (1, 2, 4, 8),
        (96, 128, 132, 264),
        (100_000, 160_000, 210_000),
    ):
        items = -(-outputs // block_n) * split
        tile_bytes = 2 * block_k * (block_n + max(8, rows))
        ring_bytes = ring // (2 if programs > 132 else 1)
        if inputs % (block_k * split) or (kind != "parts" and split > 1) or items < 64 or ring_bytes < 3 * tile_bytes:
            continue
        if items < programs and programs != 132:
            continue
        # Many rows are read anew by every tile, so that tall ones pay; few rows leave wide sums without use.
        if (rows < 64 and (warps == 8 or split == 8)) or block_n * rows > 6144 * warps:
            continue
        found.append(LinearConfig(block_n, block_k, split, warps, ring_bytes // tile_bytes, programs, True))
    return found


def _gemv(outputs: int, inputs: int, rows: int, kind: Kind) -> Sequence[Config]:
    """Whole rows by many small programs, for the fewest rows."""
    found = []
    for split, neurons, at_once, warps in itertools.product((1, 2, 3), (1, 2), (4, 8, 16), (4, 8)):
        reads = at_once * neurons * (2 if kind == "silu" else 1)
        if (
            rows > MOST_ROWS
            or inputs % (256 * at_once * split)
            or not 8 <= reads <= 16
            or (kind != "parts" and split > 1)
        ):
            continue
        found.append(GemvConfig(split, neurons, at_once, warps))
    return found


WAYS: dict[str, Callable[[int, int, int, Kind], Sequence[Config]]] = {
    "pipelined": _pipelined,
    "streamed": _streamed,
    "gemv": _gemv,
}


def measure(name: str, outputs: int, inputs: int, kind: Kind, rows: int, bandwidth: float, ways: list[str]) -> dict:
    """Time cuBLAS, the table's configuration and the best one for each split, for one shape and number of rows."""
    copies = max(2, int(_CACHE_BYTES // (outputs * inputs * 2)) + 1)
    weights = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)]
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    run = gate_up_silu if kind == "silu" else linear_parts
    exact = _exact(x, weights[0], kind)
    table = linear_config(outputs, inputs, kind, rows)
    tried = candidates(outputs, inputs, rows, kind, ways)
    configs = list(dict.fromkeys([*([] if table is None else [table]), *tried]))
    # Compile side by side; descriptors of operands need the device's context in the thread that makes them.
    with ThreadPoolExecutor(14, initializer=torch.cuda.synchronize) as pool:
        usable = list(pool.map(lambda config: _compiles(run, x, weights[0], config), configs))
    timed: dict[Config, float] = {}
    for config in itertools.compress(configs, usable):
        got = run(x, weights[0], config).double()
        error = (((got if kind == "silu" else got.sum(0)) - exact).norm() / exact.norm()).item()
        assert error < 1e-2, (name, config, error)
        timed[config] = graph_us(functools.partial(_all, run, x, weights, config), runs=5) / copies
    splits = {}
    for split in sorted({config.split for config in timed}):
        best = min((config for config in timed if config.split == split), key=timed.__getitem__)
        splits[split] = {"us": timed[best], **dataclasses.asdict(best)}
    row = {
        "shape": name,
        "rows": rows,
        "floor_us": outputs * inputs * 2 / bandwidth * 1e6,
        "cublas_us": graph_us(lambda: [x @ w.t() for w in weights]) / copies,
        "table_us": None if table is None else timed[table],  # none: it leaves the product to cuBLAS
        "best_us": min(timed.values()),
    }
    print(json.dumps({**row, "splits": {split: round(entry["us"], 2) for split, entry in splits.items()}}), flush=True)
    return {**row, "splits": splits}


def _all(run: Callable[..., torch.Tensor], x: torch.Tensor, weights: list[torch.Tensor], config: LinearConfig) -> None:
    for weight in weights:
        run(x, weight, config)


def _exact(x: torch.Tensor, weight: torch.Tensor, kind: Kind) -> torch.Tensor:
    product = x.double() @ weight.double().T
    if kind != "silu":
        return product
    gate, up = product.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def _compiles(run, x, weight, config) -> bool:
    from triton.runtime.errors import OutOfResources

    try:
        run(x, weight, config)
    except OutOfResources:
        return False
    return True


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["8b"], choices=list(SHAPES))
    parser.add_argument("--names", nargs="+", help="only these products")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="kernels, beside the table's")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    bandwidth = read_bandwidth()
    print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s", flush=True)
    results = []
    for family in args.shapes:
        for name, (outputs, inputs, kind) in SHAPES[family].items():
            if args.names and name not in args.names:
                continue
            for rows in args.rows:
                results.append(measure(f"{family}/{name}", outputs, inputs, kind, rows, bandwidth, args.ways))
                args.out.write_text(json.dumps({"read_tbps": bandwidth / 1e12, "rows": results}, indent=1))


if __name__ == "__main__":
    main()
