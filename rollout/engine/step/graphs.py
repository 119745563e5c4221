"""Decode steps as CUDA graphs, captured at start-up in one memory pool, largest first.

    whole     forward, draw, advance of the rows    one for each slot and size, against the slot's buffers: a step is
                                                    one upload, one replay, one download
    forward   forward only, up to the logits        one for each size of a coarser set, with an input of its own, for
                                                    steps that change the logits; once more for steps with adapters.
                                                    They draw outside the graph, which costs more than the padding

    ahead     both once more, for steps with tokens ahead of a model with states; other models run such steps in the
              graphs above

    replays   launches of features at the end of    one for each name and size (`AheadFeature.decode_work`)
              a step

A step of n rows takes the smallest captured size that holds them; the rest is padding on row 0. Nothing is compiled
while serving.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import torch

from rollout.engine.device.streams import DeviceStream
from rollout.engine.schedule.step_feature import of_kind
from rollout.engine.step.device_feature import AheadFeature, OutputFeature
from rollout.engine.step.device_step import DeviceStep, Outputs
from rollout.engine.step.pack import CapturedSizes
from rollout.engine.step.slot import Slot
from rollout.engine.upload import PLAIN, RowNeeds, StepInput, Upload, put_behind
from rollout.models.decoder import Decoder, DecoderLayer
from rollout.models.fused import FusedDecoder, supports, takes
from rollout.models.language_model import LanguageModel

log = logging.getLogger(__name__)

#: Called with (captured sizes, all sizes).
Progress = Callable[[int, int], None]


def no_progress(done: int, total: int) -> None:
    """No-op: progress is not reported."""


def capturable(model: LanguageModel) -> bool:
    """True if a decode step of this model needs no value from the device on the host, and there is a GPU.

    A block that reads such a value (`Block.reads_host`) must be fused: the generic experts ask the device how many
    tokens each expert has. A fallback model runs a step to find out; the reason why it is not captured is logged.
    """
    if not model.embed.is_cuda:
        return False
    if not isinstance(model, Decoder):
        from rollout.models.fallback.start import capture_obstacle

        obstacle = capture_obstacle(model)
        if obstacle:
            log.warning("decode steps are not captured as CUDA graphs: %s", obstacle)
        return not obstacle
    fused, dtype = supports(model), model.embed.dtype
    layers = [cast(DecoderLayer, layer) for layer in model.layers]
    return not any(
        block.reads_host and not (fused and takes(block.spec, dtype)) for layer in layers for block in layer.blocks
    )


def graph_sizes(most: int) -> list[int]:
    """Batch sizes to capture, ascending up to `most`: a step wastes at most a fifth of its rows, or three of them."""
    few = (1, 2, 3, 4, 6, *range(8, 32, 4), *range(32, 128, 8))
    many = (*range(128, 256, 16), *range(256, 512, 32), *range(512, most, 64))
    return [*(size for size in (*few, *many) if size < most), most]


def forward_sizes(sizes: list[int]) -> list[int]:
    """The sizes at which the forward alone is captured: the powers of two in `sizes`, and the largest."""
    return [size for size in sizes if size & (size - 1) == 0 or size == sizes[-1]]


def captured_sizes(most: int) -> CapturedSizes:
    """The sizes that are captured for steps of up to `most` rows."""
    sizes = graph_sizes(most)
    return CapturedSizes(sizes, forward_sizes(sizes))


NOT_CAPTURED = CapturedSizes([], [])


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """The graphs of one slot and size, and where the second leaves its logits."""

    whole: torch.cuda.CUDAGraph
    forward: torch.cuda.CUDAGraph
    logits_SV: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Forward:
    """A forward of one size: its input, laid out as a slot's, its logits, and what features write in it."""

    graph: torch.cuda.CUDAGraph
    step: StepInput
    logits_SV: torch.Tensor
    outputs: Outputs


class DecodeGraphs:
    """All captured decode steps of an engine, up to `most` rows with contexts up to `max_context`.

    `cuda` makes the graphs, their memory pool, and a stream the current one.
    """

    def __init__(
        self, step: DeviceStep, compute: DeviceStream, max_context: int, most: int, cuda: Any = torch.cuda
    ) -> None:
        self._cuda = cuda
        self._step = step
        self._compute = compute
        self._max_context = max_context
        self._pool = cuda.graph_pool_handle()
        self.sizes = captured_sizes(most)
        self._steps: dict[tuple[int, int, bool], torch.cuda.CUDAGraph] = {}  # key: (slot, size, with_ahead)
        #: Kinds to capture: False, without tokens ahead; also True, with some, if the model's states need it.
        self._ahead_kinds = (False, True) if step.kv.states.go_ahead else (False,)
        self.forwards: dict[tuple[int, int, bool], _Forward] = {}  # key: (size, needs, with_ahead)
        #: Launches of features at the end of decode steps, by feature, name, and size.
        self.replays: dict[str, dict[str, dict[int, Callable[[], object]]]] = {}
        #: Experts of each sparse layer, [size, K], in the last step of this size from the slot that was captured first.
        self.chosen: dict[int, list[torch.Tensor]] = {}

    @property
    def kept_bytes(self) -> int:
        """Memory of the logits that graphs of all sizes but the largest keep, since they are read after the replay."""
        step = self._step
        return len(step.kinds) * len(self._ahead_kinds) * sum(self.sizes.forward[:-1]) * step.model.spec.vocab * 4

    def capture(self, slots: list[Slot], progress: Progress = no_progress, sizes: Seq[int] = ()) -> None:
        """Capture every size, or only `sizes`, for every slot."""
        began_s, warm_up_s, before = time.perf_counter(), 0.0, self.count
        jobs = sorted(sizes or self.sizes.whole, reverse=True)
        with _no_collection(), torch.inference_mode(), self._cuda.stream(self._stream):
            for done, size in enumerate(jobs):
                warming_s = time.perf_counter()
                self._warm_up(slots[0], size)
                warm_up_s += time.perf_counter() - warming_s
                self._capture(slots, size)
                progress(done + 1, len(jobs))
        took_s = round(time.perf_counter() - began_s, 1)
        facts = {"graphs": self.count - before, "took_s": took_s, "first_runs_s": round(warm_up_s, 1)}
        log.info("captured decode steps as graphs", extra=facts)

    def warm_up(self, slot: Slot) -> None:
        """Run the launches of all captures once, on padding."""
        with torch.inference_mode(), self._cuda.stream(self._stream):
            for size in reversed(self.sizes.whole):
                self._warm_up(slot, size)

    @property
    def count(self) -> int:
        """Graphs that are captured."""
        of_features = sum(len(sizes) for by_name in self.replays.values() for sizes in by_name.values())
        return len(self._steps) + len(self.forwards) + of_features

    def run(self, slot: Slot, size: int, with_ahead: bool = False) -> None:
        """Enqueue a decode step, draw included, whose upload is padded to `size`; on the compute stream.

        `with_ahead` if the upload says which rows have tokens ahead.
        """
        self._steps[id(slot), size, with_ahead].replay()

    def forward(self, step: StepInput, outputs: Outputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Enqueue the forward alone; its logits, which the next one overwrites, and rows. On the compute stream."""
        header = step.header
        forward = self.forwards[header.size, header.needs & self._step.changes, "behind" in step]
        own = forward.step.words
        own.copy_(step.words[: len(own)])  # the sections of `_upload`, which lie first; the graph reads nothing else
        forward.graph.replay()
        for feature in self._step.with_output:
            if feature.name in outputs:
                feature.copy_output(outputs[feature.name], forward.outputs[feature.name], header.rows)
        return forward.logits_SV[: header.rows], step["rows"][: header.rows]

    def captured(self, slot: Slot, size: int) -> CapturedStep:
        """The graphs of a slot and size, to measure them; the forward reads what the slot's input holds now.

        Captures the forward of this size first if there is none.
        """
        stream = self._stream
        with torch.inference_mode(), self._cuda.stream(stream):
            if (size, 0, False) not in self.forwards:
                stream.synchronize()  # capturing writes to the staging buffer, from which a copy may be under way
                self._capture_forward(slot, size, RowNeeds.NONE, False)
            forward = self.forwards[size, 0, False]
            forward.step.words.copy_(slot.input[: len(forward.step.words)])
        return CapturedStep(self._steps[id(slot), size, False], forward.graph, forward.logits_SV)

    @property
    def _stream(self) -> torch.cuda.Stream:
        return self._compute.stream  # type: ignore[attr-defined]

    def _warm_up(self, slot: Slot, size: int) -> None:
        """Compile and load the kernels of the captures of this size, by a run on padding."""
        for with_ahead in self._ahead_kinds:
            step = self._on_slot(slot, size, with_ahead)
            step.words.zero_()
            self.run_whole(step, slot)
            for kind in self._step.kinds[1:]:
                self.run_forward(step, slot.outputs, kind)
        for _, _, launch in self._decode_work(size):
            launch()
        self._stream.synchronize()

    def _upload(self, slot: Slot, size: int, with_ahead: bool) -> Upload:
        slot.staging.begin()
        self._step.put_rows(slot.staging, [], size)
        if with_ahead:
            put_behind(slot.staging, [], size)
        return slot.staging.upload(size, size, size, PLAIN.value, self._max_context, size=size)

    def _on_slot(self, slot: Slot, size: int, with_ahead: bool) -> StepInput:
        upload = self._upload(slot, size, with_ahead)
        return slot.input_for(upload)

    def _capture(self, slots: list[Slot], size: int) -> None:
        if size in self.sizes.forward:
            for needs in self._step.kinds:
                for with_ahead in self._ahead_kinds:
                    self._capture_forward(slots[0], size, needs, with_ahead)
        for feature, name, launch in self._decode_work(size):
            graph = self._cuda.CUDAGraph()
            with capturing(graph, self._pool):
                launch()
            self.replays.setdefault(feature, {}).setdefault(name, {})[size] = graph.replay
        for slot, with_ahead in product(slots, self._ahead_kinds):
            step, graph = self._on_slot(slot, size, with_ahead), self._cuda.CUDAGraph()
            with capturing(graph, self._pool):
                self._compute.record(slot.start)  # recorded again where the device begins: the replay arrives later
                self.run_whole(step, slot)
            self._steps[id(slot), size, with_ahead] = graph
            if isinstance(self._step.forward, FusedDecoder):
                # Only the first slot's experts: they keep their memory, which later graphs can't write to.
                self.chosen.setdefault(size, self._step.forward.take_chosen())

    def _decode_work(self, size: int) -> Iterator[tuple[str, str, Callable[[], None]]]:
        """Launches of features after a decode step of this size: feature, name, and the launch."""
        for feature in of_kind(self._step.features, AheadFeature):  # type: ignore[type-abstract]
            for name, launch in feature.decode_work(size, self._max_context, self._step.kv).items():
                yield feature.name, name, launch

    def _capture_forward(self, slot: Slot, size: int, needs: RowNeeds, with_ahead: bool) -> None:
        upload, graph = self._upload(slot, size, with_ahead), self._cuda.CUDAGraph()
        step = StepInput(upload.header, torch.zeros_like(slot.input[: len(upload.words)]))
        outputs = {feature.name: self._output(feature, size) for feature in self._step.with_output}
        with capturing(graph, self._pool):
            logits_SV = self.run_forward(step, outputs, needs)
        self.forwards[size, needs.value, with_ahead] = _Forward(graph, step, logits_SV, outputs)

    def _output(self, feature: OutputFeature, size: int) -> Any:
        words = feature.output_words(size)
        device = self._step.rows.ints.device
        return feature.output(torch.zeros(words, dtype=torch.int32, device=device), size, size) if words else None

    def run_whole(self, step: StepInput, slot: Slot) -> None:
        """The work in the graph of a whole step: forward and sampling."""
        self._step.sample(self.run_forward(step, slot.outputs), step["rows"], PLAIN, slot.output)

    def run_forward(self, step: StepInput, outputs: Outputs, needs: RowNeeds = RowNeeds.NONE) -> torch.Tensor:
        """The work in the graph of a forward; returns logits [S, V]."""
        return self._step.decode_rows(step, self._max_context, needs, outputs)


class NoGraphs(DecodeGraphs):
    """The graphs of an engine that captures no size: no step is ever packed for one."""

    def __init__(self) -> None:
        self.sizes = NOT_CAPTURED
        self.replays = {}
        self.chosen = {}

    def capture(self, slots: list[Slot], progress: Progress = no_progress, sizes: Seq[int] = ()) -> None:
        """No-op."""

    def warm_up(self, slot: Slot) -> None:
        """No-op."""


NO_GRAPHS = NoGraphs()


def make_graphs(step: DeviceStep, compute: DeviceStream, max_context: int, most: int) -> DecodeGraphs:
    """The graphs of steps of up to `most` rows, not captured yet; 0: none will be."""
    return DecodeGraphs(step, compute, max_context, most) if most else NO_GRAPHS


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture the work that is enqueued on the current stream.

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
    """Disable garbage collection during captures: it is slow, and may free device memory."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
