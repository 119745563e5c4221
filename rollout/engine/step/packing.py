"""Parts of an upload that several kinds of step have, and how large an upload can become."""

from __future__ import annotations

from collections.abc import Sequence as Sequences

import numpy as np

from rollout.engine.schedule.plan import Plan, PromptChunk
from rollout.engine.schedule.sequence import Feature, Sequence
from rollout.engine.step.row_state import most_setup_words, setup_words
from rollout.engine.step.scores import SCORED_AT_ONCE
from rollout.engine.step.slot import Slot

#: int32 words of an upload. A token: id, position, chunk. A chunk: rows, ends, lengths, samples, tops, copy, alignment.
_TOKEN_WORDS = 6
_SCORED_WORDS = 4  # of a token that is scored, more: its place and the next token's id
_CHUNK_WORDS = 22
_TOP = Feature.TOP.value  # flags of an enum are slow to test
#: What padding of the scored tokens adds to an upload at the most.
PADDING_WORDS = _SCORED_WORDS * SCORED_AT_ONCE


def upload_words(seq: Sequence, length: int) -> int:
    """Upper bound on the int32 words that a prefill chunk of `length` tokens adds to an upload."""
    words = (_TOKEN_WORDS + _SCORED_WORDS * seq.scores_prompt) * length + _CHUNK_WORDS
    if not seq.row_ready:
        assert seq.prefill_tokens is not None
        words += setup_words(seq, len(seq.prefill_tokens)) + 2
    return words


def slot_words(max_rows: int, max_pages: int, max_context: int, chunk_tokens: int) -> int:
    """Size of a slot's staging buffer, int32 words: any decode step, any one chunk, and many small chunks."""
    largest = (_TOKEN_WORDS + _SCORED_WORDS) * chunk_tokens + _CHUNK_WORDS + most_setup_words(max_pages, max_context)
    return max(6 * max_rows, largest) + 64 * max_rows + PADDING_WORDS + 1024


def put_tops(slot: Slot, plan: Plan) -> None:
    """Have the likeliest tokens of the rows told that ask for them."""
    if plan.features.value & _TOP:
        places = [i for i, seq in enumerate(plan.sampled) if seq.tops is not None]
        slot.put("top_at", slot.scores.want_tops(places))


def put_scored(slot: Slot, chunks: Sequences[PromptChunk]) -> None:
    """Have the log-probs of prompts told that ask for them."""
    at, targets, begin = [], [], 0
    for chunk in chunks:
        if chunk.scored:
            at.append(np.arange(begin, begin + chunk.scored))
            targets.append(chunk.seq.group.request.prompt[chunk.start + 1 : chunk.start + 1 + chunk.scored])
        begin += chunk.length
    if at:
        put_scored_at(slot, np.concatenate(at), np.concatenate(targets))


def put_scored_at(slot: Slot, at: np.ndarray, targets: np.ndarray) -> None:
    """Have the log-probs of `targets` (ids) told at these places among the tokens of a step."""
    padded_at, padded_targets = slot.scores.want_prompt(at, targets)
    slot.put("scored_at", padded_at)
    slot.put("scored_targets", padded_targets)


def chunk_tokens(chunk: PromptChunk) -> np.ndarray:
    """Its token ids, int64 [length]."""
    assert chunk.seq.prefill_tokens is not None
    return chunk.seq.prefill_tokens[chunk.start : chunk.start + chunk.length].astype(np.int64)
