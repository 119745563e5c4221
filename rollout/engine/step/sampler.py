"""Draws tokens from logits: gathers the rows' settings, draws, carries the token to the row state, writes the output.

A row that samples has one token more with KV than its LENGTH says (the step's own); sampling advances LENGTH by one.
On a GPU the draw is a Triton kernel that writes token, log-probs and row state; on a CPU it is the torch twin.

Legend: S rows that sample, V vocabulary, I and F columns of the row state.
"""

import torch
from rollout_kernels import Sampled, SamplingRows, change_logits, sample
from rollout_kernels.sampling import VocabShard, sample_shard

from rollout.engine.step.masks import StepMasks
from rollout.engine.step.row_state import (
    FIRST_FLOAT_RULE,
    FIRST_INT_RULE,
    FLOAT_RULES,
    INT_RULES,
    LAST,
    LENGTH,
    MIN_TOKENS,
    NOISE,
    PROMPT,
    SEED,
    TEMPERATURE,
    RowState,
)
from rollout.engine.upload import NEEDS, RowNeeds

_COLUMNS = {
    "LAST": LAST,
    "LENGTH": LENGTH,
    "PROMPT": PROMPT,
    "SEED": SEED,
    "TEMPERATURE": TEMPERATURE,
    "NOISE": NOISE,
}
#: Field of `SamplingRows`, bit of `RowNeeds` and column of each sampling rule.
_INT_FIELDS = [(f"{rule.name}_S", NEEDS[rule.part].value, i) for i, rule in enumerate(INT_RULES, FIRST_INT_RULE)]
_FLOAT_FIELDS = [(f"{rule.name}_S", NEEDS[rule.part].value, i) for i, rule in enumerate(FLOAT_RULES, FIRST_FLOAT_RULE)]


class Sampler:
    """Draws tokens for rows of one row state; everything runs on the compute stream.

    With a `shard`, logits cover its part of the vocabulary. Each rank draws over it, and all draw the same tokens.
    """

    def __init__(self, rows: RowState, shard: VocabShard | None = None) -> None:
        self.rows = rows
        self._shard = shard

    def __call__(
        self,
        logits_SV: torch.Tensor,
        rows_S: torch.Tensor,
        needs: RowNeeds,
        output_4R: torch.Tensor,
        masks: StepMasks | None = None,
    ) -> None:
        """Draw a token for each of `rows_S` (int64) from float32 logits; `output_4R` is a slot's output.

        `masks` is read only with `RowNeeds.CONSTRAIN`.
        """
        if logits_SV.is_cuda:
            self._draw_on_gpu(logits_SV, rows_S, needs, output_4R, masks)
        else:
            self._draw(logits_SV, rows_S, needs, output_4R, masks)
        if needs & RowNeeds.PENALIZE:
            one = torch.ones((), dtype=torch.int32, device=rows_S.device)
            tokens_S = output_4R[0, : len(rows_S)].long()
            self.rows.counts.index_put_((rows_S, tokens_S), one, accumulate=True)

    def _draw(
        self,
        logits_SV: torch.Tensor,
        rows_S: torch.Tensor,
        needs: RowNeeds,
        output_4R: torch.Tensor,
        masks: StepMasks | None,
    ) -> None:
        ints_SI, shard = self.rows.ints.index_select(0, rows_S), self._shard
        settings = self._settings(rows_S, ints_SI, needs, masks, logits_SV.shape[1])
        sampled = sample(logits_SV, settings) if shard is None else sample_shard(logits_SV, settings, shard)
        ints_SI[:, LAST] = sampled.tokens_S
        ints_SI[:, LENGTH] += 1
        self.rows.ints.index_copy_(0, rows_S, ints_SI)
        _write_output(output_4R, sampled)

    def _draw_on_gpu(
        self,
        logits_SV: torch.Tensor,
        rows_S: torch.Tensor,
        needs: RowNeeds,
        output_4R: torch.Tensor,
        masks: StepMasks | None,
    ) -> None:
        from rollout_kernels.sampling.triton_draw import draw_and_advance
        from rollout_kernels.sampling.triton_truncate import truncate

        drawn_SV = None
        if needs.reshapes:
            ints_SI = self.rows.ints.index_select(0, rows_S)
            settings = self._settings(rows_S, ints_SI, needs, masks, logits_SV.shape[1])
            drawn_SV = change_logits(logits_SV, settings) / settings.temperature_S[:, None]
            if settings.top_k_S is not None:
                truncate(drawn_SV, settings, self._shard)
        rows = self.rows
        draw_and_advance(logits_SV, drawn_SV, rows_S, rows.ints, rows.floats, output_4R, _COLUMNS, self._shard)

    def _settings(
        self, rows_S: torch.Tensor, ints_SI: torch.Tensor, needs: RowNeeds, masks: StepMasks | None, width: int
    ) -> SamplingRows:
        state, index_S = self.rows, ints_SI[:, LENGTH] + 1 - ints_SI[:, PROMPT]
        floats_SF = state.floats.index_select(0, rows_S)
        penalize, bias = bool(needs & RowNeeds.PENALIZE), bool(needs & RowNeeds.BIAS)
        ban, bits = bool(needs & RowNeeds.MIN_TOKENS), needs.value
        rules = {name: floats_SF[:, column] for name, bit, column in _FLOAT_FIELDS if bits & bit}
        rules |= {name: ints_SI[:, column] for name, bit, column in _INT_FIELDS if bits & bit}
        first = None if self._shard is None else self._shard.first_token
        counts_RV = state.counts if first is None else state.counts[:, first : first + width]
        banned_S = index_S < ints_SI[:, MIN_TOKENS] if ban else None
        if masks is not None and needs & RowNeeds.CONSTRAIN:
            rules |= {"masked_C": masks.at, "masks_CW": masks.bits}
            if banned_S is not None:  # masks have the ban: they know where only a stop token is left
                banned_S.index_fill_(0, masks.at, False)
        return SamplingRows(
            temperature_S=floats_SF[:, TEMPERATURE],
            noise_S=floats_SF[:, NOISE] if needs & RowNeeds.DRAW else None,
            seed_S=ints_SI[:, SEED],
            index_S=index_S,
            counts_SV=counts_RV.index_select(0, rows_S) if penalize else None,
            bias_ids_SK=state.bias_ids.index_select(0, rows_S) if bias else None,
            bias_SK=state.bias.index_select(0, rows_S) if bias else None,
            banned_ids_SK=state.banned.index_select(0, rows_S) if ban else None,
            banned_S=banned_S,
            first_token=first,
            **rules,
        )


def _write_output(output_4R: torch.Tensor, sampled: Sampled) -> None:
    count = len(sampled.tokens_S)
    output_4R[0, :count] = sampled.tokens_S
    floats = output_4R[1:, :count].view(torch.float32)
    floats[0], floats[1], floats[2] = sampled.logprobs_S, sampled.raw_logprobs_S, sampled.drawn_logprobs_S
