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

    `prior` is what the completions begin with (`continue_from`): chunks go on after it. With `whole`, every chunk
    must end its completion, and may bring the prior tokens again.
    """

    def __init__(self, n: int, prior: Completion | None = None, *, whole: bool = False) -> None:
        self._parts: list[list[Completion]] = [[] if prior is None else [prior] for _ in range(n)]
        self._ends = [0 if prior is None else len(prior)] * n
        self._whole = whole

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk. Raises `ProtocolError` when it does not fit."""
        if not 0 <= chunk.index < len(self._parts):
            raise ProtocolError(f"a chunk is of completion {chunk.index}, but there are {len(self._parts)}")
        parts = self._parts[chunk.index]
        if parts and parts[-1].finish_reason is not None:
            raise ProtocolError(f"a chunk of completion {chunk.index} came after its end")
        if self._whole and chunk.offset == 0:
            parts.clear()
            self._ends[chunk.index] = 0
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
        return [self.joined(index) for index, parts in enumerate(self._parts) if parts]

    def joined(self, index: int) -> Completion:
        """A completion of which something has come, with what has come."""
        return _join(self._parts[index], index)

    def check_complete(self, result: GenerateResult) -> None:
        """Raise `ProtocolError` unless the chunks were all of the result."""
        for completion in result.completions:
            if not 0 <= completion.index < len(self._ends) or len(completion) != self._ends[completion.index]:
                raise ProtocolError(f"the stream of completion {completion.index} lacks tokens that its result has")


def _join(parts: list[Completion], index: int) -> Completion:
    last = parts[-1]
    runs: list[tuple[int, int]] = []
    for version, count in (run for part in parts for run in part.versions):
        if runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1] + count)
        else:
            runs.append((version, count))
    texts = [part.text for part in parts if part.text is not None]
    return Completion(
        index=index,
        token_ids=_concat([part.token_ids for part in parts]),
        logprobs=_concat([part.logprobs for part in parts]),
        raw_logprobs=_concat([part.raw_logprobs for part in parts]),
        drawn_logprobs=_drawn(parts),
        versions=runs,
        finish_reason=last.finish_reason,
        stop=last.stop,
        text="".join(texts) if texts else None,
        seed=next((part.seed for part in parts if part.seed is not None), None),
        error=last.error,
    )


def _drawn(parts: list[Completion]) -> np.ndarray | None:
    if all(part.drawn_logprobs is None for part in parts):
        return None
    # A part without them was drawn from the plain distribution.
    return _concat([part.logprobs if part.drawn_logprobs is None else part.drawn_logprobs for part in parts])


def _concat(arrays: list[np.ndarray]) -> np.ndarray:
    array = np.concatenate(arrays)
    array.flags.writeable = False
    return array
