"""Puts the chunks of a stream together again.

For each completion the chunks come in order and without gaps; between completions in any order. A chunk that does not
begin where the last one ended, or that comes after the end, is a `ProtocolError`: tokens are never lost silently.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trainer_bridge.client.results import Chunk, Completion, GenerateResult
from trainer_bridge.wire.columns import COLUMNS, MARKS, TOKEN_COLUMNS, TOP_COLUMNS, UNKNOWN
from trainer_bridge.wire.errors import ProtocolError
from trainer_bridge.wire.prompt_tops import PromptScores

_LOOSE_PARTS = 256  # most parts of a completion that are kept apart; more parts are joined, since each costs 1.5 kB


class Assembler:
    """The received chunks of one request.

    `prior` is the beginning of the completions (`continue_from`): chunks continue after it. With `whole`, every chunk
    must end its completion, and may bring the prior tokens again.
    """

    def __init__(self, n: int, prior: Completion | None = None, *, whole: bool = False) -> None:
        self._parts: list[list[Completion]] = [[] if prior is None else [prior] for _ in range(n)]
        self._joined = [len(parts) for parts in self._parts]  # the first parts, which stay as they are
        self._prior = prior
        self._ends = [0 if prior is None else len(prior)] * n
        self._whole = whole
        self.prompt = PromptScores()  # empty before a chunk has brought the scores

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk. Raises `ProtocolError` when it does not fit."""
        if not 0 <= chunk.index < len(self._parts):
            raise ProtocolError(f"a chunk names completion {chunk.index}, but the request has {len(self._parts)}")
        parts = self._parts[chunk.index]
        if parts and parts[-1].finish_reason is not None:
            raise ProtocolError(f"a chunk of completion {chunk.index} came after its end")
        if self._whole and chunk.offset == 0:
            parts.clear()
            self._ends[chunk.index] = self._joined[chunk.index] = 0
        if chunk.offset != self._ends[chunk.index]:
            raise ProtocolError(
                f"the stream of completion {chunk.index} has a gap: a chunk begins at token {chunk.offset} "
                f"instead of {self._ends[chunk.index]}"
            )
        if self._whole and chunk.finish_reason is None:
            raise ProtocolError(f"the chunk of completion {chunk.index} is not the whole completion")
        _check_routing(chunk, parts)
        if chunk.prompt_logprobs is not None:
            self.prompt = PromptScores(**chunk.scores())
        parts.append(chunk.part)
        self._ends[chunk.index] += len(chunk.token_ids)
        loose = self._joined[chunk.index]
        if len(parts) - loose >= _LOOSE_PARTS:
            parts[loose:] = [join_parts(parts[loose:], chunk.index)]
            self._joined[chunk.index] = loose + 1

    def begin_with(self, partials: Iterable[Completion]) -> None:
        """Begin with an earlier stream's partial completions of this request. Raises ValueError if they do not fit."""
        for part in partials:
            if not 0 <= part.index < len(self._parts):
                raise ValueError(f"a partial names completion {part.index}, but n is {len(self._parts)}; set n")
            self._parts[part.index], self._joined[part.index] = [part], 1
            self._ends[part.index] = len(part)

    def partials(self) -> list[Completion]:
        """All completions that have begun, with their received tokens."""
        return [self.joined(index) for index, parts in enumerate(self._parts) if parts]

    def joined(self, index: int) -> Completion:
        """A completion that has begun, with its received tokens."""
        return join_parts(self._parts[index], index, self._prior)

    @property
    def n(self) -> int:
        """The number of completions."""
        return len(self._parts)

    def has(self, index: int) -> bool:
        """True if any chunk of a completion has come."""
        return bool(self._parts[index])

    def length(self, index: int) -> int:
        """Number of received tokens of a completion, prior ones included."""
        return self._ends[index]

    def tokens(self, index: int) -> np.ndarray:
        """The received token ids of a completion, int32."""
        return np.concatenate([np.zeros(0, np.int32), *(part.token_ids for part in self._parts[index])])

    def missing(self, result: GenerateResult) -> list[Chunk]:
        """The rest of a result after its chunks: a worker ends the stream of a client that reads too slowly.

        Raises `ProtocolError` unless the chunks are the beginning of the result.
        """
        rest = [self._rest(whole) for whole in result.completions if not self._check_ended(whole)]
        if self.prompt.prompt_logprobs is not None:
            return rest
        return [replace(chunk, **result.scores()) if chunk.index == 0 else chunk for chunk in rest]

    def _check_ended(self, whole: Completion) -> bool:
        if not 0 <= whole.index < len(self._ends):
            raise ProtocolError(f"a result names completion {whole.index}, but the request has {len(self._ends)}")
        parts, have = self._parts[whole.index], self._ends[whole.index]
        ended = bool(parts) and parts[-1].finish_reason is not None
        wrong = len(whole) != have if ended else not np.array_equal(whole.token_ids[:have], self.tokens(whole.index))
        if wrong:
            raise ProtocolError(f"the result of completion {whole.index} differs from its stream")
        return ended

    def _rest(self, whole: Completion) -> Chunk:
        if self._whole:
            return Chunk(0, whole)
        have, text = self._ends[whole.index], None
        parts = self._parts[whole.index]
        if whole.text is not None and (self._prior is None or self._prior.text is not None):
            text = whole.text[sum(len(part.text or "") for part in parts) :]
        return Chunk(have, replace(tail(whole, have), text=text))


def join_chunks(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Chunks of one stream as one chunk for each completion, with the tokens of all."""
    by_index: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        by_index.setdefault(chunk.index, []).append(chunk)
    return [_joined(each) for each in by_index.values()]


def _joined(chunks: list[Chunk]) -> Chunk:
    first = chunks[0]
    if len(chunks) == 1:
        return first
    scored = next((chunk for chunk in chunks if chunk.prompt_logprobs is not None), first)
    part = join_parts([chunk.part for chunk in chunks], first.index)
    return Chunk(first.offset, part, **scored.scores())


def tail(completion: Completion, start: int) -> Completion:
    """A completion without its first `start` tokens, and without its text."""
    runs, position = [], 0
    for version, count in completion.versions:
        kept = min(count, position + count - start)
        if kept > 0:
            runs.append((version, kept))
        position += count
    rest: dict[str, Any] = {name: column[start:] for name, column in _columns(completion).items()}
    rest |= {name: [mark for mark in getattr(completion, name) if mark[0] >= start] for name in MARKS}
    return replace(
        completion,
        **rest,
        routing=_last_entries(completion, start),
        versions=runs,
        forced=[position for position in completion.forced if position >= start],
        text=None,
    )


def join_parts(parts: list[Completion], index: int, prior: Completion | None = None) -> Completion:
    """Parts of a completion that follow each other as one. `prior`: the part that a request has continued."""
    last = parts[-1]
    runs: list[tuple[int, int]] = []
    for version, count in (run for part in parts for run in part.versions):
        if runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1] + count)
        else:
            runs.append((version, count))
    texts = [part.text for part in parts if part.text is not None]
    whole: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in TOKEN_COLUMNS}
    whole |= {name: _tops([getattr(part, name) for part in parts], parts, UNKNOWN[name]) for name in TOP_COLUMNS}
    whole |= {name: [mark for part in parts for mark in getattr(part, name)] for name in (*MARKS, "forced")}
    return Completion(
        index=index,
        **whole,
        drawn_logprobs=_drawn(parts, prior),
        versions=runs,
        finish_reason=last.finish_reason,
        stop=last.stop,
        text="".join(texts) if texts else None,
        routing=_routing(parts),
        seed=next((part.seed for part in parts if part.seed is not None), None),
        error=last.error,
    )


def _columns(completion: Completion) -> dict[str, np.ndarray]:
    """The columns that a completion has, by name."""
    return {name: column for name in COLUMNS if (column := getattr(completion, name)) is not None}


def _check_routing(chunk: Chunk, parts: list[Completion]) -> None:
    """Raise `ProtocolError` unless a chunk's routing continues the routing of the parts before it."""
    routing = chunk.part.routing
    if routing is None:
        return
    if chunk.offset > 0 and len(routing) != len(chunk.token_ids):
        raise ProtocolError(
            f"a chunk of {len(chunk.token_ids)} tokens at {chunk.offset} has {len(routing)} entries of routing"
        )
    before = next((part.routing for part in reversed(parts) if part.routing is not None), routing)
    if before.dtype != routing.dtype or before.shape[1:] != routing.shape[1:]:
        raise ProtocolError(
            f"the routing of a chunk is {routing.dtype} with {list(routing.shape[1:])} for each token, the routing "
            f"before it is {before.dtype} with {list(before.shape[1:])}"
        )


def _last_entries(completion: Completion, start: int) -> np.ndarray | None:
    """The routing of the tokens from `start` on; a prompt's entries belong to the first token."""
    routing = completion.routing
    if routing is None or start == 0:
        return routing
    return routing[len(routing) - (len(completion) - start) :]


def _routing(parts: list[Completion]) -> np.ndarray | None:
    """The entries of all parts; None if one part has none (a `continue_from`): the others would be misplaced."""
    entries = [part.routing for part in parts if part.routing is not None]
    if not entries or any(part.routing is None and len(part) for part in parts):
        return None
    return np.concatenate(entries)


def _tops(rows: list[np.ndarray | None], parts: list[Completion], unknown: float) -> np.ndarray | None:
    """The rows of all parts, with `unknown` for a part without rows; None if no part has rows."""
    known = next((each for each in rows if each is not None), None)
    if known is None:
        return None
    shape = known.shape[1]
    return np.concatenate(
        [
            np.full((len(part), shape), unknown, known.dtype) if each is None else each
            for each, part in zip(rows, parts, strict=True)
        ]
    )


def _drawn(parts: list[Completion], prior: Completion | None) -> np.ndarray | None:
    if all(part.drawn_logprobs is None for part in parts):
        return None
    return np.concatenate([_drawn_of(part, prior) for part in parts])


def _drawn_of(part: Completion, prior: Completion | None) -> np.ndarray:
    if part.drawn_logprobs is not None:
        return part.drawn_logprobs
    if part is prior:  # unknown: it came without
        return np.full(len(part), np.nan, np.float32)
    return part.logprobs  # drawn from the plain distribution
