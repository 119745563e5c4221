"""Sums, means, quantiles and histograms of steps and completions over a stretch of time, in constant memory.

A mean or a quantile without a sample in the stretch keeps its last value; before the first sample it is 0.

Histograms count token numbers in half octaves (0, 1, 2, 3, 4, 6, 8, 12, 16, ...) and times in three buckets a decade
(1 ms, 2.5 ms, 5 ms, 10 ms, ...). A bucket holds the values above the bound before it, up to and including its own
bound. The last bucket also holds all values above its bound.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass


def percent(part: float, whole: float) -> float:
    """100 * part / whole; 0 if there is no whole."""
    return 100.0 * part / whole if whole else 0.0


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


@dataclass(slots=True)
class Mean:
    """A running mean; `last` survives `reset`."""

    total: float = 0.0
    count: int = 0
    last: float = 0.0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1

    def merge(self, other: Mean) -> None:
        """Add the samples of `other`."""
        self.total += other.total
        self.count += other.count

    def value(self) -> float:
        """The mean of the samples since the last reset; without a sample, the last mean."""
        if self.count:
            self.last = self.total / self.count
        return self.last

    def reset(self) -> None:
        """Start a new stretch."""
        self.value()
        self.total, self.count = 0.0, 0


class Quantiles:
    """Quantiles of values above 0, exact to one percent: counts by logarithm.

    No quantile is below the smallest sample or above the largest.
    """

    _STEP = math.log(1.02)

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._last: dict[float, float] = {}
        self._range = math.inf, 0.0

    def add(self, value: float) -> None:
        """Count one sample; a sample of 0 or less is ignored."""
        if value > 0:
            place = math.floor(math.log(value) / self._STEP)
            self._counts[place] = self._counts.get(place, 0) + 1
            least, most = self._range
            if not least <= value <= most:
                self._range = min(least, value), max(most, value)

    def value(self, share: float) -> float:
        """The smallest value that is not below `share` of the samples; without a sample, the last result."""
        left = share * sum(self._counts.values())
        for place in sorted(self._counts):
            left -= self._counts[place]
            if left <= 0:
                least, most = self._range
                self._last[share] = min(most, max(least, math.exp((place + 0.5) * self._STEP)))
                break
        return self._last.get(share, 0.0)

    def merge(self, other: Quantiles) -> None:
        """Add the samples of `other`."""
        for place, count in other._counts.items():
            self._counts[place] = self._counts.get(place, 0) + count
        self._range = min(self._range[0], other._range[0]), max(self._range[1], other._range[1])

    def reset(self) -> None:
        """Start a new stretch."""
        self._counts.clear()
        self._range = math.inf, 0.0


class Samples:
    """The meter's counts of a stretch of time: one instance for the interval, one for the whole run."""

    def __init__(self) -> None:
        self.steps = self.tokens = self.rows = self.zombie_rows = 0
        self.decode, self.prefill, self.host = Mean(), Mean(), Mean()  # seconds of a step
        self.length, self.version_span = Mean(), Mean()  # means over completions
        self.decode_quantiles, self.length_quantiles = Quantiles(), Quantiles()
        self._zombie_rows_pct = 0.0  # the last value
        self._speedups = 0.0, 0.0  # the last values

    @property
    def _means(self) -> tuple[Mean, ...]:
        return self.decode, self.prefill, self.host, self.length, self.version_span

    def merge(self, other: Samples) -> None:
        """Add the samples of `other`."""
        self.steps += other.steps
        self.tokens += other.tokens
        self.rows += other.rows
        self.zombie_rows += other.zombie_rows
        for mine, its in zip(self._means, other._means, strict=True):
            mine.merge(its)
        self.decode_quantiles.merge(other.decode_quantiles)
        self.length_quantiles.merge(other.length_quantiles)

    def step(self, kind: str, device_s: float, host_s: float, rows: int, zombie_rows: int, tokens: int) -> None:
        self.steps += 1
        self.tokens += tokens
        self.rows += rows
        self.zombie_rows += zombie_rows
        self.host.add(host_s)
        if kind == "decode":
            self.decode.add(device_s)
            self.decode_quantiles.add(device_s)
        else:
            self.prefill.add(device_s)

    def completion(self, length: int, version_span: int) -> None:
        self.length.add(length)
        self.length_quantiles.add(length)
        self.version_span.add(version_span)

    def zombie_rows_pct(self) -> float:
        """Share of zombie rows in all launched rows, percent."""
        if self.rows:
            self._zombie_rows_pct = percent(self.zombie_rows, self.rows)
        return self._zombie_rows_pct

    def tokens_per_s_per_row(self, wall_s: float) -> float:
        """Tokens per second of one row: the tokens of all rows over the mean number of rows in a step."""
        return self.tokens / wall_s * self.steps / self.rows if wall_s > 0 and self.rows else 0.0

    def speedups(self, work_s: float) -> tuple[float, float]:
        """Predicted and observed speed-up of overlapping over taking turns; `work_s` is the time with work to do."""
        device_s, host_s = self.decode.total + self.prefill.total, self.host.total
        if work_s > 0 and device_s > 0:
            apart_s = device_s + host_s
            zombies = self.zombie_rows / self.rows if self.rows else 0.0
            self._speedups = apart_s / max(device_s, host_s) * (1 - zombies), apart_s / work_s
        return self._speedups

    def reset(self) -> None:
        """Start a new stretch."""
        self.zombie_rows_pct()
        self.steps = self.tokens = self.rows = self.zombie_rows = 0
        for mean in self._means:
            mean.reset()
        self.decode_quantiles.reset()
        self.length_quantiles.reset()
