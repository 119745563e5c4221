"""Host memory that torch did not allocate: pinned with CUDA, in blocks that take pages as they are filled."""

import contextlib
import logging
import mmap
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rollout.process.host_memory import available_bytes, promise
from rollout.process.progress import stage
from trainer_bridge.transports.cuda_ipc import forget_last_error

#: Bytes of a block of host memory; a larger tensor has a block of its own.
BLOCK_BYTES = 256 << 20
_TOUCH_BYTES, _PAGE_BYTES = 256 << 20, 4096

_log = logging.getLogger(__name__)


class PinnedMemory:
    """Host memory that torch did not allocate, pinned with CUDA until `free`, or until this object is collected.

    Memory must be unpinned before it is unmapped: else CUDA takes the next map at its address for pinned.
    """

    def __init__(
        self, cudart: Callable[[], Any] = torch.cuda.cudart, forget_error: Callable[[], object] = forget_last_error
    ) -> None:
        self._cudart, self._forget_error = cudart, forget_error
        self._pinned: dict[int, torch.Tensor] = {}  # pinned memory by address
        self._refused: set[int] = set()
        # Not at the end of the process, whose CUDA may be gone by then.
        weakref.finalize(self, _unpin, self._pinned, cudart, forget_error).atexit = False

    def add(self, memory: torch.Tensor) -> bool:
        """Pin memory, if it is not yet. If CUDA refuses, it stays pageable, from which copies are slower: False."""
        address = memory.data_ptr()
        if memory in self:
            return address in self._pinned
        status = int(self._cudart().cudaHostRegister(address, memory.numel(), 0))
        if not status:
            self._pinned[address] = memory
        else:
            self._refused.add(address)
            self._forget_error()
            _log.warning("%d bytes of host memory cannot be pinned: CUDA error %d", memory.numel(), status)
        return not status

    def __contains__(self, memory: torch.Tensor) -> bool:
        return memory.data_ptr() in self._pinned or memory.data_ptr() in self._refused

    def free(self) -> None:
        _unpin(self._pinned, self._cudart, self._forget_error)
        self._refused.clear()


def touch(memory: torch.Tensor, advance: Callable[[], object], part_bytes: int = _TOUCH_BYTES) -> None:
    """Have the system back host memory (uint8) with pages, which stay as they are; `advance` is called now and then.

    Memory that has its pages is pinned much faster, by a call that cannot tell how far it is.
    """
    for part in memory.split(part_bytes):
        part[::_PAGE_BYTES].add_(0)
        advance()


class PagesBeside:
    """Host memory, uint8 [nbytes], that takes its pages in a thread, beside other work. Raises OSError without memory.

    The thread calls nothing of CUDA: it must not disturb a graph that is captured meanwhile.
    """

    def __init__(self, nbytes: int, pins: PinnedMemory | None = None) -> None:
        self._pins, self.nbytes = PinnedMemory() if pins is None else pins, nbytes
        self._memory, gone = _pages(nbytes), threading.Event()
        promise(self._memory.numel())
        self._thread = threading.Thread(target=_take_pages, args=(self._memory, gone), name="pages", daemon=True)
        self._thread.start()
        weakref.finalize(self, _end, self._thread, gone)

    def pinned(self) -> torch.Tensor:
        """The memory, once it has its pages and is pinned. Raises OSError if CUDA refuses to pin it."""
        self._thread.join()
        if not self._pins.add(self._memory):
            raise OSError(0, "CUDA does not pin it")
        return self._memory


def _take_pages(memory: torch.Tensor, gone: threading.Event) -> None:
    """Take the pages of memory, until its owner is gone."""
    for part in memory.split(_TOUCH_BYTES):
        if not gone.is_set():
            touch(part, lambda: None)
        promise(-part.numel())


def _end(thread: threading.Thread, gone: threading.Event) -> None:
    """End a thread, also before the process ends: it would abort inside torch."""
    gone.set()
    thread.join()


def _unpin(pinned: dict[int, torch.Tensor], cudart: Callable[[], Any], forget_error: Callable[[], object]) -> None:
    for address in pinned:
        if int(cudart().cudaHostUnregister(address)):
            forget_error()
    pinned.clear()


class HostBuffer:
    """Host memory, uint8, that grows when it is too small; pinned, if wanted.

    A thread of the start may get its first pages: for 61 GB this takes half a minute.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pages: PagesBeside | None = None
        self._growing = threading.RLock()  # an update may come before the end of the start

    def begin_pinning(self, nbytes: int, pages: Callable[[int], PagesBeside] = PagesBeside) -> None:
        """Begin to take memory. Raises ValueError without it."""
        with _pinned_or_told(nbytes):
            if nbytes > (free := available_bytes()):
                raise OSError(0, f"{free / (1 << 30):.1f} GiB are free")
            self._pages = pages(nbytes)

    def end_pinning(self) -> None:
        """Have that memory pinned, before anything decodes. Raises ValueError if it is not given."""
        with self._growing:
            if self._pages is not None and self._memory.numel() == 0:
                with stage("pinning host memory for updates of the weights"), _pinned_or_told(self._pages.nbytes):
                    self._memory = self._pages.pinned()

    def reserve(self, nbytes: int, slack: int = 0) -> torch.Tensor:
        """Memory of this size; if it grows, by `slack` bytes more."""
        with self._growing:
            if self._memory.numel() < nbytes:
                self.end_pinning()
            if self._memory.numel() < nbytes:
                self._pages = None
                self._memory = torch.empty(0, dtype=torch.uint8)  # free the old one first
                self._memory = torch.empty(nbytes + slack, dtype=torch.uint8, pin_memory=self._pinned)
            return self._memory[:nbytes]

    def free(self) -> None:
        with self._growing:
            self._memory = torch.empty(0, dtype=torch.uint8)


@contextlib.contextmanager
def _pinned_or_told(nbytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"the host does not give {nbytes / (1 << 30):.1f} GiB of pinned memory for updates of the weights: set "
            f"weights.staging to device, or weights.apply to in_place ({error.strerror or error!s:.200})"
        ) from error


class HostBlocks:
    """Blocks of host memory, uint8. Each is pinned, if wanted, when its first bytes come."""

    def __init__(self, pinned: bool, advance: Callable[[], object] = lambda: None) -> None:
        self._pins = PinnedMemory() if pinned else None
        self._advance = advance
        self.blocks: list[torch.Tensor] = []

    def reserve(self, sizes: list[int]) -> list[torch.Tensor]:
        """Blocks of at least these sizes; older blocks are not used any more."""
        there = [block.numel() for block in self.blocks[: len(sizes)]]
        if len(there) < len(sizes) or any(have < size for have, size in zip(there, sizes, strict=True)):
            if self._pins is not None:
                self._pins.free()
            self.blocks = []  # free them first
            self.blocks = [_pages(size) for size in sizes]
        return self.blocks

    def pin(self, block: torch.Tensor) -> None:
        """Pin a block that is not pinned yet."""
        if self._pins is not None and not block.is_cuda:
            if block.numel() > BLOCK_BYTES and block not in self._pins:
                touch(block, self._advance)
            self._pins.add(block)


def _pages(nbytes: int) -> torch.Tensor:
    """Memory that takes pages as it is filled; huge pages, if the system has some, are pinned faster."""
    pages = mmap.mmap(-1, max(nbytes, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
