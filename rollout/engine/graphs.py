"""Decode steps as CUDA graphs: one for each slot and batch size, captured at start-up in one memory pool.

A slot's graphs read its input buffer and write its output buffer, so a step is one upload, one replay, one download.
A step of n rows takes the smallest captured size that holds them; the rest is padding on row 0. Two graphs a size:

    whole     forward, draw, advance of the rows        plain sampling: temperature or greedy
    forward   forward only, up to the logits            what changes the logits is sampled outside of the graph

Sizes are captured largest first, so that smaller ones reuse the pool's memory. Nothing is compiled while serving.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rollout.engine.sequence import Feature
from rollout.engine.slot import Slot, Upload
from rollout.models.fused import MOST_ROWS, FusedDecoder

if TYPE_CHECKING:
    from rollout.engine.runner import Runner

#: Sampling that is inside the captured step.
PLAIN = Feature.GREEDY | Feature.DRAW


def graph_sizes(max_rows: int) -> list[int]:
    """Batch sizes to capture, ascending: every one up to 4, then steps that waste at most a fifth or 7 rows."""
    most = min(max_rows, MOST_ROWS)
    sizes = [size for size in (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, *range(40, MOST_ROWS + 1, 8)) if size < most]
    return [*sizes, most]


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """The graphs of one slot and size, and where the second leaves its logits."""

    whole: torch.cuda.CUDAGraph
    forward: torch.cuda.CUDAGraph
    logits_SV: torch.Tensor


class DecodeGraphs:
    """All captured decode steps of a runner."""

    def __init__(self, runner: Runner, fused: FusedDecoder, max_context: int, max_rows: int) -> None:
        self._runner = runner
        self._fused = fused
        self._max_context = max_context
        self._pool = torch.cuda.graph_pool_handle()
        self._sizes = graph_sizes(max_rows)
        self._steps: dict[tuple[int, int], CapturedStep] = {}

    def capture(self, slots: list[Slot], progress: Callable[[int, int], None] | None = None) -> None:
        """Capture every size for every slot; `progress` is told (captured, in all)."""
        jobs = [(slot, size) for size in reversed(self._sizes) for slot in slots]
        stream = self._runner.compute.stream  # type: ignore[attr-defined]
        for done, (slot, size) in enumerate(jobs):
            with torch.inference_mode(), torch.cuda.stream(stream):
                self._steps[id(slot), size] = self._capture(slot, size, stream)
            if progress is not None:
                progress(done + 1, len(jobs))

    def size_for(self, rows: int) -> int | None:
        """The captured size that a step of `rows` rows takes; None if there is none."""
        return next((size for size in self._sizes if size >= rows), None)

    def run(self, slot: Slot, size: int, rows: int, features: Feature, upload: Upload, output: torch.Tensor) -> None:
        """Enqueue a decode step whose upload is padded to `size`; on the compute stream."""
        step = self._steps[id(slot), size]
        if not features & ~PLAIN:
            step.whole.replay()
            return
        step.forward.replay()
        self._runner.sample(step.logits_SV[:rows], upload["rows"][:rows], features, output)

    def _capture(self, slot: Slot, size: int, stream: torch.cuda.Stream) -> CapturedStep:
        # Row 0 everywhere: what warm-up and capture run on is padding.
        slot.begin()
        self._runner.stage_decode(slot, [], size)
        upload = slot.upload()
        upload.device.zero_()
        self._step(upload, slot)  # compiles and loads what the capture will launch
        stream.synchronize()
        whole = torch.cuda.CUDAGraph()
        with torch.cuda.graph(whole, pool=self._pool, stream=stream):
            self._step(upload, slot)
        forward = torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward, pool=self._pool, stream=stream):
            logits_SV = self._forward(upload)
        return CapturedStep(whole, forward, logits_SV)

    def _step(self, upload: Upload, slot: Slot) -> None:
        self._runner.sample(self._forward(upload), upload["rows"], PLAIN, slot.output)

    def _forward(self, upload: Upload) -> torch.Tensor:
        token_ids_B, batch = self._runner.begin_decode(upload["rows"], upload["new_pages"], self._max_context)
        return self._fused(token_ids_B, batch, self._runner.kv)
