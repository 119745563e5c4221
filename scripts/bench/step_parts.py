"""The parts of a decode step, each measured on its own, for the cost model (`scripts.bench.cost_model`).

    forward      the forward up to the logits, run again and again on the device, nothing between
    sampling     the draw from given logits, and the advance of the rows, likewise
    bookkeeping  what else a step of the blocking loop takes, in two parts:
      loop         the real loop around a device that sleeps as long as a step takes, less the sleep: planning, packing,
                   upload, launch, download, waking up, commit, with the host's caches as a waiting host leaves them
      launch       what one step on an idle device takes longer than one in a row of steps: its graph arrives first

None of them sees the pipeline, and none is made from the period of the loop that it is to predict.
"""

from __future__ import annotations

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
from rollout.engine.schedule.sequence import Feature
from rollout.engine.step.graphs import PLAIN, DecodeGraphs
from rollout.engine.step.pipeline import Pipeline, StepInFlight
from rollout.engine.step.runner import Runner
from rollout.engine.step.slot import Slot, Upload

_ROUNDS, _REPEATS = 5, 20
_DRAWS = 16  # in one graph: a draw is too short to be launched one by one


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """Seconds of one step of the rows that were running."""

    forward_s: float
    sampling_s: float
    step_s: float  # forward and sampling as they are served, one after the other without a gap
    alone_s: float  # the same, on a device that was idle

    @property
    def launch_s(self) -> float:
        """What a step on an idle device takes longer than its parts."""
        return self.alone_s - self.forward_s - self.sampling_s


def measure_device_parts(engine: Engine) -> DeviceParts:
    """Time the next decode step of the rows that run, without taking it: their state is put back.

    The engine is paused with no step in flight, and every row has room for `_REPEATS` tokens more.
    """
    runner = engine.runner
    with borrowed_slot(engine.pipeline) as slot, _rows_kept(runner) as put_back:
        work = _work(engine, slot)
        forward_s = _in_a_row(runner, work.forward, put_back)
        sampling_s = _in_a_row(runner, work.draws, put_back) / work.draws_count
        step_s = _in_a_row(runner, work.step, put_back)
        runner.compute.run(put_back)
        alone_s = _alone(runner, work.step)
    return DeviceParts(forward_s, sampling_s, step_s, alone_s)


@contextmanager
def sleeping_steps(runner: Runner, seconds: float) -> Iterator[float]:
    """Decode steps only sleep, for about `seconds`; gives what one takes on an idle device, seconds.

    Outputs are those of the step before. What decodes meanwhile must not decode on afterwards.
    """
    real = runner.graphs
    nap = _nap(runner, seconds)
    runner.graphs = cast(DecodeGraphs, _SleepingGraphs(real, nap))
    try:
        yield _alone(runner, nap)
    finally:
        runner.graphs = real


@contextmanager
def borrowed_slot(pipeline: Pipeline) -> Iterator[Slot]:
    """A slot of a pipeline that has no step in flight."""
    assert pipeline.in_flight == 0
    slot = pipeline.acquire()
    try:
        yield slot
    finally:
        step = StepInFlight(cast(Plan, None), slot, 0.0, 0.0, 0.0)
        pipeline.push(step)
        pipeline.retire(step)


def stage_next_step(engine: Engine, slot: Slot) -> tuple[Upload, int]:
    """Upload the next decode step of the running rows to a slot; gives the upload and its number of rows, padded."""
    runner, seqs = engine.runner, engine.scheduler.decoding
    assert seqs, "no row decodes"
    size = len(seqs) if runner.graphs is None else runner.graphs.size_for(len(seqs))
    assert size is not None, f"{len(seqs)} rows are more than are captured"
    slot.begin()
    runner.stage_decode(slot, seqs, size)
    upload = slot.upload()
    runner.compute.run(upload.copy)
    return upload, size


@dataclass(frozen=True, slots=True)
class _Work:
    forward: Callable[[], object]
    draws: Callable[[], object]
    draws_count: int
    step: Callable[[], object]


class _SleepingGraphs:
    """Stands in for the captured steps of a runner."""

    def __init__(self, real: DecodeGraphs | None, nap: Callable[[], object]) -> None:
        self._real = real
        self._nap = nap

    def size_for(self, rows: int, features: Feature = PLAIN) -> int | None:
        return rows if self._real is None else self._real.size_for(rows, features)

    def run(self, slot: Slot, size: int) -> None:
        self._nap()


@contextmanager
def _rows_kept(runner: Runner) -> Iterator[Callable[[], None]]:
    """Gives what puts the rows' state on the device back, to run on the compute stream; it also runs at the end."""
    runner.device.synchronize()
    state = runner.rows
    with torch.inference_mode():
        kept = [(tensor, tensor.clone()) for tensor in (state.ints, state.floats, state.pages)]
    runner.device.synchronize()

    def put_back() -> None:
        for tensor, before in kept:
            tensor.copy_(before)

    try:
        yield put_back
    finally:
        runner.compute.run(put_back)
        _wait(runner)


def _work(engine: Engine, slot: Slot) -> _Work:
    runner = engine.runner
    upload, size = stage_next_step(engine, slot)
    if runner.graphs is not None:
        step = runner.graphs.captured(slot, size)
        runner.compute.run(step.forward.replay)  # its logits are drawn from
        draws = _captured_draws(runner, step.logits_SV, upload, slot.output)
        return _Work(step.forward.replay, draws, _DRAWS, step.whole.replay)
    context = max(seq.kv_len for seq in engine.scheduler.decoding) + 2 * _REPEATS
    rows, pages = upload["rows"], upload["new_pages"]
    kept: list[torch.Tensor] = []

    def forward() -> None:
        token_ids_B, batch = runner.begin_decode(rows, pages, context)
        kept[:] = [runner.model.compute_logits(runner.model(token_ids_B, batch, runner.kv))]

    def step_of_both() -> None:
        forward()
        runner.sample(kept[0], rows, PLAIN, slot.output)

    runner.compute.run(forward)
    _wait(runner)
    draw = functools.partial(runner.sample, kept[0], rows, PLAIN, slot.output)
    return _Work(forward, draw, 1, step_of_both)


def _captured_draws(runner: Runner, logits_SV: torch.Tensor, upload: Upload, output: torch.Tensor) -> Any:
    stream = runner.compute.stream  # type: ignore[attr-defined]  # of CUDA
    graph = torch.cuda.CUDAGraph()
    runner.device.synchronize()
    with torch.inference_mode(), torch.cuda.graph(graph, stream=stream):
        for _ in range(_DRAWS):
            runner.sample(logits_SV, upload["rows"], PLAIN, output)
    return graph.replay


def _in_a_row(runner: Runner, work: Callable[[], object], begin: Callable[[], None] = lambda: None) -> float:
    """Seconds of one `work` among many without a gap: median of some rounds, before each of which `begin` runs."""
    times = []
    for _ in range(_ROUNDS):
        runner.compute.run(begin)
        start, end = runner.device.event(), runner.device.event()
        runner.compute.run(work)
        runner.compute.record(start)
        for _ in range(_REPEATS):
            runner.compute.run(work)
        runner.compute.record(end)
        end.synchronize()
        runner.check()
        times.append((end.time_s - start.time_s) / _REPEATS)
    return statistics.median(times)


def _alone(runner: Runner, work: Callable[[], object]) -> float:
    """Seconds of one `work` on an idle device, from before its launch to its end: median."""
    times = []
    for _ in range(_REPEATS):
        _wait(runner)
        start, end = runner.device.event(), runner.device.event()
        runner.compute.record(start)
        runner.compute.run(work)
        runner.compute.record(end)
        end.synchronize()
        times.append(end.time_s - start.time_s)
    runner.check()
    return statistics.median(times)


def _wait(runner: Runner) -> None:
    done = runner.device.event()
    runner.compute.record(done)
    done.synchronize()
    runner.check()


def _nap(runner: Runner, seconds: float) -> Callable[[], object]:
    """Work that keeps the compute stream busy for about `seconds` and computes nothing."""
    if runner.device.torch_device.type != "cuda":
        return functools.partial(time.sleep, seconds)
    trial = 1_000_000
    rate = trial / _in_a_row(runner, _spin(runner, trial))
    return _spin(runner, round(rate * seconds))


def _spin(runner: Runner, cycles: int) -> Callable[[], object]:
    stream = runner.compute.stream  # type: ignore[attr-defined]  # of CUDA
    graph = torch.cuda.CUDAGraph()
    runner.device.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        torch.cuda._sleep(cycles)
    return graph.replay
