"""Slow work on requests (templates, tokenization, grammars) in background threads, in order for each client.

One thread prepares prompts, or waits for the process that does; the other compiles constraints, which takes longer.
The outcome continues on the service thread. Requests of one client continue in the order of arrival, also if only an
earlier one needs work. Clients take turns, however much work one of them has.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, NamedTuple, TypeVar

Result = TypeVar("Result")
Post = Callable[[Callable[[], None]], None]

_AFTER_ALL = ""  # a name in place of a client: served after all clients


class _Worker:
    """A thread that works for the clients in turn. May be used from any thread."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._lock = threading.Lock()
        # Work that has not begun, by client; the first client is next.
        self._waiting: dict[str, deque[tuple[Future, Callable[[], object]]]] = {}

    def submit(self, client: str, future: Future[Result], work: Callable[[], Result]) -> None:
        """Set the future to the outcome of `work`; never, once it is closed."""
        with self._lock:
            self._waiting.setdefault(client, deque()).append((future, work))
        try:
            self._executor.submit(self._work)
        except RuntimeError:  # it was closed while another thread still worked
            pass

    def close(self) -> None:
        """Begin nothing more."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _work(self) -> None:
        with self._lock:
            client = next((client for client in self._waiting if client != _AFTER_ALL), _AFTER_ALL)
            waiting = self._waiting.pop(client)
            future, work = waiting.popleft()
            if waiting:
                self._waiting[client] = waiting
        try:
            outcome = work()
        # The future carries it to the caller. A tokenizer that panics raises no Exception.
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(outcome)


class _Queued(NamedTuple, Generic[Result]):
    """A request in preparation."""

    future: Future[Result]
    then: Callable[[Future[Result]], None]
    begin: Callable[[Future[Result]], None] | None = None  # called after the requests before it have continued


class BackgroundWork(Generic[Result]):
    """Runs work in background threads and its continuation on the service thread."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._prompts = _Worker("service-prompts")
        self._constraints = _Worker("service-constraints")
        self._queues: dict[str, deque[_Queued[Result]]] = {}

    @property
    def waiting(self) -> int:
        """Requests that have not continued yet."""
        return sum(len(queue) for queue in self._queues.values())

    def waits(self, client: str) -> bool:
        """True if a request of the client is in preparation."""
        return client in self._queues

    def after_client(self, client: str, result: Result, then: Callable[[Future[Result]], None]) -> None:
        """Call `then` with `result` after the client's requests in preparation: at once if it has none."""
        future: Future[Result] = Future()
        future.set_result(result)
        if client in self._queues:
            self._queues[client].append(_Queued(future, then))
        else:
            then(future)

    def in_order(
        self, client: str, begin: Callable[[Future[Result]], None], then: Callable[[Future[Result]], None]
    ) -> None:
        """Call `begin` with a future after the client's requests in preparation, and `then` once the future is done."""
        waits = client in self._queues
        future = self.queue(client, then, begin if waits else None)
        if not waits:
            begin(future)

    def queue(
        self, client: str, then: Callable[[Future[Result]], None], begin: Callable[[Future[Result]], None] | None = None
    ) -> Future[Result]:
        """A future in the client's queue: once it is done, `then` is called after the client's earlier requests."""
        future: Future[Result] = Future()
        self._queues.setdefault(client, deque()).append(_Queued(future, then, begin))
        future.add_done_callback(lambda _: self._post(lambda: self._continue(client)))
        return future

    def prompt(self, client: str, future: Future[Result], work: Callable[[], Result]) -> None:
        """Set a queued future to the outcome of `work` on a prompt."""
        self._prompts.submit(client, future, work)

    def constraint(
        self, client: str, future: Future[Result], prompt: Callable[[], Result], work: Callable[[Result], Result]
    ) -> None:
        """Set a queued future to the outcome of `work`, which takes the outcome of `prompt`."""
        first: Future[Result] = Future()
        first.add_done_callback(lambda _: self._constraints.submit(client, future, lambda: work(first.result())))
        self._prompts.submit(client, first, prompt)

    def after_all(self, then: Callable[[], None]) -> None:
        """Call `then` once all earlier work is done."""
        first: Future[None] = Future()
        last: Future[None] = Future()
        last.add_done_callback(lambda _: self._post(then))
        first.add_done_callback(lambda _: self._constraints.submit(_AFTER_ALL, last, first.result))
        self._prompts.submit(_AFTER_ALL, first, lambda: None)

    def close(self) -> None:
        """Drop work that has not begun. Its `then` is not called."""
        for worker in (self._prompts, self._constraints):
            worker.close()

    def _continue(self, client: str) -> None:
        queue = self._queues.get(client)
        while queue and queue[0].future.done():
            done = queue.popleft()
            if not queue:
                del self._queues[client]
            done.then(done.future)
        if queue and (begin := queue[0].begin) is not None:
            queue[0] = queue[0]._replace(begin=None)
            begin(queue[0].future)
