"""Detects closed connections of the request socket, including idle ones.

A ROUTER socket notices a lost connection only when it sends, and a request for one long result receives nothing for
minutes. ZeroMQ's monitor reports a disconnect at once, but by file descriptor. Each message carries the descriptor of
its connection, which links the two.

Descriptors are reused. ZeroMQ reports the end of a connection before a new one with the same descriptor can deliver a
message. So the monitor is read before a message is noted, and no connection is mistaken for another.

A client with its own routing id keeps its `connection` when it reconnects, while its old descriptor may stay open
(half-open). The first message through a new descriptor ends the old connection; the end of the old descriptor is then
ignored.
"""

from __future__ import annotations

import zmq

from trainer_bridge.wire.worker_connection import socket_events


class Disconnects:
    """Watches the connections of one bound socket. Used by the thread that reads it."""

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
        """Stop watching."""
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
