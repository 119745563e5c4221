"""Takes the scores of a step on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch
from rollout_kernels.sampling import VocabShard

from rollout.engine.device.streams import Device
from rollout.engine.features.scores.buffers import SCORED_AT_ONCE, ScoreBuffers, Scores, scored_multiple, vocabulary
from rollout.engine.features.scores.feature import NAME, SCORED_WORDS, Asked, StepScores, asked_of, put_scored, put_tops
from rollout.engine.features.site import Site
from rollout.engine.schedule.feature import StepFeature
from rollout.engine.sequence.row_needs import RowNeeds
from rollout.engine.step.feature import DeviceFeature, HostParts
from rollout.engine.upload import Header, Staging, StepInput
from rollout.models.decoder import Decoder


class ScoreTaker(DeviceFeature):
    """Scores of steps over `vocab` tokens. With `exact` sums a row's scores do not depend on the other rows.

    `shard` is the part of the vocabulary that the logits of forwards are of; None if all.
    """

    name = NAME
    token_words = SCORED_WORDS
    spare_words = SCORED_WORDS * SCORED_AT_ONCE  # padding

    def __init__(self, device: Device, vocab: int, exact: bool, shard: VocabShard | None) -> None:
        self._device, self._vocab, self._exact, self._part = device, vocab, exact, vocabulary(shard)

    @classmethod
    def make(cls, site: Site) -> ScoreTaker:
        """See `DeviceFeature`: every worker has it."""
        shard = site.model.vocab_shard if isinstance(site.model, Decoder) else None
        return cls(site.device, site.model.spec.vocab, site.settings.engine.deterministic, shard)

    def host_part(self, engine: HostParts, before: StepFeature | None) -> StepScores:
        """See `DeviceFeature`."""
        return StepScores(scored_multiple(self._device.torch_device))

    def slot_output(self, rows: int, tokens: int, words: torch.Tensor) -> ScoreBuffers:
        """See `DeviceFeature`."""
        return ScoreBuffers(self._device, rows, tokens, self._vocab)

    def reads_hidden(self, header: Header) -> bool:
        """See `DeviceFeature`."""
        return asked_of(header).scored > 0

    def prefilled(
        self,
        step: StepInput,
        hidden_TD: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        output: ScoreBuffers,
    ) -> None:
        """Score positions of prompts."""
        asked = asked_of(step.header)
        if asked.scored:
            of_step = hidden_TD, step["scored_at"], step["scored_targets"], compute_logits, self._exact
            output.score_prompt(*of_step, ranked=asked.ranked, tops=asked.prompt_tops, vocab=self._part)

    def computed(self, step: StepInput, logits_SV: torch.Tensor, output: ScoreBuffers) -> None:
        """Find the likeliest tokens of rows that ask for them."""
        if NAME in step.header.facts and asked_of(step.header).tops:
            output.take_tops(logits_SV, step["top_at"], self._exact, self._part)

    def downloads(self, header: Header, output: ScoreBuffers) -> Seq[Callable[[], None]]:
        """See `DeviceFeature`."""
        if NAME not in header.facts:
            return ()
        tops, scored, ranked, prompt_tops = asked_of(header)
        return (functools.partial(output.copy, len(tops), scored, ranked=ranked, prompt_tops=prompt_tops),)

    def downloaded(self, header: Header, output: ScoreBuffers) -> Scores | None:
        """See `DeviceFeature`."""
        if NAME not in header.facts:
            return None
        tops, scored, ranked, prompt_tops = asked_of(header)
        return output.read(tops, scored, ranked=ranked, prompt_tops=prompt_tops)

    def put_largest(self, staging: Staging, rows: int, token_ids: np.ndarray | None, needs: RowNeeds) -> None:
        """All rows, and all tokens of a prefill."""
        if not needs & RowNeeds.TOP:
            return
        asked = Asked(put_tops(staging, range(rows)))
        if token_ids is not None:
            multiple = scored_multiple(self._device.torch_device)
            scored = put_scored(staging, np.arange(len(token_ids)), token_ids, multiple)
            asked = Asked(asked.tops, scored, ranked=True, prompt_tops=True)
        staging.facts[NAME] = asked.to_facts()
