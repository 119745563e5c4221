"""Rules of sampling over parts of the vocabulary: what ranks keep and draw is what one rank keeps and draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from rollout_kernels import PROMPT_BIT, Sampled, SamplingRows, sample
from rollout_kernels.parallel import TensorGroup
from rollout_kernels.sampling import VocabShard, sample_shard, truncate
from rollout_kernels.sampling.sharded_truncation import truncate_part

from tests.support.kernels.truncation_cases import INF, OFF, limits, random_limits, random_logits
from tests.support.parallel.ranks import Ranks

VOCAB = 4501
SIZES = [2, pytest.param(4, marks=pytest.mark.nightly)]
Case = tuple[torch.Tensor, SamplingRows]


def _part(group: TensorGroup, vocab: int = VOCAB) -> tuple[VocabShard, slice]:
    most = -(-vocab // (4 * group.size)) * 4
    first = group.rank * most
    return VocabShard(group, first, most, vocab), slice(first, first + most)


# --- truncation ------------------------------------------------------------------------------------------------------


def _random(seed: int) -> Case:
    return random_logits(24, VOCAB, seed).cpu(), random_limits(24, VOCAB, seed + 100)


def _ties() -> Case:
    few = torch.randint(-2, 3, (16, VOCAB), generator=torch.Generator().manual_seed(0)).float()
    few[3], few[4], few[5] = 1.5, 0.0, -2.0
    few[4, ::2] = -0.0  # equal to zero
    return few, limits([4000, 3, OFF, 100] * 4, [INF, 0.5, 0.7, 0.999] * 4, [0.0] * 16)


def _banned() -> Case:
    logits = random_logits(8, VOCAB, 3).cpu()
    logits[:, torch.arange(VOCAB) % 300 != 7] = -INF
    logits[2:4] = -INF
    logits[3, 4444] = -50.0  # all other ranks have nothing
    logits[5, : VOCAB // 2 + 4] = -INF
    return logits, limits([3, OFF, 5, 5, OFF, 1, 2000, 15], [0.9, 0.9, 0.5, 0.5, INF, 0.2, 0.99, 1.0], [0.0] * 8)


def _no_numbers() -> Case:
    logits = random_logits(5, VOCAB, 4).cpu()
    logits[0, 100], logits[1, 4321], logits[2, [5, 4400]], logits[3, 9] = float("nan"), INF, float("nan"), -INF
    return logits, limits([3, 50, 1, OFF, VOCAB], [0.5, 0.5, INF, INF, INF], [0.1, 0.1, 0.0, 0.5, 0.0])


TRUNCATED: dict[str, Callable[[], Case]] = {
    "random": lambda: _random(0),
    "random, too": lambda: _random(1),
    "ties on all ranks": _ties,
    "banned tokens": _banned,
    "no numbers": _no_numbers,
}


def _truncate(group: TensorGroup) -> list[torch.Tensor]:
    cases = [make() for make in TRUNCATED.values()]
    return [truncate_part(logits[:, _part(group)[1]], rows, group) for logits, rows in cases]


@pytest.mark.parametrize("size", SIZES)
def test_ranks_keep_the_tokens_that_one_rank_keeps(size: int, start_ranks: Callable[[int], Ranks]) -> None:
    results = start_ranks(size).run(_truncate)
    for (name, make), *parts in zip(TRUNCATED.items(), *results, strict=True):
        whole = truncate(*make())
        joined = torch.cat(parts, dim=1)
        assert torch.equal(joined.nan_to_num(nan=99.0), whole.nan_to_num(nan=99.0)), name
        assert whole.isinf().any(dim=1).sum() >= 3, "nothing is cut"


# --- the draw, with all rules ----------------------------------------------------------------------------------------


def _draws() -> Case:
    """Every rule in some rows; ids of bias and bans in all parts, in one part, and none but padding."""
    count, generator = 24, torch.Generator().manual_seed(9)
    logits = torch.randn(count, VOCAB, generator=generator) * 3
    logits[6, [11, 4490]] = 40.0  # equal ones on different ranks: a greedy row takes the first
    counts = torch.randint(0, 3, (count, VOCAB), generator=generator, dtype=torch.int32)
    counts[:, ::7] |= PROMPT_BIT
    bias_ids = torch.randint(0, VOCAB, (count, 5), generator=generator)
    bias_ids[0], bias_ids[1] = 0, torch.arange(4400, 4405)
    best = logits.topk(6, dim=1).indices
    banned = best.clone()
    banned[2], banned[3] = 4499, best[3, :1]
    floats = torch.rand(4, count, generator=generator)
    at = torch.tensor([1, 5, 6, 20])
    masks = torch.randint(-(2**31), 2**31, (len(at), -(-VOCAB // 32)), generator=generator).int()
    masks[1] = 0
    masks[1, 140] = 1 << 3  # one token
    rows = random_limits(count, VOCAB, 5)
    return logits, replace(
        rows,
        temperature_S=floats[0] + 0.4,
        noise_S=(torch.arange(count) % 3 != 0).float(),
        seed_S=torch.arange(count) * 7919 + 2**40,
        index_S=torch.arange(count) + 3,
        counts_SV=counts,
        repetition_penalty_S=floats[1] + 0.8,
        presence_penalty_S=floats[2],
        frequency_penalty_S=floats[3] - 0.3,
        bias_ids_SK=bias_ids,
        bias_SK=torch.randn(count, 5, generator=generator) * 12 * (bias_ids > 0),
        banned_ids_SK=banned,
        banned_S=torch.arange(count) % 4 != 1,
        masked_C=at,
        masks_CW=masks,
    )


KINDS: dict[str, tuple[str, ...]] = {
    "truncation": ("top_k_S", "top_p_S", "min_p_S"),
    "penalties": ("counts_SV", "repetition_penalty_S", "presence_penalty_S", "frequency_penalty_S"),
    "bias": ("bias_ids_SK", "bias_SK"),
    "bans": ("banned_ids_SK", "banned_S"),
    "masks": ("masked_C", "masks_CW"),
}


def _cases() -> dict[str, Case]:
    logits, rows = _draws()
    every = [name for names in KINDS.values() for name in names]
    cases = {}
    for kind, names in KINDS.items():
        cases[kind] = logits, replace(rows, **{name: None for name in every if name not in names})
    return cases | {"all rules": (logits, rows), "greedy": (logits, replace(rows, noise_S=None))}


def _draw(group: TensorGroup) -> list[Sampled]:
    shard, part = _part(group)
    drawn = []
    for logits, rows in _cases().values():
        counts = None if rows.counts_SV is None else rows.counts_SV[:, part]
        drawn.append(sample_shard(logits[:, part], replace(rows, counts_SV=counts, first_token=part.start), shard))
    return drawn


@pytest.mark.parametrize("size", SIZES)
def test_ranks_draw_by_every_rule_what_one_rank_draws(size: int, start_ranks: Callable[[int], Ranks]) -> None:
    results = start_ranks(size).run(_draw)
    for (name, (logits, rows)), *found in zip(_cases().items(), *results, strict=True):
        whole = sample(logits, rows)
        plain = sample(logits, SamplingRows(rows.temperature_S, rows.noise_S, rows.seed_S, rows.index_S))
        assert not torch.equal(whole.tokens_S, plain.tokens_S), f"{name} changes no draw"
        for each in found:
            assert torch.equal(each.tokens_S, whole.tokens_S), name
            for field in ("logprobs_S", "raw_logprobs_S", "drawn_logprobs_S"):
                ours, theirs = getattr(each, field), getattr(whole, field)
                assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6), (name, field)
                assert torch.equal(ours, getattr(found[0], field)), "ranks have other bits"
