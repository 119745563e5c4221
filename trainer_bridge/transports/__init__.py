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

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import zmq

from trainer_bridge.errors import RolloutError
from trainer_bridge.manifest import Manifest

if TYPE_CHECKING:
    from trainer_bridge.access import Access
    from trainer_bridge.keys import ClientCurve
    from trainer_bridge.payload import Payload

TRANSPORTS = ("zmq", "disk")


@dataclass
class Incoming:
    """An update that a worker is receiving. `stream` (uint8, manifest.total_bytes) is where its bytes belong."""

    manifest: Manifest
    transport: str
    token: bytes  # 16 random bytes that tell this update's data from all other
    stream: torch.Tensor
    arrived_bytes: int = 0
    last_data_s: float = field(default_factory=time.monotonic)  # on the monotonic clock

    def __post_init__(self) -> None:
        self.host = self.stream.numpy()  # the same memory: NumPy and file reads fill it without holding the GIL

    def arrived(self, nbytes: int) -> None:
        """Note that `nbytes` more of the stream are in place."""
        self.arrived_bytes += nbytes
        self.last_data_s = time.monotonic()


class TransportReceiver(ABC):
    """The worker's side of a transport. All methods run in the receiver's thread."""

    name: ClassVar[str]

    @abstractmethod
    def begin(self, incoming: Incoming, options: Mapping[str, Any]) -> dict[str, Any]:
        """Get ready for an update; the answer (plain data) is what the sender must know.

        Raises `RolloutError` when the options are not usable.
        """

    @abstractmethod
    def advance(self, incoming: Incoming | None) -> bool:
        """Do one piece of work, at most a bucket; true when there may be more to do at once.

        `incoming` is None while no update comes this way. Raises `RolloutError` when the update cannot succeed.
        """

    @abstractmethod
    def finish(self, incoming: Incoming, options: Mapping[str, Any]) -> bool:
        """The publisher has committed: true when all bytes are there and verified, false to be asked again.

        Raises `RolloutError` when they never will be.
        """

    def drop(self, incoming: Incoming, error: RolloutError | None) -> None:  # noqa: B027
        """Forget an update, whole or failed; `error` is for the sender, where the transport can tell it."""

    @property
    def sockets(self) -> Sequence[zmq.Socket]:
        """Sockets to wait on: readable means that `advance` has work."""
        return ()

    def close(self) -> None:  # noqa: B027
        """Free sockets and files."""


@dataclass
class Peer:
    """A worker, as a sender sees it: what it granted, and the error that ended its part of the update, if any."""

    endpoint: str  # of its request socket
    token: bytes = b""
    grant: dict[str, Any] = field(default_factory=dict)
    error: RolloutError | None = None

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

        A peer that fails gets its `error` and does not stop the others. Once the tensors are no longer read,
        `payload.release()` is called, as early as possible. Returns early when `rules.closing` is set.
        """

    def release(self, payload: Payload, applied: bool) -> None:  # noqa: B027
        """All workers have answered: free what the update took; `applied` is true when all of them use it."""

    def close(self) -> None:  # noqa: B027
        """Free sockets, files and memory."""


def make_receivers(bind: str, max_update_bytes: int, access: Access) -> dict[str, TransportReceiver]:
    """Every transport of a worker, by name. `bind` is the endpoint of the data socket, `access` who may use it."""
    from trainer_bridge.transports.disk import DiskReceiver
    from trainer_bridge.transports.zmq_stream import ZmqReceiver

    return {"zmq": ZmqReceiver(bind, max_update_bytes, access), "disk": DiskReceiver()}


def make_sender(name: str, folder: str | None, curve: ClientCurve | None = None) -> TransportSender:
    """The sender of a transport. `folder` is where `disk` writes, `curve` the keys for workers with CURVE.

    Raises ValueError for an unknown name.
    """
    from trainer_bridge.transports.disk import DiskSender
    from trainer_bridge.transports.zmq_stream import ZmqSender

    if name == "zmq":
        return ZmqSender(curve)
    if name == "disk":
        if folder is None:
            raise ValueError("transport 'disk' needs a folder that the workers can read; set folder=")
        return DiskSender(folder)
    raise ValueError(f"unknown transport {name!r}; use auto, {' or '.join(TRANSPORTS)}")
