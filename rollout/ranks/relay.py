"""The memory by which rank 0 passes an update to the other ranks, piece by piece: a ring that all of them map.

    rank 0     | piece 4 |    | piece 2 | piece 3 |     reserve -> filled by a transport -> order to take it
    follower                     taken: 1                  copies its part of each into its own staging memory

There are two such memories. One is shared memory of the host, for pieces that arrive on the host. With GPUs it is
pinned at its first use, in a moment: it is small. The other ring is on rank 0's GPU, for pieces that arrive there: the
other ranks read it by the driver's handle, over NVLink where GPUs have it. If a rank cannot read the ring, or the GPU
has no memory left, pieces for the GPU go through the host, too.

A piece's memory is used again when all followers have taken it, and this rank has read it. Pieces are given in the
order of their reservation; a piece that a device writes is given when the copy is done.
"""

import mmap
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from rollout.ranks.ring import SharedMemory
from rollout.weights.pinned_memory import PinnedMemory


class RelaySizes(NamedTuple):
    """Bytes of the memory, if two pieces fit, and of the pieces that transports write besides whole buckets."""

    memory: int = 256 << 20
    piece: int = 64 << 20


RELAY_SIZES = RelaySizes()
_ALIGN = 64


@dataclass(slots=True)
class _Piece:
    begin: int  # position
    start: int  # in the stream
    nbytes: int
    written: torch.cuda.Event | None
    read: torch.cuda.Event | None
    number: int = 0  # as `give` counts; 0: not given yet


class RelayBacking(Protocol):
    """The memory of a relay: `grow` replaces it, `unmap` takes it from the followers."""

    def grow(self, nbytes: int) -> torch.Tensor:
        """Replace the memory by a larger one, uint8."""

    @property
    def usable(self) -> bool | None:
        """Whether the followers can read it; None: that is not known yet."""

    def unmap(self) -> None:
        """Have the followers give it up; `grow` makes another one."""

    def free(self) -> int:
        """Give back what all followers have given up; returns its bytes."""


class HostBacking:
    """Shared memory."""

    usable = True

    def __init__(self, memory: SharedMemory, device: torch.device) -> None:
        self._memory, self._view = memory, PinnedView(device)

    def grow(self, nbytes: int) -> torch.Tensor:
        self._memory.grow(nbytes, reserve=True)
        return self._view.of(self._memory.map())

    def unmap(self) -> None:
        """No-op: it is small, and of the host."""

    def free(self) -> int:
        """Like `unmap`."""
        return 0


class RelayMemory:
    """Rank 0's end. `taken` is the number of pieces that all followers have taken.

    `give(start, nbytes, offset)` orders the followers to take a piece, and returns the order's number. Any thread may
    use it; pieces are reserved and passed on by one thread at a time.
    """

    def __init__(
        self,
        backing: RelayBacking,
        taken: Callable[[], int],
        give: Callable[[int, int, int], int],
        sizes: RelaySizes = RELAY_SIZES,
    ) -> None:
        self._where, self._taken, self._give, self._sizes = backing, taken, give, sizes
        self._lock = threading.Lock()
        self._tensor = torch.empty(0, dtype=torch.uint8)
        self._pieces: deque[_Piece] = deque()
        self._reserved: tuple[int, int] | None = None  # position and bytes
        self._position = 0  # where the next piece begins at the earliest
        self._piece_bytes = 0

    def open(self, bucket_bytes: int, total_bytes: int) -> None:
        """Expect pieces of at most one bucket. Memory of earlier pieces is used again when they are taken."""
        with self._lock:
            self._reserved = None
            self._piece_bytes = max(_ALIGN, min(total_bytes, max(bucket_bytes, self._sizes.piece)))

    def usable(self) -> bool | None:
        """Whether the followers can read it, which the first call finds out; None: that is not known yet.

        Memory that cannot be allocated is not usable.
        """
        with self._lock:
            self._fit()
            return self._where.usable

    def has_room(self) -> bool:
        """Whether there is memory for one more piece."""
        with self._lock:
            return self._fit() and self._free_offset(self._piece_bytes) is not None

    def reserve(self, nbytes: int) -> torch.Tensor:
        """Memory for the next piece, after `has_room` was true; the same again until it is passed on."""
        with self._lock:
            offset = self._free_offset(nbytes)
            assert offset is not None, "there is room for a piece"
            self._reserved = (offset, nbytes)
            at = offset % self._tensor.numel()
            return self._tensor[at : at + nbytes]

    def pass_on(self, start: int, written: torch.cuda.Event | None, read: torch.cuda.Event | None) -> None:
        """Give the reserved piece to the followers, once it is written."""
        with self._lock:
            assert self._reserved is not None, "a piece is reserved first"
            begin, nbytes = self._reserved
            self._reserved, self._position = None, begin + -(-nbytes // _ALIGN) * _ALIGN
            self._pieces.append(_Piece(begin, start, nbytes, written, read))
            self._advance()

    def all_given(self) -> bool:
        """Whether all pieces are given."""
        with self._lock:
            self._advance()
            return all(piece.number for piece in self._pieces)

    def drop(self) -> None:
        """Give no piece that is not given yet."""
        with self._lock:
            self._reserved = None
            for piece in self._pieces:
                if not piece.number and piece.written is not None:
                    piece.written.synchronize()
            self._pieces = deque(piece for piece in self._pieces if piece.number)

    def unmap(self) -> None:
        """Begin to give the memory back: no update is under way, and followers take the pieces that were given."""
        with self._lock:
            self._where.unmap()

    def free(self) -> int:
        """Give back what `unmap` has begun to, once all followers have carried it out; returns the bytes."""
        with self._lock:
            self._advance()
            assert not self._pieces, "nothing reads pieces in a sleep"
            self._tensor, self._position = torch.empty(0, dtype=torch.uint8), 0
            return self._where.free()

    def _fit(self) -> bool:
        """Get memory for pieces of this update; false while it can't grow because earlier pieces are in use."""
        self._advance()
        wanted = min(4 * self._piece_bytes, max(2 * self._piece_bytes, self._sizes.memory))
        if self._tensor.numel() < wanted:
            if self._pieces:
                return False
            self._tensor, self._position = self._where.grow(-(-wanted // _ALIGN) * _ALIGN), 0
        return True

    def _free_offset(self, nbytes: int) -> int | None:
        """The position of a piece of `nbytes`, which does not wrap; None if there is no room."""
        capacity, begin = self._tensor.numel(), self._position
        if capacity - begin % capacity < nbytes:
            begin += capacity - begin % capacity
        oldest = self._pieces[0].begin if self._pieces else self._position
        return begin if begin + nbytes - oldest <= capacity else None

    def _advance(self) -> None:
        for piece in self._pieces:
            if piece.number:
                continue
            if piece.written is not None and not piece.written.query():
                break
            piece.number = self._give(piece.start, piece.nbytes, piece.begin % self._tensor.numel())
        taken = self._taken() if self._pieces else 0
        while self._pieces and 0 < self._pieces[0].number <= taken:
            if (read := self._pieces[0].read) is not None and not read.query():
                break
            self._pieces.popleft()


class PinnedView:
    """Shared memory as a tensor, pinned with CUDA so that a GPU copies from it at full speed."""

    def __init__(self, device: torch.device) -> None:
        self._pins = PinnedMemory() if device.type == "cuda" else None
        self._map: mmap.mmap | None = None
        self._tensor = torch.empty(0, dtype=torch.uint8)

    def of(self, memory: mmap.mmap) -> torch.Tensor:
        """The memory, uint8; the tensor of a smaller map is not used any more."""
        if memory is not self._map:
            self._map, self._tensor = memory, torch.frombuffer(memory, dtype=torch.uint8)
            if self._pins is not None:
                self._pins.free()
                self._pins.add(self._tensor)
        return self._tensor
