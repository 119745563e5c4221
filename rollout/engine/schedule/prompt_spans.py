"""The part of the unfinished prompts that one step computes."""

from __future__ import annotations

from collections.abc import Callable

from rollout.engine.schedule.plan import PromptPart, Span
from rollout.engine.schedule.refusal import SchedulerLimits
from rollout.engine.schedule.roster import Roster
from rollout.engine.sequence.sequence import Sequence


def prompt_spans(roster: Roster, limits: SchedulerLimits, upload_words: Callable[[Sequence, int], int]) -> list[Span]:
    """The spans of prompts for one step, in their order, within `limits`; `upload_words` bounds those of a span.

    A sequence whose KV is still being copied back waits, and the others do not wait for it. The step also ends where a
    feature has no room for more.
    """
    spans: list[Span] = []
    tokens, words, page_size = limits.chunk_tokens, limits.upload_words, roster.allocator.page_size
    for seq in roster.prefilling:
        kv = seq.kv
        if kv.restoring:
            continue
        length = min(kv.chunk_end - kv.length, tokens)
        needed = upload_words(seq, length)
        if length == 0 or (spans and needed > words):
            break
        wanted = length
        for feature in roster.features:
            length = feature.fit(seq, kv.length, length, first=not spans)
        if length:
            tokens, words = tokens - length, words - needed
            spans.append(prompt_span(seq, length, page_size))
        if length < wanted:
            break
    return spans


def prompt_span(seq: Sequence, length: int, page_size: int) -> Span:
    """The next `length` tokens of a sequence that is being prefilled."""
    kv = seq.kv
    start, end = kv.length, kv.length + length
    unscored = max(0, seq.scores_after - start)  # tokens before the first that is scored
    scored = max(0, min(end, seq.prompt_len - 1) - start - unscored) if seq.scores_prompt else 0
    draws = int(end == len(kv.prefill_tokens) and seq.launched < seq.max_tokens)
    part = PromptPart(
        kv.prefill_tokens[start:end],
        scored,
        copies=kv.copies_to(kv.pages[start // page_size]),
        saves=kv.saves_of(seq.row),
        loads=kv.loads_of(seq.row),
        decodes=seq.group.request.prompt.follows_row(start, end),
        unscored=unscored,
    )
    return Span(seq, start, length, draws, part)
