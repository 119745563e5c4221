"""What the compute stream's idle time was: nothing to run, a swap of the weights, a prefill to prepare, or a bubble.

    ... step | swap | no work | preparing | step ...

An idle stretch lies between two steps. Of it

    swap      is what a swap of the weights held the stream for
    no_work   is what passed while the engine had nothing to launch: no request, or paused
    prefill   is the rest, if the step that ends the stretch is a prefill: packing it and its launches
    bubble    is the rest before a decode step: the host was late

The loop tells of these in the order in which it learns of them, which for a swap may be after the step that followed.
Times are seconds of the meter's clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields

#: (begin, end), seconds.
Span = tuple[float, float]


@dataclass(slots=True)
class IdleTimes:
    """Idle seconds by cause."""

    no_work: float = 0.0
    prefill: float = 0.0
    swap: float = 0.0
    bubble: float = 0.0


CAUSES = tuple(field.name for field in fields(IdleTimes))


class IdleCauses:
    """Splits the time between steps; `times` only grows."""

    def __init__(self, start_s: float) -> None:
        self.times = IdleTimes()
        self._told_until_s = start_s  # up to here all is accounted for
        self._no_work_since_s: float | None = start_s
        self._swap: Span | None = None
        self._last_rest: tuple[str, Span] | None = None  # what a swap that is told of late may take its part of

    def no_work(self, since_s: float) -> None:
        """There is nothing to launch since `since_s`; may be told again and again, the first time counts."""
        if self._no_work_since_s is None:
            self._no_work_since_s = since_s

    def swap(self, start_s: float, end_s: float) -> None:
        """A swap held the compute stream."""
        self._swap = (start_s, end_s)
        if self._last_rest is not None:
            cause, rest = self._last_rest
            taken_s = _overlap(rest, self._swap)
            setattr(self.times, cause, getattr(self.times, cause) - taken_s)
            self.times.swap += taken_s

    def step(self, kind: str, planned_s: float, start_s: float, end_s: float) -> None:
        """A step ran from `start_s` to `end_s`; the host began to plan it at `planned_s`."""
        idle = (self._told_until_s, start_s)
        self._last_rest = None
        if start_s > self._told_until_s:
            self._split(kind, planned_s, idle)
        self._told_until_s = max(self._told_until_s, end_s)
        if self._no_work_since_s is not None and planned_s >= self._no_work_since_s:
            self._no_work_since_s = None

    def settle(self, now_s: float) -> None:
        """Account for a stretch without work that is still going on, up to `now_s`."""
        if self._no_work_since_s is not None and now_s > self._told_until_s:
            self.times.no_work += _overlap((self._told_until_s, now_s), (self._no_work_since_s, now_s))
            self._told_until_s = now_s

    def _split(self, kind: str, planned_s: float, idle: Span) -> None:
        rest_s = idle[1] - idle[0]
        swapped = _overlap(idle, self._swap) if self._swap is not None else 0.0
        waited = 0.0
        if self._no_work_since_s is not None:
            without = (self._no_work_since_s, max(self._no_work_since_s, planned_s))
            waited = _overlap(idle, without)
            if self._swap is not None:  # the swap comes first
                waited -= _overlap((max(idle[0], without[0]), min(idle[1], without[1])), self._swap)
        self.times.swap += swapped
        self.times.no_work += waited
        rest_s -= swapped + waited
        cause = "prefill" if kind == "prefill" else "bubble"
        setattr(self.times, cause, getattr(self.times, cause) + rest_s)
        if not swapped and not waited:
            self._last_rest = (cause, idle)


class IdleWindow:
    """Idle seconds by cause, read now and then, as shares of about the last `SPAN_S` seconds."""

    SPAN_S = 10.0
    EVERY_S = 0.5  # between two readings that are kept

    def __init__(self, start_s: float) -> None:
        self._kept: deque[tuple[float, dict[str, float]]] = deque([(start_s, dict.fromkeys(CAUSES, 0.0))])

    def shares(self, now_s: float, idle_s: dict[str, float]) -> dict[str, float]:
        """Percent of the window by cause; `idle_s` are seconds since the start, as of `now_s`."""
        kept = self._kept
        if now_s - kept[-1][0] >= self.EVERY_S:
            kept.append((now_s, idle_s))
        while len(kept) > 1 and kept[1][0] <= now_s - self.SPAN_S:
            kept.popleft()
        since_s, before_s = kept[0]
        wall_s = now_s - since_s
        if wall_s <= 0:
            return dict.fromkeys(CAUSES, 0.0)
        return {cause: min(100.0, max(0.0, 100 * (idle_s[cause] - before_s[cause]) / wall_s)) for cause in CAUSES}


def _overlap(one: Span, other: Span) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
