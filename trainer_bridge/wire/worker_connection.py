"""One DEALER connection to one worker, and what happens to it.

ZeroMQ reconnects silently, but a worker that returns is another process and does not know earlier requests. So a
connection that was up and went down is `lost`: its socket is thrown away and a new one is opened. Heartbeats detect a
worker that vanished. Messages for a worker that is not connected wait here, where they can still be withdrawn.

ZeroMQ's own thread learns of a loss later than the operating system does: on a busy machine, much later. Messages sent
meanwhile would be lost with the socket. So the operating system is asked, too: a connection that the worker has closed
is `ending`. It still delivers messages that have arrived; new ones wait for the next connection.

A name may have addresses of IPv4 and IPv6, and ZeroMQ tries only one. So after a failed attempt the next attempt uses
the other family, until a connection has succeeded.

A worker that refuses the connection (CURVE keys) is not asked again by ZeroMQ: `refused` says why, until `reopen`.

Sending never blocks (no high-water mark: the number of requests in flight is the caller's business). Not thread-safe.
"""

import errno
import os
import select
import socket
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from trainer_bridge.wire.address import has_brackets, host_of, host_port, is_name, with_zone
from trainer_bridge.wire.keys import ClientCurve

#: Seconds that a client waits for an endpoint that refuses connections, unless its user sets another time.
REFUSED_S = 3.0

_RECONNECT_MAX_MS = 1000
_HEARTBEATS_MISSED = 3
_LEAST_HEARTBEAT_S, _MOST_HEARTBEAT_S = 0.05, 3600.0
_SWITCH_S = 0.1  # time between two changes of the family
_OTHER_FAMILY_MS = 2000  # time of an attempt by IPv6, which may get no answer at all
_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
)
#: Poll event of a socket that the peer has closed. Only Linux has it; elsewhere ZeroMQ alone reports a loss.
_PEER_CLOSED = getattr(select, "POLLRDHUP", 0)
_NOT_ALLOWED = "does not allow this client's key; have its public key put into the worker's folder of client keys"
_NO_AGREEMENT = "and this client do not agree on CURVE: give the client its keys if the worker uses CURVE, else none"
_BROKEN_OFF = "; something answers there, but breaks off: is the worker's public key (CURVE) the right one?"


class WorkerConnection:
    """A socket, its monitor, and whether the worker is there.

    `connected` and `ending` are as of the last `drain`. `gone`: the connection was lost or is `ending`, or a caller
    gave up and set it; it stays true until the worker is back. `heartbeat_s` is the interval of heartbeats in seconds;
    a worker that leaves one without an answer for three of them is lost.
    """

    def __init__(
        self, context: zmq.Context, endpoint: str, curve: ClientCurve | None = None, heartbeat_s: float = 10.0
    ) -> None:
        if not _LEAST_HEARTBEAT_S <= heartbeat_s <= _MOST_HEARTBEAT_S:
            raise ValueError(
                f"heartbeat_s is {heartbeat_s}; set it to {_LEAST_HEARTBEAT_S} to {_MOST_HEARTBEAT_S:g} seconds"
            )
        self.endpoint = endpoint
        self._heartbeat_ms = int(heartbeat_s * 1000)
        self.gone = False
        self.refusing_since_s: float | None = None
        self.refused_at_s = 0.0  # the last time
        self._reached = False  # a worker has been there
        self._by_name, self._ipv6 = is_name(host_of(endpoint)), "[" in endpoint
        self._switched_s = 0.0
        self._context = context
        self._curve = curve
        self._unsent: dict[str, Sequence[bytes]] = {}  # filled only while not connected, or while ending
        self._open()

    def _open(self) -> None:
        self.connected = self.ending = False
        self._descriptor: int | None = None  # descriptor of the last connected system socket
        self.refused: str | None = None
        self.hint = ""  # more about why there is no connection
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.set(zmq.SNDHWM, 0)
        self.socket.set(zmq.RCVHWM, 0)
        self.socket.set(zmq.LINGER, 0)  # a client that is dropped without `close` must not keep its process alive
        self.socket.set(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        self.socket.set(zmq.HEARTBEAT_IVL, self._heartbeat_ms)
        self.socket.set(zmq.HEARTBEAT_TIMEOUT, _HEARTBEATS_MISSED * self._heartbeat_ms)
        self.socket.set(zmq.IPV6, self._ipv6)
        if self._curve is not None:
            self._curve.apply(self.socket)
        self.monitor = self.socket.get_monitor_socket(_EVENTS | (zmq.EVENT_CONNECT_RETRIED if self._by_name else 0))
        try:
            if not has_brackets(self.endpoint):
                raise zmq.ZMQError(errno.EINVAL)
            self.socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            self._close(0)
            how = "write it as tcp://HOST:PORT, an IPv6 address in brackets"
            raise ValueError(f"{self.endpoint!r} is not a ZeroMQ endpoint; {how} ({error})") from error

    def _switch_family(self) -> None:
        """Try the other family of the name's addresses. Nothing is lost: no message goes out without a connection."""
        if self._descriptor is not None or time.monotonic() < self._switched_s + _SWITCH_S:
            return
        self._switched_s, self._ipv6 = time.monotonic(), not self._ipv6
        self.socket.disconnect(self.endpoint)
        self.socket.set(zmq.IPV6, self._ipv6)
        self.socket.set(zmq.CONNECT_TIMEOUT, _OTHER_FAMILY_MS if self._ipv6 else 0)
        self.socket.connect(self.endpoint)

    def numeric_endpoint(self) -> str:
        """The endpoint, with the address that the connection goes to in the place of a name.

        A name may have several hosts, and later messages must reach the same host.
        """
        if not self._by_name or self._descriptor is None:
            return self.endpoint
        try:
            with socket.socket(fileno=os.dup(self._descriptor)) as peer:
                address = peer.getpeername()
        except OSError:  # it has just been lost
            return self.endpoint
        return f"tcp://{host_port(with_zone(address), address[1])}"

    @property
    def can_send(self) -> bool:
        """True if a message goes out now; otherwise it waits here."""
        return self.connected and not self.ending

    def send(self, key: str, frames: Sequence[bytes]) -> None:
        """Send a message, now or when the worker can be reached."""
        if self.can_send:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        else:
            self._unsent[key] = frames

    def withdraw(self, key: str) -> bool:
        """Take a message back. False if it is on its way."""
        return self._unsent.pop(key, None) is not None

    def waits(self, key: str) -> bool:
        """True if a message has not been sent yet."""
        return key in self._unsent

    def drain(self, most: int) -> tuple[list[list[bytes]], bool]:
        """The messages that have arrived, and whether the connection was lost after them. Never blocks.

        They are all if there are fewer than `most`, or if the connection was lost. The monitor is read first: ZeroMQ
        reports a loss after it has delivered what came before.
        """
        closed = self._peer_closed()  # called before the monitor is read: see there
        lost = self._read_monitor()
        if closed and not lost:
            self.ending = self.gone = True
        messages: list[list[bytes]] = []
        while lost or len(messages) < most:
            try:
                messages.append(self.socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
        return messages, lost

    def _peer_closed(self) -> bool:
        """Whether the system knows that the worker has closed the connection.

        ZeroMQ reports a loss before it closes its own end. So unless the monitor reports a loss after this, the
        descriptor still belonged to the connection.
        """
        if not (_PEER_CLOSED and self.connected) or self._descriptor is None:
            return False
        poll = select.poll()
        poll.register(self._descriptor, _PEER_CLOSED)
        return bool(poll.poll(0))

    def _read_monitor(self) -> bool:
        """Take in the monitor's events, up to a loss: later ones belong to a socket that is thrown away."""
        for event in socket_events(self.monitor):
            if event["event"] == zmq.EVENT_CLOSED:  # an attempt to connect ended before there was a connection
                self.refused_at_s = time.monotonic()
                if self.refusing_since_s is None and not self._reached:
                    self.refusing_since_s = self.refused_at_s
            elif event["event"] == zmq.EVENT_CONNECT_RETRIED:
                self._switch_family()
            elif event["event"] == zmq.EVENT_CONNECTED:
                self._descriptor = event["value"]
                self._reached, self.refusing_since_s = True, None
            elif event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected, self.gone, self.hint = True, False, ""
            elif event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.refused = f"the worker at {self.endpoint} {_NOT_ALLOWED}"
            elif event["event"] == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self.refused = f"the worker at {self.endpoint} {_NO_AGREEMENT}"
            elif event["event"] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self.hint = _BROKEN_OFF
            elif self.connected:  # an attempt that never got through is not a loss
                self.connected = False
                return True
        if self.can_send:
            self._send_waiting()
        return False

    def _send_waiting(self) -> None:
        for frames in self._unsent.values():
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        self._unsent.clear()

    def reopen(self) -> None:
        """Throw the socket away with all sent messages, and open a new socket; waiting messages go on waiting."""
        self._close(0)
        self._open()
        self.gone = True

    def close(self, linger_s: float = 0.0) -> None:
        """Close, if it is not; a worker that is connected still gets what was sent, for `linger_s` at most."""
        self._close(int(linger_s * 1000) if self.connected else 0)

    def _close(self, linger_ms: int) -> None:
        if self.socket.closed:
            return
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)


def close_when_dropped(owner: object, context: zmq.Context, connections: Mapping[str, WorkerConnection]) -> None:
    """Close the connections that are in the map by then, and their context, once `owner` is garbage.

    A context that the garbage collector finds waits without limit for sockets that are still open. At the end of the
    process nothing waits, and threads may still use the sockets, so they are left alone.
    """
    weakref.finalize(owner, _close_all, context, connections, os.getpid()).atexit = False


def _close_all(context: zmq.Context, connections: Mapping[str, WorkerConnection], process: int) -> None:
    if os.getpid() != process:  # a fork has a copy of the client, but not its sockets
        return
    for connection in connections.values():
        connection.close()
    context.term()


def socket_events(monitor: zmq.Socket) -> Iterator[dict[str, Any]]:
    """The events that a socket's monitor has, oldest first. Never blocks."""
    while True:
        try:
            message = monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        yield dict(parse_monitor_message(message))
