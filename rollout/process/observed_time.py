"""Time that a thread has seen pass, for threads that look at something again and again."""

from __future__ import annotations

import time


class ObservedTime:
    """Measures from look to look; `period_s` is the usual time between two.

    A process that was stopped itself (SIGSTOP, a laptop asleep) has seen nothing meanwhile, so a look counts two
    periods at the most: what it looks at may not have hung.
    """

    def __init__(self, period_s: float) -> None:
        self._most_s = 2 * period_s
        self._looked_s = time.monotonic()

    def passed_s(self) -> float:
        """The seconds since the last look; of a longer gap, only two periods."""
        now_s = time.monotonic()
        passed_s, self._looked_s = min(now_s - self._looked_s, self._most_s), now_s
        return passed_s
