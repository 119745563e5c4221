"""What scores add to uploads and commits.

Sections:

    top_at                 int64 [n]: which of the drawing rows report their likeliest tokens
    scored_at, _targets    int64 [n]: tokens of the step, and the token whose log-prob each gives; padded
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np

from rollout.engine.features.scores.buffers import Scores
from rollout.engine.schedule.feature import StepFeature
from rollout.engine.schedule.plan import Plan
from rollout.engine.sequence.row_needs import RowNeeds
from rollout.engine.sequence.sequence import Sequence
from rollout.engine.step_output import StepOutput
from rollout.engine.upload import Header, Staging
from trainer_bridge.wire.prompt_tops import PromptTops

NAME = "scores"
#: int32 words of a token that is scored: its place and the next token's id.
SCORED_WORDS = 4

_TOP = RowNeeds.TOP.value  # flags of an enum are slow to test


class Asked(NamedTuple):
    """What a step scores."""

    tops: tuple[int, ...] = ()  # which of the drawing rows report their likeliest tokens
    scored: int = 0  # positions of prompts
    ranked: bool = False  # these have ranks, too
    prompt_tops: bool = False  # and their likeliest tokens

    def to_facts(self) -> list[Any]:
        """As a header has it."""
        return [list(self.tops), *self[1:]]


_NOTHING = Asked()


def asked_of(header: Header) -> Asked:
    """What a step scores."""
    if NAME not in header.facts:
        return _NOTHING
    tops, *others = header.facts[NAME]
    return Asked(tuple(tops), *others)


class StepScores(StepFeature):
    """The scores of one engine's steps. Scored positions of an upload are padded to a multiple of `multiple`."""

    name = NAME

    def __init__(self, multiple: int) -> None:
        self.multiple = multiple

    def words(self, seq: Sequence, length: int) -> int:
        """See `StepFeature`."""
        return SCORED_WORDS * length if seq.scores_prompt else 0

    def pack(self, plan: Plan, staging: Staging) -> None:
        """Put which rows and positions are scored."""
        asked = self._put_scored(plan, staging) if plan.kind == "prefill" else _NOTHING
        if plan.needs.value & _TOP:
            places = [i for i, seq in enumerate(plan.sampled) if seq.drawn.tops.k]
            asked = asked._replace(tops=put_tops(staging, places))
        if asked != _NOTHING:
            staging.facts[NAME] = asked.to_facts()

    def _put_scored(self, plan: Plan, staging: Staging) -> Asked:
        at, targets, begin, most = [], [], 0, -1
        for seq, start, tokens_in, _, prompt in plan.spans:
            if prompt.scored:
                at.append(np.arange(begin, begin + prompt.scored))
                targets.append(seq.group.request.prompt.token_ids[start + 1 : start + 1 + prompt.scored])
                if (tops := seq.group.request.prompt_tops) is not None:
                    most = max(most, tops)
            begin += tokens_in
        if not at:
            return _NOTHING
        scored = put_scored(staging, np.concatenate(at), np.concatenate(targets), self.multiple)
        return Asked(scored=scored, ranked=most >= 0, prompt_tops=most > 0)

    def commit(self, plan: Plan, output: StepOutput) -> None:
        """Give a step's scores to completions and groups."""
        if NAME not in output.of_features:
            return
        scores: Scores = output.of_features[NAME]
        _note_tops(plan, scores, output.accepted)
        taken = 0
        for seq, start, _, _, prompt in plan.spans if len(scores.prompt_N) else ():
            logprobs, prompt_tops = seq.group.prompt_logprobs, seq.group.prompt_tops
            if prompt.scored:
                here, found = slice(start + 1, start + 1 + prompt.scored), slice(taken, taken + prompt.scored)
                if start == 0:  # an earlier prefill may have left values of other weights
                    seq.group.prompt_version = plan.version
                    logprobs[:] = np.nan
                    if prompt_tops is not None:
                        prompt_tops.forget()
                logprobs[here] = scores.prompt_N[found]
                if prompt_tops is not None:
                    _note_prompt_tops(prompt_tops, here, scores, found)
                taken += prompt.scored


def put_tops(staging: Staging, places: Seq[int]) -> tuple[int, ...]:
    """Have the drawing rows at these places report their likeliest tokens."""
    staging.put("top_at", np.array(places, dtype=np.int64))
    return tuple(places)


def put_scored(staging: Staging, at: np.ndarray, targets: np.ndarray, multiple: int) -> int:
    """Have the log-probs of `targets` (ids) given at these tokens of the step. Returns their number.

    What is put is padded to a multiple of `multiple`.
    """
    padding = (0, -len(at) % multiple)
    staging.put("scored_at", np.pad(at, padding).astype(np.int64))
    staging.put("scored_targets", np.pad(targets, padding).astype(np.int64))
    return len(at)


def _note_tops(plan: Plan, scores: Scores, accepted: list[int]) -> None:
    sampled = plan.sampled if scores.places else []
    refused = _refused_places(plan, accepted) if scores.places else ()
    for place, ids_K, logprobs_K in zip(scores.places, scores.top_ids_CK, scores.top_logprobs_CK, strict=True):
        seq = sampled[place]
        if not (seq.finalized or seq.void) and place not in refused:
            tops = seq.drawn.tops
            assert plan.drafts or len(tops) == len(seq.tokens), "a position has one entry"
            tops.add(ids_K, logprobs_K)


def _refused_places(plan: Plan, accepted: list[int]) -> set[int]:
    """Places of the output with tokens that were drawn after a refused draft."""
    refused: set[int] = set()
    for draft in plan.drafts:
        refused.update(range(draft.place + accepted[draft.place] + 1, draft.place + draft.length + 1))
    return refused


def _note_prompt_tops(tops: PromptTops, here: slice, scores: Scores, found: slice) -> None:
    tops.ranks[here] = scores.prompt_ranks_N[found]
    if k := tops.ids.shape[1]:
        tops.ids[here] = scores.prompt_ids_NK[found, :k]
        tops.logprobs[here] = scores.prompt_logprobs_NK[found, :k]
