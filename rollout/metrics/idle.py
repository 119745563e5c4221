"""Why the compute stream was idle: a cause for every stretch between two steps.

    ... step | swap | no work | preparing | step ...

An idle stretch is split in this order:

    swap      a swap of the weights held the stream
    offload   a move of KV to or from host memory held it, and no swap did
    no_work   the engine had nothing to launch: there was no request, or it was paused
    prefill   the rest, if a prefill step ends the stretch: the host packed and launched it
    bubble    the rest, if a decode step ends the stretch: the host was late

The loop reports a swap or an offload when it learns of it. That may be after the step that followed, so a late report
takes its part from the stretch that was counted last. Times are seconds on the meter's clock.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from rollout.metrics.step_timing import Interval


@dataclass(frozen=True, slots=True)
class IdleCause:
    """One cause of idleness."""

    metric: str  # last part of its metrics' names
    meaning: str  # completes "share of the time in which ..."


#: The causes by the names that the code and the `status` reply use.
IDLE_CAUSES: Mapping[str, IdleCause] = {
    "no_work": IdleCause("no_work", "there was nothing to run"),
    "bubble": IdleCause("host", "a decode step was due and the host was late"),
    "prefill": IdleCause("prefill", "the host prepared and launched a prefill step"),
    "swap": IdleCause("swap", "a swap of the weights held the compute stream"),
    "offload": IdleCause("offload", "KV on its way to or from the host held all launches"),
}


class IdleCauses:
    """Splits the time between steps by cause; `seconds` only grows, up to corrections by late reports."""

    def __init__(self, start_s: float) -> None:
        #: Idle seconds since `start_s` by cause.
        self.seconds = dict.fromkeys(IDLE_CAUSES, 0.0)
        self._counted_until_s = start_s
        self._no_work_since_s: float | None = start_s
        self._holds: dict[str, Interval] = {}  # the newest swap and the newest offload
        self._last_rest: tuple[str, Interval] | None = None  # the stretch from which a late report may take its part

    def no_work(self, since_s: float) -> None:
        """There is nothing to launch since `since_s`. Repeated calls are ignored until a step ends the stretch."""
        if self._no_work_since_s is None:
            self._no_work_since_s = since_s

    def stream_held(self, cause: Literal["swap", "offload"], start_s: float, end_s: float) -> None:
        self._holds[cause] = held = (start_s, end_s)
        if self._last_rest is not None:
            rest_cause, rest = self._last_rest
            taken_s = _overlap(rest, held)
            self.seconds[rest_cause] -= taken_s
            self.seconds[cause] += taken_s

    def step(self, kind: str, planned_s: float, start_s: float, end_s: float) -> None:
        """A step ran from `start_s` to `end_s`; the host began to plan it at `planned_s`."""
        idle = (self._counted_until_s, start_s)
        self._last_rest = None
        if start_s > self._counted_until_s:
            self._split("prefill" if kind == "prefill" else "bubble", planned_s, idle)
        self._counted_until_s = max(self._counted_until_s, end_s)
        if self._no_work_since_s is not None and planned_s >= self._no_work_since_s:
            self._no_work_since_s = None

    def count_until(self, now_s: float) -> None:
        """Count a stretch without work that still lasts, up to `now_s`."""
        if self._no_work_since_s is None or now_s <= self._counted_until_s:
            return
        idle = (self._counted_until_s, now_s)
        before, self._last_rest = self._last_rest, None
        self._split("bubble", now_s, idle)
        self._counted_until_s = now_s
        if before is not None and before[0] == "no_work":  # it is one stretch, however often it is read
            idle = (before[1][0], now_s)
        self._last_rest = ("no_work", (max(idle[0], self._no_work_since_s), now_s))

    def _split(self, rest_cause: str, planned_s: float, idle: Interval) -> None:
        rest_s = idle[1] - idle[0]
        waiting: Interval | None = None
        if self._no_work_since_s is not None:
            waiting = max(idle[0], self._no_work_since_s), min(idle[1], max(self._no_work_since_s, planned_s))
        no_work_s = 0.0 if waiting is None else max(0.0, waiting[1] - waiting[0])
        held_s = 0.0
        for cause, held in self._disjoint_holds():
            taken_s = _overlap(idle, held)
            self.seconds[cause] += taken_s
            held_s += taken_s
            if waiting is not None:
                no_work_s -= _overlap(waiting, held)
        self.seconds["no_work"] += no_work_s
        self.seconds[rest_cause] += rest_s - held_s - no_work_s
        if not held_s and not no_work_s:
            self._last_rest = (rest_cause, idle)

    def _disjoint_holds(self) -> Iterator[tuple[str, Interval]]:
        """The swap, and the parts of the offload outside it; some may be empty."""
        swap = self._holds.get("swap")
        for cause, (start_s, end_s) in self._holds.items():
            if swap is None or cause == "swap":
                yield cause, (start_s, end_s)
            else:
                yield cause, (start_s, min(end_s, swap[0]))
                yield cause, (max(start_s, swap[1]), end_s)


#: (moment, idle seconds by cause up to it).
_Reading = tuple[float, dict[str, float]]


class IdleWindow:
    """Idle shares of the last `SPAN_S` seconds, from readings of `IdleCauses.seconds`."""

    SPAN_S = 10.0
    EVERY_S = 0.5  # a reading is kept this often

    def __init__(self, start_s: float) -> None:
        self._kept: deque[_Reading] = deque([(start_s, dict.fromkeys(IDLE_CAUSES, 0.0))])

    def shares(self, now_s: float, idle_s: dict[str, float]) -> dict[str, float]:
        """Percent of the window by cause; `idle_s` are the seconds since the start at `now_s`."""
        kept = self._kept
        if now_s - kept[-1][0] >= self.EVERY_S:
            kept.append((now_s, idle_s))
        while len(kept) > 1 and kept[1][0] <= now_s - self.SPAN_S:
            kept.popleft()
        begin_s = max(kept[0][0], now_s - self.SPAN_S)
        wall_s = now_s - begin_s
        if wall_s <= 0:
            return dict.fromkeys(IDLE_CAUSES, 0.0)
        before_s = _interpolated(kept[0], kept[1] if len(kept) > 1 else (now_s, idle_s), begin_s)
        return {cause: min(100.0, max(0.0, 100 * (idle_s[cause] - before_s[cause]) / wall_s)) for cause in IDLE_CAUSES}


def _interpolated(one: _Reading, other: _Reading, at_s: float) -> dict[str, float]:
    """The seconds at a moment between two readings, as if they had grown evenly."""
    share = (at_s - one[0]) / (other[0] - one[0]) if other[0] > one[0] else 0.0
    return {cause: one[1][cause] + share * (other[1][cause] - one[1][cause]) for cause in IDLE_CAUSES}


def _overlap(one: Interval, other: Interval) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
