"""Sums, means and quantiles of steps and completions over a stretch of time, in constant memory.

A mean or a quantile without a sample in the stretch keeps its last value; before the first sample it is 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


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
            self._zombie_rows_pct = 100.0 * self.zombie_rows / self.rows
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
