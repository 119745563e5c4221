"""The transport `cuda_ipc`: buckets in GPU memory that publisher and worker share; one host, also one GPU.

    publisher                                             worker
    slots on its GPU      -- begin: a handle of each -->  opened
    pack into half of the slots  -- WSB1 each -->         copied to their places, fingerprints compared
    pack into the other half     <-- WAK1 each --         the slots are free again

A handle is 64 bytes that the driver makes and reads; never a pickle. Messages are as in `shm`, on the socket of `zmq`,
with the low 32 bits of a bucket's fingerprint, computed on the device, instead of its checksum. `begin.options`:
`boot_id`, `handles` (hexadecimal), `slot_bytes`; `commit.options` as for `zmq`.

Invariants:

- Processes on one GPU are time-sliced, for milliseconds while the worker decodes. So the publisher packs half its slots
  for each wait, and the worker copies all buckets that have arrived.
- Slots are allocated by CUDA directly, not from torch's pool: a handle stands for a whole allocation.
- A slot is acknowledged when the worker's copies out of it have run, not when they are enqueued.
- A worker closes the slots before it drops the update. CUDA does not define what happens to memory that is freed while
  another process has it open: slots that a given-up worker may have open are freed after the order to abort.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from trainer_bridge.transports.base import (
    IncomingUpdate,
    Keep,
    Recipient,
    TransferRules,
    TransportSender,
    check_options,
)
from trainer_bridge.transports.bucket_link import send_buckets
from trainer_bridge.transports.fingerprint import fingerprint
from trainer_bridge.transports.payload import Payload
from trainer_bridge.transports.shm import boot_id
from trainer_bridge.transports.zmq_stream import SharedReceiver, ZmqReceiver
from trainer_bridge.wire.errors import BadRequest, RolloutError, WeightsRejected
from trainer_bridge.wire.keys import ClientCurve
from trainer_bridge.wire.manifest import MAX_BUCKET_BYTES

HANDLE_BYTES = 64
_MAX_SLOTS = 64
_SLOTS = 16
_ALL_SLOTS_BYTES = 2 << 30  # most memory of a publisher's slots, if at least two buckets fit
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
_ANY_DIRECTION = 4  # cudaMemcpyDefault: the addresses say where the memory is
_LIBRARY = re.compile(r"/\S*libcudart[^/\s]*\.so[^/\s]*")
_OPTIONS = {"boot_id": str, "handles": list, "slot_bytes": int}
_Memory = TypeVar("_Memory")


class IpcMemory(Protocol):
    """Device memory that other processes can open. Errors are `OSError`."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes], until `free`."""

    def free(self, memory: torch.Tensor) -> None:
        """Give it back."""

    def handle(self, memory: torch.Tensor) -> bytes:
        """The handle by which another process opens it."""

    def open(self, handle: bytes, nbytes: int) -> torch.Tensor:
        """Another process's memory, uint8 [nbytes], until `close`."""

    def close(self, memory: torch.Tensor) -> None:
        """Release it."""

    def reader(self, handle: bytes, nbytes: int) -> IpcReader:
        """Map another process's memory, which may be another GPU's, until `close`."""


class IpcReader(Protocol):
    """Another process's memory, to copy from. Errors are `OSError`."""

    def read(self, at: int, out: torch.Tensor) -> None:
        """Copy from byte `at` into memory of this device; on the current stream."""

    def close(self) -> None:
        """Unmap it; all copies are done."""


class CudaIpcMemory:
    """Memory of one GPU, through the CUDA runtime that torch has loaded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._library = ctypes.CDLL(runtime_paths()[0])

    def allocate(self, nbytes: int) -> torch.Tensor:
        pointer = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
        return self._tensor(pointer, nbytes)

    def free(self, memory: torch.Tensor) -> None:
        self._call("cudaFree", ctypes.c_void_p(memory.data_ptr()))

    def handle(self, memory: torch.Tensor) -> bytes:
        handle = _Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(memory.data_ptr()))
        return bytes(handle)

    def open(self, handle: bytes, nbytes: int) -> torch.Tensor:
        pointer = self._open(handle)
        memory = self._tensor(pointer, nbytes)
        if memory.data_ptr() != pointer.value:  # memory of another GPU: torch made a copy, which would never change
            self._call("cudaIpcCloseMemHandle", pointer)
            raise OSError(0, "it is another GPU's")
        return memory

    def close(self, memory: torch.Tensor) -> None:
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(memory.data_ptr()))

    def reader(self, handle: bytes, nbytes: int) -> IpcReader:
        """Map memory of any GPU of the host, until `close`. Raises OSError if this GPU has no access to it."""
        pointer = self._open(handle)
        assert pointer.value is not None
        return _CudaReader(self._call, self._device, pointer.value, nbytes)

    def _open(self, handle: bytes) -> ctypes.c_void_p:
        pointer, given = ctypes.c_void_p(), _Handle.from_buffer_copy(handle)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(pointer), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return pointer

    def _tensor(self, pointer: ctypes.c_void_p, nbytes: int) -> torch.Tensor:
        assert pointer.value is not None
        return torch.as_tensor(_CudaBytes(pointer.value, nbytes), device=self._device)

    def _call(self, name: str, *arguments: Any) -> None:
        with torch.cuda.device(self._device):
            status = getattr(self._library, name)(*arguments)
        if status:
            self._library.cudaGetLastError()  # clears the error, which the next call of torch would report
            raise OSError(status, f"{name} failed with CUDA error {status}")


class _CudaReader:
    """Memory that another process has allocated."""

    def __init__(self, call: Callable[..., None], device: torch.device, begin: int, nbytes: int) -> None:
        self._call, self._device, self._begin, self._nbytes = call, device, begin, nbytes

    def read(self, at: int, out: torch.Tensor) -> None:
        """Enqueue the copy on the current stream."""
        assert 0 <= at <= self._nbytes - out.numel() and out.is_contiguous()
        source, target = ctypes.c_void_p(self._begin + at), ctypes.c_void_p(out.data_ptr())
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        size = ctypes.c_size_t(out.numel())
        self._call("cudaMemcpyAsync", target, source, size, ctypes.c_int(_ANY_DIRECTION), stream)

    def close(self) -> None:
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(self._begin))


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class _CudaBytes:
    """Device memory as torch takes it without a copy."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 2,
        }


def runtime_paths() -> list[str]:
    """The paths of all CUDA runtimes that this process has loaded: other packages may bring one besides torch's.

    Memory is the same in all of them, but each keeps its own last error. Raises OSError if no runtime is loaded.
    """
    torch.cuda.init()
    found = runtimes_in(Path("/proc/self/maps").read_text())
    if not found:
        raise OSError("no CUDA runtime library is loaded")
    return found


def runtimes_in(maps: str) -> list[str]:
    """The paths of the CUDA runtimes in a table of mapped files, each once."""
    return list(dict.fromkeys(_LIBRARY.findall(maps)))


def forget_last_error() -> None:
    """After an error that was handled: or torch would report it after its next kernel."""
    for path in runtime_paths():
        ctypes.CDLL(path).cudaGetLastError()


def release_each(release: Callable[[_Memory], object], memories: Iterable[_Memory]) -> None:
    """Release all; raise the first error afterwards."""
    with contextlib.ExitStack() as releases:
        for memory in memories:
            releases.callback(release, memory)


def _low_words(fingerprints: Sequence[torch.Tensor]) -> list[int]:
    """The lowest 32 bits of each; waits for everything on the current stream."""
    return [total & 0xFFFFFFFF for total in torch.stack(list(fingerprints)).tolist()] if fingerprints else []


# --- worker ----------------------------------------------------------------------------------------------------------


class CudaIpcReceiver(SharedReceiver):
    """Opens the publisher's slots."""

    name = "cuda_ipc"
    on_device = True

    def __init__(self, buckets: ZmqReceiver, memory: IpcMemory) -> None:
        super().__init__(buckets)
        self._memory = memory
        self._slots: list[torch.Tensor] = []
        self._taken: list[tuple[int, int, torch.Tensor]] = []  # buckets being copied: index, checksum, fingerprint

    def begin(self, incoming: IncomingUpdate, options: Mapping[str, Any]) -> dict[str, Any]:
        """Open the slots. Raises `BadRequest` with the field `options` if that fails."""
        handles, slot_bytes = _read_options(options)
        first, end = incoming.manifest.bucket_span(0) if incoming.manifest.bucket_count else (0, 0)
        if not end - first <= slot_bytes <= MAX_BUCKET_BYTES:
            raise BadRequest("the slots are too small or too large for the buckets", field="options")
        if not boot_id() or options["boot_id"] != boot_id():
            raise _elsewhere("the publisher runs on another machine")
        try:
            for handle in handles:
                self._slots.append(self._memory.open(handle, slot_bytes))
        except OSError as error:
            raise _elsewhere(f"the publisher's memory cannot be opened ({error.strerror})") from error
        incoming.destination.offer(self.name, options)
        return self._buckets.expect(incoming, self, len(self._slots))

    def close(self) -> None:
        slots, self._slots, self._taken = self._slots, [], []
        with contextlib.ExitStack() as closing:
            closing.callback(release_each, self._memory.close, slots)
            if slots and slots[0].is_cuda:
                torch.cuda.current_stream(slots[0].device).synchronize()  # copies in progress read the slots

    def take(self, incoming: IncomingUpdate, index: int, check: int) -> bool:
        """Begin to copy a bucket to its place."""
        if self.leave(incoming, index, check):
            return False
        start, end = incoming.manifest.bucket_span(index)
        data = self._slots[index % len(self._slots)][: end - start]
        self._taken.append((index, check, fingerprint(incoming.destination.put(start, data))))
        return False

    def complete(self, incoming: IncomingUpdate, taken: Sequence[int]) -> int:
        """Like `SharedReceiver.complete`; waits for the copies of this rank. Raises `WeightsRejected` for damage."""
        copied, self._taken = self._taken, []
        for (index, check, _), found in zip(copied, _low_words([found for *_, found in copied]), strict=True):
            _check_bucket(index, found, check)
            start, end = incoming.manifest.bucket_span(index)
            incoming.note(end - start)
        return super().complete(incoming, taken)


class OpenSlots:
    """A publisher's slots, which may be on another GPU, by the options of `begin`: `OfferedMemory`.

    Raises OSError if this process cannot read them.
    """

    def __init__(self, options: Mapping[str, Any], device: torch.device, memory: IpcMemory | None) -> None:
        if memory is None:
            raise OSError(0, "this rank is on no GPU")
        self._device = device
        self._slots: list[IpcReader] = []
        handles, slot_bytes = _read_options(options)
        try:
            for handle in handles:
                self._slots.append(memory.reader(handle, slot_bytes))
        except OSError:
            self.close()
            raise

    def read(self, index: int, start: int, nbytes: int, check: int, keep: Keep) -> None:
        """Like `OfferedMemory.read`; on the current stream."""
        here = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._slots[index % len(self._slots)].read(0, here)
        sent = fingerprint(here)
        keep(start, here)
        (found,) = _low_words([sent])  # waits for all of it
        _check_bucket(index, found, check)

    def close(self) -> None:
        """Unmap them; all reads have run."""
        slots, self._slots = self._slots, []
        release_each(lambda slot: slot.close(), slots)


def _check_bucket(index: int, found: int, check: int) -> None:
    if found != check:
        raise WeightsRejected(f"bucket {index} arrived damaged: fingerprint {found:08x}, sent as {check:08x}")


def _read_options(options: Mapping[str, Any]) -> tuple[list[bytes], int]:
    check_options("cuda_ipc", options, _OPTIONS)
    handles = options["handles"]
    if not 1 <= len(handles) <= _MAX_SLOTS or any(type(handle) is not str for handle in handles):
        raise BadRequest("handles must be a few strings", field="options.handles")
    try:
        read = [bytes.fromhex(handle) for handle in handles]
    except ValueError:
        raise BadRequest("handles must be hexadecimal", field="options.handles") from None
    if any(len(handle) != HANDLE_BYTES for handle in read):
        raise BadRequest(f"a handle has {HANDLE_BYTES} bytes", field="options.handles")
    return read, options["slot_bytes"]


def _elsewhere(why: str) -> BadRequest:
    return BadRequest(f"{why}: cuda_ipc needs publisher and worker on one host; use auto or zmq", field="options")


# --- trainer ---------------------------------------------------------------------------------------------------------


class CudaIpcSender(TransportSender):
    """Packs buckets into slots on the tensors' GPU, for any number of workers on this host."""

    name = "cuda_ipc"
    why = "the worker's GPU reaches the tensors' memory"

    def __init__(self, curve: ClientCurve | None = None, memory: IpcMemory | None = None) -> None:
        self._curve = curve
        self._memory = memory
        self._slots: list[torch.Tensor] = []
        self._left: list[torch.Tensor] = []  # slots that a worker may still read
        self._used = False  # the update that prepared the slots has used them

    def prepare(self, payload: Payload) -> dict[str, Any]:
        """Return the handles of the slots. Raises `RolloutError` if GPU memory cannot be shared."""
        nbytes = max(1, min(payload.manifest.bucket_bytes, payload.manifest.total_bytes))
        self._used = False
        try:
            if self._memory is None:
                if not payload.on_gpu:
                    raise OSError(0, "the tensors are not on a GPU")
                self._memory = CudaIpcMemory(payload.device)
            wanted = max(2, min(_SLOTS, _ALL_SLOTS_BYTES // nbytes, payload.manifest.bucket_count))
            if len(self._slots) < wanted or self._slots[0].numel() < nbytes:
                self.close()
                self._allocate(nbytes, wanted)
            handles = [self._memory.handle(slot).hex() for slot in self._slots]
        except OSError as error:
            self.close()
            raise RolloutError(f"prepare: no GPU memory can be shared: {error}; use another transport") from error
        return {"boot_id": boot_id(), "handles": handles, "slot_bytes": self._slots[0].numel()}

    def transfer(self, payload: Payload, recipients: Sequence[Recipient], rules: TransferRules) -> dict[str, Any]:
        """Pack every bucket into its slot and announce it to every recipient."""
        options: dict[str, Any] = {}
        left = self._used = True
        try:
            slots = len(self._slots)
            pack = functools.partial(self.pack, payload)
            options, left = send_buckets(payload, recipients, rules, self._curve, pack, slots, together=slots)
        finally:
            if left:
                self._left, self._slots = self._left + self._slots, []  # a given-up worker still has them open
        return options

    def release(self, payload: Payload, applied: bool) -> None:
        """Free the slots of given-up workers, after their order to abort. Free all if no worker used them."""
        if not self._used:
            self.close()
        left, self._left = self._left, []
        self._free(left)

    def close(self) -> None:
        slots, self._left, self._slots = self._left + self._slots, [], []
        self._free(slots)

    def pack(self, payload: Payload, indices: range, slots: int) -> list[tuple[int, memoryview | None]]:
        """Put buckets into their slots; returns a check of each, and None: their content is in the slots."""
        buckets = []
        for index in indices:
            slot = self._slots[index % slots]
            buckets.append(slot[: payload.start_bucket(index, slot)])
        with payload.on_side_stream():
            return [(low, None) for low in _low_words([fingerprint(data) for data in buckets])]

    def _allocate(self, nbytes: int, count: int) -> None:
        """Allocate `count` slots; if memory is short, half as many, and so on. Raises OSError if two do not fit."""
        assert self._memory is not None
        while len(self._slots) < count:
            try:
                self._slots.append(self._memory.allocate(nbytes))
            except OSError:
                self.close()
                if count <= 2:
                    raise
                count = max(2, count // 2)

    def _free(self, slots: Sequence[torch.Tensor]) -> None:
        if slots:
            assert self._memory is not None
            release_each(self._memory.free, slots)
