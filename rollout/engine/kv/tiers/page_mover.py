"""Copies KV pages to pinned host memory and back, on streams of their own, in pieces.

    kv_out    index | gather pages of the pool into the staging buffer | a copy to the host for each page | end
    kv_in     (steps in flight) index | a copy from the host for each page | scatter them into pages of the pool | end

In the pool, a page has a part in each layer's keys and in each layer's values. On the host it is one stretch. So a copy
over the bus is one page, one or two MB: a step's own copy waits at most for one page. A piece needs one gather or
scatter for each tensor.

Only `PageMover.wait` waits: the caller starts a piece and asks for finished ones later. A direction has at
most `_PIECES` pieces under way. All their memory is allocated once.

Legend: N pages of a piece, W words of a page, P pages of the pool, H pages of a block on the host.
"""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rollout.engine.device.rank_orders import NO_RANK_ORDERS, RankOrders
from rollout.engine.device.streams import Device, DeviceError, DeviceStream, Event

_PIECES = 8
#: The time between two looks at a piece in a wait with a limit.
_LOOK_S = 0.0002
#: Pinned memory is taken in blocks of this many bytes: torch rounds each up to a power of two.
_BLOCK_BYTES = 512 << 20
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class HostMemory:
    """Pinned host memory for `pages` pages of `page_bytes` each."""

    def __init__(self, device: Device, pages: int, page_bytes: int) -> None:
        self.pages = pages
        self.page_bytes = page_bytes
        self._per_block = max(1, _BLOCK_BYTES // page_bytes)
        counts = [min(self._per_block, pages - first) for first in range(0, pages, self._per_block)]
        self._blocks_HW = [device.host_buffer((count, page_bytes), torch.uint8) for count in counts]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.pages * self.page_bytes

    def page(self, number: int, words: torch.dtype) -> torch.Tensor:
        """One page, [W] of `words`."""
        return self._blocks_HW[number // self._per_block][number % self._per_block].view(words)

    def memory_of(self, number: int) -> memoryview:
        return self.page(number, torch.uint8).numpy().data


@dataclass(eq=False, slots=True)
class CopyPiece:
    """Pages that are copied together."""

    index_host: torch.Tensor  # int64 [most pages], pinned
    index: torch.Tensor
    after: Event  # the end of the steps that were in flight when the piece was started
    start: Event
    end: Event
    host_pages: Seq[int] = ()
    entries: Any = None  # the caller's own objects for these pages
    order: int = 0  # number of the copy on the other ranks
    failure: str = ""

    @property
    def pages(self) -> int:
        return len(self.host_pages)


class CopyQueue:
    """The copies in one direction: a stream, a staging buffer, the pieces under way.

    With `orders` a piece has ended when it has ended on all ranks.
    """

    def __init__(
        self,
        device: Device,
        name: str,
        staging_NW: torch.Tensor,
        copy: Callable[[CopyQueue, CopyPiece], None],
        orders: RankOrders = NO_RANK_ORDERS,
    ) -> None:
        self.name, self.orders = name, orders
        self.stream: DeviceStream = device.stream(name)
        self.staging_NW = staging_NW
        self.under_way: deque[CopyPiece] = deque()
        self.ended = 0  # pieces that have ended
        self._copy = copy
        most = len(staging_NW)
        self._spare = [
            CopyPiece(
                device.host_buffer((most,), torch.int64),
                torch.zeros(most, dtype=torch.int64, device=device.torch_device),
                device.event(),
                device.event(),
                device.event(),
            )
            for _ in range(_PIECES)
        ]

    @property
    def capacity(self) -> int:
        """Pages that can be started now: a whole piece, or 0 while all pieces are under way."""
        return len(self.staging_NW) if self._spare else 0

    def start(self, pages: Seq[int], host_pages: Seq[int], entries: Any, compute: DeviceStream | None = None) -> None:
        """Begin to copy these pages of the pool to or from these host pages; after the steps of `compute` if given."""
        piece = self._spare.pop()
        piece.host_pages, piece.entries, piece.failure = host_pages, entries, ""
        piece.order = self.orders.give(self.name, list(pages), list(host_pages))
        piece.index_host.numpy()[: len(pages)] = pages
        if compute is not None:
            compute.record(piece.after)
            self.stream.wait(piece.after)
        self.stream.record(piece.start)
        try:
            self.stream.run(functools.partial(self._copy, self, piece))
        except RuntimeError as error:  # CUDA raises where the copy is enqueued
            piece.failure = str(error)
        self.stream.record(piece.end)
        self.under_way.append(piece)

    def has_ended(self, piece: CopyPiece) -> bool:
        """True if no rank reads or writes the pages of a piece any more."""
        return piece.end.query() and self.orders.done(self.name, piece.order)

    def finished(self) -> list[CopyPiece]:
        """The pieces that have ended since the last call, oldest first. The next `start` reuses them."""
        ended = []
        while self.under_way and self.has_ended(self.under_way[0]):
            piece = self.under_way.popleft()
            try:
                self.stream.check()
            except DeviceError as error:
                piece.failure = piece.failure or str(error)
            ended.append(piece)
        self._spare += ended
        self.ended += len(ended)
        return ended

    @property
    def copying(self) -> bool:
        """True while this device copies a piece. Any thread may call it."""
        return any(piece.start.query() and not piece.end.query() for piece in tuple(self.under_way))


class PageMover:
    """Moves pages in both directions. `compute` is the stream that steps run on.

    `pool` are the tensors of the pool whose pages are copied, or of a pool of states: a place is copied as a page is.
    """

    def __init__(
        self,
        device: Device,
        pool: list[torch.Tensor],
        host_memory: HostMemory,
        piece_bytes: int,
        compute: DeviceStream,
        name: str = "kv",
        orders: RankOrders = NO_RANK_ORDERS,
    ) -> None:
        self.host_memory = host_memory
        self.compute = compute
        pools_PB = [tensor.flatten(1) for tensor in pool]
        sizes = [pool.shape[1] * pool.element_size() for pool in pools_PB]
        assert sum(sizes) == host_memory.page_bytes
        self._words = next(words for words in _WORDS if math.gcd(*sizes) % words.itemsize == 0)
        self._pools_PW = [pool.view(self._words) for pool in pools_PB]
        most = min(max(1, piece_bytes // host_memory.page_bytes), host_memory.pages)
        width = host_memory.page_bytes // self._words.itemsize
        staging = [torch.zeros(most, width, dtype=self._words, device=device.torch_device) for _ in range(2)]
        device.synchronize()  # they were zeroed on a stream that the copies do not wait for
        self.out = CopyQueue(device, f"{name}_out", staging[0], self._copy_out, orders)
        self.back = CopyQueue(device, f"{name}_in", staging[1], self._copy_in, orders)

    @property
    def directions(self) -> tuple[tuple[Literal["out", "in"], CopyQueue], ...]:
        return ("out", self.out), ("in", self.back)

    @property
    def moving(self) -> bool:
        """True while pieces are under way."""
        return bool(self.out.under_way or self.back.under_way)

    def wait(self, most_s: float = math.inf) -> None:
        """Block until the oldest piece of a direction has ended, at most `most_s` seconds."""
        queue = self.out if self.out.under_way else self.back
        if not queue.under_way:
            return
        piece, until_s = queue.under_way[0], time.perf_counter() + most_s
        if most_s == math.inf:
            piece.end.synchronize()
        while not queue.has_ended(piece) and time.perf_counter() < until_s:
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Finish what is enqueued and end the streams."""
        for queue in (self.out, self.back):
            queue.stream.close()

    def _copy_out(self, queue: CopyQueue, piece: CopyPiece) -> None:
        staged_NW, index_N = self._staged(queue, piece)
        for pool_PW, part_NW in zip(self._pools_PW, self._parts(staged_NW), strict=True):
            torch.index_select(pool_PW, 0, index_N, out=part_NW)
        for page_W, host in zip(staged_NW, piece.host_pages, strict=True):
            self.host_memory.page(host, self._words).copy_(page_W, non_blocking=True)

    def _copy_in(self, queue: CopyQueue, piece: CopyPiece) -> None:
        staged_NW, index_N = self._staged(queue, piece)
        for page_W, host in zip(staged_NW, piece.host_pages, strict=True):
            page_W.copy_(self.host_memory.page(host, self._words), non_blocking=True)
        for pool_PW, part_NW in zip(self._pools_PW, self._parts(staged_NW), strict=True):
            pool_PW.index_copy_(0, index_N, part_NW)

    @staticmethod
    def _staged(queue: CopyQueue, piece: CopyPiece) -> tuple[torch.Tensor, torch.Tensor]:
        count = piece.pages
        piece.index[:count].copy_(piece.index_host[:count], non_blocking=True)
        return queue.staging_NW[:count], piece.index[:count]

    def _parts(self, staged_NW: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return staged_NW.split([pool.shape[1] for pool in self._pools_PW], dim=1)
