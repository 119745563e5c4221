"""How far a trainer's log-probs of sampled tokens are from the worker's own.

With d = trainer - worker at each token, sampled by the worker,

    k3_kl      mean of exp(d) - 1 - d       an estimate of KL(worker || trainer) that is never negative
    mean_abs   mean of |d|
    max_abs    largest |d|

A token counts where both are known: NaN stands for not known. In the exponent a d above `MAX_EXPONENT` counts as that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

#: A token that the trainer finds e^20 times as likely says all there is to say; beyond e^88 float32 ends.
MAX_EXPONENT = 20.0


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Sums over tokens; two of them add up."""

    tokens: int = 0
    k3_sum: float = 0.0
    abs_sum: float = 0.0
    max_abs: float = 0.0

    def __add__(self, other: Mismatch) -> Mismatch:
        return Mismatch(
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


def compare(worker: np.ndarray, trainer: np.ndarray) -> Mismatch:
    """The mismatch of two rows of log-probs, float32 [tokens] both; infinite ones of the worker count as not known."""
    assert worker.shape == trainer.shape and worker.ndim == 1, "a log-prob a token on both sides"
    difference = trainer.astype(np.float64) - worker
    difference = difference[np.isfinite(difference)]
    if not len(difference):
        return Mismatch()
    capped = np.minimum(difference, MAX_EXPONENT)
    size = np.abs(difference)
    k3 = np.expm1(capped) - capped
    return Mismatch(len(difference), float(k3.sum()), float(size.sum()), float(size.max()))


def compare_by_version(worker: np.ndarray, trainer: np.ndarray, runs: Iterable[tuple[int, int]]) -> dict[int, Mismatch]:
    """The same for the tokens of each weights version; `runs` are (version, tokens) and add up to all tokens."""
    found: dict[int, Mismatch] = {}
    start = 0
    for version, count in runs:
        part = compare(worker[start : start + count], trainer[start : start + count])
        found[version] = found.get(version, Mismatch()) + part
        start += count
    assert start == len(worker), "the runs add up to all tokens"
    return found


class MismatchBox:
    """What was compared since somebody looked last: filled by one thread, emptied by another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held = Mismatch()

    def add(self, found: Mismatch) -> None:
        """Put something in."""
        with self._lock:
            self._held += found

    def take(self) -> Mismatch:
        """Take everything out."""
        with self._lock:
            held, self._held = self._held, Mismatch()
        return held
