"""A plan: what one step does, as plain data. The scheduler makes it, the runner packs it, the commit reads it back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rollout.engine.schedule.sequence import Feature, Sequence, union_of
from rollout.engine.step.top_logprobs import Scores


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Part of a prompt: positions start..start+length-1 of a sequence."""

    seq: Sequence
    start: int
    length: int
    first: bool  # the row's state is set up by this step
    final: bool  # the prompt is complete after this chunk: a token is sampled
    copy: tuple[int, int] | None  # (source page, target page) to copy before anything is written
    scored: int = 0  # its first positions whose next token is scored: it is the prompt's, and its log-prob is wanted


def next_chunk(seq: Sequence, length: int, page_size: int) -> PromptChunk:
    """The next `length` tokens of a sequence that is being prefilled."""
    assert seq.prefill_tokens is not None
    copy = None if seq.copy_source is None else (seq.copy_source, seq.pages[seq.kv_len // page_size])
    final = seq.kv_len + length == len(seq.prefill_tokens)
    scored = max(0, min(length, seq.prompt_len - 1 - seq.kv_len)) if seq.scores_prompt else 0
    return PromptChunk(seq, seq.kv_len, length, not seq.row_ready, final, copy, scored)


def next_chunks(
    seqs: list[Sequence], tokens: int, words: int, upload_words: Callable[[Sequence, int], int], page_size: int
) -> list[PromptChunk]:
    """What a step takes of these prompts, in their order: so many tokens, and words of what is uploaded, at most.

    Those whose KV is still being brought back wait, and hold nobody up.
    """
    chunks: list[PromptChunk] = []
    for seq in seqs:
        assert seq.prefill_tokens is not None
        if seq.parked is not None and seq.parked.missing:
            continue
        length = min(len(seq.prefill_tokens) - seq.kv_len, tokens)
        needed = upload_words(seq, length)
        if length == 0 or (chunks and needed > words):
            break
        tokens, words = tokens - length, words - needed
        chunks.append(next_chunk(seq, length, page_size))
    return chunks


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. `seqs` are the rows in order; for prefill, the rows of `chunks`."""

    kind: Literal["decode", "prefill"]
    seqs: list[Sequence]
    features: Feature
    version: int  # weights version that the step is launched with
    max_context: int  # longest context in the step, this step's tokens included
    new_pages: list[int]  # decode: for each row the page that its token opens, 0 if it opens none
    chunks: list[PromptChunk]  # prefill

    @property
    def sampled(self) -> list[Sequence]:
        """The rows that get a token, in the order of the output."""
        return [chunk.seq for chunk in self.chunks if chunk.final] if self.chunks else self.seqs

    @property
    def held(self) -> bool:
        """True if the draw waits for masks."""
        return bool(self.features & Feature.CONSTRAIN)

    @property
    def tokens(self) -> int:
        """Input tokens of the step."""
        return sum(chunk.length for chunk in self.chunks) if self.chunks else len(self.seqs)


def decode_plan(seqs: list[Sequence], version: int, page_size: int) -> Plan:
    """One token for each of these rows."""
    new_pages = [0 if seq.kv_len % page_size else seq.pages[seq.kv_len // page_size] for seq in seqs]
    longest = max(seq.kv_len for seq in seqs) + 1
    return Plan("decode", seqs, union_of(seqs), version, longest, new_pages, [])


def prefill_plan(chunks: list[PromptChunk], version: int) -> Plan:
    """These pieces of prompts."""
    seqs = [chunk.seq for chunk in chunks]
    longest = max(chunk.start + chunk.length for chunk in chunks)
    features = union_of(chunk.seq for chunk in chunks if chunk.final)
    return Plan("prefill", seqs, features, version, longest, [], chunks)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step sampled, one entry a sampled row: every decode row, or every final chunk."""

    tokens: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    drawn_logprobs: list[float]
    scores: Scores | None = None  # where the step has any
    record: np.ndarray | None = None  # int32 [tokens, words]: experts, see `routing`; of every token of the step
