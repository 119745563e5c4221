"""What the service thread is to do next, from any thread.

`put` is all that the engine's loop ever calls: an append and one byte into a socket pair, which never blocks. The
other end of the pair is polled together with the request socket.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterator

from rollout.engine.messages import Event

Item = Event | Callable[[], None]


class Outbox:
    """A FIFO of events and of functions to call on the service thread, with a file descriptor that wakes it."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def put(self, events: list[Event]) -> None:
        """Hand over events, in order. O(events), never blocks; from any thread."""
        if events:
            self._items.extend(events)
            self._wake()

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` on the service thread, after everything handed over before."""
        self._items.append(call)
        self._wake()

    def fileno(self) -> int:
        """Readable when there may be items."""
        return self._reader.fileno()

    def drain(self) -> Iterator[Item]:
        """Take the present items. Only the service thread calls this."""
        # Bytes first: an item added after the read leaves a byte for the next poll.
        try:
            while self._reader.recv(4096):
                pass
        except BlockingIOError:
            pass
        for _ in range(len(self._items)):
            yield self._items.popleft()

    def close(self) -> None:
        """Close the pair. Later calls of `put` and `post` have no effect."""
        self._writer.close()
        self._reader.close()

    def _wake(self) -> None:
        try:
            self._writer.send(b"\0")
        except OSError:
            # Full: the bytes in the pipe wake the thread as well. Closed: the service has ended.
            pass
