"""The orders that rank 0 gives to its followers through the ring, in the order of its compute stream.

    EXTRA     a part of the extras of a step             keep it for the next step
    STEP      header of an upload, its words             launch it, and draw unless rows wait for masks
    DRAW      places and masks of constrained rows       draw of the last step
    OPEN      number of an update, size of its manifest  check that it fits, lay out the staging memory
    TAKE      a piece: start and bytes, place in relay   keep the shard's part of it in the staging memory
    RELAY     a handle of memory of rank 0's GPU         map it: pieces come through it; or unmap it
    PREPARE   number of the update                       all bytes are verified: plan its copies
    SWAP      number of the update                       copy it into the parameters, after the steps before
    ADAPTER   number, place and layout of an adapter     map this rank's part of it
    WRITE     slot and number of an adapter              copy the part to the slot, beside steps or between two
    FORGET    number of an adapter                       unmap it, once no copy reads it
    MOVE      direction, pages, pages of the host        copy KV or states to the host or back
    MEMORY    what a sleep does with the memory          keep, give back, take again
    END       nothing                                    end the process

Every order has the weights version that is in use at it; a follower with another one ends. Orders that other threads
than the loop give in any order beside swaps have none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Literal, Protocol

import msgpack
import numpy as np
import torch

from rollout.engine.step.masks import StepMasks
from rollout.engine.step_output import StepOutput
from rollout.engine.upload import Extra, Header, Upload
from rollout.models.lora_slots import AdapterWeights
from rollout.ranks.reports import Number, Reports
from rollout.ranks.ring import RingWriter
from trainer_bridge.wire.errors import InternalError

STEP, DRAW, PREPARE, SWAP, END, OPEN, TAKE, RELAY, ADAPTER, WRITE, FORGET, MOVE, MEMORY, EXTRA = range(1, 15)

_PIECE_BYTES = 1 << 20
#: Instead of a version.
ANY_VERSION = -1
#: The queues of page movers.
Queue = Literal["kv_out", "kv_in", "state_out", "state_in"]


def check_alive(lost: Callable[[], str]) -> None:
    """Raise `InternalError` if the group is lost, for the reason that `lost` gives: followers take no orders then."""
    if why := lost():
        raise InternalError(f"the tensor group is lost: {why}")


class SharedRelay(Protocol):
    """Memory of rank 0's GPU that followers have mapped."""

    def unmap(self) -> None:
        """Have the followers unmap it."""

    def free(self) -> int:
        """Give it back, once they have; returns its bytes."""


class Orders:
    """The loop's end of the ring, as the executor sees it (`rollout.engine.step.execute.Orders`)."""

    def __init__(
        self,
        ring: RingWriter,
        version: int,
        reports: Reports,
        settle: Callable[[], None],
        relay: SharedRelay | None = None,
    ) -> None:
        """`settle` returns when all that followers knew at its call is known here, and raises if a rank is lost.

        `relay` goes with the memory in a sleep.
        """
        self._ring = ring
        self._version = version
        self._reports = reports
        self._settle = settle
        self._relay = relay
        self._ordered: dict[Number, int] = {}  # how many of the orders whose ends are reported
        self.pieces = 0  # of updates that were given
        self.prepared = 0  # number of the last update that followers were told to prepare
        self.swapped = 0  # number of the last one that they were told to copy

    def step(self, upload: Upload) -> None:
        """Give a step. The arrays of its extras come before it, in pieces: they may be larger than the ring."""
        extras = []
        for extra in upload.extras:
            for array in extra.arrays:
                data = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))  # type: ignore[arg-type]
                for begin in range(0, len(data), _PIECE_BYTES):
                    self._write(EXTRA, None, data[begin : begin + _PIECE_BYTES])
            shapes = [[array.dtype.str, list(array.shape)] for array in extra.arrays]
            extras.append([extra.feature, extra.fields, shapes])
        self._write(STEP, [upload.header.to_fields(), extras], _bytes(upload.words))

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
        """Give the relay memory on rank 0's GPU, which has a number; without bytes it is to be unmapped."""
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

    def done(self, name: Number, number: int) -> bool:
        """Whether all followers have carried out this order. Any thread may ask."""
        return min(self._reports.get(name)) >= number

    # --- adapters -----------------------------------------------------------------------------------------------------

    def adapter(self, ticket: int, number: int, begin: int, part_bytes: int, layout: Any) -> None:
        """Give an adapter to map. Any thread may call it."""
        self._write(ADAPTER, [ticket, number, begin, part_bytes, layout], version=ANY_VERSION)

    def forget_adapter(self, ticket: int, number: int) -> None:
        """Give an adapter to forget. Any thread may call it."""
        self._write(FORGET, [ticket, number], version=ANY_VERSION)

    def write_adapter(self, slot: int, weights: AdapterWeights, beside: bool) -> int:
        """Give the copy of an adapter to a slot; returns its number."""
        number = self._next("wrote")
        self._write(WRITE, [number, slot, weights.shared.number, beside])  # type: ignore[attr-defined]
        return number

    def adapter_written(self, number: int) -> bool:
        """Whether that copy is done on all followers."""
        return self.done("wrote", number)

    # --- KV on the host, and sleep ------------------------------------------------------------------------------------

    def move(self, queue: Queue, pages: Seq[int], host_pages: Seq[int]) -> int:
        """Give a piece of pages to move; `queue` names the direction. Returns the number of the piece."""
        number = self._next(queue)
        self._write(MOVE, [queue, list(pages), list(host_pages)])
        return number

    def moved(self, queue: Queue, number: int) -> bool:
        """Whether that piece is moved on all followers."""
        return self.done(queue, number)

    def memory(self, what: str) -> int:
        """Give an order of a sleep; returns its number."""
        if what == "release" and self._relay is not None:
            self._relay.unmap()
        number = self._next("memory_done")
        self._write(MEMORY, [number, what])
        return number

    def memory_done(self, number: int) -> bool:
        """Whether all followers have carried it out, or failed to."""
        return self.done("memory_done", number)

    def memory_failures(self, number: int) -> list[str]:
        """Why followers could not carry it out."""
        failed = enumerate(self._reports.get("memory_failed"))
        return [f"rank {i + 1}: {self._reports.text(i, 'memory')}" for i, last in failed if last == number]

    def free_relay(self) -> int:
        """Give back the relay's memory on rank 0's GPU, after a `release` that all have carried out; its bytes."""
        return 0 if self._relay is None else self._relay.free()

    @property
    def freed_bytes(self) -> int:
        """Bytes that all followers have given back so far."""
        return sum(self._reports.get("memory_freed"))

    def _next(self, name: Number) -> int:
        number = self._ordered[name] = self._ordered.get(name, 0) + 1
        return number

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

    def _write(self, kind: int, layout: Any, *parts: memoryview, version: int | None = None) -> None:
        now = self._version if version is None else version
        self._ring.write(kind, now, msgpack.packb(layout), *parts)


def ring_bytes(upload_words: int, max_rows: int, mask_words: int, tokens: int) -> int:
    """The size of a ring that holds four of the largest steps; each span of a prefill is described by four numbers."""
    largest = 4 * upload_words + max_rows * (4 * mask_words + 8) + 40 * min(tokens, upload_words // 30) + (1 << 14)
    return max(8 << 20, -(-4 * largest // 64) * 64)


def read_step(layout: memoryview, words: memoryview, content: bytes | bytearray = b"") -> Upload:
    """The upload of a STEP; its words are in the ring. `content` is that of the EXTRAs before it."""
    fields, told = msgpack.unpackb(layout, strict_map_key=True)
    extras, at = [], 0
    for feature, of_feature, shapes in told:
        arrays = []
        for dtype, shape in shapes:
            arrays.append(np.frombuffer(content, np.dtype(dtype), math.prod(shape), at).reshape(shape))
            at += arrays[-1].nbytes
        extras.append(Extra(feature, of_feature, tuple(arrays)))
    if at != len(content):
        raise RuntimeError(f"the extras of a step have {at} bytes, and {len(content)} came")
    upload_words = torch.from_numpy(np.frombuffer(words, dtype=np.int32))
    return Upload(Header.from_fields(fields), upload_words, tuple(extras))


def read_draw(layout: memoryview, body: memoryview) -> tuple[list[int], list[int], torch.Tensor]:
    """The rows of a DRAW (`StepMasks.set_rows`) and their masks, which are in the ring."""
    at, refused, width = msgpack.unpackb(layout)
    return at, refused, torch.from_numpy(np.frombuffer(body, dtype=np.int32).reshape(len(at), width))


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy().reshape(-1).view(np.uint8))  # type: ignore[arg-type]
