"""What the compute stream's idle time was: nothing to run, a swap, an offload, a prefill to prepare, or a bubble.

    ... step | swap | no work | preparing | step ...

An idle stretch lies between two steps. Of it

    swap      is what a swap of the weights held the stream for
    offload   is what moving KV to and from host memory held it for, unless a swap did meanwhile
    no_work   is what passed while the engine had nothing to launch: no request, or paused
    prefill   is the rest, if the step that ends the stretch is a prefill: packing it and its launches
    bubble    is the rest before a decode step: the host was late

The loop tells of these in the order in which it learns of them, which for a swap or an offload may be after the step
that followed.
Times are seconds of the meter's clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

#: (begin, end), seconds.
Span = tuple[float, float]
#: (moment, idle seconds by cause up to it).
Reading = tuple[float, dict[str, float]]


@dataclass(slots=True)
class IdleTimes:
    """Idle seconds by cause."""

    no_work: float = 0.0
    prefill: float = 0.0
    swap: float = 0.0
    offload: float = 0.0
    bubble: float = 0.0


CAUSES = tuple(field.name for field in fields(IdleTimes))


class IdleCauses:
    """Splits the time between steps; `times` only grows."""

    def __init__(self, start_s: float) -> None:
        self.times = IdleTimes()
        self._told_until_s = start_s  # up to here all is accounted for
        self._no_work_since_s: float | None = start_s
        self._holds: dict[str, Span] = {}  # the newest of each cause
        self._last_rest: tuple[str, Span] | None = None  # what a hold that is told of late may take its part of

    def no_work(self, since_s: float) -> None:
        """There is nothing to launch since `since_s`; may be told again and again, the first time counts."""
        if self._no_work_since_s is None:
            self._no_work_since_s = since_s

    def hold(self, cause: Literal["swap", "offload"], start_s: float, end_s: float) -> None:
        """A swap or an offload held the compute stream."""
        self._holds[cause] = span = (start_s, end_s)
        if self._last_rest is not None:
            rest_cause, rest = self._last_rest
            taken_s = _overlap(rest, span)
            self._add(rest_cause, -taken_s)
            self._add(cause, taken_s)

    def step(self, kind: str, planned_s: float, start_s: float, end_s: float) -> None:
        """A step ran from `start_s` to `end_s`; the host began to plan it at `planned_s`."""
        idle = (self._told_until_s, start_s)
        self._last_rest = None
        if start_s > self._told_until_s:
            self._split("prefill" if kind == "prefill" else "bubble", planned_s, idle)
        self._told_until_s = max(self._told_until_s, end_s)
        if self._no_work_since_s is not None and planned_s >= self._no_work_since_s:
            self._no_work_since_s = None

    def settle(self, now_s: float) -> None:
        """Account for a stretch without work that is still going on, up to `now_s`."""
        if self._no_work_since_s is None or now_s <= self._told_until_s:
            return
        idle = (self._told_until_s, now_s)
        before, self._last_rest = self._last_rest, None
        self._split("bubble", now_s, idle)
        self._told_until_s = now_s
        if before is not None and before[0] == "no_work":  # one stretch, however often it is looked at
            idle = (before[1][0], now_s)
        self._last_rest = ("no_work", (max(idle[0], self._no_work_since_s), now_s))

    def _split(self, cause: str, planned_s: float, idle: Span) -> None:
        rest_s = idle[1] - idle[0]
        waiting: Span | None = None
        if self._no_work_since_s is not None:
            waiting = max(idle[0], self._no_work_since_s), min(idle[1], max(self._no_work_since_s, planned_s))
        waited_s = 0.0 if waiting is None else max(0.0, waiting[1] - waiting[0])
        held_s = 0.0
        for holder, span in self._disjoint_holds():
            taken_s = _overlap(idle, span)
            self._add(holder, taken_s)
            held_s += taken_s
            if waiting is not None:  # what holds the stream comes first
                waited_s -= _overlap(waiting, span)
        self.times.no_work += waited_s
        rest_s -= held_s + waited_s
        self._add(cause, rest_s)
        if not held_s and not waited_s:
            self._last_rest = (cause, idle)

    def _disjoint_holds(self) -> Iterator[tuple[str, Span]]:
        """The holds, an offload without what a swap held meanwhile; some may be empty."""
        swap = self._holds.get("swap")
        for holder, (start_s, end_s) in self._holds.items():
            if swap is None or holder == "swap":
                yield holder, (start_s, end_s)
            else:
                yield holder, (start_s, min(end_s, swap[0]))
                yield holder, (max(start_s, swap[1]), end_s)

    def _add(self, cause: str, seconds: float) -> None:
        setattr(self.times, cause, getattr(self.times, cause) + seconds)


class IdleWindow:
    """Idle seconds by cause, read now and then, as shares of the last `SPAN_S` seconds."""

    SPAN_S = 10.0
    EVERY_S = 0.5  # between two readings that are kept

    def __init__(self, start_s: float) -> None:
        self._kept: deque[Reading] = deque([(start_s, dict.fromkeys(CAUSES, 0.0))])

    def shares(self, now_s: float, idle_s: dict[str, float]) -> dict[str, float]:
        """Percent of the window by cause; `idle_s` are seconds since the start, as of `now_s`."""
        kept = self._kept
        if now_s - kept[-1][0] >= self.EVERY_S:
            kept.append((now_s, idle_s))
        while len(kept) > 1 and kept[1][0] <= now_s - self.SPAN_S:
            kept.popleft()
        begin_s = max(kept[0][0], now_s - self.SPAN_S)
        wall_s = now_s - begin_s
        if wall_s <= 0:
            return dict.fromkeys(CAUSES, 0.0)
        before_s = _between(kept[0], kept[1] if len(kept) > 1 else (now_s, idle_s), begin_s)
        return {cause: min(100.0, max(0.0, 100 * (idle_s[cause] - before_s[cause]) / wall_s)) for cause in CAUSES}


def _between(one: Reading, other: Reading, at_s: float) -> dict[str, float]:
    """What was read at a moment between two readings, about: as if it had grown evenly."""
    share = (at_s - one[0]) / (other[0] - one[0]) if other[0] > one[0] else 0.0
    return {cause: one[1][cause] + share * (other[1][cause] - one[1][cause]) for cause in CAUSES}


def _overlap(one: Span, other: Span) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
