"""Which connections of the request socket have ended, also those that nothing is sent to.

The ROUTER socket tells of a lost connection only to who sends to it, and a request for one long result sends nothing
for minutes. ZeroMQ's monitor tells at once, but by file descriptor; each message carries the descriptor that it came
through, which connects the two.

A descriptor is used again after its connection has ended. ZeroMQ reports the end of the first before the second can
deliver anything, so whoever reads the monitor before noting a message never takes one connection for another.

A client with a routing id of its own is the same `connection` after a reconnect, though its old descriptor may stay
open for long (half-open). The first message that comes through another descriptor ends what there was under that id,
and only that: the end of the old descriptor means nothing any more.
"""

from __future__ import annotations

import zmq

from trainer_bridge.wire.socket_events import socket_events


class Departures:
    """Watches the connections of one bound socket. Used by the thread that reads it."""

    def __init__(self, socket: zmq.Socket) -> None:
        self._socket = socket
        #: To be polled together with the socket.
        self.monitor: zmq.Socket = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._descriptors: dict[bytes, int] = {}
        self._connections: dict[int, list[bytes]] = {}
        self._ended: set[int] = set()  # descriptors whose connection ended and that are not in use again
        self._gone: list[bytes] = []

    def note(self, connection: bytes, frame: zmq.Frame) -> list[bytes]:
        """A message of `connection` has come, with this first frame.

        Returns the connections that ended before it, for which that is to be done before the message is handled: this
        one may be among them, under an earlier descriptor.
        """
        try:
            descriptor = int(frame.get(zmq.SRCFD))
        except zmq.ZMQError:  # not every transport has descriptors; then only a failing send tells
            return []
        self._read()
        if self._descriptors.get(connection) == descriptor:
            return self._told()
        if self._forget(connection):  # taken over
            self._gone.append(connection)
        before = self._told()
        if descriptor in self._ended:  # the message outlived its connection
            self._gone.append(connection)
        else:
            self._descriptors[connection] = descriptor
            self._connections.setdefault(descriptor, []).append(connection)
        return before

    def take(self) -> list[bytes]:
        """The connections that have ended since the last call."""
        self._read()
        return self._told()

    def close(self) -> None:
        """Stop watching."""
        self._socket.disable_monitor()
        self.monitor.close(0)

    def _told(self) -> list[bytes]:
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
