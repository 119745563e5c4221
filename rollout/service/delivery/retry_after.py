"""`retry_after_s` of an `overloaded` reply: the time in which half of the waiting requests end, at the recent rate.

So refused clients return before the queue is empty, and few of them in vain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

_RECENT = 16_384  # requests; rollouts end in waves, and one wave says nothing about the time between waves
_RECENT_S = 60.0
_UNKNOWN_S = 1.0  # if no request ended lately
_LEAST_S, _MOST_S = 0.05, 30.0


class RetryEstimate:
    """Counts finished requests. Times are those of `clock`, seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ended_s: deque[float] = deque(maxlen=_RECENT)

    def ended(self, left: int) -> None:
        """A request ended; `left` requests remain."""
        self._ended_s.append(self._clock())
        if not left:
            self._ended_s.clear()  # a rate across a pause would be wrong

    def retry_after_s(self, waiting: int) -> float:
        """Seconds after which to retry while `waiting` requests wait: 0.05 to 30."""
        now_s = self._clock()
        while self._ended_s and self._ended_s[0] < now_s - _RECENT_S:
            self._ended_s.popleft()
        if not self._ended_s:
            return _UNKNOWN_S
        each_s = (now_s - self._ended_s[0]) / len(self._ended_s)
        return min(max(waiting / 2 * each_s, _LEAST_S), _MOST_S)
