"""Connections of clients: kept between requests, cut off when a client sends no whole request or reads no answer.

Clients keep connections in pools and use them again; a request that crosses with our close is lost. So an idle
connection stays open for longer than usual pools keep theirs. When there are too many, the one that is idle for the
longest makes room; if none is idle, the newcomer gets an error with OpenAI's body, whatever it asks for.

uvicorn waits without a limit for the rest of a request's head and for the reader of a whole answer, and takes heads of
any size where httptools is installed. Bodies (`bodies.py`) and streams (`event_stream.py`) have limits of their own.

The system asks a silent client whether it is still there (TCP keepalive). So a client that has vanished is noticed,
also while it waits for an answer.
"""

import asyncio
import select
import socket
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rollout_gateway.http.http_errors import HttpError

_MAX_HEAD_BYTES = 1 << 20
_LINGER_S = 1.0  # time for a refused client to read the reason
IN_USE_S = 5.0
#: TCP keepalive: seconds of silence until the system asks, between its questions, and how many go unanswered.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 15, socket.TCP_KEEPCNT: 4}


def connection_class(
    patience_s: float, keep_alive_s: float, most: int, in_use_s: float = IN_USE_S
) -> type[asyncio.Protocol]:
    """The protocol for uvicorn.

    `patience_s`: a connection that waits for its client amid a request or an answer is cut off, at the latest after
    twice that time. `keep_alive_s`: a connection without a request is closed. `most`: connections at once. `in_use_s`:
    an idle connection makes room for a new connection only after that time, since a request may be on its way.
    """
    idle: dict[Any, float] = {}  # connections, and since when, the longest first

    class ClientConnection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        """One connection."""

        def connection_made(self, transport: Any) -> None:
            """Begin to watch; a connection too many is refused."""
            super().connection_made(transport)
            _ask_when_silent(transport)
            self._head_bytes = 0
            self._seen: Any = None
            self._timer = self.loop.call_later(patience_s, self._look)
            self._refused = len(self.connections) > most and not make_room()
            if self._refused:
                transport.write(_refusal(most))
                self._timer.cancel()
                self._timer = self.loop.call_later(_LINGER_S, transport.close)
            else:
                idle[self] = self.loop.time()
                self._arm_keep_alive()

        def connection_lost(self, exc: Exception | None) -> None:
            idle.pop(self, None)
            self._timer.cancel()
            self._unset_keepalive_if_required()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            """Take bytes; a head that does not end is cut off."""
            if self._refused:
                return
            idle.pop(self, None)
            super().data_received(data)
            if self.cycle is None or (self.cycle.response_complete and not self.cycle.more_body):
                self._head_bytes += len(data)
                if self._head_bytes > _MAX_HEAD_BYTES:
                    self.transport.abort()
            else:
                self._head_bytes = 0

        def on_response_complete(self) -> None:
            """The answer is written; the next request may have come with the last one."""
            super().on_response_complete()
            whole = (
                self.cycle.response_complete and not self.cycle.more_body
            )  # a request may be answered before its end
            if whole and not self.transport.is_closing():
                idle[self] = self.loop.time()

        def timeout_keep_alive_handler(self) -> None:
            """It has been idle for long enough."""
            if _has_come(self.transport):  # a request, which is read next
                self._arm_keep_alive()
            else:
                super().timeout_keep_alive_handler()

        def _arm_keep_alive(self) -> None:
            self.timeout_keep_alive_task = self.loop.call_later(keep_alive_s, self.timeout_keep_alive_handler)

        def _look(self) -> None:
            """Cut the connection off if it waits for its client, and nothing has changed since the last look."""
            unsent = self.transport.get_write_buffer_size()
            stuck = (self.cycle is None or self.cycle.response_complete) and (self not in idle or unsent > 0)
            seen = (self.cycle, unsent) if stuck else None
            if stuck and seen == self._seen:
                self.transport.abort()
                return
            self._seen = seen
            self._timer = self.loop.call_later(patience_s, self._look)

    def make_room() -> bool:
        """Close the connection that is idle for the longest; false if none is."""
        for connection, since_s in idle.items():
            if connection.loop.time() - since_s < in_use_s:
                return False
            if not (connection.transport.get_write_buffer_size() or _has_come(connection.transport)):
                del idle[connection]
                connection.connections.discard(connection)
                connection.transport.close()
                return True
        return False

    return ClientConnection


def _ask_when_silent(transport: Any) -> None:
    accepted = transport.get_extra_info("socket")
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        accepted.setsockopt(socket.IPPROTO_TCP, option, value)


def _has_come(transport: Any) -> bool:
    """Whether the system has something that was not read yet."""
    waiting = select.poll()
    waiting.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(waiting.poll(0))


def _refusal(most: int) -> bytes:
    """The answer to a connection too many, head and body."""
    answer = HttpError(503, f"{most} connections are open (--max-connections); try again later", retry_s=1.0).response()
    head = b"".join(b"%s: %s\r\n" % header for header in answer.raw_headers)
    return b"HTTP/1.1 503 Service Unavailable\r\n%sConnection: close\r\n\r\n%s" % (head, answer.body)
