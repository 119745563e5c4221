"""Calls that may never return, in a thread that can be left behind.

A thread cannot be stopped. So a call that takes too long keeps its thread, which ends whenever the call does, and the
next call gets a new one. Threads are daemons: one that is stuck does not hold up the end of the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Call(Generic[Result]):
    """Work that was given to a thread."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self.ended = False
        self._work = work
        self._answers: SimpleQueue[tuple[Result | None, BaseException | None]] = SimpleQueue()

    def run(self) -> None:
        """Do it; on the thread."""
        try:
            self._answers.put((self._work(), None))
        except BaseException as error:
            self._answers.put((None, error))
        finally:
            self.ended = True

    def result(self, timeout_s: float) -> Result:
        """What came of it, or the error that it raised. Raises `Empty` after `timeout_s` seconds."""
        result, error = self._answers.get(timeout=timeout_s)
        if error is not None:
            raise error
        return result  # type: ignore[return-value]


class DeadlineThread:
    """Does one thing after the other; for one caller at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._late: tuple[Call, ...] = ()  # calls that did not end in time
        self._calls: SimpleQueue[Call | None] | None = None  # of the thread of now

    @property
    def left_behind(self) -> int:
        """Calls that did not end in time and go on still, each on a thread of its own. From any thread."""
        return sum(not call.ended for call in self._late)

    def start(self, work: Callable[[], Result]) -> Call[Result]:
        """Have `work` done; `wait` for it before anything else is started."""
        if self._calls is None:
            self._calls = SimpleQueue()
            threading.Thread(target=_serve, args=(self._calls,), name=self._name, daemon=True).start()
        call = Call(work)
        self._calls.put(call)
        return call

    def wait(self, call: Call[Result], timeout_s: float) -> Result:
        """What the work returns or raises; TimeoutError after `timeout_s` seconds, and it goes on by itself."""
        try:
            return call.result(max(timeout_s, 0.0))
        except Empty:
            self._late = (*(late for late in self._late if not late.ended), call)
            self.close()
            raise TimeoutError(f"not done within {timeout_s:g} s") from None

    def call(self, work: Callable[[], Result], timeout_s: float) -> Result:
        """Start it and wait for it."""
        return self.wait(self.start(work), timeout_s)

    def close(self) -> None:
        """Let the thread end once it has nothing left to do. A later call gets another one."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None


def _serve(calls: SimpleQueue[Call | None]) -> None:
    while (call := calls.get()) is not None:
        call.run()
