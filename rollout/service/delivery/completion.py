"""One completion in the service: deltas come in, columns of its tokens grow, chunks and the final map go out.

A stop string ends the completion here. Tokens that the engine generated after it are dropped before they can be sent.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rollout.constraints.thoughts import Thoughts, forced_places
from rollout.engine.messages.requests import VersionRuns
from rollout.engine.messages.to_service import Delta, Finish
from rollout.service.delivery.expert_records import RoutingColumn
from rollout.service.delivery.waiters import Position
from rollout.service.text.stop_strings import StopMatch, StopText
from trainer_bridge.wire.columns import COLUMNS, TOKEN_COLUMNS, TOP_COLUMNS, UNKNOWN

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
        """Mark the drawn log-probs of all present tokens as unknown: NaN."""
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


class Marks(NamedTuple):
    """Positions of a completion's tokens at which versions of weights, of the adapter or of KV change."""

    recomputed: tuple[tuple[int, int], ...] = ()
    adapter_versions: tuple[tuple[int, int], ...] = ()
    kv_versions: tuple[tuple[int, int, int], ...] = ()

    def joined(self, delta: Delta) -> Marks:
        """These values of tokens that another worker drew, then the values of a delta, which has all of this
        worker's.
        """
        recomputed, kv_versions = self.recomputed + delta.recomputed, self.kv_versions + delta.kv_versions
        return Marks(recomputed, _joined(self.adapter_versions, delta.adapter_versions), kv_versions)


NO_MARKS = Marks()


class CompletionDelivery:
    """Collects the deltas of one completion. `text` is set if text is wanted or there are stop strings.

    With `shown_from`, chunks have text from that character on. `routing` is set if the request wants experts. `marks`
    and `forced` come from `continue_from`.
    """

    def __init__(
        self,
        index: int,
        columns: TokenColumns,
        text: StopText | None,
        shown_from: int | None = None,
        routing: RoutingColumn | None = None,
        marks: Marks = NO_MARKS,
        forced: ForcedTokens | None = None,
    ) -> None:
        self.index = index
        self.finish: Finish | None = None
        self.closed = False  # the engine has ended it
        self.prompt_scores: dict[str, Any] = {}  # fields of the first chunk
        self.start = Position(columns.count, shown_from or 0)
        self._columns = columns
        self._routing = routing
        self._forced = forced or ForcedTokens()
        self._marks_before = self._marks = marks
        self._text = text
        self._seed = 0
        self._shown = (
            io.StringIO(newline="") if shown_from is not None else None
        )  # text that no stop string can withdraw
        self._shown_chars = 0

    @property
    def end(self) -> Position:
        return Position(self._columns.count, self.start.chars + self._shown_chars)

    @property
    def ended(self) -> bool:
        """True if no token follows."""
        return self.finish is not None

    def tokens(self) -> np.ndarray:
        """A copy of the present token ids, int32."""
        ids: np.ndarray = self._columns.fields()["token_ids"]
        return ids.copy()

    def add(self, delta: Delta) -> StopMatch | None:
        """Add a delta. Returns the stop string that it completes; the engine must then end the completion."""
        self.closed = delta.finish is not None
        if self.finish is not None:
            return None
        assert delta.offset == self._columns.count, f"a delta at {delta.offset} follows {self._columns.count} tokens"
        self._seed, self._marks = delta.seed, self._marks_before.joined(delta)
        if delta.prompt_logprobs is not None:
            self.prompt_scores |= delta.score_fields()
        match = self._text.feed(delta.token_ids.tolist()) if self._text is not None else None
        self._extend(delta, match.tokens - delta.offset if match else len(delta.token_ids))
        if match is not None:
            self.finish = Finish("stop", match.string)
        elif delta.finish is not None:
            self.finish = delta.finish
            if self._text is not None and delta.finish.complete:
                self._text.finish()  # emits held-back text; a cut completion keeps it, since it may be continued
        self._show()
        return match if not self.closed else None

    def part(self, start: Position) -> dict[str, Any]:
        """The fields of a chunk: all tokens after `start`, and the end if it is reached."""
        fields = {"offset": start.tokens, **self._fields(start.tokens)}
        if self._shown is not None:
            self._shown.seek(start.chars - self.start.chars)
            fields["text"] = self._shown.read()
        return fields | self.prompt_scores if start.tokens == self.start.tokens else fields

    def result_fields(self, *, with_text: bool) -> dict[str, Any]:
        assert self.finish is not None, "a result needs finished completions"
        text = {"text": self._text.sendable} if with_text and self._text is not None else {}
        return self._fields(0) | text

    def _show(self) -> None:
        if self._shown is not None and self._text is not None:
            self._shown_chars += self._shown.write(self._text.take())  # `part` has read to the end

    def _extend(self, delta: Delta, keep: int) -> None:
        new = {name: column[:keep] for name in COLUMNS if (column := getattr(delta, name)) is not None}
        self._columns.extend(new, runs_between(delta.versions, 0, keep))
        self._forced.extend(delta.token_ids[:keep])
        if self._routing is not None and delta.routing is not None and (keep or len(delta.routing)):
            self._routing.extend(delta.routing[: len(delta.routing) - (len(delta.token_ids) - keep)])

    def _fields(self, start: int) -> dict[str, Any]:
        """The fields of the tokens from `start` on, and of the end if it is reached."""
        end = self._columns.count
        fields = {"index": self.index, **self._columns.fields(start), "seed": self._seed}
        if self._routing is not None:
            fields |= self._routing.fields(start, end)
        for name, marks in self._marks._asdict().items():
            if found := marks_between(marks, start, end):
                fields[name] = found
        fields |= self._forced.fields(start)
        if self.finish is not None:
            fields |= {"finish_reason": self.finish.reason, "stop": self.finish.stop}
            if self.finish.error is not None:
                fields["error"] = self.finish.error
        return fields


def _joined(old: tuple[tuple[int, int], ...], new: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Marks of version changes; a new first mark that repeats the last old version is dropped."""
    goes_on = bool(old) and bool(new) and old[-1][1] == new[0][1]
    return old + new[goes_on:]
