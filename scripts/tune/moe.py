"""Measures the experts' kernels on a CUDA machine and writes the table for `rollout_kernels.moe.dispatch`.

    PYTHONPATH=.:kernels python -m scripts.tune.moe --table table.json --out tuning.json [--shapes qwen3-30b-a3b]
        [--formats plain mxfp8] [--tokens 1 2 4 ...] [--seconds 500]

For every shape, format and number of tokens it times each candidate of each kernel, then a whole layer by each path
with the best candidates, in CUDA graphs that rotate over 8 layers. The faster path gets the band of tokens up to that
number. Every timed layer is checked against float64. The table starts as a copy of the one in the package. It is
written after each shape and format, so that no results are lost when `--seconds` run out.
"""

import argparse
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rollout_kernels.moe import dispatch
from rollout_kernels.moe.dispatch import Entry, GroupedPlan, MoEShape, Plan, WarpPlan, run_experts
from rollout_kernels.moe.formats import FORMATS, Format
from rollout_kernels.moe.triton_group_pairs import group_pairs
from rollout_kernels.moe.triton_grouped_experts import GroupedConfig, grouped_down, grouped_gate_up
from rollout_kernels.moe.triton_warp_experts import WarpConfig, moe_down, moe_gate_up

from scripts.bench.cuda_timing import graph_us
from scripts.bench.moe_layers import SHAPES, Layer, Tokens, errors, exact, floor_us, make_layers, make_tokens
from scripts.bench.output import write_results

LAYERS = 8
MOST_WARP_TOKENS = 32
#: A configuration is kept for more tokens unless another one is faster by more than this share.
STICKY = 1.01

Config = WarpConfig | GroupedConfig


def warp_candidates(format: Format, kernel: str, tokens: int) -> list[WarpConfig]:
    """Configurations of the output-centric kernels."""
    most = 8 if format == "plain" or kernel == "down" else 4
    found = [
        WarpConfig(rows=4, at_once=most),
        WarpConfig(rows=4, at_once=most // 2),
        WarpConfig(rows=8, at_once=most, num_warps=8),
        WarpConfig(rows=8, at_once=most // 2, num_warps=8),
        WarpConfig(rows=4, neurons=2, at_once=most // 2),
        WarpConfig(rows=4, neurons=2, at_once=most),
    ]
    if format != "plain":
        found += [WarpConfig(rows=4, neurons=4, at_once=most // 2), WarpConfig(rows=4, at_once=most // 4)]
        found += [WarpConfig(rows=4, neurons=n, at_once=most // 4) for n in (2, 4)]
    if kernel == "gate_up":
        found.append(WarpConfig(rows=4, at_once=most, fence=False))
    if tokens > 1:
        found += [replace(found[0], across=True), replace(found[0], across=True, once=False)]
        found.append(replace(found[4], across=True, once=False))
    return found


def grouped_candidates(format: Format, tile_rows: int) -> list[GroupedConfig]:
    """Configurations of the expert-centric kernels."""
    cut: tuple[tuple[int, int, int, int], ...]
    if tile_rows >= 64:
        cut = (
            ((64, 64, 4, 4), (128, 64, 8, 4), (128, 64, 4, 3))
            if format == "plain"
            else ((64, 128, 4, 3), (64, 128, 8, 3))
        )
    elif format == "plain":
        cut = ((64, 64, 4, 4), (64, 64, 4, 6), (64, 128, 4, 3), (128, 64, 4, 4), (32, 128, 4, 4))
    else:
        cut = ((64, 128, 4, 4), (64, 128, 4, 6), (64, 128, 8, 4), (128, 128, 8, 3), (64, 128, 4, 3))
    found = [GroupedConfig(n, k, warps, stages) for n, k, warps, stages in cut]
    if format in ("fp8_row", "fp8_block"):
        found += [replace(config, half=True) for config in found] + [
            GroupedConfig(128, 128, 8 if tile_rows >= 64 else 4, 3, half=True)
        ]
    return found + [GroupedConfig(*cut[0], bulk=False)] + ([GroupedConfig(*cut[2], bulk=False)] if len(cut) > 2 else [])


def tile_heights(shape: MoEShape, tokens: int) -> list[int]:
    """Tile heights to try: about the tokens per expert, and half of that."""
    each = tokens * shape.top_k / shape.experts
    return [rows for rows in (16, 32, 64, 128) if rows == 16 or rows / 4 <= each] if each < 64 else [64, 128]


class Tuner:
    """Layers of one shape and format, and the fastest configurations for the previous number of tokens."""

    def __init__(self, shape: MoEShape, format: Format) -> None:
        self.shape, self.format = shape, format
        self.layers = make_layers(shape, format, LAYERS)
        self.before: dict[Any, Config] = {}
        self.compiled: set[Any] = set()
        self.log: list[dict[str, Any]] = []

    def plans(self, tokens: int) -> list[tuple[float, Plan]]:
        """Each path with its best configurations, and microseconds a layer; fastest first."""
        batches = [make_tokens(self.shape, tokens, seed=77 * i + tokens) for i in range(LAYERS)]
        plans: list[Plan] = [self._grouped(batches, rows) for rows in tile_heights(self.shape, tokens)]
        if tokens <= MOST_WARP_TOKENS:
            plans.append(self._warp(batches))
        expected = exact(self.layers[0], batches[0]) if tokens <= 512 else None
        timed = []
        for plan in plans:

            def run(layer: Layer, batch: Tokens, plan: Plan = plan) -> torch.Tensor:
                return run_experts(batch.x_TH, batch.routing, layer.gate_up, layer.down, plan)

            if expected is not None:
                error = errors(run(self.layers[0], batches[0]), expected).relative
                assert error < 6e-3, (plan, error)
            works = [lambda pair=pair, run=run: run(*pair) for pair in zip(self.layers, batches, strict=True)]
            timed.append((graph_us(*works * (4 if tokens <= 8 else 1)), plan))
        timed.sort(key=lambda pair: pair[0])
        floor = floor_us(self.layers, batches)
        us_by = {f"{plan.path}{getattr(plan, 'tile_rows', '')}": us for us, plan in timed}
        self.log.append({"tokens": tokens, "floor_us": floor, "us": us_by})
        paths = "  ".join(f"{name} {us:.1f}" for name, us in us_by.items())
        print(f"{self.format} T {tokens}: floor {floor:.1f} us  {paths}  {timed[0][1]}", flush=True)
        return timed

    def _warp(self, batches: list[Tokens]) -> WarpPlan:
        tokens, top_k = batches[0].routing.experts_TK.shape
        h_TKI = torch.randn(tokens, top_k, self.shape.inner, device="cuda").bfloat16()

        def gate_up(config: Any, layer: Layer, batch: Tokens) -> object:
            return moe_gate_up(batch.x_TH, batch.routing.experts_TK, layer.gate_up, config)

        def down(config: Any, layer: Layer, batch: Tokens) -> object:
            return moe_down(h_TKI, batch.routing.experts_TK, batch.routing.weights_TK, layer.down, config)

        best = [
            self._best(("warp", name), warp_candidates(self.format, name, tokens), work, batches)
            for name, work in (("gate_up", gate_up), ("down", down))
        ]
        return WarpPlan(*best)

    def _grouped(self, batches: list[Tokens], tile_rows: int) -> GroupedPlan:
        tokens, top_k = batches[0].routing.experts_TK.shape
        h_PI = torch.randn(tokens * top_k, self.shape.inner, device="cuda").bfloat16()
        groups = {id(b): group_pairs(b.routing.experts_TK, self.shape.experts, tile_rows) for b in batches}

        def gate_up(config: Any, layer: Layer, batch: Tokens) -> object:
            return grouped_gate_up(batch.x_TH, groups[id(batch)], layer.gate_up, top_k, config)

        def down(config: Any, layer: Layer, batch: Tokens) -> object:
            return grouped_down(h_PI, groups[id(batch)], batch.routing.weights_TK, layer.down, config)

        candidates = grouped_candidates(self.format, tile_rows)
        best_gate_up = self._best(("gate_up", tile_rows), candidates, gate_up, batches)
        best_down = self._best(("down", tile_rows), candidates, down, batches)
        return GroupedPlan(best_gate_up, best_down, tile_rows)

    def _best(
        self, key: Any, candidates: list[Any], work: Callable[[Any, Layer, Tokens], object], batches: list[Tokens]
    ) -> Any:
        """The fastest candidate; the choice for fewer tokens is kept unless it is clearly slower."""
        pairs = list(zip(self.layers, batches, strict=True))
        new = [config for config in candidates if (key, config) not in self.compiled]
        with ThreadPoolExecutor(12) as pool:  # compile in parallel
            list(pool.map(lambda config: _works(work, config, *pairs[0]), new))
        self.compiled |= {(key, config) for config in new}
        timed = {}
        for config in candidates:
            if _works(work, config, *pairs[0]):
                timed[config] = graph_us(*(lambda c=config, p=pair: work(c, *p) for pair in pairs), runs=5)
        best = min(timed, key=lambda config: timed[config])
        before = self.before.get(key)
        if before in timed and timed[before] <= STICKY * timed[best]:
            best = before
        self.before[key] = best
        return best


def _works(work: Callable[[Any, Layer, Tokens], object], config: Any, layer: Layer, batch: Tokens) -> bool:
    from triton.runtime.errors import OutOfResources

    try:
        work(config, layer, batch)
    except OutOfResources:
        return False
    except RuntimeError as error:
        # Skip a configuration that this version of Triton cannot compile. Any other error is a fault.
        if "PassManager" not in str(error):
            raise
        print(f"not compiled: {config}", flush=True)
        return False
    return True


def tune(shape: MoEShape, format: Format, counts: list[int], deadline: float) -> tuple[Entry | None, list[Any]]:
    """The entry for one shape and format, from the numbers of tokens that were measured in time; and the log."""
    tuner = Tuner(shape, format)
    bands: list[tuple[int, Plan]] = []
    steady: Plan | None = None
    for tokens in counts:
        if time.monotonic() > deadline:
            print(f"no time left for {tokens} tokens", flush=True)
            break
        timed = tuner.plans(tokens)
        us, plan = timed[0]
        # The path in use is kept unless it is clearly slower.
        for other_us, other in timed:
            if bands and other == bands[-1][1] and other_us <= STICKY * us:
                plan = other
        grouped = [p for _, p in timed if isinstance(p, GroupedPlan) and p.tile_rows == 16]
        if grouped and (steady is None or tokens <= 32):
            steady = grouped[0]
        bands = [*bands[:-1], (tokens, plan)] if bands and bands[-1][1] == plan else [*bands, (tokens, plan)]
    if not bands or steady is None:
        return None, tuner.log
    beyond = [band for band in dispatch.default_entry(shape, format).bands if band[0] > bands[-1][0]]
    return Entry((*bands, *beyond), steady), tuner.log


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["qwen3-30b-a3b"], choices=list(SHAPES))
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048])
    parser.add_argument("--seconds", type=float, default=500, help="seconds after which no measurement is started")
    parser.add_argument("--table", type=Path, required=True, help="the table to write")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the times of all paths")
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    table = dict(dispatch.measured_table())
    measured = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    rows: list[dict[str, Any]] = []
    for name, format in product(args.shapes, args.formats):
        if time.monotonic() > deadline:
            print(f"no time left for {name} in {format}", flush=True)
            continue
        entry, log = tune(SHAPES[name], format, sorted(args.tokens), deadline)
        if entry is not None:
            table[SHAPES[name], format] = entry
        rows += [{"shape": name, "format": format, **row} for row in log]
        args.table.write_text(json.dumps(dispatch.write_table(table, measured), indent=1) + "\n")
        write_results(args.out, rows)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
