"""Counts of token numbers by size, in constant memory: half octaves, 0, 1, 2, 3, 4, 6, 8, 12, 16, ... tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

#: Largest number of each bucket, tokens; a bucket begins after the one before. What is larger counts in the last one.
BOUNDS = (0, 1, *(bound for octave in range(1, 24) for bound in (1 << octave, 3 << (octave - 1))))


@dataclass(frozen=True, slots=True)
class Histogram:
    """A reading, an entry of `BOUNDS` each: counts of the interval, and counts and sum since the start."""

    counts: tuple[int, ...]
    run_counts: tuple[int, ...]
    run_sum: float

    def whole_run(self) -> Histogram:
        """The same reading, with the whole run for the interval."""
        return Histogram(self.run_counts, self.run_counts, self.run_sum)

    def filled(self) -> Iterator[tuple[int, int, int]]:
        """(smallest, largest, count) of the buckets that the interval has something in, smallest first."""
        for place, count in enumerate(self.counts):
            if count:
                yield (BOUNDS[place - 1] + 1 if place else 0), BOUNDS[place], count

    def edges(self) -> tuple[list[int], list[float]]:
        """Counts of the interval and the edges around them, one more: from the first to the last that is not empty."""
        filled = [place for place, count in enumerate(self.counts) if count]
        if not filled:
            return [], []
        first, last = filled[0], filled[-1]
        low = BOUNDS[first - 1] + 0.5 if first else -0.5
        return list(self.counts[first : last + 1]), [low, *(bound + 0.5 for bound in BOUNDS[first : last + 1])]


class Counts:
    """Counts since the start, read once an interval."""

    def __init__(self) -> None:
        self._counts = [0] * len(BOUNDS)
        self._read = (0,) * len(BOUNDS)
        self._sum = 0

    def add(self, value: int) -> None:
        """Count one."""
        self._counts[min(bisect_left(BOUNDS, value), len(BOUNDS) - 1)] += 1
        self._sum += value

    def read(self) -> Histogram:
        """What there is; ends an interval."""
        now, before = tuple(self._counts), self._read
        self._read = now
        return Histogram(tuple(new - old for new, old in zip(now, before, strict=True)), now, self._sum)
