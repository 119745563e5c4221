"""A bound ROUTER socket, such as the service's for requests, and the queue of work for its polling thread."""

import contextlib
import socket
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import zmq

from rollout.config import ServiceSettings
from rollout.network.access import Access


def bind_router(
    context: zmq.Context, bind: str, setting: str, access: Access, options: Mapping[zmq.SocketOption, int]
) -> zmq.Socket:
    """A ROUTER socket with these options of ZeroMQ, bound. `setting` names the setting that `bind` comes from.

    Raises ValueError if the endpoint cannot be bound, or needs CURVE.
    """
    access.check_bind(bind, setting)
    router = context.socket(zmq.ROUTER)
    for option, value in options.items():
        router.setsockopt(option, value)
    if "[" in bind:
        router.setsockopt(zmq.IPV6, 1)
    access.secure(context, router)
    try:
        router.bind(bind)
    except zmq.ZMQError as error:
        router.close(linger=0)
        raise ValueError(f"cannot bind {bind}: {error}; choose another {setting!r}") from error
    return router


T = TypeVar("T")


class PolledQueue(Generic[T]):
    """A FIFO for a thread that polls sockets: any thread adds items, and a descriptor wakes the reader.

    An item is added before the signal, and the reader forgets the signals before it takes items. So an item that comes
    meanwhile wakes the next poll.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def put(self, items: Sequence[T]) -> None:
        """Add items, in order. O(items), never blocks; from any thread."""
        if items:
            self._items.extend(items)
            self._signal()

    def post(self, item: T) -> None:
        """Like `put`, for one item."""
        self._items.append(item)
        self._signal()

    def fileno(self) -> int:
        """Readable when there may be items."""
        return self._reader.fileno()

    def drain(self) -> Iterator[T]:
        """Take the present items. Only the reader calls this."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass
        for _ in range(len(self._items)):
            yield self._items.popleft()

    def close(self) -> None:
        """Close the descriptor. Later items wake no thread."""
        self._writer.close()
        self._reader.close()

    def _signal(self) -> None:
        # A full pipe wakes the thread as well. A closed one belongs to a thread that has ended.
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")


RECEIVE_HWM = 64  # unread messages of one connection; beyond that TCP stops its sender
_HEARTBEAT_MS = 10_000  # a client whose host is gone is noticed within 40 s, soon enough for a lease of 60 s
_HEARTBEATS_MISSED = 3


def receive_parts(socket: zmq.Socket, max_parts: int, max_bytes: int) -> list[bytes]:
    """The parts of a message after the first one, which the caller has received.

    Parts are kept up to `max_parts`, and until they exceed `max_bytes` together; later parts are read and dropped.
    """
    parts: list[bytes] = []
    size = 0
    while socket.getsockopt(zmq.RCVMORE):
        part = socket.recv(zmq.NOBLOCK)
        if len(parts) < max_parts and size <= max_bytes:
            parts.append(part)
            size += len(part)
    return parts


def open_router(context: zmq.Context, settings: ServiceSettings, access: Access) -> zmq.Socket:
    """A bound ROUTER socket. Raises ValueError if the endpoint cannot be bound, or needs CURVE."""
    options = {
        zmq.ROUTER_MANDATORY: 1,  # an unknown destination is an error, not a silent drop
        # A client with its own routing id takes the id over when it reconnects, even while its old, half-open
        # connection still exists here. Without this option ZeroMQ ignores the new connection for good.
        zmq.ROUTER_HANDOVER: 1,
        zmq.SNDHWM: settings.constants.send_hwm,
        zmq.RCVHWM: RECEIVE_HWM,
        # Twice the limit: a slightly oversized message gets an error reply; a far larger message is cut off before it
        # takes memory.
        zmq.MAXMSGSIZE: 2 * settings.max_message_bytes,
        zmq.HEARTBEAT_IVL: _HEARTBEAT_MS,
        zmq.HEARTBEAT_TIMEOUT: _HEARTBEATS_MISSED * _HEARTBEAT_MS,
        zmq.HEARTBEAT_TTL: min(_HEARTBEATS_MISSED * _HEARTBEAT_MS, 6_553_500),
    }
    return bind_router(context, settings.bind, "service.bind", access, options)
