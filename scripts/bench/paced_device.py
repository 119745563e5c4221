"""A device whose steps take a given time and compute nothing, for measuring what the host adds.

It behaves to the host as a GPU does: what is enqueued returns at once, and waiting for an event sleeps without Python's
lock until the moment at which the work would have been done. There are no threads. Copies happen when they are
enqueued; a slot is not used again before its step is committed, so nobody sees that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rollout.engine.device.streams import CpuDevice
from rollout.engine.step.execute import Executor
from rollout.engine.step.slot import Slot
from rollout.engine.step.upload import StepInput


class PacedEvent:
    """A moment of a stream, `time.perf_counter()` seconds; it may lie ahead."""

    time_s = 0.0

    def query(self) -> bool:
        """True once the moment has come."""
        return time.perf_counter() >= self.time_s

    def synchronize(self) -> None:
        """Sleep until the moment has come."""
        if (left_s := self.time_s - time.perf_counter()) > 0:
            time.sleep(left_s)


class PacedStream:
    """Keeps account of when its work would be done."""

    def __init__(self) -> None:
        self._free_s = 0.0

    def run(self, work: Callable[[], object]) -> None:
        """Do `work` now; it takes no time of the stream, unless it says so with `busy`."""
        work()

    def busy(self, seconds: float) -> None:
        """The stream works for so long."""
        self._free_s = max(self._free_s, time.perf_counter()) + seconds

    def record(self, event: PacedEvent) -> None:
        """`event` is when all the work so far is done."""
        event.time_s = max(self._free_s, time.perf_counter())

    def wait(self, event: PacedEvent) -> None:
        """Later work begins when `event` has come."""
        self._free_s = max(self._free_s, event.time_s)

    def check(self) -> None:
        """Nothing can have failed: work runs in its caller."""

    def close(self) -> None:
        """There is no thread to end."""


class PacedDevice(CpuDevice):
    """Paced streams in the CPU's memory."""

    def stream(self, name: str) -> Any:
        """A new stream."""
        return PacedStream()

    def event(self) -> Any:
        """A new event."""
        return PacedEvent()


class PacedExecutor(Executor):
    """An executor whose steps take `step_s` seconds of the device each and sample token 7."""

    step_s = 0.0

    def run(self, step: StepInput, slot: Slot) -> None:
        """Take the time, and sample token 7 for every row."""
        slot.output[0] = 7
        self.compute.busy(self.step_s)  # type: ignore[attr-defined]
