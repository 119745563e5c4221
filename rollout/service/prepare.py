"""Slow work on prompts (templates, tokenization) beside the service thread, in order for each client.

One thread does the work, or waits for the process that does; what it returns continues on the service thread. A
client's requests continue in the order in which they came, also when one needs no work and the one before it does.
Clients do not wait for each other here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")
Post = Callable[[Callable[[], None]], None]


class Preparer:
    """Runs `work` in a thread of its own and `then` on the service thread."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="service-prepare")
        self._queues: dict[str, deque[tuple[Future, Callable[[Future], None]]]] = {}

    @property
    def waiting(self) -> int:
        """Requests that have not continued yet."""
        return sum(len(queue) for queue in self._queues.values())

    def run(
        self, client: str, work: Callable[[], Result], then: Callable[[Future[Result]], None], *, slow: bool
    ) -> None:
        """Call `then` with the outcome of `work`: right away if it is not `slow` and nothing of the client waits."""
        future: Future[Result]
        if slow:
            future = self._executor.submit(work)
        else:
            future = _done(work)
            if client not in self._queues:
                then(future)
                return
        self._queues.setdefault(client, deque()).append((future, then))
        if slow:
            future.add_done_callback(lambda _: self._post(lambda: self._continue(client)))

    def close(self) -> None:
        """Give up what has not begun. `then` is not called for it."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _continue(self, client: str) -> None:
        queue = self._queues.get(client)
        while queue and queue[0][0].done():
            future, then = queue.popleft()
            if not queue:
                del self._queues[client]
            then(future)


def _done(work: Callable[[], Result]) -> Future[Result]:
    future: Future[Result] = Future()
    try:
        future.set_result(work())
    # As the executor does: whoever asks for the result gets it.
    except Exception as error:
        future.set_exception(error)
    return future
