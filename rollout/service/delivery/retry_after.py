"""When a client that was refused should come back: an estimate from the queue and from how fast requests end.

It is the time in which half of what waits now is done, as fast as requests ended lately, while there was something to
do. So clients are back before the queue runs dry, and few of them in vain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

_RECENT = 16_384  # requests; rollouts end in waves, and one wave says nothing about the time between two
_RECENT_S = 60.0
_UNKNOWN_S = 1.0  # while nothing has ended lately
_LEAST_S, _MOST_S = 0.05, 30.0


class Patience:
    """Counts requests that end. Times are of `clock`, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ended_s: deque[float] = deque(maxlen=_RECENT)

    def ended(self, left: int) -> None:
        """A request has ended, and made room for another one; `left` are still there."""
        self._ended_s.append(self._clock())
        if not left:
            self._ended_s.clear()  # what comes after a pause says nothing about the pause

    def retry_after_s(self, waiting: int) -> float:
        """Seconds after which to come back, while so many requests wait: from 0.05 to 30."""
        now_s = self._clock()
        while self._ended_s and self._ended_s[0] < now_s - _RECENT_S:
            self._ended_s.popleft()
        if not self._ended_s:
            return _UNKNOWN_S
        each_s = (now_s - self._ended_s[0]) / len(self._ended_s)
        return min(max(waiting / 2 * each_s, _LEAST_S), _MOST_S)
