"""Runs many long rows of one shape through the engine and checks for leaks of resources and memory.

Memory is measured early, when all buffers of a step exist, and then at equal distances to the end.
"""

import functools
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollout.config import EngineSettings, ModelSettings, Settings
from rollout.engine.device.streams import make_device
from rollout.engine.messages.requests import SamplingParams
from rollout.engine.schedule.roster import Roster
from rollout.models import load_model
from scripts.bench.driver import Driver, random_prompt
from scripts.bench.output import spread
from scripts.bench.shapes import write_checkpoint

_PROMPT = 16
_EARLY = 64  # tokens before the first measurement of memory
_MEMORY = ("allocated", "reserved", "driver_free")  # the kinds of memory that are measured
_FLAT_MIB = 8.0  # allowed growth: the driver allocates in pieces of 2 MiB


@dataclass(frozen=True, slots=True)
class LongRun:
    """What to run."""

    shape: str
    device: str
    rows: int
    tokens: int  # of each row
    marks: int = 9  # measurements of memory

    def targets(self) -> list[int]:
        """The numbers of tokens after which memory is measured, ascending."""
        parts = range(1, self.marks)
        return [_EARLY, *(max(_EARLY, self.tokens * part // (self.marks - 1) - 8) for part in parts)]


def memory_now(device: str) -> dict[str, float]:
    """MiB that torch has allocated and reserved, and that the driver has free; zeros on a CPU."""
    if device == "cpu":
        return {"allocated": 0.0, "reserved": 0.0, "driver_free": 0.0}
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    sizes = {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved(), "driver_free": free}
    return {name: size / 2**20 for name, size in sizes.items()}


def growth(marks: Sequence[dict[str, float]]) -> list[str]:
    """A sentence for each kind of memory that grew."""
    found = []
    for name in _MEMORY:
        values = [mark[name] for mark in marks]
        if max(values) - min(values) > _FLAT_MIB:
            found.append(f"memory is not flat: {name} {min(values):.1f} to {max(values):.1f} MiB")
    return found


def run_long(run: LongRun) -> dict[str, Any]:
    """Run all rows to their full length and print each measurement. `failures` lists what is wrong."""
    driver = _driver(run)
    roster, vocab = driver.engine.roster, driver.engine.executor.step.model.spec.vocab
    for i in range(run.rows):
        driver.submit(f"r{i}", random_prompt(vocab, _PROMPT, i), run.tokens, SamplingParams(seed=i))
    marks, start_s = [], time.perf_counter()
    for target in run.targets():
        began_s, steps = time.perf_counter(), driver.engine.meter.steps
        driver.tick_until(functools.partial(_reached, roster, _PROMPT + target))
        now_s = time.perf_counter()
        per_step_s = (now_s - began_s) / max(driver.engine.meter.steps - steps, 1)
        times = {"seconds": now_s - start_s, "ms_per_step": 1e3 * per_step_s}
        marks.append({"tokens": target, **times, **memory_now(run.device)})
        print(marks[-1], flush=True)
    driver.finish()
    return {
        "shape": run.shape,
        "rows": run.rows,
        "tokens": run.tokens,
        "pages": roster.allocator.pool.total,
        "preemptions": roster.counters.preemptions,
        "marks": len(marks),
        "seconds": marks[-1]["seconds"],
        "memory_mib": {name: spread([mark[name] for mark in marks]) for name in _MEMORY},
        "failures": [*_not_whole(driver, run), *growth(marks)],
    }


def _reached(roster: Roster, tokens: int) -> bool:
    return bool(roster.decoding) and roster.decoding[0].kv.length >= tokens


def _driver(run: LongRun) -> Driver:
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(run.shape, Path(folder))
        settings = ModelSettings(path=str(path), load_format="random", device=run.device)
        model = load_model(settings, torch.device(run.device)).model
    context = _PROMPT + run.tokens
    engine = EngineSettings(max_rows=run.rows, max_context_tokens=context, prefix_cache=False, kv_memory_fraction=0.9)
    return Driver(Settings(engine=engine), make_device(run.device), model)


def _not_whole(driver: Driver, run: LongRun) -> list[str]:
    """Sentences about leaked pages, rows, slots and incomplete completions. Closes the engine."""
    found = []
    for i in range(run.rows):
        done = driver.completions[f"r{i}"]
        if len(done.tokens) != run.tokens or not np.isfinite(done.logprobs).all():
            found.append(f"row {i}: {len(done.tokens)} tokens, log-probs finite: {np.isfinite(done.logprobs).all()}")
    try:
        driver.close()
    except AssertionError as error:
        found.append(f"not whole afterwards: {error}")
    return found
