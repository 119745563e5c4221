"""How an update's bytes get from a trainer to a worker: one file for each way, a sender and a receiver as twins.

The control messages (`begin`, `commit`, `abort`) pass through the worker's request socket and are the same for all:

    publisher                                   worker's receiver thread
    sender.prepare(payload)       -- begin -->  receiver.begin(incoming, options)
                                  <-- grant --
    sender.transfer(payload, ..)  == bytes ==>  receiver.advance(incoming)        again and again, in small pieces
                                  -- commit ->  receiver.finish(incoming, options)
    sender.release(payload)       <-- ok ---                                      once the update is applied

A transport moves bytes and finds damage. Names, shapes, versions and all-or-nothing are the callers' business.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch
import zmq

from trainer_bridge.wire.errors import ConnectionLost, RolloutError
from trainer_bridge.wire.manifest import Manifest

if TYPE_CHECKING:
    from rollout.service.access import Access
    from trainer_bridge.client.keys import ClientCurve
    from trainer_bridge.publish.payload import Payload

TRANSPORTS = ("cuda_ipc", "nccl", "shm", "zmq", "disk")


class Landing(Protocol):
    """Where an update's bytes go: memory in which they wait, or the parameters themselves."""

    def room(self, start: int, end: int) -> np.ndarray:
        """Host memory (uint8) to write bytes `start` to `end` of the stream to; `landed` says when they are there."""

    def landed(self, start: int, end: int) -> None:
        """The room for these bytes was filled. Each byte lands once."""

    def put(self, start: int, data: torch.Tensor) -> None:
        """Take bytes (uint8, one dimension, any device) from `start` on, on the current stream of their device."""


@dataclass
class Incoming:
    """An update that a worker is receiving, and where its bytes land."""

    manifest: Manifest
    transport: str
    token: bytes  # 16 random bytes that tell this update's data from all other
    landing: Landing
    open: threading.Event = field(default_factory=threading.Event)  # bytes may land
    arrived_bytes: int = 0
    last_data_s: float = field(default_factory=time.monotonic)  # on the monotonic clock

    def room(self, start: int, end: int) -> np.ndarray:
        """Host memory (uint8) for these bytes of the stream; `arrived` hands it over."""
        return self.landing.room(start, end)

    def arrived(self, start: int, end: int) -> None:
        """Bytes `start` to `end` of the stream are in their room."""
        self.landing.landed(start, end)
        self.note(end - start)

    def note(self, nbytes: int) -> None:
        """Count bytes that have come."""
        self.arrived_bytes += nbytes
        self.last_data_s = time.monotonic()

    def summary(self) -> dict[str, Any]:
        """What a status says of it."""
        return {
            "version": self.manifest.version,
            "transport": self.transport,
            "arrived_bytes": self.arrived_bytes,
            "total_bytes": self.manifest.total_bytes,
        }


class TransportReceiver(ABC):
    """The worker's side of a transport. All methods run in the receiver's thread."""

    name: ClassVar[str]
    #: Transports whose data `advance` takes: shm's buckets are announced on the socket of zmq.
    carries: ClassVar[tuple[str, ...]] = ()
    #: Bytes come by `put` only, and lie on the device: no host memory is needed for them.
    on_device: bool = False

    @abstractmethod
    def begin(self, incoming: Incoming, options: Mapping[str, Any]) -> dict[str, Any]:
        """Get ready for an update; the answer (plain data) is what the sender must know.

        Raises `RolloutError` when the options are not usable.
        """

    @abstractmethod
    def advance(self, incoming: Incoming | None) -> bool:
        """Do one piece of work: begin a bucket, or end what was begun; true when there may be more to do at once.

        `incoming` is None while no update comes this way. Raises `RolloutError` when the update cannot succeed.
        """

    @abstractmethod
    def finish(self, incoming: Incoming, options: Mapping[str, Any]) -> bool:
        """The publisher has committed: true when all bytes are there and verified, false to be asked again.

        Raises `RolloutError` when they never will be.
        """

    def drop(self, incoming: Incoming, error: RolloutError | None) -> None:  # noqa: B027
        """Forget an update, whole or failed; `error` is for the sender, where the transport can tell it."""

    def rest(self) -> None:  # noqa: B027
        """None has begun, and none comes for a while: give back what was kept for the next one."""

    @property
    def sockets(self) -> Sequence[zmq.Socket]:
        """Sockets to wait on: readable means that `advance` has work."""
        return ()

    def close(self) -> None:  # noqa: B027
        """Free sockets and files."""


class GroupBroken(ConnectionLost):
    """A group of several workers broke, maybe by another one's fault: those that live can be tried again."""

    met = True  # false if it never came about: this way may not work at all
    kept = False  # from an earlier update: it may have broken long ago, and through nobody's fault


@dataclass
class Peer:
    """A worker, as a sender sees it: what it granted, and the error that ended its part of the update, if any."""

    endpoint: str  # of its request socket
    token: bytes = b""
    grant: dict[str, Any] = field(default_factory=dict)
    error: RolloutError | None = None
    transport: str = ""  # that it granted
    why: str = ""  # this transport and no faster one

    def fail(self, error: RolloutError) -> None:
        """Give up on this worker; the first reason stays."""
        if self.error is None:
            self.error = error


@dataclass(frozen=True)
class TransferRules:
    """What bounds a transfer: seconds without progress after which a worker is given up, and the publisher's end."""

    stall_s: float
    closing: threading.Event


class TransportSender(ABC):
    """The trainer's side of a transport. All methods run in the publisher's thread."""

    name: ClassVar[str]

    @abstractmethod
    def prepare(self, payload: Payload) -> dict[str, Any]:
        """What `begin` tells the workers as options (plain data), for an update that is about to start."""

    @abstractmethod
    def transfer(self, payload: Payload, peers: Sequence[Peer], rules: TransferRules) -> dict[str, Any]:
        """Bring the bytes to all peers and return the options of `commit`.

        A peer that fails gets its `error` and does not stop the others. Once this sender reads the tensors no longer,
        it calls `payload.read()`, as early as possible. Returns early when `rules.closing` is set.
        """

    def release(self, payload: Payload, applied: bool) -> None:  # noqa: B027
        """All workers have answered: free what the update took; `applied` is true when one of them uses it."""

    def close(self) -> None:  # noqa: B027
        """Free sockets, files and memory."""


def make_receivers(
    bind: str, max_update_bytes: int, access: Access, device: torch.device, idle_s: float, wake: Callable[[], object]
) -> dict[str, TransportReceiver]:
    """Every transport of a worker, by name.

    `bind` is the endpoint of the data socket, `access` who may use it, `device` where the model is; `idle_s` bounds
    waits in a group; `wake` makes the receiver's thread look. With CURVE there is no `nccl`: a group has no keys.
    """
    from trainer_bridge.transports.disk import DiskReceiver
    from trainer_bridge.transports.shm import ShmReceiver
    from trainer_bridge.transports.zmq_stream import ZmqReceiver

    zmq_receiver = ZmqReceiver(bind, max_update_bytes, access)
    receivers: dict[str, TransportReceiver] = {
        "zmq": zmq_receiver,
        "shm": ShmReceiver(zmq_receiver),
        "disk": DiskReceiver(),
    }
    if device.type == "cuda":
        from trainer_bridge.transports.cuda_ipc import CudaIpcMemory, CudaIpcReceiver
        from trainer_bridge.wire.fingerprint import fingerprint

        fingerprint(torch.zeros(4, dtype=torch.uint8, device=device))  # compiled now, and not while rows decode
        with contextlib.suppress(OSError):  # no runtime library to be found: the others serve
            receivers["cuda_ipc"] = CudaIpcReceiver(zmq_receiver, CudaIpcMemory(device))
    if access.keys is None and torch.distributed.is_available():
        from trainer_bridge.transports.nccl.transport import NcclReceiver

        receivers["nccl"] = NcclReceiver(device, idle_s, wake)
    return receivers


def make_sender(
    name: str, folder: str | None, curve: ClientCurve | None = None, endpoints: Sequence[str] = ()
) -> TransportSender:
    """The sender of a transport to the workers at `endpoints`.

    `folder` is where `disk` writes, `curve` the keys for workers with CURVE.

    Raises ValueError for an unknown name.
    """
    from trainer_bridge.transports.disk import DiskSender
    from trainer_bridge.transports.shm import ShmSender
    from trainer_bridge.transports.zmq_stream import ZmqSender

    if name == "zmq":
        return ZmqSender(curve)
    if name == "shm":
        return ShmSender(curve)
    if name == "cuda_ipc":
        from trainer_bridge.transports.cuda_ipc import CudaIpcSender

        return CudaIpcSender(curve)
    if name == "nccl":
        from trainer_bridge.transports.nccl.transport import NcclSender

        return NcclSender(endpoints)
    if name == "disk":
        if folder is None:
            raise ValueError("transport 'disk' needs a folder that the workers can read; set folder=")
        return DiskSender(folder)
    raise ValueError(f"unknown transport {name!r}; use auto, {', '.join(TRANSPORTS[:-1])} or {TRANSPORTS[-1]}")
