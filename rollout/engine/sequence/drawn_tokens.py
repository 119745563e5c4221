"""The tokens of a completion with the values that the service gets for each: one column per value.

Tokens that another worker drew (`known`) come first in all columns. The tokens drawn here follow; `versions` counts
only these. A commit writes to `versions` last: a token is whole once it is counted there.
"""

from __future__ import annotations

from array import array

import numpy as np

from rollout.constraints.matcher import NEVER
from rollout.engine.messages.requests import VERSION_END, Request


class NoRepetition:
    """The absence of a rule: a completion may repeat itself."""

    every = NEVER  # tokens between two calls of `found`

    def found(self, tokens: array) -> bool:
        return False


class Repetition(NoRepetition):
    """The counters of one completion; `found` is called after each new token. P: sizes of a pattern.

    A pattern of p tokens that stands there c times in a row: the last p * (c - 1) tokens are those p places before
    them. So one counter for each p is enough: the number of tokens in a row for which that is true.
    """

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


class DrawnTokens:
    """The drawn tokens of one completion. A commit appends to the columns, a delta reads them."""

    __slots__ = (
        "drawn_logprobs",
        "flushed",
        "known",
        "logprobs",
        "max_version_span",
        "newest_version",
        "oldest_version",
        "raw_logprobs",
        "run",
        "tokens",
        "versions",
    )

    def __init__(self, request: Request, reshapes: bool) -> None:
        """`reshapes`: the sampling rules change the distribution, so its log-probs have a column, too."""
        prior = request.prior
        self.tokens = array("i", prior.token_ids.astype(np.int32).tobytes())
        self.known = known = len(self.tokens)
        self.logprobs = array("f", bytes(4 * known))
        self.raw_logprobs = array("f", bytes(4 * known))
        self.drawn_logprobs = array("f", bytes(4 * known)) if reshapes else None
        self.versions: list[list[int]] = []  # runs of [weights version, tokens]
        self.run = [VERSION_END, 0]  # newest of these runs; VERSION_END before the first token drawn here
        self.oldest_version, self.newest_version = prior.oldest_version, prior.newest_version
        asked = request.max_version_span
        self.max_version_span = VERSION_END if asked is None else asked
        self.flushed = known  # tokens that deltas have carried

    def too_old_for(self, version: int) -> bool:
        """True if a token of this weights version would make the span of versions larger than asked for.

        The version may also be older than the versions of a completion that another worker began.
        """
        return max(self.newest_version, version) - min(self.oldest_version, version) > self.max_version_span

    def begin_run(self, version: int) -> None:
        """Begin a run: the next tokens are of this weights version."""
        self.run = [version, 0]
        self.versions.append(self.run)
        self.oldest_version = min(self.oldest_version, version)
        self.newest_version = max(self.newest_version, version)

    def drop_torn_token(self) -> None:
        """Cut the columns to the tokens that all of them have: a fault may come between two of them."""
        if self.versions and not self.versions[-1][1]:
            self.versions.pop()
        whole = self.known + sum(count for _, count in self.versions)
        for column in (self.tokens, self.logprobs, self.raw_logprobs, self.drawn_logprobs):
            if column is not None:
                del column[whole:]
