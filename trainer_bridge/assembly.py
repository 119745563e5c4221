"""Puts the chunks of a stream together again.

For each completion the chunks come in order and without gaps; between completions in any order. A chunk that does not
begin where the last one ended, or that comes after the end, is a `ProtocolError`: tokens are never lost silently.
"""

from __future__ import annotations

import numpy as np

from trainer_bridge.errors import ProtocolError
from trainer_bridge.results import Chunk, Completion, GenerateResult


class Assembler:
    """The chunks of one request so far.

    `start` is how many tokens the completions had before (`continue_from`). With `whole`, every chunk must be a
    finished completion from its first token on.
    """

    def __init__(self, n: int, start: int = 0, *, whole: bool = False) -> None:
        self._parts: list[list[Completion]] = [[] for _ in range(n)]
        self._ends = [0 if whole else start] * n
        self._whole = whole

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk. Raises `ProtocolError` when it does not fit."""
        if not 0 <= chunk.index < len(self._parts):
            raise ProtocolError(f"a chunk is of completion {chunk.index}, but there are {len(self._parts)}")
        parts = self._parts[chunk.index]
        if parts and parts[-1].finish_reason is not None:
            raise ProtocolError(f"a chunk of completion {chunk.index} came after its end")
        if chunk.offset != self._ends[chunk.index]:
            raise ProtocolError(
                f"the stream of completion {chunk.index} has a gap: a chunk begins at token {chunk.offset} "
                f"instead of {self._ends[chunk.index]}"
            )
        if self._whole and chunk.finish_reason is None:
            raise ProtocolError(f"a chunk of completion {chunk.index} is not a whole completion")
        parts.append(chunk.part)
        self._ends[chunk.index] += len(chunk.token_ids)

    def partials(self) -> list[Completion]:
        """Every completion of which something has come, with what has come."""
        return [_join(parts) for parts in self._parts if parts]

    def check_complete(self, result: GenerateResult) -> None:
        """Raise `ProtocolError` unless the chunks were all of the result."""
        for completion in result.completions:
            if not 0 <= completion.index < len(self._ends) or len(completion) != self._ends[completion.index]:
                raise ProtocolError(f"the stream of completion {completion.index} lacks tokens that its result has")


def _join(parts: list[Completion]) -> Completion:
    if len(parts) == 1:
        return parts[0]
    last = parts[-1]
    runs: list[tuple[int, int]] = []
    for version, count in (run for part in parts for run in part.versions):
        if runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1] + count)
        else:
            runs.append((version, count))
    drawn = [part.drawn_logprobs for part in parts]
    return Completion(
        index=last.index,
        token_ids=_concat([part.token_ids for part in parts]),
        logprobs=_concat([part.logprobs for part in parts]),
        raw_logprobs=_concat([part.raw_logprobs for part in parts]),
        drawn_logprobs=None if any(values is None for values in drawn) else _concat(drawn),
        versions=runs,
        finish_reason=last.finish_reason,
        stop=last.stop,
        text=last.text,
        seed=next((part.seed for part in parts if part.seed is not None), None),
        error=last.error,
    )


def _concat(arrays: list) -> np.ndarray:
    array = np.concatenate(arrays)
    array.flags.writeable = False
    return array
