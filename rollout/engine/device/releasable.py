"""Releasable memory: a sleep gives it back, a wake takes it again at the same addresses.

    block   |== tensor ==|== tensor ==|== tensor ==|..|      addresses, reserved for the life of the process
    backing |##########################################|      memory at these addresses: present, or given back

A tensor stays at one place of one block. So tensors, their views, and captured graphs that contain addresses are valid
after a wake. An access during a sleep reads zeros on a CPU, and breaks the context on a GPU.

Invariants:

- All blocks have memory, or no block has: a wake that fails half-way gives back the memory that it got.
- Content that is `kept` is in host memory before any block is given back. All other content is zeros after a wake.
- `working` and `parts` tell other threads that a sleep or wake is under way, and whether it makes progress.
"""

import contextlib
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch

from rollout.engine.device.streams import CpuDevice, Device
from rollout.models.batch import zeroed

_GIB = 2**30
#: Alignment of tensors in a block, bytes: the same as in torch's own allocator.
_ALIGN = 512
#: Tensors that are moved share blocks of about this size. While a block is moved, both places take memory.
BLOCK_BYTES = 256 << 20
#: Host memory is allocated in pieces of powers of two, because pinned memory is rounded up to those: pieces of the
#: first size, and the rest of a block in smaller pieces, down to the second size.
PIECE_BYTES, _LEAST_PIECE_BYTES = 256 << 20, 1 << 20


class MemoryShortError(RuntimeError):
    """Too little memory on the device or the host; the message says how much is missing."""


class SleepMemory(Protocol):
    """The memory that a sleep gives back; see `ReleasableMemory`."""

    @property
    def sleeps(self) -> bool:
        """Whether the memory can be given back."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""

    @property
    def released(self) -> bool:
        """Whether the memory is given back."""

    def save(self) -> None:
        """Copy kept content to host memory. Raises MemoryShortError if there is too little of it."""

    def release(self) -> int:
        """Give all memory back; returns the freed bytes."""

    def forget(self) -> None:
        """Drop the saved content."""

    def restore(self) -> None:
        """Take all memory again. Raises MemoryShortError if there is too little; then nothing has changed."""


class Backing(Protocol):
    """Reserves addresses and puts memory there; a reservation ends with the last tensor in it."""

    lazy: bool  # memory appears, zeroed, when it is first accessed

    def reserve(self, nbytes: int) -> Any:
        """Reserve addresses for at least `nbytes`, without memory."""

    def back(self, addresses: Any) -> None:
        """Put memory at the addresses of a reservation. After MemoryShortError it has no memory."""

    def give_back(self, addresses: Any) -> None:
        """Give the memory back; nothing on the device uses it any more."""

    def tensor(self, addresses: Any, start: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] at byte `start` of a reservation with memory, as a storage of its own."""

    def free_bytes(self) -> int:
        """Free memory as the driver or the system reports it, bytes."""

    def trim(self) -> int:
        """Give back memory that torch's allocator keeps unused; returns its bytes."""


@dataclass(eq=False, slots=True)
class _Block:
    """One reservation; tensors use its first `nbytes`."""

    addresses: Any
    nbytes: int
    kept: bool  # the content outlives a sleep of level 1
    host: list[torch.Tensor] = field(default_factory=list)  # the content during a sleep, in pieces; reused


class ReleasableMemory:
    """All blocks of a worker. Call `release` and `restore` only while nothing runs on the device.

    Tensors that are moved share blocks of about `block_bytes`; host memory comes in pieces of `piece_bytes` at most.
    """

    sleeps = True

    def __init__(
        self, device: Device, backing: Backing, block_bytes: int = BLOCK_BYTES, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self._device = device
        self._host = device if isinstance(device, CpuDevice) else CpuDevice()
        self._block_bytes, self._piece_bytes = block_bytes, piece_bytes
        self.backing = backing
        self._blocks: list[_Block] = []
        self._saved = self._was_saved = False  # `_was_saved`: its value before the last wake
        self._headroom = 0  # memory that the allocator kept for steps, bytes
        self.released = False
        self.working = False  # a call that may take seconds is under way
        self.parts = 0  # total of blocks done and pieces copied, in all calls

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(block.nbytes for block in self._blocks)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the tensors whose content is kept."""
        return sum(block.nbytes for block in self._blocks if block.kept)

    @property
    def _needed(self) -> int:
        """Free memory that a wake needs, bytes."""
        return self.kept_bytes if self.backing.lazy else self.nbytes + self._headroom

    # --- while it is built -------------------------------------------------------------------------------------------

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A zeroed tensor whose content is not kept."""
        nbytes = prod(shape) * dtype.itemsize
        block = self._add(nbytes, kept=False)
        self._clear(block)
        return self.backing.tensor(block.addresses, 0, nbytes).view(dtype).view(shape)

    def buffer(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes], zeroed; its content is not kept."""
        return self.zeros((nbytes,), torch.uint8)

    @torch.no_grad()
    def take_over(self, tensors: Iterable[torch.Tensor], *, kept: bool) -> None:
        """Move tensors into blocks. The tensor objects stay the same; earlier views still refer to the old memory."""
        for group in _grouped(tensors, self._block_bytes):
            starts, end = [], 0
            for tensor in group:
                assert tensor.is_contiguous(), "only contiguous tensors can be moved"
                starts.append(end)
                end += -(-tensor.nbytes // _ALIGN) * _ALIGN
            block = self._add(end, kept)
            for tensor, start in zip(group, starts, strict=True):
                there = self.backing.tensor(block.addresses, start, tensor.nbytes).view(tensor.dtype).view(tensor.shape)
                there.copy_(tensor)
                tensor.data = there
            self.backing.trim()  # frees the old copy, so that only one group at a time takes memory twice

    def _add(self, nbytes: int, kept: bool) -> _Block:
        assert not self.released
        addresses = self.backing.reserve(max(nbytes, 1))
        try:
            self.backing.back(addresses)
        except MemoryShortError:
            if not self.backing.trim():
                raise
            self.backing.back(addresses)
        block = _Block(addresses, nbytes, kept)
        self._blocks.append(block)
        return block

    # --- sleep -------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def save(self) -> None:
        """Copy kept content to host memory. Raises MemoryShortError if there is too little of it."""
        missing = self.kept_bytes - sum(block.nbytes for block in self._blocks if block.host)
        free = self._host.free_bytes()
        if missing > free:
            raise MemoryShortError(
                f"keeping the weights takes {missing / _GIB:.2f} GiB of host memory and {free / _GIB:.2f} GiB are "
                "free: sleep with level 2, or free host memory"
            )
        with self._work():
            for block in self._blocks:
                if block.kept:
                    block.host = block.host or self._host_pieces(block.nbytes)
                    for piece, there in self._parts(block):
                        self._copy(there, piece)
        self._saved = True

    def _host_pieces(self, nbytes: int) -> list[torch.Tensor]:
        pieces = []
        try:
            for piece in pieces_of(nbytes, self._piece_bytes):
                pieces.append(self._device.host_buffer((piece,), torch.uint8))
                self.parts += 1
            return pieces
        except RuntimeError as error:  # free memory may be unavailable to this process, or cannot be pinned
            raise MemoryShortError(
                f"the host has no {nbytes / _GIB:.2f} GiB of pinned memory for the weights: sleep with level 2, or "
                f"free host memory ({error!s:.200})"
            ) from error

    def release(self) -> int:
        """Give all memory back; returns the freed bytes as the driver or the system reports them."""
        assert not self.released
        self._device.synchronize()
        before = self.backing.free_bytes()
        self.released = True  # set first: if the release fails half-way, the memory is not valid
        with self._work():
            for block in self._blocks:
                self.backing.give_back(block.addresses)
                self.parts += 1
            self._headroom = self.backing.trim()
        return max(self.backing.free_bytes() - before, 0)

    def forget(self) -> None:
        """Drop the saved content."""
        self._saved = False

    def fall_back(self) -> int:
        """Undo a wake because another rank could not take its memory; returns the freed bytes.

        No-op if this rank could not take its memory either.
        """
        if self.released:
            return 0
        if self._was_saved:
            self.save()
        return self.release()

    @torch.inference_mode()
    def restore(self) -> None:
        """Take all memory again: saved content, zeros elsewhere. After MemoryShortError no block has memory."""
        assert self.released
        self.backing.trim()
        if self.backing.free_bytes() < self._needed:
            raise self._too_little()
        with self._work():
            try:
                self._back_all()
            except MemoryShortError as error:
                raise self._too_little() from error
            for block in self._blocks:
                if block.kept and self._saved:
                    for piece, there in self._parts(block):
                        self._copy(piece, there)
                else:
                    self._clear(block)
            self._device.synchronize()
        self._was_saved = self._saved
        self.released = self._saved = False  # set last: if the device fails before this, the memory is not valid

    def _back_all(self) -> None:
        with contextlib.ExitStack() as undo:
            for block in self._blocks:
                self.backing.back(block.addresses)
                undo.callback(self.backing.give_back, block.addresses)
                self.parts += 1
            undo.pop_all()

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a piece and wait for it, so that `parts` counts only finished copies."""
        target.copy_(source, non_blocking=True)
        self._device.synchronize()
        self.parts += 1

    @contextlib.contextmanager
    def _work(self) -> Iterator[None]:
        self.working = True
        try:
            yield
        finally:
            self.working = False

    def _too_little(self) -> MemoryShortError:
        needed, free = self._needed, self.backing.free_bytes()
        return MemoryShortError(
            f"waking takes {needed / _GIB:.2f} GiB and {free / _GIB:.2f} GiB are free: "
            f"{max(needed - free, 0) / _GIB:.2f} GiB are missing; free them, then wake the worker again"
        )

    def _clear(self, block: _Block) -> None:
        """Zero a block that has just got its memory: a KV page may contain NaN, and masks do not hide NaN."""
        if not self.backing.lazy:
            self._whole(block).zero_()

    def _parts(self, block: _Block) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of a piece of host memory and the part of the block that it saves."""
        return zip(block.host, self._whole(block).split([len(piece) for piece in block.host]), strict=True)

    def _whole(self, block: _Block) -> torch.Tensor:
        return self.backing.tensor(block.addresses, 0, block.nbytes)


class PermanentMemory(ReleasableMemory):
    """The memory of a worker that cannot sleep: it has no blocks to give back."""

    sleeps = False

    def __init__(self, device: Device) -> None:
        super().__init__(device, HostPages())

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return zeroed(self._device.torch_device, shape, dtype)

    def take_over(self, tensors: Iterable[torch.Tensor], *, kept: bool) -> None:
        """No-op: the tensors stay where they are."""


def _grouped(tensors: Iterable[torch.Tensor], block_bytes: int) -> Iterator[list[torch.Tensor]]:
    group: list[torch.Tensor] = []
    for tensor in tensors:
        if group and sum(other.nbytes for other in group) + tensor.nbytes > block_bytes:
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group


def pieces_of(nbytes: int, piece: int = PIECE_BYTES) -> list[int]:
    """Sizes of pieces that add up to `nbytes`: of `piece` bytes, and the rest in smaller ones."""
    sizes = []
    while nbytes > 0:
        if nbytes < piece and piece > _LEAST_PIECE_BYTES:
            piece //= 2
            continue
        sizes.append(min(piece, nbytes))
        nbytes -= sizes[-1]
    return sizes


class HostPages:
    """Host memory: the kernel takes its pages back, and gives zeroed pages at the next access."""

    lazy = True

    def reserve(self, nbytes: int) -> mmap.mmap:
        """Reserve addresses; memory appears at the first access."""
        # Private: shared pages would only be unmapped, and stay in memory.
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def back(self, addresses: mmap.mmap) -> None:
        """No-op: the kernel adds memory page by page."""

    def give_back(self, addresses: mmap.mmap) -> None:
        addresses.madvise(mmap.MADV_DONTNEED)

    def tensor(self, addresses: mmap.mmap, start: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] at byte `start`."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(addresses, dtype=torch.uint8, offset=start, count=nbytes)

    def free_bytes(self) -> int:
        """Memory that is available without swapping, as the kernel reports it, bytes."""
        return CpuDevice().free_bytes()

    def trim(self) -> int:
        """0: torch keeps no unused CPU memory."""
        return 0
