"""Measures the host time of a step (plan, launch and commit) with a model that takes no time.

The engine is the real one, with its streams, slots, uploads and events. Only the two functions on the compute stream
are replaced: they write a constant token. Medians over the steps around several lengths show whether the cost grows
with the length.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollout.config import EngineSettings, Settings
from rollout.engine.build import build_engine, local_links
from rollout.engine.device.streams import CpuDevice
from rollout.engine.kv.allocator import pages_for
from rollout.engine.loop import Engine
from rollout.engine.messages.prompts import Prompt
from rollout.engine.messages.requests import Request, SamplingParams
from rollout.engine.messages.to_engine import Submit
from rollout.engine.step.execute import Executor
from rollout.engine.step.slot import Slot
from rollout.engine.upload import StepInput
from rollout.metrics.meter import Meter
from rollout.metrics.step_timing import StepTiming
from rollout.models.config_spec import spec_from_config
from rollout.models.decoder import Decoder
from scripts.bench.output import DEFAULT_FOLDER, print_table, write_results

_PROMPT = 32
_SHOW_EVERY_S = 2.0
_WINDOW = 512  # steps around a length over which the median is taken
TINY_SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "max_position_embeddings": 65_536,
}


class FreeExecutor(Executor):
    """An executor whose steps compute nothing: every sampled token is 7."""

    def run(self, step: StepInput, slot: Slot) -> None:
        """Sample without a forward."""
        slot.output[0] = 7


class StepTimes(Meter):
    """A meter that keeps the host time of every decode step at full batch."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._full = rows
        self.parts_s: list[tuple[float, float, float]] = []

    def step(self, record: StepTiming) -> None:
        """Keep the step's host times."""
        super().step(record)
        if record.kind == "decode" and record.rows == self._full:
            self.parts_s.append((record.plan_s, record.launch_s, record.commit_s))


def make_engine(rows: int, length: int) -> tuple[Engine, StepTimes]:
    """An engine for `rows` completions of `length` tokens whose model takes no time."""
    from transformers import Qwen3Config

    spec = spec_from_config(Qwen3Config(**TINY_SHAPE), "Qwen3ForCausalLM")
    device = CpuDevice()
    model = Decoder(spec, torch.float32, device.torch_device)
    pages = rows * (pages_for(_PROMPT + length, 16) + 1) + 1
    engine_settings = EngineSettings(max_rows=rows, kv_pages=pages, max_context_tokens=_PROMPT + length + 16)
    settings = Settings(engine=engine_settings)
    engine = build_engine(settings, device, model, local_links(settings, lambda events: None))
    executor = FreeExecutor(device, engine.executor.streams, engine.executor.step)
    engine.restart(replace(engine.parts, executor=executor))
    engine.meter = times = StepTimes(rows)
    return engine, times


def measure(rows: int, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """One row of results for each length."""
    longest = max(lengths) + _WINDOW
    engine, times = make_engine(rows, longest)
    rng = np.random.default_rng(0)
    for i in range(rows):
        prompt = Prompt.of_tokens(rng.integers(0, 64, _PROMPT).astype(np.int32))
        engine.inbox.put(Submit(Request(("bench", str(i)), prompt, longest, sampling=SamplingParams(seed=i))))
    engine.tick()
    shown_s = 0.0
    while engine.busy:
        engine.tick()
        # No progress bar: its thread would affect the results.
        if engine.meter.steps % _WINDOW == 0 and time.perf_counter() > shown_s + _SHOW_EVERY_S:
            shown_s = time.perf_counter()
            print(f"{rows} rows: {engine.meter.steps} of {longest} steps", file=sys.stderr, flush=True)
    engine.check_integrity()
    engine.executor.close()
    results = []
    for length in lengths:
        begin = max(0, min(length, len(times.parts_s)) - _WINDOW)
        parts = np.array(times.parts_s[begin : begin + 2 * _WINDOW]) * 1e3
        total = parts.sum(axis=1)
        results.append(
            {
                "rows": rows,
                "length": length,
                "median_ms": float(np.median(total)),
                "p99_ms": float(np.quantile(total, 0.99)),
                "plan_ms": float(np.median(parts[:, 0])),
                "launch_ms": float(np.median(parts[:, 1])),
                "commit_ms": float(np.median(parts[:, 2])),
            }
        )
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.bookkeeping", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16_384, 32_768])
    parser.add_argument("--out", type=Path, default=DEFAULT_FOLDER / "bookkeeping.json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    results = [row for rows in args.rows for row in measure(rows, args.lengths)]
    print_table("host time of a decode step (plan + launch + commit)", results)
    growth = {}
    for rows in args.rows:
        medians = [row["median_ms"] for row in results if row["rows"] == rows]
        growth[str(rows)] = medians[-1] / medians[0]
    write_results(args.out, results, growth_longest_over_shortest=growth, median=statistics.median(growth.values()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
