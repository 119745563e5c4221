"""The transport `shm`: buckets in memory that publisher and worker share, on one host.

    publisher                                            worker
    memfd: header | slot 0 | slot 1 | ..   -- begin -->  /proc/PID/fd/FD opened, header compared, mapped read-only
    pack into slot i                       -- WSB1 -->   slot i copied to its place, checksum of the copy
                                           <-- WAK1 --   slot i is free again

Messages are as in `zmq`, on the same socket, without the bytes. One segment serves all workers of the host.

Invariants:

- The segment has no name in a file system: the kernel frees it when both sides have ended, even by a crash.
- A worker is on the same host if the kernel's boot id is the same and the segment, opened through /proc, begins with
  the random bytes that `begin` named. Anything else (a container with processes of its own, another user) is refused
  with the field `options`, and `auto` takes another transport.
- A worker maps only memory that is sealed against shrinking, so that no process can crash it by truncating the memory.
  It checks its own copy of the bytes, which the publisher cannot change.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer_bridge.transports.base import (
    IncomingUpdate,
    Keep,
    Recipient,
    TransferRules,
    TransportSender,
    check_options,
)
from trainer_bridge.transports.bucket_link import pack_on_host, send_buckets
from trainer_bridge.transports.payload import Payload
from trainer_bridge.transports.zmq_stream import DEFAULT_WINDOW, SharedReceiver, ZmqReceiver, check_bucket
from trainer_bridge.wire.errors import BadRequest, RolloutError
from trainer_bridge.wire.keys import ClientCurve
from trainer_bridge.wire.manifest import MAX_BUCKET_BYTES

_HEADER_BYTES = 4096  # a page, so that slots begin on pages; its first bytes are the secret
_SECRET_BYTES = 32
_MAX_SLOTS = 64
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_OPTIONS = {"boot_id": str, "pid": int, "fd": int, "slots": int, "slot_bytes": int, "secret": str}


def boot_id() -> str:
    """The kernel's id of this boot of this machine; empty if the system has none."""
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text("ascii").strip()
    return ""


# --- worker ----------------------------------------------------------------------------------------------------------


class ShmReceiver(SharedReceiver):
    """Maps the publisher's segment."""

    name = "shm"

    def __init__(self, buckets: ZmqReceiver) -> None:
        super().__init__(buckets)
        self._segment: OpenSegment | None = None

    def begin(self, incoming: IncomingUpdate, options: Mapping[str, Any]) -> dict[str, Any]:
        """Open the segment. Raises `BadRequest` with the field `options` when it cannot be the publisher's."""
        check_options(self.name, options, _OPTIONS)
        slots, slot_bytes = options["slots"], options["slot_bytes"]
        first, end = incoming.manifest.bucket_span(0) if incoming.manifest.bucket_count else (0, 0)
        fits = 1 <= slots <= _MAX_SLOTS and end - first <= slot_bytes <= MAX_BUCKET_BYTES
        if not fits or slot_bytes % mmap.PAGESIZE:
            raise BadRequest("the slots are too small, too large or too many for the buckets", field="options")
        if not boot_id() or options["boot_id"] != boot_id():
            raise _elsewhere("the publisher runs on another machine")
        self._segment = OpenSegment(options)
        incoming.destination.offer(self.name, options)
        return self._buckets.expect(incoming, self, slots)

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def take(self, incoming: IncomingUpdate, index: int, check: int) -> bool:
        """Copy a bucket to its place. Raises `WeightsRejected` if it is damaged."""
        assert self._segment is not None
        if self.leave(incoming, index, check):
            return False
        start, end = incoming.manifest.bucket_span(index)
        self._segment.copy(index, incoming.destination.memory(start, end), check)
        incoming.arrived(start, end)
        return True


class OpenSegment:
    """A publisher's segment, mapped read-only by the options of `begin`: `OfferedMemory`.

    Raises `BadRequest` with the field `options` if it is not there.
    """

    def __init__(self, options: Mapping[str, Any], device: torch.device | None = None) -> None:
        self._slots, self._slot_bytes = options["slots"], options["slot_bytes"]
        self._pinned = device is not None and device.type == "cuda"
        self._map = _map_segment(options, _HEADER_BYTES + self._slots * self._slot_bytes)

    def copy(self, index: int, out: np.ndarray, check: int) -> None:
        """Copy a bucket. Raises `WeightsRejected` if it is damaged."""
        at = _HEADER_BYTES + index % self._slots * self._slot_bytes
        np.copyto(out, np.frombuffer(self._map, np.uint8, len(out), at))
        check_bucket(index, memoryview(out), check)  # type: ignore[arg-type]  # of the copy, which the publisher cannot change

    def read(self, index: int, start: int, nbytes: int, check: int, keep: Keep) -> None:
        copied = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        self.copy(index, copied.numpy(), check)
        if (kept := keep(start, copied)) is not None:
            kept.synchronize()

    def close(self) -> None:
        self._map.close()


def _map_segment(options: Mapping[str, Any], nbytes: int) -> mmap.mmap:
    """The publisher's memory, read-only."""
    pid, number, secret = options["pid"], options["fd"], options["secret"].encode()
    if pid < 1 or number < 0:
        raise BadRequest("pid and fd must name the publisher's segment", field="options")
    try:
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _elsewhere(f"the publisher's memory cannot be opened ({error.strerror})") from error
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # fails unless it is a memfd
        if not seals & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size != nbytes:
            raise _elsewhere("the publisher's memory is not sealed, or has another size")
        mapped = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
    except OSError as error:
        raise _elsewhere(f"the publisher's memory cannot be mapped ({error.strerror})") from error
    finally:
        os.close(fd)
    if len(secret) != 2 * _SECRET_BYTES or not secrets.compare_digest(mapped[: len(secret)], secret):
        mapped.close()
        raise _elsewhere("the memory there is not the publisher's")
    return mapped


def _elsewhere(why: str) -> BadRequest:
    return BadRequest(f"{why}: shm needs publisher and worker on one host; use auto or zmq", field="options")


# --- trainer ---------------------------------------------------------------------------------------------------------


class Segment:
    """Memory with `slots` slots of `slot_bytes`, which other processes of the host can open while this one lives.

    Raises OSError if the system cannot provide it.
    """

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slots, self.slot_bytes = slots, slot_bytes
        self._secret = secrets.token_hex(_SECRET_BYTES)
        nbytes = _HEADER_BYTES + slots * slot_bytes
        self._fd = os.memfd_create("rollout-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, nbytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            mapped = mmap.mmap(self._fd, nbytes)
        except OSError:
            os.close(self._fd)
            raise
        mapped[: 2 * _SECRET_BYTES] = self._secret.encode()
        # The tensor keeps the mapping alive.
        self.memory = torch.frombuffer(mapped, dtype=torch.uint8)
        self._pinned = False

    def pin(self) -> None:
        """Pin it, so that copies from a GPU run in the background. Raises CUDA's RuntimeError."""
        if not self._pinned:
            status = torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), self.memory.numel(), 0)
            torch.cuda.check_error(int(status))
            self._pinned = True

    def slot(self, index: int) -> torch.Tensor:
        """The memory of a slot, uint8 [slot_bytes]."""
        start = _HEADER_BYTES + index * self.slot_bytes
        return self.memory[start : start + self.slot_bytes]

    def options(self) -> dict[str, Any]:
        """The options of `begin` with which a worker opens it."""
        place = {"boot_id": boot_id(), "pid": os.getpid(), "fd": self._fd, "secret": self._secret}
        return {**place, "slots": self.slots, "slot_bytes": self.slot_bytes}

    def close(self) -> None:
        """Release the memory; workers that have mapped it keep their mapping."""
        os.close(self._fd)
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())
        self.memory = torch.empty(0, dtype=torch.uint8)


class ShmSender(TransportSender):
    """Packs buckets into a segment, for any number of workers on this host."""

    name = "shm"
    why = "the worker runs on this host"

    def __init__(self, curve: ClientCurve | None = None) -> None:
        self._curve = curve
        self._segment: Segment | None = None

    def prepare(self, payload: Payload) -> dict[str, Any]:
        """Return the options that name the segment. Raises `RolloutError` if memory cannot be shared."""
        nbytes = min(payload.manifest.bucket_bytes, payload.manifest.total_bytes)
        slot_bytes = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._segment is None or self._segment.slot_bytes < slot_bytes:
            self.close()
            try:
                self._segment = Segment(DEFAULT_WINDOW, slot_bytes)
            except (OSError, AttributeError) as error:
                raise RolloutError(f"prepare: no memory can be shared here: {error}; use the transport zmq") from error
        if payload.on_gpu:
            try:
                self._segment.pin()
            except RuntimeError as error:
                self.close()
                raise RolloutError(f"prepare: memory cannot be pinned: {error!s:.200}; use zmq") from error
        return self._segment.options()

    def transfer(self, payload: Payload, recipients: Sequence[Recipient], rules: TransferRules) -> dict[str, Any]:
        """Pack every bucket into its slot and announce it to every recipient."""
        assert self._segment is not None
        segment, left = self._segment, True
        options: dict[str, Any] = {}
        try:
            pack = pack_on_host(payload, segment.slot, travels=False)
            options, left = send_buckets(payload, recipients, rules, self._curve, pack, segment.slots)
        finally:
            if left:
                self.close()  # a given-up worker may still read it
        return options

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None
