"""A client for a training loop that must not wait: requests run in a thread, the loop holds futures.

    with BackgroundClient(worker.endpoints, resume=True) as client:
        future = client.generate_many(prompts, n=8, max_tokens=4096)     # returns at once
        ...                                                              # train on an earlier batch
        results = future.result()

The futures come from `concurrent.futures`.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, TypeVar, Unpack

from trainer_bridge.client.asynchronous import AsyncRolloutClient
from trainer_bridge.client.batch import MAX_IN_FLIGHT, BatchItem
from trainer_bridge.client.core import MAKE_CLIENTS
from trainer_bridge.client.generate_request import GenerateFields, Prompt
from trainer_bridge.client.results import GenerateResult
from trainer_bridge.process_bound import Closing, ProcessBound

_Value = TypeVar("_Value")


class BackgroundFuture(ProcessBound, Future[_Value]):
    """A `concurrent.futures.Future` of a call that a `BackgroundClient` makes in its thread."""

    _instead = "wait for it in its process, and pass its result"

    def __init__(self, work: Future[_Value]) -> None:
        super().__init__()
        self._work = work
        work.add_done_callback(self._end)

    def cancel(self) -> bool:
        """Cancel the requests at the worker. False if they are over."""
        return self._work.cancel()

    def _end(self, work: Future[_Value]) -> None:
        if work.cancelled():
            super().cancel()
            self.set_running_or_notify_cancel()
        elif (error := work.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(work.result())


class BackgroundClient(Closing):
    """`RolloutClient` for any thread: `generate` and `generate_many` return futures of `concurrent.futures`.

    Cancelling a future cancels its requests.
    """

    _instead = MAKE_CLIENTS
    _readable_after_fork = frozenset({"endpoints", "_client"})

    def __init__(self, endpoints: str | Sequence[str], **options: Any) -> None:
        self._client = AsyncRolloutClient(endpoints, **options)
        self._loop = asyncio.new_event_loop()
        self._under_way: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="background-client", daemon=True)
        running = threading.Event()
        self._loop.call_soon(running.set)
        self._thread.start()
        running.wait()  # a forked process closes a loop that does not run yet, also for this process

    def generate(self, prompt: Prompt | None = None, **fields: Unpack[GenerateFields]) -> Future[GenerateResult]:
        """Like `RolloutClient.generate`, but a future of its result."""
        return self._run(self._client.generate(prompt, **fields))

    def generate_many(
        self, requests: Iterable[BatchItem], *, max_in_flight: int = MAX_IN_FLIGHT, **common: Unpack[GenerateFields]
    ) -> Future[list[GenerateResult]]:
        """Like `RolloutClient.generate_many`, but a future of its results."""
        return self._run(self._client.generate_many(requests, max_in_flight=max_in_flight, **common))

    def run(self, job: Callable[[AsyncRolloutClient], Coroutine[Any, Any, _Value]]) -> Future[_Value]:
        """Run a coroutine function in the thread, with the asynchronous client as argument.

        It must not block.
        """
        made = job(self._client) if callable(job) else None
        if not asyncio.iscoroutine(made):
            raise TypeError(f"run takes an `async def` function of the client, not called yet; this is {job!r}")
        return self._run(made)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Like `RolloutClient.endpoints`."""
        return self._client.endpoints

    def add(self, endpoint: str) -> None:
        """Like `RolloutClient.add`."""
        self._run(self._change(self._client.add, endpoint)).result()

    def remove(self, endpoint: str, mode: Literal["drain", "now"] = "drain") -> None:
        """Like `RolloutClient.remove`."""
        self._run(self._change(self._client.remove, endpoint, mode)).result()

    async def _change(self, change: Callable[..., None], *given: str) -> None:
        change(*given)

    def close(self) -> None:
        """Cancel all requests and end the thread. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            unfinished = list(self._under_way)
        for future in unfinished:
            future.cancel()
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*tasks, return_exceptions=True)  # they were cancelled
        await self._client.close()

    def _run(self, coroutine: Coroutine[Any, Any, _Value]) -> Future[_Value]:
        with self._lock:
            if self._closed:
                coroutine.close()
                raise ValueError("this client is closed; make a new one")
            future = BackgroundFuture(asyncio.run_coroutine_threadsafe(coroutine, self._loop))
            self._under_way.add(future)
        future.add_done_callback(self._forget)
        return future

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._under_way.discard(future)
