"""Decode steps as CUDA graphs, captured at start-up in one memory pool, largest first.

    whole     forward, draw, advance of the rows    one for each slot and size, against the slot's buffers: a step is
                                                    one upload, one replay, one download
    forward   forward only, up to the logits        one for each size of a coarser set, with an input of its own; what
                                                    changes the logits is sampled outside of the graph and costs more
                                                    than the larger padding; once more for steps with adapters

A step of n rows takes the smallest captured size that holds them; the rest is padding on row 0. Nothing is compiled
while serving.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rollout.engine.schedule.sequence import Feature
from rollout.engine.step.slot import Slot, Upload
from rollout.engine.step.step_record import StepRecord
from rollout.models.decoder import Decoder
from rollout.models.fused import FusedDecoder, supports

if TYPE_CHECKING:
    from rollout.engine.step.runner import Runner

log = logging.getLogger(__name__)

#: Told (done, in all).
Progress = Callable[[int, int], None]

#: Sampling that is inside the captured step.
PLAIN = Feature.GREEDY | Feature.DRAW


def capturable(model: Decoder, fused_experts: bool) -> bool:
    """True if a decode step of this model reads nothing on the host: on a GPU, dense or with fused experts.

    The generic experts ask the device how many tokens each of them has.
    """
    return model.embed.is_cuda and (model.spec.moe is None or supports(model, fused_experts))


def graph_sizes(most: int) -> list[int]:
    """Batch sizes to capture, ascending up to `most`: a step wastes at most a fifth of its rows, or three of them."""
    steps = (1, 2, 3, 4, 6, *range(8, 32, 4), *range(32, 128, 8), *range(128, 256, 16), *range(256, most, 32))
    return [*(size for size in steps if size < most), most]


def forward_sizes(sizes: list[int]) -> list[int]:
    """Those of `sizes` at which the forward alone is captured: powers of two, and the largest."""
    return [size for size in sizes if size & (size - 1) == 0 or size == sizes[-1]]


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """The graphs of one slot and size, and where the second leaves its logits."""

    whole: torch.cuda.CUDAGraph
    forward: torch.cuda.CUDAGraph
    logits_SV: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Forward:
    """A forward of one size: its input, of the same layout as a slot's upload, and where it leaves its logits."""

    graph: torch.cuda.CUDAGraph
    upload: Upload
    logits_SV: torch.Tensor
    record: StepRecord | None  # of its own, too


class DecodeGraphs:
    """All captured decode steps of a runner, up to `most` rows."""

    def __init__(self, runner: Runner, max_context: int, most: int) -> None:
        self._runner = runner
        self._max_context = max_context
        self._pool = torch.cuda.graph_pool_handle()
        self.sizes = graph_sizes(most)
        self._forward_sizes = forward_sizes(self.sizes)
        self._steps: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._kinds = (False,) if runner.adapters is None else (False, True)  # without adapters, and with
        self._forwards: dict[tuple[int, bool], _Forward] = {}
        #: Experts of each sparse layer, [size, K], in the last step of this size from the slot that was captured first.
        self.experts: dict[int, list[torch.Tensor]] = {}

    @property
    def kept_bytes(self) -> int:
        """What graphs of all sizes but the largest keep, because it is read after them: logits."""
        return len(self._kinds) * sum(self._forward_sizes[:-1]) * self._runner.model.spec.vocab * 4

    def capture(self, slots: list[Slot], progress: Progress | None = None, sizes: list[int] | None = None) -> None:
        """Capture every size, or only `sizes`, for every slot; `progress` is told (sizes done, in all)."""
        began_s, warm_up_s, before = time.perf_counter(), 0.0, self.count
        jobs = sorted(sizes or self.sizes, reverse=True)
        with _no_collection(), torch.inference_mode(), torch.cuda.stream(self._stream):
            for done, size in enumerate(jobs):
                warming_s = time.perf_counter()
                self._warm_up(slots[0], size)
                warm_up_s += time.perf_counter() - warming_s
                self._capture(slots, size)
                if progress is not None:
                    progress(done + 1, len(jobs))
        took_s = round(time.perf_counter() - began_s, 1)
        facts = {"graphs": self.count - before, "took_s": took_s, "first_runs_s": round(warm_up_s, 1)}
        log.info("captured decode steps as graphs", extra=facts)

    @property
    def count(self) -> int:
        """Graphs that are captured."""
        return len(self._steps) + len(self._forwards)

    def size_for(self, rows: int, features: Feature = PLAIN) -> int | None:
        """The captured size that a step of `rows` rows takes; None if there is none."""
        sizes = self._forward_sizes if features & ~PLAIN else self.sizes
        return next((size for size in sizes if size >= rows), None)

    def run(self, slot: Slot, size: int) -> None:
        """Enqueue a decode step, draw included, whose upload is padded to `size`; on the compute stream."""
        self._steps[id(slot), size].replay()

    def forward(
        self, size: int, rows: int, adapted: bool, upload: Upload, record: StepRecord | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Enqueue the forward alone; its logits, which the next one writes over, and rows. On the compute stream."""
        forward = self._forwards[size, adapted]
        forward.upload.device.copy_(upload.device[: len(forward.upload.device)])  # what else there is is not its own
        forward.graph.replay()
        if record is not None and forward.record is not None:
            record.copy_from(forward.record, rows)
        return forward.logits_SV[:rows], upload["rows"][:rows]

    def captured(self, slot: Slot, size: int) -> CapturedStep:
        """The graphs of a slot and size, to measure them; the forward reads what the slot's input holds now.

        Where no forward of this size was captured it is captured now.
        """
        stream = self._stream
        with torch.inference_mode(), torch.cuda.stream(stream):
            if (size, False) not in self._forwards:
                stream.synchronize()  # what is on its way from the slot's staging buffer, which capturing writes to
                self._capture_forward(slot, size, False)
            forward = self._forwards[size, False]
            forward.upload.device.copy_(slot.input[: len(forward.upload.device)])
        return CapturedStep(self._steps[id(slot), size], forward.graph, forward.logits_SV)

    @property
    def _stream(self) -> torch.cuda.Stream:
        return self._runner.compute.stream  # type: ignore[attr-defined]

    def _warm_up(self, slot: Slot, size: int) -> None:
        """Compile and load what the captures of this size will launch; it runs on padding."""
        upload = self._stage(slot, size)
        upload.device.zero_()
        self._step(upload, slot)
        if True in self._kinds:
            self._forward(upload, slot.record, adapted=True)
        self._stream.synchronize()

    def _stage(self, slot: Slot, size: int) -> Upload:
        slot.begin()
        self._runner.stage_decode(slot, [], size)
        return slot.upload()

    def _capture(self, slots: list[Slot], size: int) -> None:
        if size in self._forward_sizes:
            for adapted in self._kinds:
                self._capture_forward(slots[0], size, adapted)
        for slot in slots:
            upload, graph = self._stage(slot, size), torch.cuda.CUDAGraph()
            with _capturing(graph, self._pool):
                self._runner.compute.record(slot.start)  # again, where the device begins: the replay arrives later
                self._step(upload, slot)
            self._steps[id(slot), size] = graph
            if isinstance(self._runner.forward, FusedDecoder):
                # Only the first slot's: they keep their memory, which the graphs captured after them can't write to.
                self.experts.setdefault(size, self._runner.forward.take_chosen())

    def _capture_forward(self, slot: Slot, size: int, adapted: bool) -> None:
        staged, graph = self._stage(slot, size), torch.cuda.CUDAGraph()
        upload = Upload(staged.host, torch.zeros_like(staged.device), staged.sections)
        record = None if slot.record is None else slot.record.another(size)
        with _capturing(graph, self._pool):
            logits_SV = self._forward(upload, record, adapted)
        self._forwards[size, adapted] = _Forward(graph, upload, logits_SV, record)

    def _step(self, upload: Upload, slot: Slot) -> None:
        self._runner.sample(self._forward(upload, slot.record), upload["rows"], PLAIN, slot.output)

    def _forward(self, upload: Upload, record: StepRecord | None, adapted: bool = False) -> torch.Tensor:
        runner = self._runner
        token_ids_B, batch = runner.begin_decode(
            upload["rows"], upload["new_pages"], self._max_context, record, adapted
        )
        hidden_BD = runner.forward(token_ids_B, batch, runner.kv)
        if record is not None:
            record.end(batch)
        return runner.forward.compute_logits(hidden_BD)


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture what is enqueued on the current stream.

    `torch.cuda.graph` does the same and each time also gives all cached memory back to the driver. What other threads
    do meanwhile (weights may arrive while an engine is built anew) does not void the capture.
    """
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):  # the capture is void; the first error says why
            graph.capture_end()
        raise
    graph.capture_end()


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection amid captures: it takes long, and what it frees may be the device's."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
