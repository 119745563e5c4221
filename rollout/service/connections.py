r"""Sends through the ROUTER socket: never blocks, bounded for each connection, notices closed connections.

    send ---> ROUTER pipe of the connection (at most `constants.send_hwm` messages) ---> network
       \-->   backlog of the connection (at most max_buffer_bytes)  ---/     as the pipe gets room

A message goes to the backlog only when the pipe is full. When the backlog is full, `send` refuses a chunk; the caller
then drops the stream and keeps the final result.
"""

import logging
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import zmq

from rollout.process.logs import request_fields
from trainer_bridge.wire.codec import join_envelope
from trainer_bridge.wire.worker_connection import socket_events

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplyAddress:
    """The address of a reply: the connection, its framing, and the id of the request."""

    connection: bytes
    delimiter: bool
    id: str
    client: str = ""  # the client's key, once it is known

    @property
    def request_fields(self) -> dict[str, Any]:
        """Fields that identify the request in the log."""
        return request_fields(self.client or f"connection:{self.connection.hex()}", self.id)


@dataclass(slots=True)
class _Unsent:
    frames: list[bytes]
    size: int
    streams: frozenset[Hashable]


@dataclass(slots=True)
class _Backlog:
    queue: deque[_Unsent] = field(default_factory=deque)
    size: int = 0


class Connections:
    """The sending side of a ROUTER socket, which must have ROUTER_MANDATORY set. Used by one thread."""

    def __init__(self, socket: zmq.Socket, max_buffer_bytes: int, on_gone: Callable[[bytes], None]) -> None:
        self._socket = socket
        self._max_buffer_bytes = max_buffer_bytes
        self._on_gone = on_gone
        self._backlogs: dict[bytes, _Backlog] = {}

    @property
    def has_backlog(self) -> bool:
        """True while `flush` has something to try."""
        return bool(self._backlogs)

    def send(self, peer: ReplyAddress, frames: list[bytes], streams: frozenset[Hashable] = frozenset()) -> bool:
        """Send a message, now or when the connection has room. False if its buffer is full.

        `streams` are the streams whose chunks it has; `drop_streams` can withdraw it. A closed connection accepts
        everything: `on_gone` has been called for it.
        """
        message = [peer.connection, *join_envelope(peer.delimiter, frames)]
        backlog = self._backlogs.get(peer.connection)
        if backlog is None:
            if self._try_send(message):
                return True
            backlog = self._backlogs[peer.connection] = _Backlog()
        size = sum(len(frame) for frame in message)
        if backlog.queue and backlog.size + size > self._max_buffer_bytes:
            return False
        backlog.queue.append(_Unsent(message, size, streams))
        backlog.size += size
        return True

    def drop_streams(self, connection: bytes, streams: frozenset[Hashable]) -> frozenset[Hashable]:
        """Withdraw the chunks of streams from a connection's backlog. Returns all streams that lost chunks.

        A message may have chunks of other streams, too. Such streams end with the connection, so that no stream has a
        gap.
        """
        backlog = self._backlogs.get(connection)
        if backlog is not None:
            kept: deque[_Unsent] = deque()
            for unsent in backlog.queue:
                if unsent.streams & streams:
                    streams |= unsent.streams
                else:
                    kept.append(unsent)
            backlog.queue = kept
            backlog.size = sum(unsent.size for unsent in kept)
        return streams

    def flush(self) -> None:
        """Move messages from backlogs into pipes with room."""
        for connection, backlog in list(self._backlogs.items()):
            while backlog.queue:
                if not self._try_send(backlog.queue[0].frames):
                    break
                if connection not in self._backlogs:  # gone, and its backlog with it
                    break
                backlog.size -= backlog.queue.popleft().size
            else:
                del self._backlogs[connection]

    def ended(self, connection: bytes) -> None:
        """The connection is closed: drop its backlog and report it."""
        self._backlogs.pop(connection, None)
        logger.debug("a connection is gone", extra={"connection": connection.hex()})
        self._on_gone(connection)

    def _try_send(self, message: list[bytes]) -> bool:
        """False if the pipe is full; true if the message was sent, or its connection is closed."""
        try:
            self._socket.send_multipart(message, flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.ended(message[0])
        return True


class Disconnects:
    """Detects closed connections of one bound socket, including idle ones. Used by the thread that reads it.

    A ROUTER socket notices a lost connection only when it sends, and a request for one long result receives nothing for
    minutes. ZeroMQ's monitor reports a disconnect at once, but by file descriptor. Each message carries the descriptor
    of its connection, which links the two.

    Descriptors are reused. ZeroMQ reports the end of a connection before a new one with the same descriptor can deliver
    a message. So the monitor is read before a message is noted, and no connection is mistaken for another.

    A client with its own routing id keeps its `connection` when it reconnects, while its old descriptor may stay open
    (half-open). The first message through a new descriptor ends the old connection; the end of the old descriptor is
    then ignored.
    """

    def __init__(self, socket: zmq.Socket) -> None:
        self._socket = socket
        #: Poll it together with the socket.
        self.monitor: zmq.Socket = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._descriptors: dict[bytes, int] = {}
        self._connections: dict[int, list[bytes]] = {}
        self._ended: set[int] = set()  # closed descriptors that are not reused yet
        self._gone: list[bytes] = []

    def note(self, connection: bytes, frame: zmq.Frame) -> list[bytes]:
        """A message of `connection` arrived, with this first frame.

        Returns the connections that ended before the message; handle their end first. `connection` itself may be among
        them, with an earlier descriptor.
        """
        try:
            descriptor = int(frame.get(zmq.SRCFD))
        except zmq.ZMQError:  # some transports have no descriptors; then only a failed send reveals the end
            return []
        self._read()
        if self._descriptors.get(connection) == descriptor:
            return self._take_gone()
        if self._forget(connection):  # the client reconnected
            self._gone.append(connection)
        before = self._take_gone()
        if descriptor in self._ended:  # the message outlived its connection
            self._gone.append(connection)
        else:
            self._descriptors[connection] = descriptor
            self._connections.setdefault(descriptor, []).append(connection)
        return before

    def take(self) -> list[bytes]:
        """Connections that ended since the last call."""
        self._read()
        return self._take_gone()

    def close(self) -> None:
        self._socket.disable_monitor()
        self.monitor.close(0)

    def _take_gone(self) -> list[bytes]:
        gone, self._gone = self._gone, []
        return gone

    def _read(self) -> None:
        for event in socket_events(self.monitor):
            descriptor = int(event["value"])
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._ended.discard(descriptor)
                continue
            self._ended.add(descriptor)
            for connection in self._connections.pop(descriptor, []):
                del self._descriptors[connection]
                self._gone.append(connection)

    def _forget(self, connection: bytes) -> bool:
        descriptor = self._descriptors.pop(connection, None)
        if descriptor is None:
            return False
        self._connections[descriptor].remove(connection)
        return True
