"""Scores in uploads and commits.

Sections:

    top_at                     int64 [n]: the drawing rows that report their likeliest tokens
    narrow_at, narrow_targets  int64 [n]: tokens of the step, and the token whose log-prob each gives; padded
    wide_at, wide_targets      the same of the wide list (`buffers.py`)
    wide_chosen                int32 [n, M]: tokens whose log-probs each gives; padded
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rollout.engine.features.scores.buffers import WIDE_WORDS, ScoredPrompts, ScoredSpan, Scores, Scoring
from rollout.engine.messages.requests import NO_CHOSEN, Request
from rollout.engine.messages.to_service import DeltaFields, DoneFields
from rollout.engine.schedule.plan import Plan, Span
from rollout.engine.schedule.step_feature import RequestFeature
from rollout.engine.sequence.sequence import Group, Sequence, SequenceState
from rollout.engine.upload import Header, RowNeeds, StepOutput, UploadStaging
from trainer_bridge.wire.prompt_tops import PromptTops
from trainer_bridge.wire.request_fields import MAX_PROMPT_TOKENS_SCORED, MAX_TOP_LOGPROBS

NAME = "scores"
#: int32 words of a token that is scored: its position in the step and the next token's id.
SCORED_WORDS = 4

_LOGITS = RowNeeds.LOGITS.value  # flags of an enum are slow to test


class AskedScores(NamedTuple):
    """The rows and positions that a step scores."""

    tops: tuple[int, ...] = ()  # the drawing rows that report their likeliest tokens
    narrow: Scoring = Scoring()
    wide: Scoring = Scoring()
    spans: tuple[ScoredSpan, ...] = ()

    def to_facts(self) -> list[Any]:
        return [list(self.tops), list(self.narrow), list(self.wide), [list(span) for span in self.spans]]


_NOTHING = AskedScores()


def asked_scores(header: Header) -> AskedScores:
    """Read from a header what its step scores."""
    if NAME not in header.facts:
        return _NOTHING
    tops, narrow, wide, spans = header.facts[NAME]
    return AskedScores(tuple(tops), Scoring(*narrow), Scoring(*wide), tuple(ScoredSpan(*span) for span in spans))


def wide_words(request: Request) -> int:
    """The most tokens that a request scores at a position, if its prompt is in the wide list; else 0."""
    tops, chosen = request.prompt_top_logprobs or 0, request.chosen.shape[-1]
    if not chosen and not request.prompt_entropy and tops <= MAX_TOP_LOGPROBS:
        return 0
    return max(1, tops, chosen)


@dataclass(slots=True)
class _List:
    """One list of the positions that a step scores."""

    at: list[np.ndarray] = field(default_factory=list)
    targets: list[np.ndarray] = field(default_factory=list)
    chosen: list[np.ndarray] = field(default_factory=list)  # int32 [positions, M]; M may be 0
    ranked: bool = False
    tops: int = 0
    entropy: bool = False

    def add(self, span: Span, begin: int, first: int, scored: int) -> None:
        """Add `scored` tokens of a span, after its `first` tokens; the span begins at token `begin` of the step."""
        request, token = span.seq.group.request, span.start + first + 1
        self.at.append(np.arange(begin + first, begin + first + scored))
        self.targets.append(request.prompt.token_ids[token : token + scored])
        self.chosen.append(_chosen(request, token, scored))
        self.ranked |= request.prompt_top_logprobs is not None
        self.tops = max(self.tops, request.prompt_top_logprobs or 0)
        self.entropy |= request.prompt_entropy

    def put(self, staging: UploadStaging, name: str, multiple: int, tops: int) -> Scoring:
        """Put the list; `tops`: the likeliest tokens that are found if any are asked for."""
        if not self.at:
            return Scoring()
        most = max(rows.shape[1] for rows in self.chosen)
        chosen = np.concatenate([np.pad(rows, ((0, 0), (0, most - rows.shape[1]))) for rows in self.chosen])
        scored = put_scored(staging, name, np.concatenate(self.at), np.concatenate(self.targets), multiple, chosen)
        return Scoring(scored, self.ranked, tops if self.tops else 0, most, self.entropy)


def _chosen(request: Request, token: int, scored: int) -> np.ndarray:
    """The tokens that a request names for `scored` tokens of its prompt from `token` on, int32 [scored, M]."""
    ids = request.chosen
    first = token - request.scored_from
    return ids[first : first + scored] if ids.ndim == 2 else np.broadcast_to(ids, (scored, len(ids)))


class ScoresFeature(RequestFeature):
    """The scores of one engine's steps over `vocab` tokens.

    Scored positions of an upload are padded to a multiple of `multiple`. With `exact` each step finds the
    same number of likeliest tokens; otherwise other prompts change the order of equal ones.
    """

    name = NAME

    def __init__(self, multiple: int, vocab: int, exact: bool) -> None:
        self.multiple = multiple
        self._narrow_tops, self._wide_tops = min(MAX_TOP_LOGPROBS, vocab), min(MAX_PROMPT_TOKENS_SCORED, vocab)
        self._exact = exact
        self.most_words = WIDE_WORDS
        self._wide, self._widest = 0, 0  # the step being planned: scored positions, most tokens at one
        self.prompts: dict[Group, PromptScoreRows] = {}  # the known scores of prompts
        self.tops: dict[Sequence, TopTokens] = {}  # top tokens of unfinished sequences

    def enter(self, group: Group) -> None:
        """A prompt that is scored has to be computed, except for tokens before the first one with scored logits."""
        if group.request.prompt_logprobs:
            group.fresh_from = _first_scored(group.request)
        if group.request.logprobs:
            group.needs |= RowNeeds.LOGITS

    def fit(self, seq: Sequence, start: int, length: int, first: bool) -> int:
        """Take tokens up to the last position for which the wide list has room."""
        if first:
            self._wide = self._widest = 0
        if (scored := _scored_from(seq)) is None or not (wide := wide_words(seq.group.request)):
            return length
        unscored = max(0, scored - start)  # tokens before the first one with a score
        if unscored >= length:
            return length
        widest = max(self._widest, MAX_PROMPT_TOKENS_SCORED if self._exact else wide)
        length = min(length, unscored + max(0, self.most_words // widest - self._wide))
        if length > unscored:
            self._wide, self._widest = self._wide + length - unscored, widest
        return length

    def pack(self, plan: Plan, staging: UploadStaging) -> None:
        """Put the rows and positions that are scored."""
        asked = self._put_prompts(plan, staging) if plan.kind == "prefill" else _NOTHING
        if plan.needs.value & _LOGITS:
            top_rows = [i for i, seq in enumerate(plan.sampled) if seq.group.request.logprobs]
            asked = asked._replace(tops=put_tops(staging, top_rows))
        if asked != _NOTHING:
            staging.facts[NAME] = asked.to_facts()

    def _put_prompts(self, plan: Plan, staging: UploadStaging) -> AskedScores:
        narrow, wide, begin, spans = _List(), _List(), 0, list[ScoredSpan]()
        for index, span in enumerate(plan.spans):
            if (scored := _scored_from(span.seq)) is not None:
                first = max(0, scored - span.start)
                count = min(span.start + span.tokens_in, span.seq.prompt_len - 1) - span.start - first
                if count > 0:
                    spans.append(ScoredSpan(index, first, count))
                    (wide if wide_words(span.seq.group.request) else narrow).add(span, begin, first, count)
            begin += span.tokens_in
        wide_tops = self._wide_tops if self._exact else wide.tops
        return AskedScores(
            narrow=narrow.put(staging, "narrow", self.multiple, self._narrow_tops),
            wide=wide.put(staging, "wide", self.multiple, wide_tops),
            spans=tuple(spans),
        )

    def launched(self, plan: Plan) -> None:
        """A prompt that is launched as a whole is fresh: from now on its group may reuse it."""
        for span in plan.spans if plan.kind == "prefill" else ():
            if span.seq.state is SequenceState.DECODE:
                span.seq.group.fresh_from = None

    def commit(self, plan: Plan, output: StepOutput) -> None:
        """Give a step's scores to completions and groups."""
        if NAME not in output.of_features:
            return
        scores = output.of(NAME, Scores)
        self._note_tops(plan, scores, output.accepted)
        taken = {False: 0, True: 0}
        for index, first, count in scores.spans:
            seq, start, *_ = plan.spans[index]
            group, request, token = seq.group, seq.group.request, start + first + 1
            wide, row = wide_words(request) > 0, token - request.scored_from
            found = slice(taken[wide], taken[wide] + count)
            taken[wide] += count
            if group.unfinished == 0:
                continue
            if group not in self.prompts or token == _first_scored(request) + 1:  # an earlier prefill had other weights
                self.prompts[group] = PromptScoreRows.unknown(request, plan.version)
            _note_prompt(self.prompts[group], slice(row, row + count), scores.wide if wide else scores.narrow, found)

    def delta_fields(self, seq: Sequence) -> DeltaFields:
        """Add top tokens and, once, the scores of the prompt."""
        drawn, fields = seq.drawn, DeltaFields()
        if seq.index == 0 and drawn.flushed == drawn.known:
            fields.update(self._prompt_fields(seq.group))
        if seq.group.request.logprobs:
            fields["top_ids"], fields["top_logprobs"] = self._tops_of(seq).between(drawn.flushed, len(drawn.tokens))
        return fields

    def delta_made(self, seq: Sequence) -> None:
        """After its last delta a sequence keeps nothing: its group may run for long."""
        if seq.finish is not None:
            self.tops.pop(seq, None)

    def done_fields(self, group: Group) -> DoneFields:
        """The scores of the prompt."""
        fields = self._prompt_fields(group)
        self.prompts.pop(group, None)
        return fields

    def _prompt_fields(self, group: Group) -> DoneFields:
        if not group.request.prompt_logprobs:
            return {}
        return (self.prompts.get(group) or PromptScoreRows.unknown(group.request)).event_fields()

    def check(self) -> None:
        assert not self.prompts, "the scores of a prompt are left"
        assert not self.tops, "top tokens of a sequence that has ended are kept"

    def _tops_of(self, seq: Sequence) -> TopTokens:
        if seq not in self.tops:
            self.tops[seq] = TopTokens(seq.group.request.logprobs, seq.drawn.known)
        return self.tops[seq]

    def _note_tops(self, plan: Plan, scores: Scores, accepted: list[int]) -> None:
        sampled = plan.sampled if scores.top_rows else []
        refused = _refused_draws(plan, accepted) if scores.top_rows else ()
        last = None
        for index, ids_K, logprobs_K in zip(scores.top_rows, scores.top_ids_CK, scores.top_logprobs_CK, strict=True):
            seq = sampled[index]
            if not (seq.finalized or seq.void) and index not in refused:
                tops = self._tops_of(seq)
                if seq is not last:
                    tops.cut(len(seq.tokens))
                    assert len(tops) == len(seq.tokens), "a token has one entry"
                tops.add(ids_K, logprobs_K)
                last = seq


def _first_scored(request: Request) -> int:
    """The first token of a prompt whose logits are scored: its logits give the log-prob of the next token."""
    return max(request.scored_from - 1, 0)


def _scored_from(seq: Sequence) -> int | None:
    """The first token whose logits are scored, if the prompt is, and this sequence computes it."""
    request = seq.group.request
    return _first_scored(request) if request.prompt_logprobs and seq.fresh_from is not None else None


def put_tops(staging: UploadStaging, top_rows: Seq[int]) -> tuple[int, ...]:
    """Have the drawing rows at these indices report their likeliest tokens."""
    staging.put("top_at", np.array(top_rows, dtype=np.int64))
    return tuple(top_rows)


def put_scored(
    staging: UploadStaging,
    name: str,
    at: np.ndarray,
    targets: np.ndarray,
    multiple: int,
    chosen: np.ndarray = NO_CHOSEN,
) -> int:
    """Have the log-probs of `targets` (ids), and of `chosen` (ids by row), given at these tokens of the step.

    Returns their number. The section is padded to a multiple of `multiple`.
    """
    padding = (0, -len(at) % multiple)
    staging.put(f"{name}_at", np.pad(at, padding).astype(np.int64))
    staging.put(f"{name}_targets", np.pad(targets, padding).astype(np.int64))
    if chosen.size:
        staging.put(f"{name}_chosen", np.pad(chosen, (padding, (0, 0))).astype(np.int32))
    return len(at)


def _refused_draws(plan: Plan, accepted: list[int]) -> set[int]:
    """Indices of the output with tokens that were drawn after a refused one."""
    refused: set[int] = set()
    for ahead in plan.ahead:
        refused.update(range(ahead.draw_index + accepted[ahead.draw_index] + 1, ahead.draw_index + ahead.length + 1))
    return refused


def _note_prompt(known: PromptScoreRows, here: slice, scores: ScoredPrompts, found: slice) -> None:
    known.logprobs[here] = scores.logprobs_N[found]
    if known.tops is not None:
        known.tops.ranks[here] = scores.ranks_N[found]
        if k := known.tops.ids.shape[1]:
            known.tops.ids[here] = scores.ids_NK[found, :k]
            known.tops.logprobs[here] = scores.top_logprobs_NK[found, :k]
    if known.chosen.shape[1]:
        known.chosen[here] = scores.chosen_NM[found, : known.chosen.shape[1]]
    if known.entropy is not None:
        known.entropy[here] = scores.entropy_N[found]


class TopTokens:
    """The `k` likeliest tokens at each position of one completion; zeros at the first `known` positions.

    They are added before the tokens of the same step. So there may be entries of tokens that are not kept. A reader
    asks for the tokens that exist, and the next step replaces the other entries.
    """

    def __init__(self, k: int, known: int) -> None:
        self.k = k
        self._ids = array("i", bytes(4 * k * known))
        self._logprobs = array("f", bytes(4 * k * known))

    def __len__(self) -> int:
        return len(self._ids) // self.k

    def add(self, ids_K: np.ndarray, logprobs_K: np.ndarray) -> None:
        """Add the next position: int32 and float32, likeliest first, at least k of each."""
        self._ids.frombytes(ids_K[: self.k].tobytes())
        self._logprobs.frombytes(logprobs_K[: self.k].tobytes())

    def cut(self, tokens: int) -> None:
        """Forget the positions from this one on."""
        del self._ids[tokens * self.k :]
        del self._logprobs[tokens * self.k :]

    def between(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions start..end-1: ids int32 and log-probs float32, [end - start, k] each."""
        part, shape = slice(start * self.k, end * self.k), (end - start, self.k)
        ids, logprobs = np.frombuffer(self._ids, np.int32), np.frombuffer(self._logprobs, np.float32)
        return ids[part].reshape(shape).copy(), logprobs[part].reshape(shape).copy()


@dataclass(slots=True)
class PromptScoreRows:
    """The known scores of a prompt. N: scored tokens.

    Row i belongs to token `scored_from` + i; unknown rows are NaN.
    """

    logprobs: np.ndarray  # float32 [N]
    tops: PromptTops | None  # top tokens of the same tokens
    chosen: np.ndarray  # float32 [N, K]: log-probs of the tokens that the request names
    entropy: np.ndarray | None  # float32 [N], nats
    version: int | None = None  # weights version of these scores; None if no version is known

    @classmethod
    def unknown(cls, request: Request, version: int | None = None) -> PromptScoreRows:
        """Rows for the scores that a request asks for, all unknown."""
        rows = len(request.prompt) - request.scored_from
        return cls(
            np.full(rows, np.nan, np.float32),
            None if request.prompt_top_logprobs is None else PromptTops.unknown(rows, request.prompt_top_logprobs),
            np.full((rows, request.chosen.shape[-1]), np.nan, np.float32),
            np.full(rows, np.nan, np.float32) if request.prompt_entropy else None,
            version,
        )

    def event_fields(self) -> DoneFields:
        """The fields of an event, with copies of the present values: later chunks still write to these."""
        return {
            "prompt_logprobs": self.logprobs.copy(),
            "prompt_tops": None if self.tops is None else self.tops.copy(),
            "prompt_chosen_logprobs": self.chosen.copy() if self.chosen.shape[1] else None,
            "prompt_entropy": None if self.entropy is None else self.entropy.copy(),
            "prompt_version": self.version,
        }
