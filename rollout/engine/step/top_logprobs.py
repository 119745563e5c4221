"""What the host keeps of a step's scores: the likeliest tokens of each completion, the log-probs of a group's prompt.

Tops are added before the tokens of the same step, so a completion that ends without its newest token may have one
entry too many; whoever reads them asks for the entries of tokens that there are.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rollout.engine.schedule.plan import Plan


class TopTokens:
    """The `k` likeliest tokens at each position of one completion, of which the first `known` are not known."""

    def __init__(self, k: int, known: int) -> None:
        self.k = k
        self._ids = array("i", bytes(4 * k * known))
        self._logprobs = array("f", bytes(4 * k * known))

    def __len__(self) -> int:
        return len(self._ids) // self.k

    def add(self, ids_K: np.ndarray, logprobs_K: np.ndarray) -> None:
        """The next position: int32 and float32, likeliest first, at least k of each."""
        self._ids.frombytes(ids_K[: self.k].tobytes())
        self._logprobs.frombytes(logprobs_K[: self.k].tobytes())

    def between(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions start..end-1: ids int32 and log-probs float32, [end - start, k] each."""
        part, shape = slice(start * self.k, end * self.k), (end - start, self.k)
        ids, logprobs = np.frombuffer(self._ids, np.int32), np.frombuffer(self._logprobs, np.float32)
        return ids[part].reshape(shape).copy(), logprobs[part].reshape(shape).copy()


@dataclass(frozen=True, slots=True)
class Scores:
    """What a step says beyond its tokens."""

    places: tuple[int, ...]  # of the rows with tops, among those that sample
    top_ids_CK: np.ndarray  # int32, likeliest first; K is MAX_TOP_LOGPROBS, or the vocabulary if that is smaller
    top_logprobs_CK: np.ndarray  # float32
    prompt_N: np.ndarray  # float32, of the prompt tokens that the step's chunks score, in their order


def note_scores(plan: Plan, scores: Scores) -> None:
    """Give a step's scores to completions and groups; before its tokens are taken."""
    sampled = plan.sampled if scores.places else []
    for place, ids_K, logprobs_K in zip(scores.places, scores.top_ids_CK, scores.top_logprobs_CK, strict=True):
        seq = sampled[place]
        if not seq.finalized:
            assert seq.tops is not None and len(seq.tops) == len(seq.tokens), "a position has one entry"
            seq.tops.add(ids_K, logprobs_K)
    taken = 0
    for chunk in plan.chunks if len(scores.prompt_N) else ():
        prompt = chunk.seq.group.prompt_logprobs
        if chunk.scored and prompt is not None:
            if chunk.start == 0:
                prompt[:] = np.nan  # what an earlier prefill of it left may be of other weights
            prompt[chunk.start + 1 : chunk.start + 1 + chunk.scored] = scores.prompt_N[taken : taken + chunk.scored]
            taken += chunk.scored
