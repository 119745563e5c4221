"""The orders that rank 0 gives to its followers through the ring, in the order of its compute stream.

    STEP      header of an upload, its words             launch it, and draw unless rows wait for masks
    DRAW      places and masks of constrained rows       draw of the last step
    OPEN      number of an update, size of its manifest  check that it fits, lay out the staging memory
    TAKE      a piece: start and bytes, place in relay   keep the shard's part of it in the staging memory
    RELAY     a handle of memory of rank 0's GPU         map it: pieces come through it
    PREPARE   number of the update                       all bytes are verified: plan its copies
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

STEP, DRAW, PREPARE, SWAP, END, OPEN, TAKE, RELAY = range(1, 9)


class Orders:
    """The loop's end of the ring, as the executor sees it (`rollout.engine.step.execute.Orders`)."""

    def __init__(self, ring: RingWriter, version: int, settle: Callable[[], None]) -> None:
        """`settle` returns when all that followers knew at its call is known here, and raises if a rank is lost."""
        self._ring = ring
        self._version = version
        self._settle = settle
        self.slow = 0  # sequence number of the last order that may take long
        self.pieces = 0  # of updates that were given
        self.prepared = 0  # number of the last update that followers were told to prepare
        self.swapped = 0  # number of the last one that they were told to copy

    def step(self, upload: Upload) -> None:
        """Give a step."""
        self._write(STEP, upload.header.to_fields(), _bytes(upload.words))

    def draw(self, masks: StepMasks) -> None:
        """Give the draw of the last step."""
        at, refused = masks.rows
        self._write(DRAW, [at, refused, masks.host.shape[1]], _bytes(masks.host[: len(at)]))

    def open(self, number: int, manifest_bytes: int) -> None:
        """Give the beginning of an update. Any thread may call it, as those for pieces and preparation."""
        self._write(OPEN, [number, manifest_bytes])

    def take(self, start: int, nbytes: int, at: int, on_device: bool) -> int:
        """Give a piece of the update, which lies at byte `at` of the relay memory of the host or of the device.

        Returns the number of the piece, over all updates. One thread at a time gives pieces.
        """
        self._write(TAKE, [start, nbytes, at, on_device])
        self.pieces += 1
        return self.pieces

    def relay(self, number: int, handle: bytes, nbytes: int) -> None:
        """Give the relay memory on rank 0's GPU, which has a number."""
        self._write(RELAY, [number, handle, nbytes])

    def prepare(self, number: int) -> None:
        """Give the preparation of the update, whose bytes are verified."""
        self.prepared = number
        self._write(PREPARE, [number])

    def swap(self, version: int) -> None:
        """Give the copy of the prepared update."""
        self.swapped = self.prepared
        self._write(SWAP, [self.prepared, version])
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
