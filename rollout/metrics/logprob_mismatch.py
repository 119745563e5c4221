"""The distance of a trainer's log-probs of sampled tokens from the worker's own.

With d = trainer - worker at each token that the worker sampled:

    k3_kl      mean of exp(d) - 1 - d       an estimate of KL(worker || trainer) that is never negative
    mean_abs   mean of |d|
    max_abs    largest |d|

A token counts if both log-probs are known; NaN means unknown. In the exponent d is capped at `MAX_EXPONENT`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

#: Far above any healthy difference, and far below the e^88 at which float32 overflows.
MAX_EXPONENT = 20.0


@dataclass(frozen=True, slots=True)
class MismatchSums:
    """Sums over tokens; two can be added."""

    tokens: int = 0
    k3_sum: float = 0.0
    abs_sum: float = 0.0
    max_abs: float = 0.0

    def __add__(self, other: MismatchSums) -> MismatchSums:
        return MismatchSums(
            self.tokens + other.tokens,
            self.k3_sum + other.k3_sum,
            self.abs_sum + other.abs_sum,
            max(self.max_abs, other.max_abs),
        )

    @property
    def k3_kl(self) -> float:
        """Mean over the tokens; 0 without any."""
        return self.k3_sum / self.tokens if self.tokens else 0.0

    @property
    def mean_abs(self) -> float:
        """Mean over the tokens; 0 without any."""
        return self.abs_sum / self.tokens if self.tokens else 0.0


def compare(worker: np.ndarray, trainer: np.ndarray) -> MismatchSums:
    """The mismatch of two rows of log-probs, both float32 [tokens]; an infinite one of the worker counts as unknown."""
    assert worker.shape == trainer.shape and worker.ndim == 1, "both sides have one log-prob for each token"
    difference = trainer.astype(np.float64) - worker
    difference = difference[np.isfinite(difference)]
    if not len(difference):
        return MismatchSums()
    capped = np.minimum(difference, MAX_EXPONENT)
    size = np.abs(difference)
    k3 = np.expm1(capped) - capped
    return MismatchSums(len(difference), float(k3.sum()), float(size.sum()), float(size.max()))


def compare_by_version(
    worker: np.ndarray, trainer: np.ndarray, runs: Iterable[tuple[int, int]]
) -> dict[int, MismatchSums]:
    """`compare` for each weights version; `runs` are (version, tokens) and add up to all tokens."""
    found: dict[int, MismatchSums] = {}
    start = 0
    for version, count in runs:
        part = compare(worker[start : start + count], trainer[start : start + count])
        found[version] = found.get(version, MismatchSums()) + part
        start += count
    assert start == len(worker), "the runs add up to all tokens"
    return found


class MismatchBox:
    """Mismatches on their way to the loop: one thread adds, another takes everything."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sum = MismatchSums()

    def add(self, found: MismatchSums) -> None:
        with self._lock:
            self._sum += found

    def take(self) -> MismatchSums:
        """Return the sum since the last call."""
        with self._lock:
            taken, self._sum = self._sum, MismatchSums()
        return taken
