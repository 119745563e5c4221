"""What was counted in a stretch of time: one instance for the interval between two reports, one for the whole run."""

from __future__ import annotations

import math

from rollout.metrics.report import Mean, Sums


class Quantiles:
    """Quantiles of values above 0, right to one percent, in constant memory: counts by logarithm.

    None is below the smallest sample or above the largest.
    """

    _STEP = math.log(1.02)

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._last: dict[float, float] = {}
        self._range = math.inf, 0.0

    def add(self, value: float) -> None:
        """Count one sample; none that is 0 or less."""
        if value > 0:
            place = math.floor(math.log(value) / self._STEP)
            self._counts[place] = self._counts.get(place, 0) + 1
            least, most = self._range
            if not least <= value <= most:
                self._range = min(least, value), max(most, value)

    def value(self, share: float) -> float:
        """The smallest value that is not below `share` of the samples; without any, what it was before."""
        left = share * sum(self._counts.values())
        for place in sorted(self._counts):
            left -= self._counts[place]
            if left <= 0:
                least, most = self._range
                self._last[share] = min(most, max(least, math.exp((place + 0.5) * self._STEP)))
                break
        return self._last.get(share, 0.0)

    def merge(self, other: Quantiles) -> None:
        """Count the samples of another one, too."""
        for place, count in other._counts.items():
            self._counts[place] = self._counts.get(place, 0) + count
        self._range = min(self._range[0], other._range[0]), max(self._range[1], other._range[1])

    def reset(self) -> None:
        """Begin anew."""
        self._counts.clear()
        self._range = math.inf, 0.0


class Samples:
    """Sums, means and quantiles of steps and completions. What had no sample keeps its last value through `reset`."""

    def __init__(self) -> None:
        self.sums = Sums()
        self.decode, self.prefill, self.host = Mean(), Mean(), Mean()  # seconds of a step
        self.length, self.version_span = Mean(), Mean()  # of a completion
        self.decode_quantiles, self.length_quantiles = Quantiles(), Quantiles()
        self._speedups = 0.0, 0.0

    @property
    def _means(self) -> tuple[Mean, ...]:
        return self.decode, self.prefill, self.host, self.length, self.version_span

    def merge(self, other: Samples) -> None:
        """Count what another one has counted, too."""
        self.sums.merge(other.sums)
        for mine, its in zip(self._means, other._means, strict=True):
            mine.merge(its)
        self.decode_quantiles.merge(other.decode_quantiles)
        self.length_quantiles.merge(other.length_quantiles)

    def step(self, kind: str, device_s: float, host_s: float, rows: int, zombie_rows: int, tokens: int) -> None:
        """Count one committed step."""
        sums = self.sums
        sums.steps += 1
        sums.tokens += tokens
        sums.rows += rows
        sums.zombie_rows += zombie_rows
        self.host.add(host_s)
        if kind == "decode":
            self.decode.add(device_s)
            self.decode_quantiles.add(device_s)
        else:
            self.prefill.add(device_s)

    def completion(self, length: int, version_span: int) -> None:
        """Count one finished completion."""
        self.length.add(length)
        self.length_quantiles.add(length)
        self.version_span.add(version_span)

    def tokens_per_s_per_row(self, wall_s: float) -> float:
        """Tokens that one row got a second: those of all, over the rows of a step."""
        sums = self.sums
        return sums.tokens / wall_s * sums.steps / sums.rows if wall_s > 0 and sums.rows else 0.0

    def speedups(self, busy_s: float) -> tuple[float, float]:
        """Predicted and observed, of overlapping over taking turns; `busy_s` is the time in which there was work."""
        device_s, host_s = self.decode.total + self.prefill.total, self.host.total
        if busy_s > 0 and device_s > 0:
            apart_s = device_s + host_s
            zombies = self.sums.zombie_rows / self.sums.rows if self.sums.rows else 0.0
            self._speedups = apart_s / max(device_s, host_s) * (1 - zombies), apart_s / busy_s
        return self._speedups

    def reset(self) -> None:
        """Begin anew."""
        self.sums.reset()
        for mean in self._means:
            mean.reset()
        self.decode_quantiles.reset()
        self.length_quantiles.reset()
