"""The work queue of the service thread; any thread may add to it.

`put` is all that the engine's loop ever calls: an append and a signal, which never blocks. The service
thread polls for the signal and the request socket together.
"""

from collections import deque
from collections.abc import Callable, Iterator

from rollout.engine.messages.to_service import Event
from rollout.network.router_socket import PollWaker

Item = Event | Callable[[], None]


class Outbox:
    """A FIFO of events and of functions to call on the service thread, with a file descriptor that wakes it."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._wake = PollWaker()

    def put(self, events: list[Event]) -> None:
        """Hand over events, in order. O(events), never blocks; from any thread."""
        if events:
            self._items.extend(events)
            self._wake.signal()

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` on the service thread, after everything handed over before."""
        self._items.append(call)
        self._wake.signal()

    def fileno(self) -> int:
        """Readable when there may be items."""
        return self._wake.fileno()

    def drain(self) -> Iterator[Item]:
        """Take the present items. Only the service thread calls this."""
        self._wake.clear()
        for _ in range(len(self._items)):
            yield self._items.popleft()

    def close(self) -> None:
        """Later calls of `put` and `post` have no effect."""
        self._wake.close()
