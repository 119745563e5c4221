"""The tokens of one completion with their log-probs and versions, as columns that grow in place."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rollout.constraints.thoughts import Thoughts, forced_places
from rollout.engine.messages.requests import VersionRuns
from trainer_bridge.wire.columns import TOKEN_COLUMNS, TOP_COLUMNS, UNKNOWN

_FIRST_CAPACITY = 64


class TokenColumns:
    """One entry per token: id, log-probs, weights version, and the `tops` likeliest tokens.

    Memory grows with the number of tokens, not with the number of calls.
    """

    def __init__(self, tops: int = 0) -> None:
        self.count = 0
        self.versions: VersionRuns = []
        self._drawn_unknown = 0  # leading tokens without drawn log-probs
        self._columns = {name: np.empty(_FIRST_CAPACITY, dtype) for name, dtype in TOKEN_COLUMNS.items()}
        if tops:
            self._columns |= {name: np.empty((_FIRST_CAPACITY, tops), dtype) for name, dtype in TOP_COLUMNS.items()}

    def extend(self, new: Mapping[str, np.ndarray | None], versions: VersionRuns) -> None:
        """Add tokens: columns of one length by name, and version runs that add up to it.

        `drawn_logprobs` is None if the tokens were drawn from the plain distribution; likeliest tokens are None if they
        are unknown, or if the completion has none.
        """
        count = sum(count for _, count in versions)
        given = {name: column for name, column in new.items() if column is not None}
        assert all(len(given[name]) == count for name in TOKEN_COLUMNS)
        start, end = self.count, self.count + count
        self._reserve(end)
        if "drawn_logprobs" in given and "drawn_logprobs" not in self._columns:
            self._columns["drawn_logprobs"] = self._columns["logprobs"].copy()
            self._columns["drawn_logprobs"][: self._drawn_unknown] = np.nan
        others = {**UNKNOWN, "drawn_logprobs": given["logprobs"]}
        for name, column in self._columns.items():
            column[start:end] = given[name] if name in given else others[name]
        self.count = end
        for version, count in versions:
            if self.versions and self.versions[-1][0] == version:
                self.versions[-1] = (version, self.versions[-1][1] + count)
            else:
                self.versions.append((version, count))

    def mark_drawn_unknown(self) -> None:
        """Mark the drawn log-probs of all present tokens as unknown; they read as NaN."""
        self._drawn_unknown = self.count

    def fields(self, start: int = 0) -> dict[str, Any]:
        """The reply fields of the tokens from `start` on. The arrays are views, valid until the next `extend`."""
        fields: dict[str, Any] = {name: column[start : self.count] for name, column in self._columns.items()}
        return fields | {"versions": [list(run) for run in runs_between(self.versions, start, self.count)]}

    def _reserve(self, count: int) -> None:
        capacity = len(self._columns["token_ids"])
        if count <= capacity:
            return
        for name, old in self._columns.items():
            grown = np.empty((max(count, capacity * 2), *old.shape[1:]), old.dtype)
            grown[: self.count] = old[: self.count]
            self._columns[name] = grown


def marks_between(marks: Iterable[Sequence[int]], start: int, end: int) -> list[list[int]]:
    """The marks, tuples that begin with a position, from position `start` to `end` (exclusive)."""
    return [list(mark) for mark in marks if start <= mark[0] < end]


def runs_between(runs: VersionRuns, start: int, end: int) -> VersionRuns:
    """The runs that cover tokens `start` to `end` (exclusive)."""
    covered: VersionRuns = []
    position = 0
    for version, count in runs:
        used = min(position + count, end) - max(position, start)
        if used > 0:
            covered.append((version, used))
        position += count
    return covered


class ForcedTokens:
    """Forced positions. `known`: those in `continue_from`; `thoughts`: the place after it, None without a budget."""

    def __init__(self, known: Iterable[int] = (), thoughts: Thoughts | None = None) -> None:
        self._places = list(known)
        self._thoughts = thoughts

    def extend(self, token_ids: np.ndarray) -> None:
        """Add the next tokens of the completion, int32."""
        if self._thoughts is not None:
            self._places += forced_places(self._thoughts, token_ids.tolist())

    def fields(self, start: int) -> dict[str, list[int]]:
        """The reply field of the tokens from `start` on; empty if no token was forced."""
        return forced_field(self._places, start)


def forced_field(places: Iterable[int], start: int) -> dict[str, list[int]]:
    """The reply field of the positions from `start` on, if there are any."""
    found = [place for place in places if place >= start]
    return {"forced": found} if found else {}
