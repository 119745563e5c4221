"""The orders that rank 0 gives to its followers through the ring, in the order of its compute stream.

    EXTRA     a part of the extras of a step         keep it for the next step
    STEP      header of an upload, its words         launch it, and draw unless rows wait for masks
    DRAW      indices and masks of constrained rows  draw of the last step
    LANE      an order of a lane, with its number    carry it out, and acknowledge it (`reports.py`)
    END       nothing                                end the process

The orders of each lane, with their fields:

    updates          open      number of an update, size of its manifest   lay out the staging memory, if it fits
                     take      a piece: start, bytes, offset in the relay  keep the shard's part in the staging memory
                     relay     a handle of memory of rank 0's GPU          map it, for pieces; or unmap it
                     offer     a transport, its options                    open the publisher's memory; or close it
                     prepare   number of the update                        its bytes are verified: plan its copies
    update_reads               update, a bucket or piece, check            read it from the offer, and keep it
    swap                       version of the update                       after older steps, copy it to the parameters
    adapters         prepare   number, place and layout of an adapter      map this rank's part
                     forget    number of an adapter                        unmap its part: no copy reads it
    adapter_copies             slot and number of an adapter               copy it, during steps or between two
    kv_out, ..                 pages, pages of the host                    copy KV or states to the host or back
    kv_write, ..     open      folder of the worker                        write files of KV or states to a subfolder
                     write     key, page of the host, versions             write it, in a thread
                     delete    keys                                        delete their files, after older writes
                     close                                                 end the threads of files
    kv_read, ..      read      key, page of the host, versions             read the file into the page, in a thread
                     give up                                               no read touches a page from now on
    sleep                      save, release, restore, ..                  keep memory, give it back, take it again

Every order but those for adapters has the weights version in use; a follower with another version ends. Threads other
than the loop give the orders for adapters, before or after a swap.
"""

import math
import threading
from collections.abc import Callable
from typing import Any, Protocol

import msgpack
import numpy as np
import torch

from rollout.engine.device.rank_orders import MemoryOfRanks
from rollout.engine.device.releasable import ReleasableMemory, SleepMemory
from rollout.engine.step.device_feature import Orders, OrderSizes
from rollout.engine.step.masks import StepMasks
from rollout.engine.upload import Extra, Header, StepOutput, Upload
from rollout.ranks.rank_watch import LANES, LaneName
from rollout.ranks.reports import RankReports
from rollout.ranks.ring import RingWriter
from trainer_bridge.wire.errors import InternalError

STEP, DRAW, EXTRA, LANE, END = range(1, 6)

_PIECE_BYTES = 1 << 20
#: Instead of a version.
ANY_VERSION = -1


def check_alive(lost: Callable[[], str]) -> None:
    """Raise `InternalError` if the group is lost, for the reason that `lost` gives: followers take no orders then."""
    if why := lost():
        raise InternalError(f"the tensor group is lost: {why}")


class SharedRelay(Protocol):
    """Memory of rank 0's GPU that followers have mapped."""

    def unmap(self) -> None:
        """Have the followers unmap it."""

    def free(self) -> int:
        """Free the memory, once the followers have unmapped it; returns its bytes."""


class OrderWriter(Orders):
    """The loop's end of the ring."""

    def __init__(
        self,
        ring: RingWriter,
        version: int,
        reports: RankReports,
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
        self._giving = threading.Lock()
        self._given = dict.fromkeys(LANES, 0)  # number of the last order of each lane
        self.prepared = 0  # number of the last update that followers were told to prepare

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

    def give(self, lane: LaneName, *fields: Any, number: int | None = None) -> int:
        """Give an order of a lane; returns its number, by default the next one. Any thread may call it."""
        with self._giving:
            number = self._given[lane] + 1 if number is None else number
            self._given[lane] = number
            self._write(LANE, [lane, number, *fields], version=ANY_VERSION if lane == "adapters" else None)
        return number

    def done(self, lane: LaneName, number: int) -> bool:
        """Whether all followers have carried out this order of a lane, or failed to. Any thread may ask."""
        return self._reports.done(lane, number)

    def failures(self, lane: LaneName, number: int) -> list[str]:
        """Why followers could not carry out this order of a lane, or a later one."""
        return self._reports.failures(lane, number)

    def swap(self, version: int) -> None:
        """Give the copy of the prepared update."""
        self.give("swap", version, number=self.prepared)
        self._version = version

    @property
    def swapped(self) -> int:
        """Number of the last update that followers were told to copy."""
        return self._given["swap"]

    def unmap_relay(self) -> None:
        """Have the followers unmap the relay's memory on rank 0's GPU, before a sleep gives memory back."""
        if self._relay is not None:
            self._relay.unmap()

    def free_relay(self) -> int:
        """Give that memory back, once all have carried out their orders; returns its bytes."""
        return 0 if self._relay is None else self._relay.free()

    def memory_of_all(self, own: ReleasableMemory) -> SleepMemory:
        """The memory of all ranks; if none can sleep, no rank gets orders about it."""
        return MemoryOfRanks(own, self) if own.sleeps else own

    @property
    def freed_bytes(self) -> int:
        """Bytes that all followers have given back."""
        return sum(self._reports.get("memory_freed"))

    def confirm(self, output: StepOutput) -> None:
        """Raise if another rank knows that a step may be wrong.

        A part that a rank lacks is NaN, and NaN in a part of a row makes its log-prob NaN on every rank. Weights may
        have NaN, too, so that alone is no fault.
        """
        if math.isnan(sum(output.logprobs)):
            self._settle()

    @property
    def ordered(self) -> int:
        """Sequence number of the last order."""
        return self._ring.sequence

    def end(self) -> None:
        self._write(END, None)

    def _write(self, kind: int, layout: Any, *parts: memoryview, version: int | None = None) -> None:
        now = self._version if version is None else version
        self._ring.write(kind, now, msgpack.packb(layout), *parts)


def ring_bytes(sizes: OrderSizes) -> int:
    """The size of a ring that holds four of the largest steps; each span of a prefill is described by four numbers."""
    words, rows, mask_words, tokens = sizes
    largest = 4 * words + rows * (4 * mask_words + 8) + 40 * min(tokens, words // 30) + (1 << 14)
    return max(8 << 20, -(-4 * largest // 64) * 64)


def read_step(layout: memoryview, words: memoryview, content: bytes | bytearray = b"") -> Upload:
    """The upload of a STEP; its words are in the ring. `content` comes from the EXTRAs before it."""
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
