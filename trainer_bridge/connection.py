"""One DEALER connection to one worker, and what happens to it.

ZeroMQ reconnects quietly, but a worker that comes back is another worker: it knows nothing of the requests before. So
a connection that was up and went down is `lost`: the socket is thrown away with all that it holds, and a new one is
opened. Heartbeats make a peer that vanished without a word count as gone. What is sent before a worker is there waits
here, where it can still be withdrawn.

Sending never blocks (no high-water mark: the number of requests in flight is the caller's business). Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

HEARTBEAT_S = 10.0
_RECONNECT_MAX_MS = 1000
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Connection:
    """A socket, its monitor, and whether the worker is there.

    `connected` is as of the last `drain`. `gone` is true from a loss, or from when somebody gave up waiting and set it,
    until the worker is there again.
    """

    def __init__(self, context: zmq.Context, endpoint: str) -> None:
        self.endpoint = endpoint
        self.gone = False
        self._context = context
        self._open()

    def _open(self) -> None:
        self.connected = False
        self._unsent: dict[str, Sequence[bytes]] = {}  # only while not connected
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.set(zmq.SNDHWM, 0)
        self.socket.set(zmq.RCVHWM, 0)
        self.socket.set(zmq.LINGER, 0)  # a client that is dropped without `close` must not keep its process alive
        self.socket.set(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        self.socket.set(zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1000))
        self.socket.set(zmq.HEARTBEAT_TIMEOUT, int(HEARTBEAT_S * 3000))
        self.monitor = self.socket.get_monitor_socket(_EVENTS)
        try:
            self.socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            self._close(0)
            raise ValueError(f"{self.endpoint!r} is not a ZeroMQ endpoint such as tcp://host:5757 ({error})") from error

    def send(self, key: str, frames: Sequence[bytes]) -> None:
        """Send a message, now or when the worker can be reached."""
        if self.connected:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        else:
            self._unsent[key] = frames

    def withdraw(self, key: str) -> bool:
        """Take a message back. False if it is on its way."""
        return self._unsent.pop(key, None) is not None

    def drain(self) -> tuple[list[list[bytes]], bool]:
        """Every message that has arrived, and whether the connection was lost after them. Never blocks.

        The monitor is read first: ZeroMQ reports a loss after it has delivered what came before.
        """
        lost = self._read_monitor()
        messages = []
        while True:
            try:
                messages.append(self.socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return messages, lost

    def _read_monitor(self) -> bool:
        lost = False
        while True:
            try:
                event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return lost
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected, self.gone = True, False
                self._send_waiting()
            elif self.connected:  # an attempt that never got through is not a loss
                self.connected = False
                lost = True

    def _send_waiting(self) -> None:
        for frames in self._unsent.values():
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        self._unsent.clear()

    def reopen(self) -> None:
        """Throw the socket away, unsent messages included, and open another one."""
        self._close(0)
        self._open()
        self.gone = True

    def close(self, linger_s: float) -> None:
        """Close; a worker that is connected still gets what was sent, for `linger_s` at most."""
        self._close(int(linger_s * 1000) if self.connected else 0)

    def _close(self, linger_ms: int) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)
