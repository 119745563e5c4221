"""Finds that a completion repeats itself, token by token.

A pattern of p tokens that stands there c times in a row: the last p * (c - 1) tokens are those p places before them.
So one counter for each p is enough: the number of tokens in a row for which that is true.
"""

from array import array

import numpy as np

from rollout.constraints.matcher import NEVER
from rollout.engine.messages.requests import Request


class NoRepetition:
    """The absence of a rule: a completion may repeat itself."""

    every = NEVER  # tokens between two calls of `found`

    def found(self, tokens: array) -> bool:
        return False


class Repetition(NoRepetition):
    """The counters of one completion; `found` is called after each new token. P: sizes of a pattern."""

    every = 1

    def __init__(self, least: int, most: int, count: int, min_tokens: int, known: array) -> None:
        """`least`, `most`: tokens of a pattern, at least 1; `count`: how often it stands there, at least 2."""
        self._least, self._min_tokens = least, min_tokens
        self._needs_P = np.arange(least, most + 1, dtype=np.int64) * (count - 1)
        self._runs_P = np.zeros(len(self._needs_P), np.int64)
        tokens = np.frombuffer(known, np.int32)
        for place, need in enumerate(self._needs_P.tolist()):
            size = least + place
            begin = max(len(tokens) - need, size)
            newest = tokens[begin:]
            self._runs_P[place] = _trues_at_end(newest == tokens[begin - size :][: len(newest)])

    def found(self, tokens: array) -> bool:
        """True if the newest token completes a pattern that repeats itself often enough."""
        last = len(tokens) - 1
        begin = max(last - self._least - len(self._runs_P) + 1, 0)
        earlier_P = np.frombuffer(tokens, np.int32)[begin : max(last - self._least + 1, 0)][::-1]
        runs_P = self._runs_P[: len(earlier_P)]
        runs_P += 1
        runs_P *= earlier_P == tokens[last]
        return last + 1 >= self._min_tokens and bool((runs_P >= self._needs_P[: len(runs_P)]).any())


NO_REPETITION = NoRepetition()


def repetition_of(request: Request, known: array) -> NoRepetition:
    """The repetition counters of a completion that begins with the tokens `known`."""
    rule = request.stop.repetition
    most = min(rule.most, request.max_tokens // rule.count)  # longer repetitions do not fit
    if most < rule.least:
        return NO_REPETITION
    return Repetition(rule.least, most, rule.count, request.stop.min_tokens, known)


def _trues_at_end(values: np.ndarray) -> int:
    """Length of the run of true values at the end."""
    wrong = np.flatnonzero(~values)
    return len(values) - 1 - int(wrong[-1]) if len(wrong) else len(values)
