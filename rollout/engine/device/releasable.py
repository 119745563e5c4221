"""Memory that can be given back and had again while its addresses stay: what a worker lets go of when it sleeps.

    block   |== tensor ==|== tensor ==|== tensor ==|..|      addresses, reserved for good
    backing |##########################################|      memory behind them: there, or given back

A tensor lies at one place of one block, so tensors, their views and captured graphs that hold addresses are as valid
after a wake as before a sleep; whoever touches one in between reads nothing or, on a GPU, breaks the context.

Invariants:

- All blocks have memory, or none has: where a wake fails half-way, what it got goes back.
- What is `kept` is in host memory before anything is given back. What is not is zeros when it is back.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch

from rollout.engine.device.streams import CpuDevice, Device

_GIB = 2**30
#: Where tensors begin in a block, bytes: as torch's own allocator does.
_ALIGN = 512
#: Tensors that are moved share blocks of about this size: while they move, both places are taken.
_BLOCK_BYTES = 256 << 20
#: Host memory is taken in pieces of powers of two, to which pinned memory is rounded up: most of this size, the rest of
#: a block in smaller ones, down to the least.
_PIECE_BYTES, _LEAST_PIECE_BYTES = 256 << 20, 1 << 20


class MemoryShortError(RuntimeError):
    """There is too little memory, on the device or the host; the message says how much is missing."""


class Backing(Protocol):
    """Where addresses come from, and the memory behind them; a reservation ends with the last tensor in it."""

    lazy: bool  # memory comes when it is touched, zeroed

    def reserve(self, nbytes: int) -> Any:
        """Addresses for at least so many bytes, without memory."""

    def back(self, span: Any) -> None:
        """Put memory behind a reservation. Raises MemoryShortError, and then there is none."""

    def give_back(self, span: Any) -> None:
        """Take the memory away; nothing on the device may use it any more."""

    def tensor(self, span: Any, start: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] at byte `start` of a reservation that has memory; a storage of its own."""

    def free_bytes(self) -> int:
        """What the driver, or the system, says is free."""

    def trim(self) -> int:
        """Give back what torch's allocator holds and no tensor uses; bytes."""


@dataclass(eq=False, slots=True)
class _Block:
    """One reservation. `nbytes` are in use."""

    span: Any
    nbytes: int
    kept: bool  # its content outlives a sleep of level 1
    host: list[torch.Tensor] = field(default_factory=list)  # where it is then, in pieces; stays for the next time


class ReleasableMemory:
    """All blocks of a worker. `release` and `restore` are called while nothing runs on the device."""

    def __init__(self, device: Device, backing: Backing | None = None) -> None:
        self._device = device
        self._backing = backing or _backing(device)
        self._blocks: list[_Block] = []
        self._saved = False
        self._headroom = 0  # what steps had made the allocator hold
        self.released = False

    @property
    def nbytes(self) -> int:
        """What the tensors take, bytes."""
        return sum(block.nbytes for block in self._blocks)

    @property
    def kept_bytes(self) -> int:
        """What of it is kept, bytes."""
        return sum(block.nbytes for block in self._blocks if block.kept)

    @property
    def _needed(self) -> int:
        """What must be free for a wake, bytes."""
        return self.kept_bytes if self._backing.lazy else self.nbytes + self._headroom

    # --- while it is built -------------------------------------------------------------------------------------------

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A zeroed tensor whose content is not kept."""
        nbytes = prod(shape) * dtype.itemsize
        block = self._add(nbytes, kept=False)
        self._clear(block)
        return self._backing.tensor(block.span, 0, nbytes).view(dtype).view(shape)

    def room(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes], zeroed; its content is not kept."""
        return self.zeros((nbytes,), torch.uint8)

    @torch.no_grad()
    def take_over(self, tensors: Iterable[torch.Tensor], *, kept: bool) -> None:
        """Move tensors here; the objects stay the same, views that others hold of them do not move along."""
        for group in _grouped(tensors):
            starts, end = [], 0
            for tensor in group:
                assert tensor.is_contiguous(), "a tensor that is moved lies in one piece"
                starts.append(end)
                end += -(-tensor.nbytes // _ALIGN) * _ALIGN
            block = self._add(end, kept)
            for tensor, start in zip(group, starts, strict=True):
                there = self._backing.tensor(block.span, start, tensor.nbytes).view(tensor.dtype).view(tensor.shape)
                there.copy_(tensor)
                tensor.data = there
            self._backing.trim()  # so that all of it is never there twice

    def _add(self, nbytes: int, kept: bool) -> _Block:
        assert not self.released
        span = self._backing.reserve(max(nbytes, 1))
        try:
            self._backing.back(span)
        except MemoryShortError:
            if not self._backing.trim():
                raise
            self._backing.back(span)
        block = _Block(span, nbytes, kept)
        self._blocks.append(block)
        return block

    # --- sleep -------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def save(self) -> None:
        """Copy what is kept to host memory. Raises MemoryShortError where there is too little of it."""
        missing = self.kept_bytes - sum(block.nbytes for block in self._blocks if block.host)
        free = CpuDevice().free_bytes()
        if missing > free:
            raise MemoryShortError(
                f"keeping the weights takes {missing / _GIB:.2f} GiB of host memory and {free / _GIB:.2f} GiB are "
                "free: sleep with level 2, or free host memory"
            )
        for block in self._blocks:
            if block.kept:
                block.host = block.host or self._host_pieces(block.nbytes)
                for piece, there in self._parts(block):
                    piece.copy_(there, non_blocking=True)
        self._device.synchronize()
        self._saved = True

    def _host_pieces(self, nbytes: int) -> list[torch.Tensor]:
        try:
            return [self._device.host_buffer((piece,), torch.uint8) for piece in _pieces(nbytes)]
        except RuntimeError as error:  # of an allocator: the memory there is may not be had, or not be pinned
            raise MemoryShortError(
                f"the host does not give {nbytes / _GIB:.2f} GiB of pinned memory for weights: sleep with level 2, or "
                f"free host memory ({error!s:.200})"
            ) from error

    def release(self) -> int:
        """Give all memory back; the bytes that came free by what the driver, or the system, says."""
        assert not self.released
        self._device.synchronize()
        before = self._backing.free_bytes()
        self.released = True  # first: nobody may count on any of it, should this fail half-way
        for block in self._blocks:
            self._backing.give_back(block.span)
        self._headroom = self._backing.trim()
        return max(self._backing.free_bytes() - before, 0)

    def forget(self) -> None:
        """What was saved is of no use any more."""
        self._saved = False

    @torch.inference_mode()
    def restore(self) -> None:
        """Have all memory, with what was saved and zeros elsewhere. Raises MemoryShortError; then there is none."""
        assert self.released
        self._backing.trim()
        if self._backing.free_bytes() < self._needed:
            raise self._too_little()
        try:
            self._back_all()
        except MemoryShortError as error:
            raise self._too_little() from error
        for block in self._blocks:
            if block.kept and self._saved:
                for piece, there in self._parts(block):
                    there.copy_(piece, non_blocking=True)
            else:
                self._clear(block)
        self._device.synchronize()
        self.released = self._saved = False  # last: where the device fails, nobody may count on what is there

    def _back_all(self) -> None:
        with contextlib.ExitStack() as undo:
            for block in self._blocks:
                self._backing.back(block.span)
                undo.callback(self._backing.give_back, block.span)
            undo.pop_all()

    def _too_little(self) -> MemoryShortError:
        needed, free = self._needed, self._backing.free_bytes()
        return MemoryShortError(
            f"waking takes {needed / _GIB:.2f} GiB and {free / _GIB:.2f} GiB are free: "
            f"{max(needed - free, 0) / _GIB:.2f} GiB are missing; free them, then wake it again"
        )

    def _clear(self, block: _Block) -> None:
        """Make it zeros, just after it has got its memory: a page may hold NaN, which masks don't hold back."""
        if not self._backing.lazy:
            self._whole(block).zero_()

    def _parts(self, block: _Block) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The pieces of host memory, and what each is of."""
        return zip(block.host, self._whole(block).split([len(piece) for piece in block.host]), strict=True)

    def _whole(self, block: _Block) -> torch.Tensor:
        return self._backing.tensor(block.span, 0, block.nbytes)


def _backing(device: Device) -> Backing:
    if device.torch_device.type == "cuda":
        from rollout.engine.device.cuda_pages import CudaPages

        return CudaPages(device.torch_device)
    return HostPages()


def _grouped(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    group: list[torch.Tensor] = []
    for tensor in tensors:
        if group and sum(other.nbytes for other in group) + tensor.nbytes > _BLOCK_BYTES:
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group


def _pieces(nbytes: int) -> list[int]:
    """Sizes that add up to `nbytes`."""
    sizes, piece = [], _PIECE_BYTES
    while nbytes > 0:
        if nbytes < piece and piece > _LEAST_PIECE_BYTES:
            piece //= 2
            continue
        sizes.append(min(piece, nbytes))
        nbytes -= sizes[-1]
    return sizes


class HostPages:
    """Memory of the host: the kernel takes its pages back, and gives zeroed ones when they are touched again."""

    lazy = True

    def reserve(self, nbytes: int) -> mmap.mmap:
        """Addresses; there is memory as soon as they are written to."""
        # Private: what is shared would only be unmapped, and stay in memory.
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def back(self, span: mmap.mmap) -> None:
        """Nothing to do: the kernel does it page by page."""

    def give_back(self, span: mmap.mmap) -> None:
        """Have the kernel take the pages."""
        span.madvise(mmap.MADV_DONTNEED)

    def tensor(self, span: mmap.mmap, start: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] at byte `start`."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(span, dtype=torch.uint8, offset=start, count=nbytes)

    def free_bytes(self) -> int:
        """Memory that the kernel says can be had without swapping, bytes."""
        return CpuDevice().free_bytes()

    def trim(self) -> int:
        """Nothing: torch keeps no memory of a CPU."""
        return 0
