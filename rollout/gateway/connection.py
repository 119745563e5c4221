"""A connection of a client: cut off when it neither completes a request nor takes its answer.

uvicorn waits for ever for the rest of a request's head and for the reader of a whole answer, and takes heads of any
size where httptools is installed. Bodies (`bodies.py`) and streams (`answers.py`) have limits of their own.

A connection beyond the most that there may be gets an error with OpenAI's body, whatever it asks for.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rollout.gateway.errors import HttpError

_MAX_HEAD_BYTES = 1 << 20
_LINGER_S = 1.0  # for a refused client to read why


def connection_class(patience_s: float, most: int) -> type[asyncio.Protocol]:
    """The protocol for uvicorn: connections that wait for their client for `patience_s` are cut off, at twice it.

    `most`: connections at once.
    """

    class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        """One connection."""

        def connection_made(self, transport: Any) -> None:
            """Begin to watch; a connection too many is refused."""
            super().connection_made(transport)
            self._head_bytes = 0
            self._seen: Any = None
            self._timer = self.loop.call_later(patience_s, self._look)
            self._refused = len(self.connections) > most
            if self._refused:
                transport.write(_refusal(most))
                self._timer.cancel()
                self._timer = self.loop.call_later(_LINGER_S, transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            """End the watch."""
            self._timer.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            """Take bytes; a head that does not end is cut off."""
            if self._refused:
                return
            super().data_received(data)
            if self.cycle is None or (self.cycle.response_complete and not self.cycle.more_body):
                self._head_bytes += len(data)
                if self._head_bytes > _MAX_HEAD_BYTES:
                    self.transport.abort()
            else:
                self._head_bytes = 0

        def _look(self) -> None:
            """Cut the connection off if it waits for its client, and nothing has changed since the last look."""
            waits = self.cycle is None or self.cycle.response_complete
            seen = (self.cycle, self.transport.get_write_buffer_size()) if waits else None
            if waits and seen == self._seen:
                self.transport.abort()
                return
            self._seen = seen
            self._timer = self.loop.call_later(patience_s, self._look)

    return Connection


def _refusal(most: int) -> bytes:
    """The answer to a connection too many, head and body."""
    answer = HttpError(503, f"{most} connections are open (--max-connections); try again later", retry_s=1.0).response()
    head = b"".join(b"%s: %s\r\n" % header for header in answer.raw_headers)
    return b"HTTP/1.1 503 Service Unavailable\r\n%sConnection: close\r\n\r\n%s" % (head, answer.body)
