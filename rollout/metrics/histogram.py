"""Counts of values by size, in constant memory.

Token numbers are counted in half octaves (0, 1, 2, 3, 4, 6, 8, 12, 16, ...), times in three buckets a decade (1 ms,
2.5 ms, 5 ms, 10 ms, ...). A bucket holds the values above the bound before it, up to and including its own bound. The
last bucket also holds all values above its bound.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Buckets:
    """The bounds of a histogram: the largest value of each bucket."""

    bounds: tuple[float, ...]
    whole: bool  # values are whole numbers: a bucket begins one above the bound before it

    def smallest(self, place: int) -> float:
        """The beginning of a bucket: its smallest whole number, or the bound before it."""
        if place == 0:
            return 0
        return self.bounds[place - 1] + 1 if self.whole else self.bounds[place - 1]


TOKENS = Buckets((0, 1, *(bound for octave in range(1, 24) for bound in (1 << octave, 3 << (octave - 1)))), whole=True)
#: 1 ms to 50,000 s.
SECONDS = Buckets(tuple(float(f"{digit}e{power}") for power in range(-3, 5) for digit in (1, 2.5, 5)), whole=False)


@dataclass(frozen=True, slots=True)
class Histogram:
    """One reading: counts of the interval, and counts and sum since the start. A count for each bucket."""

    buckets: Buckets
    counts: tuple[int, ...]
    run_counts: tuple[int, ...]
    run_sum: float

    def whole_run(self) -> Histogram:
        """The same reading with the whole run as its interval."""
        return Histogram(self.buckets, self.run_counts, self.run_counts, self.run_sum)

    def filled(self) -> Iterator[tuple[float, float, int]]:
        """(begin, bound, count) of the buckets that are not empty in the interval, smallest first."""
        for place, count in enumerate(self.counts):
            if count:
                yield self.buckets.smallest(place), self.buckets.bounds[place], count

    def edges(self) -> tuple[list[int], list[float]]:
        """Counts of the interval from the first to the last filled bucket, and their edges (one more)."""
        filled = [place for place, count in enumerate(self.counts) if count]
        if not filled:
            return [], []
        first, last = filled[0], filled[-1]
        bounds, half = self.buckets.bounds, 0.5 if self.buckets.whole else 0.0
        low = bounds[first - 1] + half if first else 0.0 - half
        return list(self.counts[first : last + 1]), [low, *(bound + half for bound in bounds[first : last + 1])]


class HistogramCounts:
    """Counts since the start, read once an interval."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._counts = [0] * len(buckets.bounds)
        self._before = (0,) * len(buckets.bounds)
        self._sum = 0.0

    def add(self, value: float) -> None:
        bounds = self._buckets.bounds
        self._counts[min(bisect_left(bounds, value), len(bounds) - 1)] += 1
        self._sum += value

    def read(self) -> Histogram:
        """The histogram of now; ends an interval."""
        now, before = tuple(self._counts), self._before
        self._before = now
        return Histogram(self._buckets, tuple(n - b for n, b in zip(now, before, strict=True)), now, self._sum)
