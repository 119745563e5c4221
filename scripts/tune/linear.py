"""Measures the few-row matrix products on a CUDA machine and chooses a configuration for each shape and row count.

    PYTHONPATH=.:kernels python -m scripts.tune.linear --out FILE [--shapes 8b] [--rows 1 8 32]
        [--ways gemv streamed]

For every shape and number of rows it times cuBLAS, the table's configuration and each candidate in CUDA graphs. The
graphs rotate over several copies of the weights, so that no weights are read from the L2 cache. It reports
microseconds, the floor (the bytes of the weights over the read bandwidth of the same run), the best time for each split
of K (one split is chosen for all numbers of rows), and the best configuration of all. The best of each split are
printed. Every candidate is checked against float64 once.
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
from typing import Any

import torch
from rollout_kernels.linear.table import Config, Kind, linear_config
from rollout_kernels.linear.triton_linear import LinearConfig, gate_up_silu, linear, linear_parts

from scripts.bench.cuda_timing import graph_us, read_bandwidth
from scripts.bench.linear_candidates import SHAPES, WAYS, candidates
from scripts.bench.output import write_results

_CACHE_BYTES = 400e6  # weights in rotation, several times the L2


def measure(name: str, outputs: int, inputs: int, kind: Kind, rows: int, bandwidth: float, ways: list[str]) -> dict:
    """Time cuBLAS, the table's configuration and the best one for each split, for one shape and number of rows."""
    copies = max(2, int(_CACHE_BYTES // (outputs * inputs * 2)) + 1)
    weights = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)]
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    run: Callable[..., torch.Tensor] = {"silu": gate_up_silu, "whole": linear, "parts": linear_parts}[kind]
    exact = _exact(x, weights[0], kind)
    table = linear_config(outputs, inputs, kind, rows)
    tried = candidates(outputs, inputs, rows, kind, ways)
    configs = list(dict.fromkeys([*([] if table is None else [table]), *tried]))
    # Compile in parallel. Descriptors of operands need the device's context in the thread that makes them.
    with ThreadPoolExecutor(14, initializer=torch.cuda.synchronize) as pool:
        usable = list(pool.map(lambda config: _compiles(run, x, weights[0], config), configs))
    timed: dict[Config, float] = {}
    for config in itertools.compress(configs, usable):
        got = run(x, weights[0], config).double()
        error = (((got.sum(0) if kind == "parts" else got) - exact).norm() / exact.norm()).item()
        assert error < 1e-2, (name, config, error)
        timed[config] = graph_us(functools.partial(_all, run, x, weights, config), runs=5) / copies
    by_split = {
        split: min((config for config in timed if config.split == split), key=timed.__getitem__)
        for split in sorted({config.split for config in timed})
    }
    best = min(timed, key=timed.__getitem__)
    row: dict[str, Any] = {
        "shape": name,
        "rows": rows,
        "floor_us": outputs * inputs * 2 / bandwidth * 1e6,
        "cublas_us": graph_us(lambda: [x @ w.t() for w in weights]) / copies,
        "table_us": None if table is None else timed[table],  # None: the product is left to cuBLAS
        "best_us": timed[best],
        "splits_us": {split: timed[config] for split, config in by_split.items()},
        "best": dataclasses.asdict(best),
    }
    print(json.dumps(row), flush=True)
    for split, config in by_split.items():
        print(f"  split {split}: {timed[config]:.2f} us, {config}", flush=True)
    return row


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


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["8b"], choices=list(SHAPES))
    parser.add_argument("--names", nargs="+", help="products to measure; default: all")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="kernels to measure, besides the table's"
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    bandwidth = read_bandwidth()
    print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s", flush=True)
    results = []
    for family in args.shapes:
        for name, (outputs, inputs, kind) in SHAPES[family].items():
            if args.names and name not in args.names:
                continue
            for rows in args.rows:
                results.append(measure(f"{family}/{name}", outputs, inputs, kind, rows, bandwidth, args.ways))
                write_results(args.out, results, read_tbps=bandwidth / 1e12)


if __name__ == "__main__":
    main()
