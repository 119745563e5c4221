"""Devices whose streams are late, to expose a missing event."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch

from rollout.engine.device.streams import CpuDevice, CpuEvent, CpuStream, _Ticket


class LateStream(CpuStream):
    """Sleeps before each piece of work, for a random time or always the same."""

    def __init__(
        self, name: str, delay_s: Callable[[], float], around: Callable[[Callable], None] = lambda work: work()
    ) -> None:
        self._delay_s, self._around = delay_s, around
        super().__init__(name)

    def run(self, work: Callable[[], object]) -> None:
        def late() -> None:
            time.sleep(self._delay_s())
            self._around(work)

        super().run(late)


class LateDevice(CpuDevice):
    """`delays` maps a stream's name to its delay; those not named are on time. `around` runs the work of a stream."""

    def __init__(
        self, delays: dict[str, Callable[[], float]], around: dict[str, Callable[[Callable], None]] | None = None
    ) -> None:
        self._delays, self._around = delays, around or {}

    def stream(self, name: str) -> CpuStream:  # type: ignore[override]
        return LateStream(name, self._delays.get(name, lambda: 0.0), self._around.get(name, lambda work: work()))


def random_delays(seed: int, most_s: float = 0.002) -> LateDevice:
    rng = random.Random(seed)
    return LateDevice({name: lambda: rng.random() * most_s for name in ("h2d", "compute", "d2h")})


BROKEN_BUS = "the bus is broken"


class BrokenBus(LateDevice):
    """One stream fails after so many pieces of work; with `enqueued` when work is enqueued, else when it runs."""

    def __init__(self, broken: str, after: int = 0, enqueued: bool = False) -> None:
        super().__init__({} if enqueued else {broken: self.take})
        self.left = after
        self._refusing = broken if enqueued else ""

    def take(self) -> float:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError(BROKEN_BUS)
        return 0.0

    def stream(self, name: str) -> CpuStream:  # type: ignore[override]
        return _RefusingStream(name, self.take) if name == self._refusing else super().stream(name)


class _RefusingStream(CpuStream):
    def __init__(self, name: str, take: Callable[[], float]) -> None:
        self._take = take
        super().__init__(name)

    def run(self, work: Callable[[], object]) -> None:
        self._take()
        super().run(work)


class InlineStream:
    """Runs everything at once: nothing is ever late, and runs are alike to the tick."""

    def run(self, work: Callable[[], object]) -> None:
        with torch.inference_mode():
            work()

    def record(self, event: CpuEvent) -> None:
        event.ticket = _Ticket()
        event.ticket.fire()

    def wait(self, event: CpuEvent) -> None:
        assert event.query()

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


class InlineDevice(CpuDevice):
    """A device without threads."""

    def stream(self, name: str) -> InlineStream:  # type: ignore[override]
        return InlineStream()


class DeafStream(CpuStream):
    """A stream that ignores events: what happens when a wait is forgotten."""

    def __init__(self, name: str) -> None:
        self.enqueued = self.ran = 0
        super().__init__(name)

    def wait(self, event: CpuEvent) -> None:
        pass

    def run(self, work: Callable[[], object]) -> None:
        def counted() -> None:
            work()
            self.ran += 1

        self.enqueued += 1
        super().run(counted)


class OvertakenStream(CpuStream):
    """Its work waits, for some time, until the deaf stream has run what was enqueued there next."""

    def __init__(self, name: str, deaf: Callable[[], DeafStream]) -> None:
        self._deaf = deaf
        super().__init__(name)

    def run(self, work: Callable[[], object]) -> None:
        deaf = self._deaf()
        before, until_s = deaf.enqueued, time.perf_counter() + 0.2

        def late() -> None:
            while deaf.ran <= before and time.perf_counter() < until_s:
                time.sleep(0.0005)
            work()

        super().run(late)


class DeafDevice(CpuDevice):
    """The stream `deaf` forgets to wait, and overtakes the stream `late`."""

    def __init__(self, deaf: str, late: str) -> None:
        self._names = deaf, late

    def stream(self, name: str) -> CpuStream:  # type: ignore[override]
        deaf, late = self._names
        if name == deaf:
            self._deaf = DeafStream(name)
            return self._deaf
        return OvertakenStream(name, lambda: self._deaf) if name == late else super().stream(name)


class SteppedStream(InlineStream):
    """An inline stream on the clock of a `SteppedDevice`."""

    def __init__(self, device: SteppedDevice, seconds: float) -> None:
        self._device = device
        self._seconds = seconds

    def run(self, work: Callable[[], object]) -> None:
        super().run(work)
        self._device.now_s += self._seconds

    def record(self, event: CpuEvent) -> None:
        super().record(event)
        event.ticket.time_s = self._device.now_s


class SteppedDevice(CpuDevice):
    """A device without threads, on a clock of its own: each piece of work on the compute stream takes one second."""

    now_s = 0.0

    def stream(self, name: str) -> SteppedStream:  # type: ignore[override]
        return SteppedStream(self, 1.0 if name == "compute" else 0.0)
