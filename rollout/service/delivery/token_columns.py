"""The tokens of one completion with their log-probs and versions, as columns that grow in place."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rollout.constraints.thoughts import Thoughts, forced_places
from rollout.engine.messages.requests import VersionRuns

_FIRST_CAPACITY = 64
#: Value in `top_ids` for unknown likeliest tokens.
UNKNOWN_ID = -1


class TokenColumns:
    """One entry per token: id, log-probs, weights version, and the `tops` likeliest tokens.

    Memory grows with the number of tokens, not with the number of calls.
    """

    def __init__(self, tops: int = 0) -> None:
        self.count = 0
        self.versions: VersionRuns = []
        self._token_ids = np.empty(_FIRST_CAPACITY, np.int32)
        self._logprobs = np.empty(_FIRST_CAPACITY, np.float32)
        self._raw_logprobs = np.empty(_FIRST_CAPACITY, np.float32)
        self._drawn_logprobs: np.ndarray | None = None
        self._top_ids = np.empty((_FIRST_CAPACITY, tops), np.int32) if tops else None
        self._top_logprobs = np.empty((_FIRST_CAPACITY, tops), np.float32) if tops else None
        self._drawn_unknown = 0  # leading tokens without drawn log-probs

    def extend(
        self,
        token_ids: np.ndarray,
        logprobs: np.ndarray,
        raw_logprobs: np.ndarray,
        drawn_logprobs: np.ndarray | None,
        versions: VersionRuns,
        top_ids: np.ndarray | None = None,
        top_logprobs: np.ndarray | None = None,
    ) -> None:
        """Add tokens: arrays of one length, and version runs that add up to it.

        `drawn_logprobs` is None if the tokens were drawn from the plain distribution. `top_ids` and `top_logprobs` are
        None if they are unknown, or if the completion has none.
        """
        assert len(token_ids) == len(logprobs) == len(raw_logprobs) == sum(count for _, count in versions)
        start, end = self.count, self.count + len(token_ids)
        self._reserve(end)
        self._token_ids[start:end] = token_ids
        self._logprobs[start:end] = logprobs
        self._raw_logprobs[start:end] = raw_logprobs
        if drawn_logprobs is not None and self._drawn_logprobs is None:
            self._drawn_logprobs = self._logprobs.copy()
            self._drawn_logprobs[: self._drawn_unknown] = np.nan
        if self._drawn_logprobs is not None:
            self._drawn_logprobs[start:end] = logprobs if drawn_logprobs is None else drawn_logprobs
        if self._top_ids is not None and self._top_logprobs is not None:
            self._top_ids[start:end] = UNKNOWN_ID if top_ids is None else top_ids
            self._top_logprobs[start:end] = np.nan if top_logprobs is None else top_logprobs
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
        part = slice(start, self.count)
        fields: dict[str, Any] = {
            "token_ids": self._token_ids[part],
            "logprobs": self._logprobs[part],
            "raw_logprobs": self._raw_logprobs[part],
            "versions": [list(run) for run in runs_between(self.versions, start, self.count)],
        }
        if self._drawn_logprobs is not None:
            fields["drawn_logprobs"] = self._drawn_logprobs[part]
        if self._top_ids is not None and self._top_logprobs is not None:
            fields |= {"top_ids": self._top_ids[part], "top_logprobs": self._top_logprobs[part]}
        return fields

    def _reserve(self, count: int) -> None:
        capacity = len(self._token_ids)
        if count <= capacity:
            return
        capacity = max(count, capacity * 2)
        for name in ("_token_ids", "_logprobs", "_raw_logprobs", "_drawn_logprobs", "_top_ids", "_top_logprobs"):
            old = getattr(self, name)
            if old is not None:
                grown = np.empty((capacity, *old.shape[1:]), old.dtype)
                grown[: self.count] = old[: self.count]
                setattr(self, name, grown)


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
