"""Copies KV pages to pinned host memory and back, on streams of their own, in pieces.

    kv_out    index | gather pages of the pool into the staging buffer | a copy to the host for each page | end
    kv_in     (steps in flight) index | a copy from the host for each page | scatter them into pages of the pool | end

A page lies in as many places as there are layers, twice; on the host it is one stretch. So a copy over the bus is of a
page, one or two MB, which a step's own copies can wait for; of gathers and scatters a piece has one for each tensor.

Nobody waits here: a piece is started, and looked at later. A direction has at most `_PIECES` pieces under way. All that
they need is allocated once.

Legend: N pages of a piece, W words of a page, P pages of the pool, H pages of a block on the host.
"""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rollout.engine.device.streams import Device, DeviceError, Event, Stream
from rollout.models.batch import KVCache

_PIECES = 2
#: Between two looks at a piece that is waited for no longer than so long.
_LOOK_S = 0.0002
#: Pinned memory is taken in blocks of this many bytes: torch rounds what it pins up to a power of two.
_BLOCK_BYTES = 512 << 20
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class HostRoom:
    """Pinned host memory for `pages` pages of `page_bytes` each."""

    def __init__(self, device: Device, pages: int, page_bytes: int) -> None:
        self.pages = pages
        self.page_bytes = page_bytes
        self._per_block = max(1, _BLOCK_BYTES // page_bytes)
        counts = [min(self._per_block, pages - first) for first in range(0, pages, self._per_block)]
        self._blocks_HW = [device.host_buffer((count, page_bytes), torch.uint8) for count in counts]

    def page(self, number: int, words: torch.dtype) -> torch.Tensor:
        """One page, [W] of `words`."""
        return self._blocks_HW[number // self._per_block][number % self._per_block].view(words)


@dataclass(eq=False, slots=True)
class Piece:
    """Pages that are copied together."""

    index_host: torch.Tensor  # int64 [most pages], pinned
    index: torch.Tensor
    after: Event  # the steps that were in flight when it was started
    start: Event
    end: Event
    hosts: Sequence[int] = ()
    cargo: Any = None  # what the caller calls the pages
    failure: str = ""

    @property
    def pages(self) -> int:
        """How many."""
        return len(self.hosts)


class Lane:
    """One direction: its stream, its staging buffer, its pieces."""

    def __init__(
        self, device: Device, name: str, staging_NW: torch.Tensor, copy: Callable[[Lane, Piece], None]
    ) -> None:
        self.stream: Stream = device.stream(name)
        self.staging_NW = staging_NW
        self.flying: deque[Piece] = deque()
        self._copy = copy
        most = len(staging_NW)
        self._spare = [
            Piece(
                device.host_buffer((most,), torch.int64),
                torch.zeros(most, dtype=torch.int64, device=device.torch_device),
                device.event(),
                device.event(),
                device.event(),
            )
            for _ in range(_PIECES)
        ]

    @property
    def most(self) -> int:
        """Pages that can be started now: those of a piece, or none while all are under way."""
        return len(self.staging_NW) if self._spare else 0

    def start(self, pages: Sequence[int], hosts: Sequence[int], cargo: Any, compute: Stream | None = None) -> None:
        """Begin to copy these pages of the pool to or from these on the host; after the steps of `compute` if given."""
        piece = self._spare.pop()
        piece.hosts, piece.cargo, piece.failure = hosts, cargo, ""
        piece.index_host.numpy()[: len(pages)] = pages
        if compute is not None:
            compute.record(piece.after)
            self.stream.wait(piece.after)
        self.stream.record(piece.start)
        try:
            self.stream.run(functools.partial(self._copy, self, piece))
        except RuntimeError as error:  # of CUDA, which says so where it is enqueued
            piece.failure = str(error)
        self.stream.record(piece.end)
        self.flying.append(piece)

    def landed(self) -> list[Piece]:
        """The pieces that are over, oldest first; what they say is theirs until the next `start`."""
        over = []
        while self.flying and self.flying[0].end.query():
            piece = self.flying.popleft()
            try:
                self.stream.check()
            except DeviceError as error:
                piece.failure = piece.failure or str(error)
            over.append(piece)
        self._spare += over
        return over


class PageMover:
    """Both directions. `kv` is the pool whose pages are moved; `compute` the stream that its steps run on."""

    def __init__(self, device: Device, kv: KVCache, room: HostRoom, piece_bytes: int, compute: Stream) -> None:
        self.room = room
        self.compute = compute
        pools_PB = [tensor.flatten(1) for tensor in kv.tensors]
        sizes = [pool.shape[1] * pool.element_size() for pool in pools_PB]
        assert sum(sizes) == room.page_bytes
        self._words = next(words for words in _WORDS if math.gcd(*sizes) % words.itemsize == 0)
        self._pools_PW = [pool.view(self._words) for pool in pools_PB]
        most = min(max(1, piece_bytes // room.page_bytes), room.pages)
        width = room.page_bytes // self._words.itemsize
        staging = [torch.zeros(most, width, dtype=self._words, device=device.torch_device) for _ in range(2)]
        device.synchronize()  # they were zeroed on a stream that these do not wait for
        self.out = Lane(device, "kv_out", staging[0], self._copy_out)
        self.back = Lane(device, "kv_in", staging[1], self._copy_in)

    @property
    def moving(self) -> bool:
        """True while pieces are under way."""
        return bool(self.out.flying or self.back.flying)

    def wait(self, most_s: float = math.inf) -> None:
        """Block until the oldest piece of a direction is over, for so long at most."""
        flying = self.out.flying or self.back.flying
        if flying and most_s == math.inf:
            flying[0].end.synchronize()
        until_s = time.perf_counter() + most_s
        while flying and not flying[0].end.query() and time.perf_counter() < until_s:
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Finish what is enqueued and end the streams."""
        for lane in (self.out, self.back):
            lane.stream.close()

    def _copy_out(self, lane: Lane, piece: Piece) -> None:
        staged_NW, index_N = self._staged(lane, piece)
        for pool_PW, part_NW in zip(self._pools_PW, self._parts(staged_NW), strict=True):
            torch.index_select(pool_PW, 0, index_N, out=part_NW)
        for page_W, host in zip(staged_NW, piece.hosts, strict=True):
            self.room.page(host, self._words).copy_(page_W, non_blocking=True)

    def _copy_in(self, lane: Lane, piece: Piece) -> None:
        staged_NW, index_N = self._staged(lane, piece)
        for page_W, host in zip(staged_NW, piece.hosts, strict=True):
            page_W.copy_(self.room.page(host, self._words), non_blocking=True)
        for pool_PW, part_NW in zip(self._pools_PW, self._parts(staged_NW), strict=True):
            pool_PW.index_copy_(0, index_N, part_NW)

    @staticmethod
    def _staged(lane: Lane, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
        count = piece.pages
        piece.index[:count].copy_(piece.index_host[:count], non_blocking=True)
        return lane.staging_NW[:count], piece.index[:count]

    def _parts(self, staged_NW: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return staged_NW.split([pool.shape[1] for pool in self._pools_PW], dim=1)
