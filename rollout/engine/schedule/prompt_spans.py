"""What one step takes of the prompts that are being computed."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from rollout.engine.schedule.feature import StepFeature
from rollout.engine.schedule.plan import PromptPart, Span
from rollout.engine.sequence.sequence import Sequence


def prompt_spans(
    seqs: list[Sequence],
    tokens: int,
    words: int,
    upload_words: Callable[[Sequence, int], int],
    page_size: int,
    features: Seq[StepFeature] = (),
) -> list[Span]:
    """What one step takes of these prompts, in their order: at most `tokens` tokens and `words` int32 of upload.

    A sequence whose KV is still being copied back waits, and the others do not wait for it. The step also ends where a
    feature has no room for more.
    """
    spans: list[Span] = []
    for feature in features:
        feature.plan_begins()
    for seq in seqs:
        kv = seq.kv
        if kv.offloaded is not None and kv.offloaded.restoring:
            continue
        length = min(len(kv.prefill_tokens) - kv.length, tokens)
        if kv.planned_snapshot is not None and kv.length < kv.planned_snapshot.tokens:
            length = min(length, kv.planned_snapshot.tokens - kv.length)  # a state is saved between two steps
        needed = upload_words(seq, length) + sum(feature.words(seq, length) for feature in features)
        if length == 0 or (spans and needed > words):
            break
        wanted = length
        for feature in features:
            length = feature.fit(seq, kv.length, length)
        if length:
            tokens, words = tokens - length, words - needed
            spans.append(prompt_span(seq, length, page_size, features))
        if length < wanted:
            break
    return spans


def prompt_span(seq: Sequence, length: int, page_size: int, features: Seq[StepFeature] = ()) -> Span:
    """The next `length` tokens of a sequence that is being prefilled."""
    kv = seq.kv
    start, end = kv.length, kv.length + length
    scored = max(0, min(length, seq.prompt_len - 1 - start)) if seq.scores_prompt else 0
    copies = () if kv.copy_source is None else ((kv.copy_source, kv.pages[start // page_size]),)
    planned = kv.planned_snapshot
    saves = ((seq.row, planned.place),) if planned is not None and planned.tokens == start else ()
    loads = () if kv.load_from is None else ((kv.load_from, seq.row),)
    decodes = all(feature.decodes(seq, start, length) for feature in features)
    draws = int(end == len(kv.prefill_tokens) and seq.launched < seq.max_tokens)
    part = PromptPart(kv.prefill_tokens[start:end], scored, copies, saves, loads, decodes)
    return Span(seq, start, length, draws, part)
