"""The clock of device times, with events that behave as CUDA's: float32 milliseconds, reached after the call."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from rollout.engine.device.streams import _CudaClock

_STEP_S = 2.1e-3
_LATE_S = 5e-6  # from the record of an event to its being reached


class Machine:
    """A host's clock and a device's, which are the same here, and how often the host has waited."""

    def __init__(self) -> None:
        self.now_s = 1e3
        self.waits = 0
        self.Event, self.Stream = functools.partial(Event, self), object  # as torch.cuda names them

    def clock(self) -> _CudaClock:
        return _CudaClock(self, lambda: self.now_s)


class Event:
    def __init__(self, machine: Machine, enable_timing: bool) -> None:
        assert enable_timing
        self.machine = machine

    def record(self, stream: object) -> None:
        self.at_s = self.machine.now_s + _LATE_S

    def query(self) -> bool:
        return self.machine.now_s >= self.at_s

    def synchronize(self) -> None:
        self.machine.waits += 1
        self.machine.now_s = max(self.machine.now_s, self.at_s)

    def elapsed_time(self, other: Event) -> float:
        return float(np.float32((other.at_s - self.at_s) * 1e3))


@pytest.fixture
def machine() -> Machine:
    return Machine()


def step(machine: Machine, clock: _CudaClock) -> tuple[float, float]:
    """How far off the begin of a step is that the device has just made, and its length."""
    start, end = (machine.Event(enable_timing=True) for _ in range(2))
    start.record(machine.Stream())
    machine.now_s += _STEP_S
    end.record(machine.Stream())
    machine.now_s += _LATE_S
    begun_s, ended_s = clock.time_s(start), clock.time_s(end)
    return begun_s - (machine.now_s - _STEP_S), ended_s - begun_s - _STEP_S


def test_hours_of_steps_are_timed_to_microseconds_and_the_host_never_waits(machine: Machine) -> None:
    clock = machine.clock()
    assert machine.waits == 1
    worst = np.zeros(2)
    for _ in range(3 * 3600):
        machine.now_s += 1 - _STEP_S  # a question a second is enough for the clock
        worst = np.maximum(worst, np.abs(step(machine, clock)))
    assert machine.waits == 1
    assert worst[1] < 3e-6, "lengths"
    assert worst[0] < 1e-3, "what a thousand renewals add up to"


@pytest.mark.parametrize("idle_s", [5.0, 30.0, 3600.0, 86_400.0, 30 * 86_400.0])
@pytest.mark.parametrize("asked_before", [False, True], ids=["", "a newer origin was asked for before"])
def test_the_first_step_after_a_long_time_without_work_is_timed_as_well(
    machine: Machine, idle_s: float, asked_before: bool
) -> None:
    clock = machine.clock()
    if asked_before:
        machine.now_s += 11.0
        step(machine, clock)
    machine.now_s += idle_s
    for _ in range(3):
        off_s, longer_s = step(machine, clock)
        assert abs(longer_s) < 1e-5 and abs(off_s) < 1e-4
