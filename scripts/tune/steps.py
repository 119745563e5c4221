"""Finds the configuration of a few-row product that makes whole decode steps fastest, on a CUDA machine.

    PYTHONPATH=.:kernels python -m scripts.tune.steps --shape qwen3-8b --rows 8 32 --products gate_up --out FILE

`scripts.tune.linear` times a product alone; here its neighbours run, too, and overlap with it. The forward and the
output layer of a model with random weights and --context tokens in each row are captured with every candidate for one
product. The best few and the table's configuration are captured again and replayed in turns, because the clock of the
chip varies over seconds. The result is the median of those turns.

The winner is used for the products that follow in the same run. Enter it in `linear_table` by hand.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rollout_kernels.linear import table as linear_table
from rollout_kernels.linear.table import Config, Kind, linear_config
from rollout_kernels.linear.triton_linear import gated_linear, linear, linear_parts
from triton.runtime.errors import OutOfResources

from rollout.models.batch import AttentionBatch, KVCache
from rollout.models.fused import FusedDecoder
from rollout.models.language_model import native
from scripts.bench.cuda_timing import read_bandwidth
from scripts.bench.linear_candidates import SHAPES, WAYS, candidates
from scripts.bench.output import write_results
from scripts.bench.peers.ours_engine import load_random

_PAGE = 16
_FINALISTS, _TURNS, _REPLAYS = 5, 6, 6
_RUN: dict[Kind, Callable[..., torch.Tensor]] = {"parts": linear_parts, "whole": linear, "silu": gated_linear}

Product = tuple[int, int, Kind]


class Steps:
    """Decode steps of a model with random weights, as graphs."""

    def __init__(self, shape: str, rows: int, context: int) -> None:
        model = native(load_random(shape, torch.device("cuda")).model)
        self._decoder = FusedDecoder(model)
        columns = context // _PAGE + 1
        self._kv = KVCache.allocate(model.spec, rows * columns + 1, _PAGE, torch.bfloat16, "cuda")
        for tensor in self._kv.tensors:
            tensor.normal_()
        self._table_BP = torch.randperm(rows * columns, device="cuda", dtype=torch.int32).view(rows, columns) + 1
        self._ids_B = torch.randint(model.spec.vocab, (rows,), device="cuda")
        self._lens_B = torch.full((rows,), context, dtype=torch.int32, device="cuda")
        self._slots_B = self._table_BP[:, (context - 1) // _PAGE].long() * _PAGE + (context - 1) % _PAGE
        self._context = context
        self._stream = torch.cuda.Stream()

    def capture(self, rows: int) -> torch.cuda.CUDAGraph:
        """A step of the first rows with the configurations that the table has now."""
        where = (self._lens_B[:rows] - 1, self._slots_B[:rows], self._table_BP[:rows], self._lens_B[:rows])

        def step() -> torch.Tensor:
            hidden_BH = self._decoder(self._ids_B[:rows], AttentionBatch(*where, self._context), self._kv)
            return self._decoder.compute_logits(hidden_BH)

        with torch.inference_mode(), torch.cuda.stream(self._stream):
            assert step().isfinite().all()
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            step()
            graph.capture_end()
            self._decoder.take_chosen()
        graph.reads = where  # type: ignore[attr-defined]
        return graph

    def replay_us(self, graph: torch.cuda.CUDAGraph, times: int) -> float:
        """Median microseconds of a replay; the first is not counted."""
        spent = []
        with torch.cuda.stream(self._stream):
            for _ in range(times + 1):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                spent.append(start.elapsed_time(end) * 1e3)
        return statistics.median(spent[1:])

    def by_turns(self, graphs: Sequence[torch.cuda.CUDAGraph]) -> list[float]:
        """Median microseconds of each graph, all of them replayed by turns."""
        turns = [[self.replay_us(graph, _REPLAYS) for graph in graphs] for _ in range(_TURNS)]
        return [statistics.median(times) for times in zip(*turns, strict=True)]


def usable(product: Product, rows: int, configs: list[Config]) -> list[Config]:
    """The candidates that compile and give the product."""
    outputs, inputs, kind = product
    x_MK = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    w_NK = torch.empty(outputs, inputs, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)
    exact = torch.cat([x_MK.double() @ part.double().T for part in w_NK.split(8192)], 1)
    if kind == "silu":
        gate, up = exact.chunk(2, dim=1)
        exact = torch.nn.functional.silu(gate) * up

    def works(config: Config) -> bool:
        try:
            got = _RUN[kind](x_MK, w_NK, config)
        except OutOfResources:
            return False
        got = got.double().sum(0) if kind == "parts" else got.double()
        return ((got - exact).norm() / exact.norm()).item() < 1e-2

    # Compile in parallel. Descriptors of operands need the device's context in the thread that makes them.
    with ThreadPoolExecutor(12, initializer=torch.cuda.synchronize) as pool:
        return [config for config, fine in zip(configs, pool.map(works, configs), strict=True) if fine]


def tune(steps: Steps, name: str, product: Product, rows: int, ways: list[str], seconds: float) -> dict[str, Any]:
    """Try the candidates for one product within some seconds; the best is the table's from then on."""
    began_s, before = time.monotonic(), linear_table.FAST.get(product)
    table = linear_config(*product, rows)
    tried: dict[Config, float] = {}

    def captured(config: Config | None) -> torch.cuda.CUDAGraph:
        linear_table.FAST[product] = before or () if config is None else ((rows, config),)
        return steps.capture(rows)

    for config in usable(product, rows, candidates(*product[:2], rows, product[2], ways)):
        if time.monotonic() - began_s > seconds:
            break
        tried[config] = steps.replay_us(captured(config), 3)
    finalists: list[Config | None] = [*sorted(tried, key=tried.__getitem__)[:_FINALISTS]]
    if table not in finalists:
        finalists.append(table)
    times = dict(zip(finalists, steps.by_turns([captured(config) for config in finalists]), strict=True))
    best = min(times, key=times.__getitem__)
    captured(best)
    row = {"product": name, "rows": rows, "tried": len(tried), "table_us": times[table], "best_us": times[best]}
    print(f"{name} at {rows} rows, {len(tried)} tried: table {times[table]:.1f} us a step", flush=True)
    for finalist in sorted(times, key=times.__getitem__):
        print(f"  {times[finalist]:8.1f}  {finalist or 'cuBLAS'}", flush=True)
    return row | {"table": str(table), "best": str(best), "finalists": {str(c): us for c, us in times.items()}}


def main(argv: Sequence[str] | None = None) -> None:
    """Tune and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[f"qwen3-{family}" for family in SHAPES], default="qwen3-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--products", nargs="+", help="products of the shape; default: all")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=["streamed", "gemv"])
    parser.add_argument("--context", type=int, default=320)
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds for the candidates of one product")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    products = SHAPES[args.shape.removeprefix("qwen3-")]
    names = args.products or list(products)
    if unknown := set(names) - set(products):
        parser.error(f"{args.shape} has no product {', '.join(sorted(unknown))}; it has {', '.join(products)}")
    bandwidth = read_bandwidth()
    steps, kept = Steps(args.shape, max(args.rows), args.context), dict(linear_table.FAST)
    results: list[dict[str, Any]] = []
    for rows in args.rows:
        for name in names:
            results.append(tune(steps, name, products[name], rows, args.ways, args.seconds))
            write_results(args.out, results, shape=args.shape, context=args.context, read_tbps=bandwidth / 1e12)
        linear_table.FAST.clear()
        linear_table.FAST.update(kept)


if __name__ == "__main__":
    main()
