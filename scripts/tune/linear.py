"""Measures the few-row matrix products on a CUDA machine and chooses a configuration for each shape and row count.

    PYTHONPATH=.:kernels python -m scripts.tune.linear --out FILE [--shapes 8b] [--rows 1 8 32]
        [--ways gemv streamed] [--format fp8_block]

For every shape and number of rows it times cuBLAS, the table's configuration and each candidate in CUDA graphs. The
graphs rotate over several copies of the weights, so that no weights are read from the L2 cache. It reports
microseconds, the floor (the bytes of the weights over the read bandwidth of the same run), the best time for each split
of K (one split is chosen for all numbers of rows), and the best configuration of all. The best of each split are
printed. Every candidate is checked against float64 once; a wrong one is printed and left out. With a format, weights
are codes, and cuBLAS multiplies the decoded weights of the same step. Where activations are codes, too (`--ways
codes`), the exact product is that of the rounded activations.
"""

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
from rollout_kernels.linear.coded import CodedMatrix, Weights, scales_shape
from rollout_kernels.linear.products import product
from rollout_kernels.linear.table import Config, Kind, linear_config
from rollout_kernels.linear.triton_code_rows import code_rows
from rollout_kernels.linear.triton_linear import LinearConfig, gated_linear, linear, linear_parts
from rollout_kernels.moe.formats import FORMATS, Format, scale_dtype

from scripts.bench.cuda_timing import graph_us, read_bandwidth
from scripts.bench.linear_candidates import CODED_WAYS, SHAPES, WAYS, candidates
from scripts.bench.output import write_results

_CACHE_BYTES = 400e6  # weights in rotation, several times the L2


def coded(weights: torch.Tensor, kind: Kind, format: Format) -> CodedMatrix:
    """Weights as codes; gate and up are two modules."""
    outputs, inputs = weights.shape
    widths = (outputs // 2, outputs // 2) if kind == "silu" else (outputs,)
    scales = torch.empty(scales_shape(widths, inputs, format), dtype=scale_dtype(format), device=weights.device)
    made = CodedMatrix(torch.empty_like(weights, dtype=torch.uint8), scales, format, widths)
    made.quantize(weights)
    return made


def measure(
    name: str,
    outputs: int,
    inputs: int,
    kind: Kind,
    rows: int,
    bandwidth: float,
    ways: list[str],
    format: Format = "plain",
) -> dict:
    """Time cuBLAS, the table's configuration and the best one for each split, for one shape and number of rows."""
    nbytes = outputs * inputs * (2 if format == "plain" else 1)
    copies = max(2, int(_CACHE_BYTES // nbytes) + 1)
    plain = (torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies))
    weights: list[Weights] = [each if format == "plain" else coded(each, kind, format) for each in plain]
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    ways_to_run: dict[Kind, Callable[..., torch.Tensor]]
    ways_to_run = {"silu": gated_linear, "whole": linear, "parts": linear_parts}
    run = ways_to_run[kind]
    exact = {codes: _exact(code_rows(x).dequantized() if codes else x, weights[0], kind) for codes in (False, True)}
    table = linear_config(outputs, inputs, kind, rows, format=format)
    tried = candidates(outputs, inputs, rows, kind, ways)
    configs = list(dict.fromkeys([*([] if table is None else [table]), *tried]))
    # Compile in parallel. Descriptors of operands need the device's context in the thread that makes them.
    with ThreadPoolExecutor(14, initializer=torch.cuda.synchronize) as pool:
        usable = list(pool.map(lambda config: _compiles(run, x, weights[0], config), configs))
    timed: dict[Config, float] = {}
    for config in itertools.compress(configs, usable):
        got = run(x, weights[0], config).double()
        both = isinstance(config, LinearConfig) and config.codes
        expected, least = exact[both], 1e-3 if both else 1e-4
        error = (((got.sum(0) if kind == "parts" else got) - expected).norm() / expected.norm()).item()
        if not error < (least if kind == "parts" else 1e-2):
            print(f"  WRONG by {error:.1e}: {config}", flush=True)
            continue
        timed[config] = graph_us(functools.partial(_all, run, x, weights, config), runs=5) / copies
    if not timed:
        return {"shape": name, "rows": rows, "format": format, "best": None}
    by_split = {
        split: min((config for config in timed if config.split == split), key=timed.__getitem__)
        for split in sorted({config.split for config in timed})
    }
    best = min(timed, key=timed.__getitem__)
    row: dict[str, Any] = {
        "shape": name,
        "rows": rows,
        "format": format,
        "floor_us": nbytes / bandwidth * 1e6,
        "cublas_us": graph_us(lambda: [product(x, w) for w in weights]) / copies,
        "table_us": None if table is None else timed.get(table),  # None: the product is left to cuBLAS
        "best_us": timed[best],
        "splits_us": {split: timed[config] for split, config in by_split.items()},
        "best": dataclasses.asdict(best),
    }
    print(json.dumps(row), flush=True)
    for split, config in by_split.items():
        print(f"  split {split}: {timed[config]:.2f} us, {config}", flush=True)
    if format != "plain":
        for config in sorted(timed, key=timed.__getitem__):
            print(f"    {timed[config]:.2f} us, {config}", flush=True)
    return row


def _all(run: Callable[..., torch.Tensor], x: torch.Tensor, weights: list[Weights], config: Config) -> None:
    for weight in weights:
        run(x, weight, config)


def _exact(x: torch.Tensor, weight: Weights, kind: Kind) -> torch.Tensor:
    wide = weight.dequantized() if isinstance(weight, CodedMatrix) else weight.double()
    exact = x.double() @ wide.T
    if kind != "silu":
        return exact
    gate, up = exact.chunk(2, dim=1)
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
    parser.add_argument("--format", choices=FORMATS, default="plain", help="of the weights")
    parser.add_argument(
        "--ways", nargs="*", choices=[*WAYS, *CODED_WAYS], help="kernels to measure, besides the table's; default: all"
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    ways = list(WAYS if args.format == "plain" else CODED_WAYS) if args.ways is None else args.ways
    bandwidth = read_bandwidth()
    print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s", flush=True)
    results = []
    for family in args.shapes:
        for name, (outputs, inputs, kind) in SHAPES[family].items():
            if args.names and name not in args.names:
                continue
            for rows in args.rows:
                results.append(measure(f"{family}/{name}", outputs, inputs, kind, rows, bandwidth, ways, args.format))
                write_results(args.out, results, read_tbps=bandwidth / 1e12)
    for row in results:
        if row["best"] is not None:
            table_us = row["table_us"] or row["cublas_us"]
            figures = f"floor {row['floor_us']:6.1f}  table {table_us:6.1f}  best {row['best_us']:6.1f} us"
            print(f"{row['shape']:12} {row['format']:9} {row['rows']:4} rows  {figures}  {list(row['best'].values())}")


if __name__ == "__main__":
    main()
