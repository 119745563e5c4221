"""One row for each weights version, for plots over the trainer's steps: what happened while the version served.

A row is the difference between two readings of the meter's totals since the start, so it costs a step nothing. A
version serves from the report of its swap until the report of the next swap. The bounds may be off by one step.
"""

import logging
from collections import deque
from dataclasses import dataclass, replace

from rollout.metrics.definitions import VERSION_METRICS, Served

log = logging.getLogger(__name__)

#: Rows that wait for a report at most; older ones are dropped.
MOST_ROWS = 256


@dataclass(frozen=True, slots=True)
class VersionRow:
    """One version's row: the values of `VERSION_METRICS` that had a sample."""

    version: int
    metrics: dict[str, float]


class ByVersion:
    """The rows of versions that serve no more, and the beginning of the one that serves."""

    def __init__(self, version: int, begin: Served) -> None:
        self._version, self._begin, self._pause_s = version, begin, 0.0
        self._ended: deque[VersionRow] = deque(maxlen=MOST_ROWS)
        self._dropped = 0  # since the last `take`

    def swapped(self, version: int, now: Served, pause_s: float) -> None:
        """A swap that held the compute stream for `pause_s` brought another version."""
        self._dropped += len(self._ended) == MOST_ROWS
        self._ended.append(self._row(now))
        self._version, self._begin, self._pause_s = version, now, pause_s

    def take(self, now: Served | None = None) -> tuple[VersionRow, ...]:
        """The rows since the last call, oldest first. `now` adds a row for the version that serves."""
        if self._dropped:
            log.warning("rows of %d weights versions were dropped: more than %d in a report", self._dropped, MOST_ROWS)
            self._dropped = 0
        rows = (*self._ended, *([] if now is None else [self._row(now)]))
        self._ended.clear()
        return rows

    def _row(self, now: Served) -> VersionRow:
        served = replace(now - self._begin, swap_pause_s=self._pause_s)
        values = ((metric.name, metric.read(served)) for metric in VERSION_METRICS if metric.read is not None)
        return VersionRow(self._version, {name: value for name, value in values if value is not None})
