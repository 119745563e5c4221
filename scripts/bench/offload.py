"""Compares offloaded KV, recomputed KV and a larger pool, for rows with more KV than the pool holds.

    PYTHONPATH=.:kernels python -m scripts.bench.offload --shape qwen3-1.7b --rows 64 --tokens 4096 --holds 24 --out OUT

Random weights of the real shape. All rows are submitted at once and have `--tokens` tokens; the pool holds `--holds` of
them at full length. There are three runs: `offload` (the KV of preempted rows moves to the host and back), `recompute`
(it is computed again) and `whole` (a pool for all rows; leave it out with `--modes` if memory does not suffice). Each
reports wall time, tokens per second, and the time between decode steps. `offload` also compares steps with and without
moving KV: the gap between two decode steps on the device, and the time of a step over the nearest quiet one with as
many rows.
"""

import argparse
import gc
import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollout.config import EngineConstants, EngineSettings, Settings
from rollout.engine.device.streams import make_device
from rollout.engine.inspect import Inspector
from rollout.engine.kv.allocator import pages_for
from rollout.engine.kv.tiers.host_tier import HostTier, MoveRecord
from rollout.engine.messages.requests import SamplingParams
from rollout.metrics.meter import Meter
from rollout.metrics.step_timing import StepTiming
from rollout.models.decoder import Decoder
from rollout.models.language_model import native
from scripts.bench.driver import Driver, random_prompt
from scripts.bench.output import print_table, write_results
from scripts.bench.peers.ours_engine import load_random
from scripts.bench.shapes import SHAPES

MODES = ("offload", "recompute", "whole")
_PAGE = 16
_NEAR = 200  # steps within which another step counts as near
_SHOW_EVERY_S = 10.0


class AllSteps(Meter):
    """A meter that keeps the times of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[bool, int, float, float, int]] = []  # decode, rows, start, end, input tokens

    def step(self, record: StepTiming) -> None:
        """Keep a step."""
        super().step(record)
        self.kept.append((record.kind == "decode", record.rows, record.start_s, record.end_s, record.input_tokens))


def moving(begin_s: np.ndarray, end_s: np.ndarray, moves: list[MoveRecord]) -> np.ndarray:
    """For each interval, whether KV moved in it."""
    if not moves:
        return np.zeros(len(begin_s), bool)
    spans = np.array(sorted((move.start_s, move.end_s) for move in moves))
    latest = np.maximum.accumulate(spans[:, 1])
    before = np.searchsorted(spans[:, 0], end_s)  # pieces that began before the end of the interval
    return (before > 0) & (latest[np.maximum(before - 1, 0)] > begin_s)


def nearest_ratio(step_s: np.ndarray, rows: np.ndarray, moved: np.ndarray) -> float | None:
    """Median ratio of a moving step's time to the nearest quiet one with as many rows; None without such a pair."""
    quiet, ratios = np.flatnonzero(~moved), []
    for i in np.flatnonzero(moved):
        near = quiet[np.searchsorted(quiet, i - _NEAR) : np.searchsorted(quiet, i + _NEAR)]
        near = near[rows[near] == rows[i]]
        if len(near):
            ratios.append(step_s[i] / step_s[near[np.abs(near - i).argmin()]])
    return float(np.median(ratios)) if ratios else None


def step_figures(meter: AllSteps, moves: list[MoveRecord]) -> dict[str, Any]:
    """Gaps and times of consecutive decode steps, milliseconds."""
    decode, rows, start_s, end_s, _ = (np.array(column) for column in zip(*meter.kept, strict=True))
    pair = decode[1:] & decode[:-1]
    gap_s, step_s = (start_s[1:] - end_s[:-1])[pair], (end_s - start_s)[1:][pair]
    moved = moving(end_s[:-1][pair], end_s[1:][pair], moves)
    figures: dict[str, Any] = {"step_ms": 1e3 * float(np.median(step_s))}
    for name, these in (("quiet", ~moved), ("moving", moved)):
        gaps = gap_s[these]
        figures[f"{name}_steps"] = int(these.sum())
        figures[f"{name}_gap_ms"] = 1e3 * float(np.median(gaps)) if len(gaps) else None
        figures[f"{name}_gap_p99_ms"] = 1e3 * float(np.quantile(gaps, 0.99)) if len(gaps) else None
    figures["moving_gap_of_step_pct"] = 100 * float(np.median(gap_s[moved] / step_s[moved])) if moved.any() else None
    figures["moving_step_over_quiet"] = nearest_ratio(step_s, rows[1:][pair], moved)
    return figures


def settings_of(mode: str, model: Decoder, args: argparse.Namespace) -> EngineSettings:
    """The engine's settings for a mode."""
    a_row = pages_for(args.prompt + args.tokens, _PAGE) + 1
    row_gib = a_row * _PAGE * model.spec.kv_bytes_per_token(model.embed.dtype) / 2**30
    away = args.host_gib or (args.rows - args.holds) * row_gib
    return EngineSettings(
        max_rows=args.rows,
        page_size=_PAGE,
        kv_pages=(args.rows if mode == "whole" else args.holds) * a_row + 1,
        max_context_tokens=args.prompt + args.tokens,
        prefix_cache=False,
        host_kv_gib=away if mode == "offload" else 0.0,
        constants=EngineConstants(host_kv_piece_mib=args.piece_mib),
    )


def run(mode: str, model: Decoder, args: argparse.Namespace) -> dict[str, Any]:
    """Run a mode from the first submission to the last token."""
    driver = Driver(Settings(engine=settings_of(mode, model, args)), make_device(args.device), model)
    engine, meter = driver.engine, AllSteps()
    engine.meter = meter
    if isinstance(tier := engine.parts.tier, HostTier):
        tier.recent = deque()  # all of them
    for i in range(args.rows):
        prompt = random_prompt(model.spec.vocab, args.prompt, i)
        driver.submit(f"r{i}", prompt, args.tokens, SamplingParams(seed=i))
    began_s = shown_s = time.perf_counter()
    engine.tick()
    while engine.busy or not engine.inbox.empty():
        engine.tick()
        if (now_s := time.perf_counter()) > shown_s + _SHOW_EVERY_S:
            shown_s = now_s
            tokens = engine.roster.counters.tokens
            print(f"{mode}: {tokens} tokens, {tokens / (now_s - began_s):.0f} a second", flush=True)
    wall_s = time.perf_counter() - began_s
    status, counters = Inspector(engine).status().offload, engine.roster.counters
    moves = list(tier.recent) if isinstance(tier := engine.parts.tier, HostTier) else []
    tokens = sum(len(done.tokens) for done in driver.completions.values())
    assert tokens == args.rows * args.tokens, "every row has all its tokens"
    row = {
        "mode": mode,
        "seconds": wall_s,
        "tokens_per_s": tokens / wall_s,
        "preemptions": counters.preemptions,
        "restored": status.restored,
        "prefilled": sum(count for decode, _, _, _, count in meter.kept if not decode),
        "gib_out": status.bytes_out / 2**30,
        "gib_in": status.bytes_in / 2**30,
        "bubbles_pct": {cause: 100 * idle_s / wall_s for cause, idle_s in meter.idle_seconds().items()},
        **step_figures(meter, moves),
    }
    driver.close()
    return row


def cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure the rows of results, one by one."""
    model = native(load_random(args.shape, make_device(args.device).torch_device).model)
    for mode in args.modes:
        yield run(mode, model, args)
        gc.collect()  # the engine frees its pool
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-1.7b")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--holds", type=int, default=24, help="rows at full length that fit in the pool")
    parser.add_argument("--host-gib", type=float, help="host memory for KV; default: enough for the other rows")
    parser.add_argument("--piece-mib", type=float, default=32.0, help="most KV in one copy")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    results = []
    for row in cases(args):
        results.append(row)
        print(json.dumps(row), flush=True)
        write_results(args.out, results, shape=args.shape, rows_in_all=args.rows, tokens=args.tokens, holds=args.holds)
    shown = ("mode", "seconds", "tokens_per_s", "preemptions", "restored", "prefilled", "step_ms", "moving_gap_ms")
    title = f"{args.shape}, {args.rows} rows of {args.tokens} tokens"
    print_table(title, [{key: row[key] for key in shown} for row in results])


if __name__ == "__main__":
    main()
