"""The costs of decode steps, by number of rows; a draft is a row.

    seconds(rows, context) = measured[rows] + constant + slope * context

`measured` is a table from start-up: steps of this many rows with short contexts. Constant and slope correct it by the
steps that were run: attention reads the context of each row, and a verify step sets drafts up. Plain and verify steps
have a correction each. The correction of verify steps starts equal to the one of plain steps, and goes back to it while
only plain steps run, so that old costs do not keep rows from drafting. A context counts again for each draft, unless
attention reads shared pages once. What the drafter on the device takes after a step is a table of its own, by rows.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

#: Weight of the older steps in the next correction, and of the correction that is assumed before any step.
_KEPT, _ASSUMED = 0.98, 1.0
#: Steps of a kind from which on their correction is known.
_FEW_STEPS = 4.0
#: Unit of a context in the corrections, tokens: keeps both unknowns of similar size.
_UNIT = 100_000.0


class _Correction:
    """Decayed least squares of the steps' time beyond the table, against (1, context)."""

    def __init__(self) -> None:
        self._products = np.zeros((2, 2))
        self._sums = np.zeros(2)

    def add(self, context: float, seconds: float) -> None:
        x = np.array([1.0, context / _UNIT])
        self.forget()
        self._products += np.outer(x, x)
        self._sums += x * seconds

    def forget(self) -> None:
        """Reduce the weight of earlier steps, as one more step does."""
        self._products *= _KEPT
        self._sums *= _KEPT

    @property
    def steps(self) -> float:
        """The total weight of the known steps."""
        return float(self._products[0, 0])

    def solve(self, assumed: np.ndarray) -> np.ndarray:
        """(constant, slope), near `assumed` where few steps are known."""
        weights = _ASSUMED * np.diag([1.0, 1e-3])
        return np.linalg.solve(self._products + weights, self._sums + weights @ assumed)


class StepCosts:
    """The cost table of one engine.

    Args:
        measured: seconds of a decode step by its rows; one entry at least.
        padded: a step takes as long as the next larger entry (captured sizes), else costs lie between two entries.
        shares: a row and its drafts read its context once, all together.
        drafting: seconds of the drafter on the device after a step, by rows; a draft model reads the step, too. Empty
            without one.
    """

    def __init__(
        self,
        measured: Mapping[int, float],
        padded: bool,
        shares: bool = False,
        drafting: Mapping[int, float] = MappingProxyType({}),
    ) -> None:
        self._shares = shares
        self._drafting = dict(sorted(drafting.items()))
        sizes = np.array(sorted(measured))
        # More rows are never cheaper: a measurement that says otherwise is noise.
        seconds = np.maximum.accumulate(np.array([measured[size] for size in sizes.tolist()]))
        rows = np.arange(sizes[-1] + 1)
        self._measured = seconds[np.searchsorted(sizes, rows)] if padded else np.interp(rows, sizes, seconds)
        self._plain, self._verify = _Correction(), _Correction()
        self._of_plain = self._of_verify = np.zeros(2)

    def plain_s(self, rows: int, context: float) -> float:
        """Seconds of a step of `rows` rows without drafts; `context` is the sum of their contexts, tokens."""
        constant, slope = self._of_plain
        return max(float(self._table(np.array([rows]))[0] + constant + slope * context / _UNIT), 1e-9)

    def verify_s(self, rows: int, context: float, drafts_N: np.ndarray) -> np.ndarray:
        """Seconds [N] of verify steps: `plain_s` with this number of additional drafts."""
        constant, slope = self._of_verify
        contexts_N = self._read(rows, context, drafts_N)
        return np.maximum(self._table(rows + drafts_N) + constant + slope * contexts_N / _UNIT, 1e-9)

    @property
    def knows_plain(self) -> bool:
        """Whether some steps without drafts have run: until then verify steps alone seem dearer than the table says."""
        return self._plain.steps >= _FEW_STEPS

    def draft_s(self, rows: int) -> float:
        """Seconds of the drafter on the device after a step of this number of rows."""
        if not self._drafting:
            return 0.0
        return float(np.interp(rows, list(self._drafting), list(self._drafting.values())))

    def ran(self, rows: int, context: float, drafts: int, seconds: float) -> None:
        """Note the device time of a step of `rows` rows and `drafts` drafts; for `context` see `plain_s`."""
        beyond = seconds - float(self._table(np.array([rows + drafts]))[0])
        if drafts:
            context = float(self._read(rows, context, np.array([drafts]))[0])
            self._verify.add(context, beyond)
        else:
            self._plain.add(context, beyond)
            self._verify.forget()
            self._of_plain = self._plain.solve(np.zeros(2))
        self._of_verify = self._verify.solve(self._of_plain)

    def _read(self, rows: int, context: float, drafts_N: np.ndarray) -> np.ndarray:
        """Contexts [N] that attention reads."""
        return np.full(len(drafts_N), context) if self._shares else context * (1 + drafts_N / rows)

    def _table(self, rows_N: np.ndarray) -> np.ndarray:
        return self._measured[np.minimum(rows_N, len(self._measured) - 1)]


def worthwhile(
    chances_MK: np.ndarray, rows: int, context: float, costs: StepCosts, most: int, draft_s: float = 0.0
) -> list[int]:
    """The number of drafts for each of M rows that maximizes tokens a second; all 0 if plain steps are best.

    Args:
        chances_MK: probability that a row's draft k and all before it are accepted, falling along K; 0: no such draft.
        rows: rows of the step, rows without drafts included.
        context: sum of their contexts, tokens; each row counts once.
        costs: costs of the steps.
        most: drafts of all rows.
        draft_s: seconds of the drafter on the device.
    """
    chances_N = chances_MK.reshape(-1)
    order = np.argsort(-chances_N, kind="stable")[: min(most, np.count_nonzero(chances_N))]
    if not len(order):
        return [0] * len(chances_MK)
    drafts_N = np.arange(1, len(order) + 1)
    tokens_N = rows + np.cumsum(chances_N[order])
    speeds_N = tokens_N / (costs.verify_s(rows, context, drafts_N) + draft_s)
    best = int(speeds_N.argmax())
    if speeds_N[best] < LEAST_GAIN * rows / costs.plain_s(rows, context):
        return [0] * len(chances_MK)
    return np.bincount(order[: best + 1] // chances_MK.shape[1], minlength=len(chances_MK)).tolist()


#: The gain of a verify step over a plain one below which no row drafts: costs and acceptance are estimates.
LEAST_GAIN = 1.03
