"""Rules of sampling over parts of the vocabulary: what ranks keep and draw is what one rank keeps and draws."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rollout_kernels import PROMPT_BIT, Sampled, SamplingRows, sample
from rollout_kernels.parallel import TensorGroup
from rollout_kernels.parallel.group import HISTOGRAM_WORDS
from rollout_kernels.sampling import VocabShard, change_logits, sample_shard, truncate
from rollout_kernels.sampling.sharded_truncation import truncate_part
from rollout_kernels.sampling.triton_draw import draw_and_advance
from rollout_kernels.sampling.triton_truncate import truncate as truncate_by_kernel

from tests.support.kernels.truncation_cases import INF, OFF, limits, random_limits, random_logits
from tests.support.parallel.ranks import Ranks
from tests.support.parallel.shared_peers import share_buffers

VOCAB = 4501
SIZES = [2, pytest.param(4, marks=pytest.mark.nightly)]
COLUMNS = {"LAST": 0, "LENGTH": 1, "PROMPT": 2, "SEED": 3, "TEMPERATURE": 0, "NOISE": 1}
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
    logits[4] *= 3000  # some have less than a unit of probability, and stay
    logits[5, : VOCAB // 2 + 4] = -INF
    return logits, limits([3, OFF, 5, 5, OFF, 1, 2000, 15], [0.9, 0.9, 0.5, 0.5, INF, 0.2, 0.99, 1.0], [0.0] * 8)


def _no_numbers() -> Case:
    logits = random_logits(6, VOCAB, 4).cpu()
    logits[5] = -INF
    logits[5, 9], logits[5, 4400] = 0.0, math.log(65537.5 * 2.0**-40)  # top-p falls between two units of 2^-40
    logits[0, 100], logits[1, 4321], logits[2, [5, 4400]], logits[3, 9] = float("nan"), INF, float("nan"), -INF
    return logits, limits(
        [3, 50, 1, OFF, VOCAB, OFF], [0.5, 0.5, INF, INF, INF, 1 - 2.0**-24], [0.1, 0.1, 0.0, 0.5, 0.0, 0.0]
    )


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


def _few(make: Callable[[], Case]) -> Case:
    """The first rows of a case: the interpreter takes its time."""
    logits, rows = make()
    names = ("temperature_S", "seed_S", "index_S", "top_k_S", "top_p_S", "min_p_S")
    return logits[:6].contiguous(), replace(rows, **{name: getattr(rows, name)[:6] for name in names})


interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")


def _over_peers(group: TensorGroup, folder: Path | None, rows: int) -> TensorGroup:
    """The group, with memory that the ranks write to each other if a folder is given."""
    group = copy.copy(group)
    if folder is not None:
        group.histogram_peers = share_buffers(group, folder, rows, HISTOGRAM_WORDS)
    return group


def _truncate_by_kernel(group: TensorGroup, folder: Path | None) -> list[torch.Tensor]:
    group, found = _over_peers(group, folder, 4), []  # for four rows at a time
    for make in TRUNCATED.values():
        logits, rows = _few(make)
        shard, part = _part(group)
        found.append(logits[:, part].contiguous())
        truncate_by_kernel(found[-1], rows, shard)
    assert group.histogram_peers is None or not group.histogram_peers.fault
    return found


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "peers", [pytest.param(False, marks=pytest.mark.nightly, id="gathered"), pytest.param(True, id="over peers")]
)
def test_kernels_of_ranks_keep_the_tokens_that_one_rank_keeps(
    peers: bool, size: int, tmp_path: Path, start_ranks: Callable[[int], Ranks]
) -> None:
    results = start_ranks(size).run(_truncate_by_kernel, tmp_path if peers else None)
    for (name, make), *parts in zip(TRUNCATED.items(), *results, strict=True):
        logits, rows = _few(make)
        truncate_by_kernel(logits, rows)
        assert torch.equal(torch.cat(parts, dim=1).nan_to_num(nan=99.0), logits.nan_to_num(nan=99.0)), name


def _without_a_peer(group: TensorGroup, folder: Path) -> tuple[int, torch.Tensor]:
    group = _over_peers(group, folder, 3)
    shard, part = _part(group)
    logits = random_logits(3, VOCAB, 0).cpu()[:, part].contiguous()
    drawn, output = logits.clone(), torch.zeros(4, 3, dtype=torch.int32)
    for rank in range(group.size):  # one after the other, so the first waits in vain
        if rank == group.rank:
            truncate_by_kernel(drawn, limits([5, OFF, OFF], [INF, 0.9, INF], [0.0] * 3), shard, most_spins=20)
        group.all_gather(torch.zeros(1))
    state = torch.arange(1, 4), torch.full((4, 4), 20), torch.ones(4, 2)
    draw_and_advance(logits, drawn, *state, output, COLUMNS, shard)
    assert group.histogram_peers is not None
    return int(group.histogram_peers.fault), output[1:].view(torch.float32)


@interpreted
def test_a_row_without_a_peers_histogram_has_log_probs_that_are_nan_on_all_ranks(
    tmp_path: Path, start_ranks: Callable[[int], Ranks]
) -> None:
    """By which rank 0 knows that it must not commit the step."""
    for rank, (fault, logprobs) in enumerate(start_ranks(2).run(_without_a_peer, tmp_path)):
        assert fault == 1 + (1 - rank)
        tempered, plain, drawn = logprobs.isnan().tolist()
        assert tempered == drawn == [True, True, False], "the last row is not truncated"
        assert not any(plain)


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


def _by_kernel(logits: torch.Tensor, rows: SamplingRows, shard: VocabShard | None) -> torch.Tensor:
    """Change, truncate and draw as a sampler does on a GPU; returns its output."""
    count = len(logits)
    drawn = change_logits(logits, rows) / rows.temperature_S[:, None]
    truncate_by_kernel(drawn, rows, shard)
    ints, floats = torch.zeros(count + 1, 4, dtype=torch.int64), torch.ones(count + 1, 2)
    ints[1:, 1], ints[1:, 3] = rows.index_S - 1, rows.seed_S
    assert rows.noise_S is not None
    floats[1:, 0], floats[1:, 1] = rows.temperature_S, rows.noise_S
    output = torch.zeros(4, count, dtype=torch.int32)
    draw_and_advance(logits, drawn, torch.arange(1, count + 1), ints, floats, output, COLUMNS, shard)
    return output


def _draw_by_kernel(group: TensorGroup, folder: Path) -> torch.Tensor:
    shard, part = _part(_over_peers(group, folder, 24))
    logits, rows = _draws()
    assert rows.counts_SV is not None
    rows = replace(rows, counts_SV=rows.counts_SV[:, part], first_token=part.start)
    return _by_kernel(logits[:, part].contiguous(), rows, shard)


@pytest.mark.nightly
@interpreted
@pytest.mark.parametrize("size", SIZES)
def test_kernels_of_ranks_draw_by_all_rules_what_the_kernel_of_one_rank_draws(
    size: int, tmp_path: Path, start_ranks: Callable[[int], Ranks]
) -> None:
    whole, results = _by_kernel(*_draws(), None), start_ranks(size).run(_draw_by_kernel, tmp_path)
    for output in results:
        assert torch.equal(output[0], whole[0])
        assert torch.allclose(output[1:].view(torch.float32), whole[1:].view(torch.float32), rtol=1e-6, atol=2e-6)
        assert torch.equal(output, results[0]), "ranks have other bits"
