"""Measure the few-row matrix products on a CUDA machine and choose a configuration for each shape and row count.

    PYTHONPATH=.:kernels python scripts/tune_linear.py --out docs/results/linear.json [--shapes 8b] [--rows 1 8 32]

For every shape and number of rows: cuBLAS and each candidate, in CUDA graphs that go through several copies of the
weights, so that none of them is read from the L2 cache. Reports microseconds and TB/s of weights beside the floor: the
bytes of the weights over the read bandwidth measured in the same run. Every candidate is checked against float64 once.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from rollout_kernels.triton_linear import LinearConfig, gate_up_silu, linear_parts

# name: (outputs, inputs, kind); gate_up outputs count both halves.
SHAPES = {
    "8b": {
        "qkv": (6144, 4096, "parts"),
        "o": (4096, 4096, "parts"),
        "gate_up": (24576, 4096, "silu"),
        "down": (4096, 12288, "parts"),
        "head": (151936, 4096, "parts"),
    },
    "30b-a3b": {"qkv": (5120, 2048, "parts"), "o": (2048, 4096, "parts"), "head": (151936, 2048, "parts")},
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


def graph_us(work: Callable[[], None], runs: int = 12) -> float:
    """Median time of `work` replayed as a CUDA graph, microseconds."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(runs + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times[2:])[runs // 2]


def read_bandwidth() -> float:
    """Bytes per second that a sum over 4 GiB reads."""
    data = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    return data.numel() * 4 / graph_us(lambda: data.sum()) * 1e6


def candidates(outputs: int, inputs: int, rows: int, kind: str) -> list[LinearConfig]:
    """Configurations worth a try: enough programs for the chip, tiles that fit in shared memory."""
    found = []
    for block_n, block_k, split, warps, stages in itertools.product(
        (32, 64, 128), (64, 128, 256), (1, 2, 3, 4, 6, 8), (4, 8), (3, 4, 5, 6)
    ):
        programs = outputs // (2 if kind == "silu" else 1) // block_n * split
        tile_bytes = 2 * block_k * (block_n * (2 if kind == "silu" else 1) + max(16, rows))
        if inputs % (block_k * split) or (kind == "silu" and split > 1) or (split > 1 and programs > 132 * 12):
            continue
        if not 96 <= programs or tile_bytes * stages > 220_000 or tile_bytes * stages < 40_000:
            continue
        if inputs // (block_k * split) < stages or (block_n == 32 and warps == 8):
            continue
        found.append(LinearConfig(block_n, block_k, split, warps, stages))
    return found


def measure(name: str, outputs: int, inputs: int, kind: str, rows: int, bandwidth: float, keep: int) -> dict:
    """Time cuBLAS and all candidates for one shape and row count."""
    copies = max(2, int(_CACHE_BYTES // (outputs * inputs * 2)) + 1)
    weights = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)]
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    run = gate_up_silu if kind == "silu" else linear_parts
    reference = x.double() @ weights[0].double().T
    if kind == "silu":
        gate, up = reference.chunk(2, dim=1)
        reference = torch.nn.functional.silu(gate) * up
    floor_us = outputs * inputs * 2 / bandwidth * 1e6
    cublas_us = graph_us(lambda: [x @ w.t() for w in weights]) / copies
    timed = []
    configs = candidates(outputs, inputs, rows, kind)
    with ThreadPoolExecutor(12) as pool:  # compile side by side
        usable = list(pool.map(lambda config: _compiles(run, x, weights[0], config), configs))
    for config, ok in zip(configs, usable, strict=True):
        if not ok:
            continue
        got = run(x, weights[0], config)
        got = got.double() if kind == "silu" else got.double().sum(0)
        error = ((got - reference).norm() / reference.norm()).item()
        assert error < 1e-2, (name, config, error)
        timed.append((graph_us(lambda c=config: [run(x, w, c) for w in weights], 5) / copies, config))
    timed.sort(key=lambda pair: pair[0])
    best_us, best = timed[0]
    row = {
        "shape": name,
        "rows": rows,
        "floor_us": floor_us,
        "cublas_us": cublas_us,
        "best_us": best_us,
        "best_tbps": outputs * inputs * 2 / best_us / 1e6,
        "config": [best.block_n, best.block_k, best.split, best.num_warps, best.num_stages],
        "next": [[us, c.block_n, c.block_k, c.split, c.num_warps, c.num_stages] for us, c in timed[1:keep]],
    }
    print(json.dumps({k: v for k, v in row.items() if k != "next"}), flush=True)
    return row


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
                results.append(measure(f"{family}/{name}", outputs, inputs, kind, rows, bandwidth, 4))
                args.out.write_text(json.dumps({"read_tbps": bandwidth / 1e12, "rows": results}, indent=1))


if __name__ == "__main__":
    main()
