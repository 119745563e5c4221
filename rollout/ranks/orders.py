"""The orders that rank 0 gives to its followers through the ring, in the order of its compute stream.

    STEP      header of an upload, its words             launch it, and draw unless rows wait for masks
    DRAW      places and masks of constrained rows       draw of the last step
    PREPARE   number and sizes of an update              check that it fits, plan its copies; nothing changes yet
    SWAP      number of the update                       copy it into the parameters, after the steps before
    END       nothing                                    end the process

Every order has the weights version that is in use at it; a follower with another one ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import torch

from rollout.engine.step.masks import StepMasks
from rollout.engine.step.upload import Header, Upload
from rollout.engine.step_output import StepOutput
from rollout.ranks.ring import RingWriter

STEP, DRAW, PREPARE, SWAP, END = range(1, 6)


class Orders:
    """The loop's end of the ring, as the executor sees it (`rollout.engine.step.execute.Orders`)."""

    def __init__(self, ring: RingWriter, version: int, settle: Callable[[], None]) -> None:
        """`settle` returns when all that followers knew at its call is known here, and raises if a rank is lost."""
        self._ring = ring
        self._version = version
        self._settle = settle
        self.slow = 0  # sequence number of the last order that may take long
        self.update = 0  # number of the last update that followers were told to prepare
        self.swapped = 0  # number of the last one that they were told to copy

    def step(self, upload: Upload) -> None:
        """Give a step."""
        self._write(STEP, upload.header.to_fields(), _bytes(upload.words))

    def draw(self, masks: StepMasks) -> None:
        """Give the draw of the last step."""
        at, refused = masks.rows
        self._write(DRAW, [at, refused, masks.host.shape[1]], _bytes(masks.host[: len(at)]))

    def prepare(self, total_bytes: int, manifest_bytes: int) -> int:
        """Give an update to prepare; returns its number. Any thread may call it."""
        self.update += 1
        self._write(PREPARE, [self.update, total_bytes, manifest_bytes])
        return self.update

    def swap(self, version: int) -> None:
        """Give the copy of the prepared update."""
        self.swapped = self.update
        self._write(SWAP, [self.update, version])
        self._version = version

    def confirm(self, output: StepOutput) -> None:
        """Raise if another rank knows that a step may be wrong.

        What a rank lacks is NaN, and NaN in a part of a row makes its log-prob NaN on every rank. Weights may have NaN,
        too, so that alone is no fault.
        """
        if math.isnan(sum(output.logprobs)):
            self._settle()

    @property
    def ordered(self) -> int:
        """Sequence number of the last order."""
        return self._ring.sequence

    def end(self) -> None:
        """Give the end."""
        self._write(END, None)

    def _write(self, kind: int, layout: Any, *parts: memoryview) -> None:
        sequence = self._ring.write(kind, self._version, msgpack.packb(layout), *parts)
        if kind not in (STEP, DRAW):
            self.slow = max(self.slow, sequence)


def ring_bytes(upload_words: int, max_rows: int, mask_words: int, tokens: int) -> int:
    """The size of a ring that holds four of the largest steps; each span of a prefill is described by four numbers."""
    largest = 4 * upload_words + max_rows * (4 * mask_words + 8) + 40 * min(tokens, upload_words // 30) + (1 << 14)
    return max(8 << 20, -(-4 * largest // 64) * 64)


def read_step(layout: memoryview, words: memoryview) -> Upload:
    """The upload of a STEP; its words are in the ring."""
    header = Header.from_fields(msgpack.unpackb(layout, strict_map_key=True))
    return Upload(header, torch.from_numpy(np.frombuffer(words, dtype=np.int32)))


def read_draw(layout: memoryview, body: memoryview) -> tuple[list[int], list[int], torch.Tensor]:
    """The rows of a DRAW (`StepMasks.set_rows`) and their masks, which are in the ring."""
    at, refused, width = msgpack.unpackb(layout)
    return at, refused, torch.from_numpy(np.frombuffer(body, dtype=np.int32).reshape(len(at), width))


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy().reshape(-1).view(np.uint8))  # type: ignore[arg-type]
