"""A ring in shared memory: one process writes records, other processes read all of them, in order.

    memory     | record 1 | record 2 | ... | filler |        positions only grow; a record never wraps
                 ^ a reader's position       ^ the writer's
    record     | OrderHeader | body |   padded to 64 bytes         sequence numbers count from 1
    eventfd    one a reader: the number of records that were not announced to it yet

The writer adds 1 to each reader's eventfd after it has written a record. So a reader sleeps in the kernel while there
is nothing to read, and the kernel orders memory: a reader looks only at announced records. Readers publish
their positions in a table (`reports.py`). The writer waits until all have left the memory of the next record, or
until the group is lost. Memory and eventfds are inherited: they have no names, and end with their processes.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

#: Records begin at a multiple of this many bytes.
_ALIGN = 64  # more than a head, so that one fits at the end
_FILLER = 0
_HEAD = struct.Struct("<QIIQqQ")
_PAUSE_S = 0.0002


class OrderHeader(NamedTuple):
    """The fixed beginning of a record."""

    sequence: int
    kind: int  # counted from 1
    layout: int  # bytes of the body that describe the rest of it
    size: int  # bytes of the body
    version: int  # version of the weights in use at this record
    position: int  # start of the record: a reader checks that it reads the right record


class RingBrokenError(RuntimeError):
    """A record is not the one that a reader expects."""


class SharedMemoryError(OSError):
    """The system gives no such memory; the message says what to change."""


class SharedMemory:
    """Memory without a name: a process that inherits `descriptor` maps the same bytes.

    Methods raise `SharedMemoryError` if the system gives none. It does not come from /dev/shm.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map: mmap.mmap | None = None

    @classmethod
    def create(cls, name: str, size: int) -> SharedMemory:
        """New memory, filled with zeros."""
        memory = cls(os.memfd_create(name, os.MFD_CLOEXEC))
        memory.grow(size)
        return memory

    @property
    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def grow(self, size: int, reserve: bool = False) -> None:
        """Make it `size` bytes, if it is smaller. Older maps stay as they are.

        With `reserve` it has its pages at once. Otherwise pages come as they are first written, and a system without
        any left kills the process.
        """
        before = self.size
        if size <= before:
            return
        try:
            os.ftruncate(self.descriptor, size)
            if reserve:
                os.posix_fallocate(self.descriptor, 0, size)
        except OSError as error:
            os.ftruncate(self.descriptor, before)
            raise _no_memory(size, error) from error

    def map(self) -> mmap.mmap:
        """The whole memory, mapped; it is mapped again after it has grown."""
        if self._map is None or len(self._map) < self.size:
            try:
                self._map = mmap.mmap(self.descriptor, self.size)
            except OSError as error:
                raise _no_memory(self.size, error) from error
        return self._map


def _no_memory(size: int, error: OSError) -> SharedMemoryError:
    return SharedMemoryError(
        f"the ranks cannot share {size / (1 << 20):.1f} MiB of memory ({error.strerror}): free memory, or raise the "
        "memory of the container, the limit of file sizes (`ulimit -f`) or of addresses (`ulimit -v`)"
    )


class RingWriter:
    """The writing end. Any thread may write; records are numbered in the order of their writes.

    `positions` returns the positions of all readers. `lost` says that some reader will never make room: then a record
    is dropped. How long a reader may take is decided elsewhere (`rank_watch.py`).
    """

    def __init__(
        self,
        memory: SharedMemory,
        eventfds: Sequence[int],
        positions: Callable[[], list[int]],
        lost: Callable[[], bool] = lambda: False,
    ) -> None:
        self._map, self._capacity = memory.map(), memory.size
        assert self._capacity % _ALIGN == 0, "records are aligned"
        self._eventfds, self._positions, self._lost = eventfds, positions, lost
        self._lock = threading.Lock()
        self._position = 0
        self.sequence = 0  # number of the last record

    @property
    def largest(self) -> int:
        """Bytes of the largest body: half of the ring, so that it fits wherever the next record begins."""
        return self._capacity // 2 - _ALIGN - _HEAD.size

    def write(self, kind: int, version: int, layout: bytes, *parts: memoryview | bytes) -> int:
        """Write a record whose body is `layout` and `parts`; returns its sequence number. Waits for room.

        Raises ValueError for a body that is too large.
        """
        size = len(layout) + sum(len(part) for part in parts)
        if size > self.largest:
            raise ValueError(f"a record of {size} bytes is larger than a record may be ({self.largest})")
        with self._lock:
            taken = -(-(_HEAD.size + size) // _ALIGN) * _ALIGN
            at = self._position % self._capacity
            if at + taken > self._capacity:
                if not self._wait_for(self._capacity - at):
                    return self.sequence
                _HEAD.pack_into(self._map, at, 0, _FILLER, 0, 0, 0, self._position)
                self._position += self._capacity - at
                at = 0
            if not self._wait_for(taken):
                return self.sequence
            begin = at + _HEAD.size
            for part in (layout, *parts):
                self._map[begin : begin + len(part)] = part
                begin += len(part)
            self.sequence += 1
            _HEAD.pack_into(self._map, at, self.sequence, kind, len(layout), size, version, self._position)
            self._position += taken
            for eventfd in self._eventfds:
                os.eventfd_write(eventfd, 1)
            return self.sequence

    def _wait_for(self, needed: int) -> bool:
        """Wait for room for `needed` bytes; false if the group is lost."""
        while self._position + needed - min(self._positions()) > self._capacity:
            if self._lost():
                return False
            time.sleep(_PAUSE_S)
        return True


class RingReader:
    """One reading end. `left` is called with the position up to which the reader needs nothing any more."""

    def __init__(self, memory: SharedMemory, eventfd: int, left: Callable[[int], None]) -> None:
        self._memory = memory  # the writer gives it its size before the first record
        self._eventfd, self._left = eventfd, left
        self._poll = select.poll()
        self._poll.register(eventfd, select.POLLIN)
        self._told = 0
        self._position = 0
        self.sequence = 0  # number of the last record

    def wait(self, timeout_s: float) -> bool:
        """Whether there is a record to read; waits for one in the kernel, up to `timeout_s`."""
        if self._told == 0 and self._poll.poll(1e3 * timeout_s):
            self._told = os.eventfd_read(self._eventfd)
        return self._told > 0

    def read(self) -> tuple[OrderHeader, memoryview]:
        """The next record, after `wait` was true. Its body is in the ring until `done` is called.

        Raises `RingBrokenError` if the memory does not hold that record.
        """
        ring = self._memory.map()
        at = self._position % len(ring)
        head = OrderHeader(*_HEAD.unpack_from(ring, at))
        if head.kind == _FILLER and head.position == self._position:
            self._position += len(ring) - at
            head, at = OrderHeader(*_HEAD.unpack_from(ring, 0)), 0
        if head.position != self._position or head.sequence != self.sequence + 1:
            raise RingBrokenError(f"expected order {self.sequence + 1} at {self._position}, found {head}")
        begin = at + _HEAD.size
        return head, memoryview(ring)[begin : begin + head.size]

    def done(self, head: OrderHeader) -> None:
        """The record is not needed any more."""
        self.sequence, self._told = head.sequence, self._told - 1
        self._position += -(-(_HEAD.size + head.size) // _ALIGN) * _ALIGN
        self._left(self._position)
