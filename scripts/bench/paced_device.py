"""A device whose steps take a given time and compute nothing, for measurements of the host.

For the host it behaves like a GPU: a launch returns at once, and a wait for an event sleeps, without Python's lock,
until the work would be done. It has no threads. Copies happen when they are enqueued; this is not visible, because a
slot is not used again before its step is committed.
"""

import time
from collections.abc import Callable
from typing import Any

from rollout.engine.device.streams import CpuDevice
from rollout.engine.step.execute import Executor
from rollout.engine.step.slot import Slot
from rollout.engine.upload import StepInput


class PacedEvent:
    """A time of a stream, `time.perf_counter()` seconds; it may be in the future."""

    time_s = 0.0

    def query(self) -> bool:
        """True once the time is reached."""
        return time.perf_counter() >= self.time_s

    def synchronize(self) -> None:
        """Sleep until the time is reached."""
        if (left_s := self.time_s - time.perf_counter()) > 0:
            time.sleep(left_s)


class PacedStream:
    """Tracks the time at which its work would be done."""

    def __init__(self) -> None:
        self._free_s = 0.0

    def run(self, work: Callable[[], object]) -> None:
        """Do `work` now. It takes no time of the stream unless it calls `busy`."""
        work()

    def busy(self, seconds: float) -> None:
        """Add this time of work to the stream."""
        self._free_s = max(self._free_s, time.perf_counter()) + seconds

    def record(self, event: PacedEvent) -> None:
        """Set `event` to the end of all work so far."""
        event.time_s = max(self._free_s, time.perf_counter())

    def wait(self, event: PacedEvent) -> None:
        """Later work begins after `event`."""
        self._free_s = max(self._free_s, event.time_s)

    def check(self) -> None:
        """No-op: work runs in its caller, which sees its errors."""

    def close(self) -> None:
        """No-op: there is no thread to end."""


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
        """Take the time of a step, and sample token 7 for every row."""
        slot.output[0] = 7
        self.compute.busy(self.step_s)  # type: ignore[attr-defined]
