"""The memory of a staged update, and the update that the engine's loop takes.

    stream bytes (one buffer, reused)   |-- a --|..|---- b ----|.|-- c --|
                                            | typed view  --copy_-->  view of a fused parameter

The buffer is host memory (pinned, for a GPU). With a shadow, bytes are copied on to memory of the device in pieces, on
a separate stream, while decoding runs; the swap then copies within the device.

Invariants:

- A buffer is allocated once, for the largest layout seen; updates of one layout find it at the same address.
- From `lend` until the update is released the buffer is not written; `busy` is true.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch

from rollout.weights.parameter_map import Fit
from rollout.weights.swap_copies import copy_tensors
from trainer_bridge.transports.cuda_ipc import forget_last_error
from trainer_bridge.transports.tensors import typed_view
from trainer_bridge.wire.manifest import Manifest

#: Allocates memory of a device: uint8 [bytes].
Allocate = Callable[[int], torch.Tensor]
#: (view of a parameter, staged tensor that is copied there)
Copy = tuple[torch.Tensor, torch.Tensor]
#: Share of the memory left by the weights that a shadow may take: the rest is for KV.
SHADOW_SHARE = 1 / 3
_TOUCH_BYTES, _PAGE_BYTES = 256 << 20, 4096

_log = logging.getLogger(__name__)


def parameter_bytes(views: Mapping[str, torch.Tensor]) -> int:
    """Bytes of an update in the parameters' own dtypes, with padding; memory with several names counts once."""
    storages = {}
    for view in views.values():
        widened = 2 if view.dtype == torch.uint8 else 1  # codes: each arrives as a 16-bit number
        storage = view.untyped_storage()
        storages[storage.data_ptr() or storage._cdata] = widened * storage.nbytes()  # on the meta device no address
    return sum(storages.values()) + 64 * len(views)


def takes_device(
    nbytes: int, device: torch.device, staging: Literal["auto", "device", "host"], free_bytes: int | None = None
) -> bool:
    """Whether updates of `nbytes` are staged on the device; `staging` is the setting. ValueError if it is full.

    `free_bytes` of the device are what the driver reports, if they are not given.
    """
    if free_bytes is None:
        free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    if staging == "device" and nbytes > free_bytes:
        raise ValueError(
            f"weights.staging = device takes {nbytes / (1 << 30):.1f} GiB of a GPU next to the weights, "
            f"{free_bytes / (1 << 30):.1f} GiB are free; set it to host, or weights.apply to in_place"
        )
    return staging == "device" or (staging == "auto" and nbytes <= SHADOW_SHARE * free_bytes)


class Pins:
    """Host memory that torch did not allocate, pinned with CUDA until `free`, or until this object is collected.

    Memory must be unpinned before it is unmapped: else CUDA takes what is mapped there next for pinned.
    """

    def __init__(self) -> None:
        self._pinned: dict[int, torch.Tensor] = {}  # by address
        self._refused: set[int] = set()
        # Not at the end of the process, whose CUDA may be gone by then.
        weakref.finalize(self, _unpin, self._pinned).atexit = False

    def add(self, memory: torch.Tensor) -> None:
        """Pin memory, if it is not yet. If CUDA refuses, it stays pageable, from which copies are slower."""
        address = memory.data_ptr()
        if memory in self:
            return
        status = int(torch.cuda.cudart().cudaHostRegister(address, memory.numel(), 0))
        if not status:
            self._pinned[address] = memory
        else:
            self._refused.add(address)
            forget_last_error()
            _log.warning("%d bytes of host memory cannot be pinned: CUDA error %d", memory.numel(), status)

    def __contains__(self, memory: torch.Tensor) -> bool:
        return memory.data_ptr() in self._pinned or memory.data_ptr() in self._refused

    def free(self) -> None:
        """Unpin all of it."""
        _unpin(self._pinned)
        self._refused.clear()


def touch(memory: torch.Tensor, advance: Callable[[], object]) -> None:
    """Have the system back host memory (uint8) with pages, which stay as they are; `advance` is called now and then.

    Memory that has its pages is pinned much faster, by a call that cannot tell how far it is.
    """
    for part in memory.split(_TOUCH_BYTES):
        part[::_PAGE_BYTES].add_(0)
        advance()


def _unpin(pinned: dict[int, torch.Tensor]) -> None:
    for address in pinned:
        if int(torch.cuda.cudart().cudaHostUnregister(address)):
            forget_last_error()
    pinned.clear()


def plan_copies(manifest: Manifest, fit: Fit, views: Mapping[str, torch.Tensor], stream: torch.Tensor) -> list[Copy]:
    """The staged tensor of each view; valid until the staging memory is reallocated."""
    wanted = set(fit.copied)
    return [(views[entry.name], typed_view(stream, entry)) for entry in manifest.tensors if entry.name in wanted]


def names_of(manifest: Manifest) -> tuple[str, ...]:
    """The names of its tensors."""
    return tuple(entry.name for entry in manifest.tensors)


class HostStaging:
    """The buffer. Owned by the receiver's thread; only `StagedWeights` crosses to the engine's loop."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._lent: StagedWeights | InPlaceWeights | None = None

    @property
    def busy(self) -> bool:
        """Whether the buffer holds an update that may still be read."""
        if self._lent is not None and self._lent.released:
            self._lent = None
        return self._lent is not None

    def reserve(self, nbytes: int) -> torch.Tensor:
        """The first `nbytes` of the buffer (uint8), which grows when it is too small."""
        assert not self.busy, "the staging memory still holds an update"
        if self._buffer.numel() < nbytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old one first
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        return self._buffer[:nbytes]

    def lend(self, update: StagedWeights | InPlaceWeights) -> None:
        """Keep the buffer as it is until `update` is released."""
        assert not self.busy, "the staging memory holds another update"
        self._lent = update


class DeviceShadow:
    """Memory on a GPU for a whole update, filled in pieces while the GPU computes. Owned by the receiver's thread.

    `allocate` makes it, by default torch does.
    """

    #: Bytes of a copy: small, so that no step's upload waits long for one.
    PIECE_BYTES = 4 << 20

    def __init__(self, nbytes: int, device: torch.device, allocate: Allocate | None = None) -> None:
        self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=device) if allocate is None else allocate(nbytes)
        self._stream = torch.cuda.Stream(device)
        self._done = torch.cuda.Event()
        self.memory = self._buffer[:0]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self._buffer.numel()

    def reserve(self, nbytes: int) -> None:
        """Begin an update of `nbytes`."""
        self.memory = self._buffer[:nbytes]

    def upload(self, host: torch.Tensor, start: int, end: int) -> None:
        """Enqueue the copy of these bytes of `host` (pinned), which must stay until `copied`."""
        with torch.cuda.stream(self._stream):
            for lo in range(start, end, self.PIECE_BYTES):
                hi = min(lo + self.PIECE_BYTES, end)
                self.memory[lo:hi].copy_(host[lo:hi], non_blocking=True)
            self._done.record(self._stream)

    def put(self, start: int, data: torch.Tensor) -> None:
        """Copy bytes on the current stream of the device."""
        self.memory[start : start + data.numel()].copy_(data, non_blocking=True)
        self._done.record(torch.cuda.current_stream(self._buffer.device))

    def copied(self) -> bool:
        """Whether every copy so far is done."""
        return self._done.query()

    def wait(self) -> None:
        """Wait for every copy so far."""
        self._done.synchronize()


class InPlaceWeights:
    """An update that is in the parameters already: the engine only notes its version."""

    def __init__(self, manifest: Manifest) -> None:
        self.version = manifest.version
        self.nbytes = manifest.tensor_bytes
        self.names = names_of(manifest)
        self.released = False

    def copy_into(self) -> None:
        """Nothing to copy."""

    def close(self, applied: bool) -> None:
        """Called when the engine is done with it."""
        self.released = True


class StagedWeights:
    """A whole, checked update, ready to be copied into the model. `version` and `nbytes` are for reports."""

    def __init__(self, manifest: Manifest, copies: Sequence[Copy]) -> None:
        self.version = manifest.version
        self.nbytes = manifest.tensor_bytes
        self.names = names_of(manifest)
        self._copies = copies
        self._cuda = [view.device for view, _ in self._copies if view.is_cuda][:1]
        self._lock = threading.Lock()
        self._copying = False
        self._copied = False
        self._closed = False
        self._done: torch.cuda.Event | None = None

    def copy_into(self) -> None:
        """Copy every staged tensor into the model, converting dtypes; call it on the engine's compute stream.

        On CUDA the copies are enqueued on the current stream and the call returns before they have run. What could
        be refused was refused before: this raises only for a broken device.
        """
        with self._lock:
            self._copying = True
        try:
            copy_tensors(self._copies)
            if self._cuda:
                done = torch.cuda.Event()
                done.record(torch.cuda.current_stream(self._cuda[0]))
                self._done = done
        finally:
            with self._lock:
                self._copying, self._copied = False, True

    def close(self, applied: bool) -> None:
        """The engine is done with this update. Its memory is free once no copy reads it; if `applied` is true, that
        includes a copy that is queued and has not begun.
        """
        with self._lock:
            self._closed = True
            self._copied |= not applied

    @property
    def released(self) -> bool:
        """Whether the staged bytes may be overwritten."""
        with self._lock:
            if not self._closed or self._copying or not self._copied:
                return False
        return self._done is None or self._done.query()
