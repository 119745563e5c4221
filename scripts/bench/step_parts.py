"""Measures the parts of a decode step separately, for the cost model (`scripts.bench.cost_model`).

    forward      the forward up to the logits, repeated on the device without gaps
    sampling     the draw from given logits and the advance of the rows, likewise
    bookkeeping  the other time of a step in the blocking loop, in two parts:
      loop         the real loop around a device that sleeps for the time of a step, minus the sleep: plan, pack,
                   upload, launch, download, wake-up, commit, with the state of the host's caches after a wait
      launch       the extra time of a step on an idle device, which waits for its graph to arrive

No part runs the pipeline, and none is derived from the loop's period that the model predicts.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch

from rollout.engine.loop import Engine
from rollout.engine.schedule.plan import Plan
from rollout.engine.step.device_feature import Replays
from rollout.engine.step.execute import Executor
from rollout.engine.step.graphs import DecodeGraphs
from rollout.engine.step.pack import CapturedSizes
from rollout.engine.step.pipeline import Pipeline, StepInFlight
from rollout.engine.step.slot import Slot
from rollout.engine.upload import PLAIN, Header, RowNeeds, StepInput, put_decode

_ROUNDS, _REPEATS = 5, 20
_DRAWS = 16  # in one graph: a draw is too short for separate launches


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """Seconds of one step of the rows that were running."""

    forward_s: float
    sampling_s: float
    step_s: float  # forward and sampling as in service, without gaps
    alone_s: float  # the same on an idle device

    @property
    def launch_s(self) -> float:
        """Extra time of a step on an idle device over its parts."""
        return self.alone_s - self.forward_s - self.sampling_s


def measure_device_parts(engine: Engine) -> DeviceParts:
    """Time the next decode step of the running rows without taking it: their state is restored.

    The engine is paused with no step in flight, and every row has room for `_REPEATS` tokens more.
    """
    executor = engine.executor
    with borrowed_slot(engine.pipeline) as slot, _rows_kept(executor) as put_back:
        work = _work(engine, slot)
        forward_s = _in_a_row(executor, work.forward, put_back)
        sampling_s = _in_a_row(executor, work.draws, put_back) / work.draws_count
        step_s = _in_a_row(executor, work.step, put_back)
        executor.compute.run(put_back)
        alone_s = _alone(executor, work.step)
    return DeviceParts(forward_s, sampling_s, step_s, alone_s)


@contextmanager
def sleeping_steps(engine: Engine, seconds: float) -> Iterator[float]:
    """Replace decode steps by a sleep of about `seconds`; yields the exact seconds on an idle device.

    Outputs come from the previous step. Rows that decode meanwhile must not continue afterwards.
    """
    executor, packer = engine.executor, engine.parts.packer
    graphs, captured = executor.graphs, packer.captured
    nap = _nap(executor, seconds)
    executor.graphs = cast(DecodeGraphs, _SleepingGraphs(nap))
    packer.captured = captured if captured.whole else cast(CapturedSizes, _AnySize())
    try:
        yield _alone(executor, nap)
    finally:
        executor.graphs, packer.captured = graphs, captured


@contextmanager
def borrowed_slot(pipeline: Pipeline) -> Iterator[Slot]:
    """A slot of a pipeline without a step in flight."""
    assert pipeline.in_flight == 0
    slot = pipeline.acquire()
    try:
        yield slot
    finally:
        step = StepInFlight(cast(Plan, None), cast(Header, None), slot, 0.0, 0.0, 0.0)
        pipeline.push(step)
        pipeline.retire(step)


def stage_next_step(engine: Engine, slot: Slot) -> tuple[StepInput, int]:
    """Upload the next decode step of the running rows to a slot; returns its input and its padded number of rows."""
    captured, seqs, staging = engine.parts.packer.captured, engine.roster.decoding, slot.staging
    assert seqs, "no row decodes"
    rows, context = len(seqs), max(seq.kv.length for seq in seqs) + 1
    size = captured.size_for(rows) if captured.whole else rows
    assert size, f"{rows} rows are more than are captured"
    staging.begin()
    put_decode(staging, [seq.row for seq in seqs], [], size)
    upload = staging.upload(rows, rows, rows, PLAIN.value, context, size=size)
    step = slot.input_for(upload)
    engine.executor.compute.run(functools.partial(step.receive, upload.words))
    return step, size


@dataclass(frozen=True, slots=True)
class _Work:
    forward: Callable[[], object]
    draws: Callable[[], object]
    draws_count: int
    step: Callable[[], object]


class _SleepingGraphs:
    """Replaces the captured steps of an executor."""

    def __init__(self, nap: Callable[[], object]) -> None:
        self._nap = nap
        self.replays: dict[str, Replays] = {}

    def run(self, slot: Slot, size: int, drafted: bool = False) -> None:
        self._nap()


class _AnySize:
    """Replaces the captured sizes: every size is captured."""

    def size_for(self, rows: int, features: RowNeeds = PLAIN) -> int:
        return rows


@contextmanager
def _rows_kept(executor: Executor) -> Iterator[Callable[[], None]]:
    """Yields a function for the compute stream that restores the rows' state; it also runs at the end."""
    executor.device.synchronize()
    state = executor.step.rows
    with torch.inference_mode():
        kept = [(tensor, tensor.clone()) for tensor in (state.ints, state.floats, state.pages)]
    executor.device.synchronize()

    def put_back() -> None:
        for tensor, before in kept:
            tensor.copy_(before)

    try:
        yield put_back
    finally:
        executor.compute.run(put_back)
        _wait(executor)


def _work(engine: Engine, slot: Slot) -> _Work:
    executor = engine.executor
    upload, size = stage_next_step(engine, slot)
    if executor.captures:
        step = executor.graphs.captured(slot, size)
        executor.compute.run(step.forward.replay)  # provides the logits
        draws = _captured_draws(executor, step.logits_SV, upload, slot.output)
        return _Work(step.forward.replay, draws, _DRAWS, step.whole.replay)
    context = max(seq.kv.length for seq in engine.roster.decoding) + 2 * _REPEATS
    rows, pages = upload["rows"], upload["new_pages"]
    kept: list[torch.Tensor] = []

    def forward() -> None:
        token_ids_B, batch = executor.step.begin_decode(rows, pages, context)
        kept[:] = [executor.step.model.compute_logits(executor.step.model(token_ids_B, batch, executor.step.kv))]

    def step_of_both() -> None:
        forward()
        executor.step.sample(kept[0], rows, PLAIN, slot.output)

    executor.compute.run(forward)
    _wait(executor)
    draw = functools.partial(executor.step.sample, kept[0], rows, PLAIN, slot.output)
    return _Work(forward, draw, 1, step_of_both)


def _captured_draws(executor: Executor, logits_SV: torch.Tensor, upload: StepInput, output: torch.Tensor) -> Any:
    stream = executor.compute.stream  # type: ignore[attr-defined]  # of CUDA
    graph = torch.cuda.CUDAGraph()
    executor.device.synchronize()
    with torch.inference_mode(), torch.cuda.graph(graph, stream=stream):
        for _ in range(_DRAWS):
            executor.step.sample(logits_SV, upload["rows"], PLAIN, output)
    return graph.replay


def _in_a_row(executor: Executor, work: Callable[[], object], begin: Callable[[], None] = lambda: None) -> float:
    """Seconds of one `work` among many without gaps: the median of some rounds. `begin` runs before each round."""
    times = []
    for _ in range(_ROUNDS):
        executor.compute.run(begin)
        start, end = executor.device.event(), executor.device.event()
        executor.compute.run(work)
        executor.compute.record(start)
        for _ in range(_REPEATS):
            executor.compute.run(work)
        executor.compute.record(end)
        end.synchronize()
        executor.check()
        times.append((end.time_s - start.time_s) / _REPEATS)
    return statistics.median(times)


def _alone(executor: Executor, work: Callable[[], object]) -> float:
    """Seconds of one `work` on an idle device, from before its launch to its end: median."""
    times = []
    for _ in range(_REPEATS):
        _wait(executor)
        start, end = executor.device.event(), executor.device.event()
        executor.compute.record(start)
        executor.compute.run(work)
        executor.compute.record(end)
        end.synchronize()
        times.append(end.time_s - start.time_s)
    executor.check()
    return statistics.median(times)


def _wait(executor: Executor) -> None:
    done = executor.device.event()
    executor.compute.record(done)
    done.synchronize()
    executor.check()


def _nap(executor: Executor, seconds: float) -> Callable[[], object]:
    """Work that only keeps the compute stream busy for about `seconds`."""
    if executor.device.torch_device.type != "cuda":
        return functools.partial(time.sleep, seconds)
    trial = 1_000_000
    rate = trial / _in_a_row(executor, _spin(executor, trial))
    return _spin(executor, round(rate * seconds))


def _spin(executor: Executor, cycles: int) -> Callable[[], object]:
    stream = executor.compute.stream  # type: ignore[attr-defined]  # of CUDA
    graph = torch.cuda.CUDAGraph()
    executor.device.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        torch.cuda._sleep(cycles)
    return graph.replay
