"""Sampling with exact log-probabilities in torch: the CPU path and the twin of the kernels.

The logits change in this order, as in transformers' processors: logit bias, penalties, the ban on stop tokens before
`min_tokens`, the mask of a constraint; then temperature; then top-k, top-p and min-p, each applied to the result of the
one before.

The sampled token has three log-probabilities:
    logprobs      log-softmax of logits / temperature (of the logits at temperature 0): what a trainer recomputes
    raw           log-softmax of the logits
    drawn         log-softmax of the distribution that was drawn from, after all changes

Legend: S rows that sample, V vocabulary, K entries of a padded list, C rows with a constraint, W words of a mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout_kernels.sampling.philox import gumbel_noise

#: The bit of a token count that means "occurs in the prompt". The bits below it count occurrences in the completion.
PROMPT_BIT = 1 << 30
_WORD_BITS = 32  # bits of a word of a constraint's mask


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Settings and state of the rows that sample. An optional field is None if no row needs it.

    The field of a sampling rule is the rule's name with `_S`: the engine fills it from the row state by this name.
    """

    temperature_S: torch.Tensor  # float32; 1 for greedy rows
    noise_S: torch.Tensor | None  # float32: 1 to draw, 0 for greedy rows; None if all rows are greedy
    seed_S: torch.Tensor  # int64
    index_S: torch.Tensor  # int64, position of the sampled token in its completion
    counts_SV: torch.Tensor | None = None  # int32: occurrences in the completion, and PROMPT_BIT
    repetition_penalty_S: torch.Tensor | None = None  # float32
    presence_penalty_S: torch.Tensor | None = None
    frequency_penalty_S: torch.Tensor | None = None
    bias_ids_SK: torch.Tensor | None = None  # int64, padded with id 0
    bias_SK: torch.Tensor | None = None  # float32, padded with 0
    banned_ids_SK: torch.Tensor | None = None  # int64, padded with repetitions
    banned_S: torch.Tensor | None = None  # bool: whether the ban applies to this row now
    top_k_S: torch.Tensor | None = None  # int64, V or more if off
    top_p_S: torch.Tensor | None = None  # float32, infinity if off
    min_p_S: torch.Tensor | None = None  # float32, 0 if off
    masked_C: torch.Tensor | None = None  # int64, the rows that have a mask
    masks_CW: torch.Tensor | None = None  # int32, a bit for each allowed token; see `allow_only`
    #: The token of the first logit, if the logits are of a part of the vocabulary. `counts_SV` is then of this part,
    #: too; ids and masks are of the whole.
    first_token: int | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampled token of each row, and its log-probabilities."""

    tokens_S: torch.Tensor  # int64
    logprobs_S: torch.Tensor  # float32
    raw_logprobs_S: torch.Tensor  # float32
    drawn_logprobs_S: torch.Tensor  # float32


def sample(logits_SV: torch.Tensor, rows: SamplingRows) -> Sampled:
    """Draw one token for each row from float32 logits, which are not changed."""
    tempered_SV = logits_SV / rows.temperature_S[:, None]
    changed_SV = change_logits(logits_SV, rows)
    drawn_SV = tempered_SV if changed_SV is logits_SV else changed_SV / rows.temperature_S[:, None]
    if rows.top_k_S is not None:
        drawn_SV = truncate(drawn_SV, rows)
    noisy_SV = drawn_SV
    if rows.noise_S is not None:
        noise_SV = gumbel_noise(rows.seed_S, rows.index_S, logits_SV.shape[1])
        noisy_SV = torch.addcmul(drawn_SV, noise_SV, rows.noise_S[:, None])
    tokens_S = noisy_SV.argmax(dim=1)
    logprobs_S = logprob_of(tempered_SV, tokens_S)
    return Sampled(
        tokens_S,
        logprobs_S,
        logprob_of(logits_SV, tokens_S),
        logprobs_S if drawn_SV is tempered_SV else logprob_of(drawn_SV, tokens_S),
    )


def logprob_of(logits_SV: torch.Tensor, tokens_S: torch.Tensor) -> torch.Tensor:
    """log-softmax of each row at its token, float32 [S]."""
    shifted_SV = logits_SV - logits_SV.amax(dim=1, keepdim=True)  # small numbers, so the difference loses no digits
    return shifted_SV.gather(1, tokens_S[:, None]).squeeze(1) - shifted_SV.exp().sum(dim=1).log_()


def change_logits(logits_SV: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Logits with bias, penalties, bans and masks applied; the given tensor if `rows` asks for no change.

    The repetition penalty (N. Keskar et al., CTRL, 2019) divides positive logits and multiplies negative logits of
    tokens that occur in the prompt or the completion. Presence and frequency penalties are subtracted for tokens of the
    completion only.
    """
    plain_SV = logits_SV
    if rows.bias_SK is not None:
        assert rows.bias_ids_SK is not None
        ids_SK, bias_SK = rows.bias_ids_SK, rows.bias_SK
        if rows.first_token is not None:
            ids_SK, own_SK = _own_ids(ids_SK, rows.first_token, logits_SV.shape[1])
            bias_SK = bias_SK.masked_fill(~own_SK, 0.0)
        logits_SV = logits_SV.scatter_add(1, ids_SK, bias_SK)
    if rows.counts_SV is not None:
        assert (
            rows.repetition_penalty_S is not None
            and rows.presence_penalty_S is not None
            and rows.frequency_penalty_S is not None
        )
        repetition_S1 = rows.repetition_penalty_S[:, None]
        penalized_SV = torch.where(logits_SV > 0, logits_SV / repetition_S1, logits_SV * repetition_S1)
        logits_SV = torch.where(rows.counts_SV != 0, penalized_SV, logits_SV)
        counts_SV = rows.counts_SV & (PROMPT_BIT - 1)
        logits_SV = (
            logits_SV
            - rows.presence_penalty_S[:, None] * (counts_SV > 0)
            - rows.frequency_penalty_S[:, None] * counts_SV
        )
    if rows.banned_S is not None:
        assert rows.banned_ids_SK is not None
        ids_SK, banned_S = rows.banned_ids_SK, rows.banned_S
        if rows.first_token is not None:
            ids_SK, own_SK = _own_ids(ids_SK, rows.first_token, logits_SV.shape[1])
            banned_S = banned_S & own_SK.any(dim=1)
        banned_SV = torch.zeros_like(logits_SV, dtype=torch.bool)
        banned_SV.scatter_(1, ids_SK, banned_S[:, None].expand_as(ids_SK))
        logits_SV = logits_SV.masked_fill(banned_SV, -torch.inf)
    if rows.masks_CW is not None:
        assert rows.masked_C is not None
        logits_SV = logits_SV.clone() if logits_SV is plain_SV else logits_SV
        allow_only(logits_SV, rows.masked_C, rows.masks_CW, rows.first_token or 0)
    return logits_SV


def _own_ids(ids_SK: torch.Tensor, first_token: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of token ids in a part of the vocabulary, and which ids are in it.

    The others repeat a place of the same row that is; if a row has none, its places are 0.
    """
    places_SK = ids_SK - first_token
    own_SK = (places_SK >= 0) & (places_SK < width)
    some_S1 = places_SK.masked_fill(~own_SK, 0).amax(dim=1, keepdim=True)
    return torch.where(own_SK, places_SK, some_S1), own_SK


def allow_only(logits_SV: torch.Tensor, at_C: torch.Tensor, masks_CW: torch.Tensor, first_token: int = 0) -> None:
    """Set the logits of tokens that a constraint does not allow to -inf, in place.

    Args:
        logits_SV: float32; contiguous on a GPU.
        at_C: int64, the rows of `logits_SV` with a constraint, each once.
        masks_CW: int32; bit v % 32 of word v // 32 is set if token v is allowed.
        first_token: the token of the first logit.
    """
    if logits_SV.is_cuda:
        from rollout_kernels.sampling.triton_allow import allow_only as on_gpu

        on_gpu(logits_SV, at_C, masks_CW, first_token)
        return
    token_V = torch.arange(first_token, first_token + logits_SV.shape[1], device=logits_SV.device)
    words_CV = masks_CW.index_select(1, token_V // _WORD_BITS)
    allowed_CV = (words_CV >> (token_V % _WORD_BITS).int()) & 1
    banned_CV = logits_SV.index_select(0, at_C).masked_fill_(allowed_CV == 0, -torch.inf)
    logits_SV.index_copy_(0, at_C, banned_CV)


def truncate(logits_SV: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """-inf for all tokens that top-k, then top-p, then min-p drop. At least one token stays; ties are broken by index.

    A running sum of floats depends on the order of additions. So probabilities are rounded to multiples of 2^-40 of the
    most likely token's probability and added as integers, which gives the same result on every device, independent of
    the other rows. If a row's largest logit is not finite, only top-k applies to it. `triton_truncate` computes the
    same without a sort.
    """
    assert rows.top_k_S is not None and rows.top_p_S is not None and rows.min_p_S is not None
    sorted_SV, order_SV = logits_SV.sort(dim=1, descending=True, stable=True)
    best_S1 = sorted_SV[:, :1]
    beyond_SV = torch.arange(logits_SV.shape[1], device=logits_SV.device) >= rows.top_k_S[:, None]
    weights_SV = (sorted_SV - best_S1).exp()
    units_SV = (weights_SV * 2.0**40).long().masked_fill(beyond_SV, 0)
    before_SV = units_SV.cumsum(dim=1) - units_SV
    bound_S = (rows.top_p_S.double() * units_SV.sum(dim=1)).ceil().clamp(max=2.0**62).long()
    drop_SV = (before_SV >= bound_S[:, None]) | (weights_SV < rows.min_p_S[:, None])
    drop_SV = (drop_SV & best_S1.isfinite()) | beyond_SV
    drop_SV[:, 0] = False
    sorted_SV = sorted_SV.masked_fill(drop_SV, -torch.inf)
    return torch.empty_like(logits_SV).scatter_(1, order_SV, sorted_SV)
