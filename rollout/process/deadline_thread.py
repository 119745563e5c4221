"""Calls with a deadline, in a thread that can be abandoned.

Python cannot stop a thread. A call that misses its deadline keeps its thread until its return; the next call gets a new
thread. The threads are daemons: a stuck one does not delay the end of the process.
"""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class DeadlineCall(Generic[Result]):
    """Work for a thread."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self.ended = False
        self.work = work
        self._answers: SimpleQueue[tuple[Result | None, BaseException | None]] = SimpleQueue()

    def run(self) -> None:
        """Do the work. Called by the thread."""
        try:
            self._answers.put((self.work(), None))
        except BaseException as error:
            self._answers.put((None, error))
        finally:
            self.ended = True

    def result(self, timeout_s: float) -> Result:
        """The result of the work; raises its error, or `Empty` after `timeout_s` seconds."""
        result, error = self._answers.get(timeout=timeout_s)
        if error is not None:
            raise error
        return result  # type: ignore[return-value]


class DeadlineThread:
    """Does one call after the other, for one caller."""

    def __init__(self, name: str, make_call: Callable[[Callable[[], Any]], DeadlineCall] = DeadlineCall) -> None:
        self._name = name
        self._make_call = make_call
        self._late: tuple[DeadlineCall, ...] = ()  # calls that missed their deadline
        self._calls: SimpleQueue[DeadlineCall | None] | None = None  # calls for the present thread

    @property
    def left_behind(self) -> int:
        """Number of calls that missed their deadline and still run. May be read from any thread."""
        return sum(not call.ended for call in self._late)

    def start(self, work: Callable[[], Result]) -> DeadlineCall[Result]:
        """Start `work`. Call `wait` for it before the next `start`."""
        if self._calls is None:
            self._calls = SimpleQueue()
            threading.Thread(target=_serve, args=(self._calls,), name=self._name, daemon=True).start()
        call = self._make_call(work)
        self._calls.put(call)
        return call

    def wait(self, call: DeadlineCall[Result], timeout_s: float) -> Result:
        """The result of the work; raises its error, or TimeoutError after `timeout_s` seconds.

        After a TimeoutError the work continues on its abandoned thread.
        """
        try:
            return call.result(max(timeout_s, 0.0))
        except Empty:
            self._late = (*(late for late in self._late if not late.ended), call)
            self.close()
            raise TimeoutError(f"not done within {timeout_s:g} s") from None

    def call(self, work: Callable[[], Result], timeout_s: float) -> Result:
        """Start `work` and wait for it."""
        return self.wait(self.start(work), timeout_s)

    def close(self) -> None:
        """End the thread after its present call. A later call gets a new one."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None


def _serve(calls: SimpleQueue[DeadlineCall | None]) -> None:
    while (call := calls.get()) is not None:
        call.run()
