"""The two halves of a transport, sender and receiver, and the data that they share.

The control messages (`begin`, `commit`, `abort`) are the same for all transports:

    publisher                                   worker's receiver thread
    sender.prepare(payload)       -- begin -->  receiver.begin(incoming, options)
                                  <-- grant --
    sender.transfer(payload, ..)  == bytes ==>  receiver.advance(incoming)        repeatedly, in small pieces
                                  -- commit ->  receiver.finish(incoming, options)
    sender.release(payload, ..)   <-- ok ---                                      once the update is applied or given up

A transport moves bytes and finds damage. Its caller checks names, shapes and versions, and applies all or nothing.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from trainer_bridge.transports.payload import Payload
from trainer_bridge.wire.errors import BadRequest, ConnectionLost, RolloutError
from trainer_bridge.wire.manifest import Manifest


class Destination(ABC):
    """The destination of an update's bytes: staging memory, or the parameters themselves."""

    @abstractmethod
    def wait_for_room(self) -> bool:
        """Whether bytes can be taken now; may wait a moment if not. Raises `RolloutError` if they never can."""

    @abstractmethod
    def memory(self, start: int, end: int) -> np.ndarray:
        """Host memory (uint8) to write bytes `start` to `end` of the stream to, if there is room; then `landed`."""

    @abstractmethod
    def landed(self, start: int, end: int) -> None:
        """Note that the memory of these bytes is filled. Each byte lands exactly once."""

    @abstractmethod
    def put(self, start: int, data: torch.Tensor) -> torch.Tensor:
        """Write bytes (uint8, one dimension, any device) at `start`, if there is room, on the device's current stream.

        Returns the bytes to verify, preferably the copy at the destination: another GPU's memory is slower to read.
        """

    def offer(self, transport: str, options: Mapping[str, Any]) -> None:  # noqa: B027
        """Note memory of the publisher, by the options of `begin`: other ranks may read their buckets there."""

    def leave_to_owner(self, index: int, start: int, end: int, check: int) -> bool:
        """Have the ranks that keep some of these bytes read them from the offered memory.

        False if this process is to take them, for all ranks or for itself.
        """
        return False

    def unread(self) -> int:
        """The number of offered buckets and pieces that the ranks have not verified yet: the last ones that came.

        May wait a moment. Raises `RolloutError` for damage.
        """
        return 0


#: Takes bytes (uint8) at a place of the stream. Returns the event after which they are read, or None if they are.
Keep = Callable[[int, torch.Tensor], torch.cuda.Event | None]


class OfferedMemory(Protocol):
    """Memory of the publisher, as a process reads buckets from it. Errors of memory are `OSError`."""

    def read(self, index: int, start: int, nbytes: int, check: int, keep: Keep) -> None:
        """Read bucket `index`, which begins at `start` of the stream; returns when its bytes are kept.

        Raises `WeightsRejected` for a damaged bucket.
        """

    def close(self) -> None:
        """Give it up."""


@dataclass
class IncomingUpdate:
    """An update that a worker is receiving, and its destination."""

    manifest: Manifest
    transport: str
    token: bytes  # 16 random bytes that mark this update's data
    destination: Destination
    open: threading.Event = field(default_factory=threading.Event)  # set, between two rounds, once bytes may land
    room: bool = True  # whether the destination has room for a piece
    arrived_bytes: int = 0
    last_data_s: float = field(default_factory=time.monotonic)  # time of the last data, on the monotonic clock

    @property
    def may_land(self) -> bool:
        """Whether a piece may land in this round."""
        return self.open.is_set() and self.room

    def arrived(self, start: int, end: int) -> None:
        """Hand over bytes `start` to `end` of the stream, which were written to their memory."""
        self.destination.landed(start, end)
        self.note(end - start)

    def note(self, nbytes: int) -> None:
        """Count bytes that have arrived."""
        self.arrived_bytes += nbytes
        self.last_data_s = time.monotonic()

    def summary(self) -> dict[str, Any]:
        """The update as `status` reports it."""
        return {
            "version": self.manifest.version,
            "transport": self.transport,
            "arrived_bytes": self.arrived_bytes,
            "total_bytes": self.manifest.total_bytes,
        }


def check_options(transport: str, options: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    """Raise `BadRequest` unless these are exactly the options of a message, with values of these types."""
    if {name: type(value) for name, value in options.items()} != dict(kinds):
        known = ", ".join(f"{name} ({kind.__name__})" for name, kind in kinds.items())
        raise BadRequest(f"transport {transport} takes the options {known or 'none'}", field="options")


class TransportReceiver(ABC):
    """The worker's side of a transport. All methods run in the receiver's thread."""

    name: ClassVar[str]
    #: All bytes arrive on the device, by `put`: they need no host memory.
    on_device: bool = False

    @abstractmethod
    def begin(self, incoming: IncomingUpdate, options: Mapping[str, Any]) -> dict[str, Any]:
        """Prepare for an update; return the grant (plain data) for the sender.

        Raises `RolloutError` when the options are not usable.
        """

    @abstractmethod
    def advance(self, incoming: IncomingUpdate | None) -> bool:
        """Do one piece of work; return true when there may be more to do at once.

        `incoming` is None while this transport carries no update. Bytes may land only if `incoming.may_land`, which the
        receiver's thread sets between two rounds: one piece a call. Messages are read all the same.
        Raises `RolloutError` when the update cannot succeed.
        """

    @abstractmethod
    def finish(self, incoming: IncomingUpdate, options: Mapping[str, Any]) -> bool:
        """Finish a committed update: return true when all bytes are verified, false to be called again.

        Raises `RolloutError` when the bytes can never be complete.
        """

    def drop(self, incoming: IncomingUpdate, error: RolloutError | None) -> None:  # noqa: B027
        """Drop an update, complete or failed. A transport with a connection to its sender sends it `error`."""

    def rest(self) -> None:  # noqa: B027
        """Free everything kept for the next update, because none comes for a while."""

    def close(self) -> None:  # noqa: B027
        """Free sockets and files."""


class GroupBroken(ConnectionLost):
    """The error of a broken group of several workers. Another member may be at fault, so retry live workers."""

    met = True  # false if the group never formed: this transport may not work at all
    kept = False  # true for a group of an earlier update, which may have broken since


@dataclass
class Recipient:
    """One worker of an update: its grant, and the error that ended its part, if any."""

    endpoint: str  # endpoint of its request socket
    token: bytes = b""
    grant: dict[str, Any] = field(default_factory=dict)
    error: RolloutError | None = None
    transport: str = ""  # the transport that it granted
    route: str = ""  # the sender of that transport that serves it
    why: str = ""  # why no faster transport was chosen
    weight_socket: str = ""  # the endpoint by which the publisher is connected to it
    options: dict[str, Any] = field(default_factory=dict)  # fields of `commit`, from its sender
    sent_bytes: int = 0  # bytes of tensors or codes

    def fail(self, error: RolloutError) -> None:
        """Give up on this worker; the first error stays."""
        if self.error is None:
            self.error = error


@dataclass(frozen=True)
class TransferRules:
    """Bounds of a transfer: `stall_s` without progress before a worker is given up; `closing` ends all waits.

    `clock` returns seconds.
    """

    stall_s: float
    closing: threading.Event
    clock: Callable[[], float] = time.monotonic


class TransportSender(ABC):
    """The trainer's side of a transport. All methods run in the publisher's thread."""

    name: ClassVar[str]
    #: The reason for which `auto` takes this transport; reports and the log show it.
    why: ClassVar[str] = ""

    @abstractmethod
    def prepare(self, payload: Payload) -> dict[str, Any]:
        """Prepare to send an update; return the options of `begin` (plain data)."""

    @abstractmethod
    def transfer(self, payload: Payload, recipients: Sequence[Recipient], rules: TransferRules) -> dict[str, Any]:
        """Send the bytes to all recipients and return the options of `commit`.

        A recipient that fails gets its `error` and does not stop the others. The sender calls `payload.read()` as soon
        as it no longer reads the tensors. Returns early when `rules.closing` is set.
        """

    def release(self, payload: Payload, applied: bool) -> None:  # noqa: B027
        """Free the memory of an update after all workers have answered. `applied`: at least one uses it."""

    def close(self) -> None:  # noqa: B027
        """Free sockets, files and memory."""
