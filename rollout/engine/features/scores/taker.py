"""Takes the scores of a step on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch
from rollout_kernels.sampling import VocabShard

from rollout.engine.device.streams import Device
from rollout.engine.features.scores.buffers import (
    SCORED_AT_ONCE,
    WIDE_WORDS,
    ScoreBuffers,
    Scores,
    Scoring,
    scored_multiple,
    vocabulary,
)
from rollout.engine.features.scores.feature import (
    NAME,
    SCORED_WORDS,
    AskedScores,
    ScoresFeature,
    asked_scores,
    put_scored,
    put_tops,
)
from rollout.engine.schedule.step_feature import StepFeature
from rollout.engine.step.device_feature import HostParts, LogitsFeature, Site
from rollout.engine.upload import Header, RowNeeds, StepInput, UploadStaging
from rollout.models.decoder import Decoder
from trainer_bridge.wire.request_fields import MAX_PROMPT_TOKENS_SCORED, MAX_TOP_LOGPROBS


class ScoreTaker(LogitsFeature[ScoreBuffers]):
    """Scores of steps over `vocab` tokens. With `exact` sums a row's scores do not depend on the other rows.

    `shard` is the part of the vocabulary that the forwards' logits cover; None if they cover all of it.
    """

    name = NAME
    fresh_words = SCORED_WORDS
    #: Words for named tokens, for padding, and for the wide list of a rehearsal, where the narrow one has all tokens.
    spare_words = (
        WIDE_WORDS
        + (2 * SCORED_WORDS + MAX_PROMPT_TOKENS_SCORED) * SCORED_AT_ONCE
        + SCORED_WORDS * (WIDE_WORDS // MAX_PROMPT_TOKENS_SCORED)
    )

    def __init__(self, device: Device, vocab: int, exact: bool, shard: VocabShard | None) -> None:
        self._device, self._vocab, self._exact, self._part = device, vocab, exact, vocabulary(shard)

    @classmethod
    def make(cls, site: Site) -> ScoreTaker:
        """See `DeviceFeature`: every worker has it."""
        shard = site.model.vocab_shard if isinstance(site.model, Decoder) else None
        return cls(site.device, site.model.spec.vocab, site.settings.engine.deterministic, shard)

    def host_part(self, engine: HostParts, before: StepFeature | None) -> ScoresFeature:
        """Make the part on the host."""
        return ScoresFeature(scored_multiple(self._device.torch_device), self._vocab, self._exact)

    def output(self, words: torch.Tensor, rows: int, tokens: int) -> ScoreBuffers:
        """Make a slot's buffers for scores."""
        return ScoreBuffers(self._device, rows, tokens, self._vocab)

    def reads_hidden(self, header: Header) -> bool:
        """Have the last layer compute all tokens if the step scores a prompt."""
        asked = asked_scores(header)
        return asked.narrow.scored + asked.wide.scored > 0

    def prefilled(
        self,
        step: StepInput,
        hidden_TD: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        output: ScoreBuffers,
    ) -> None:
        """Score positions of prompts."""
        asked = asked_scores(step.header)
        for name, scoring, buffers in (
            ("narrow", asked.narrow, output.narrow),
            ("wide", asked.wide, output.wide),
        ):
            if scoring.scored:
                at_N, targets_N, chosen_NM = step[f"{name}_at"], step[f"{name}_targets"], step.get(f"{name}_chosen")
                buffers.score(hidden_TD, at_N, targets_N, chosen_NM, compute_logits, scoring, self._exact, self._part)

    def computed(self, step: StepInput, logits_SV: torch.Tensor, output: ScoreBuffers) -> None:
        """Find the likeliest tokens of rows that ask for them."""
        if asked_scores(step.header).tops:
            output.take_tops(logits_SV, step["top_at"], self._exact, self._part)

    def downloads(self, header: Header, output: ScoreBuffers) -> Seq[Callable[[], None]]:
        """Copy the scores to the host."""
        asked = asked_scores(header)
        return (functools.partial(output.copy, len(asked.tops), asked.narrow, asked.wide),)

    def read(self, words: np.ndarray, header: Header, output: ScoreBuffers) -> Scores:
        """Hand the scores to the part on the host."""
        return output.read(*asked_scores(header))

    def put_largest(self, staging: UploadStaging, rows: int, token_ids: np.ndarray, needs: RowNeeds) -> None:
        """Score all rows, and all tokens of a prefill, in rehearsals."""
        if not needs & RowNeeds.LOGITS:
            return
        asked = AskedScores(put_tops(staging, range(rows)))
        if len(token_ids):
            multiple = scored_multiple(self._device.torch_device)
            k, wide = min(MAX_TOP_LOGPROBS, self._vocab), min(MAX_PROMPT_TOKENS_SCORED, self._vocab)
            scored = put_scored(staging, "narrow", np.arange(len(token_ids)), token_ids, multiple)
            few = np.arange(min(len(token_ids), WIDE_WORDS // MAX_PROMPT_TOKENS_SCORED))
            chosen = np.zeros((len(few), MAX_PROMPT_TOKENS_SCORED), np.int32)
            put_scored(staging, "wide", few, token_ids[few], multiple, chosen)
            most = Scoring(len(few), True, wide, MAX_PROMPT_TOKENS_SCORED, True)
            asked = AskedScores(asked.tops, Scoring(scored, True, k), most)
        staging.facts[NAME] = asked.to_facts()
