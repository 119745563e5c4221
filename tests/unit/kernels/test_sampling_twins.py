"""The torch sampler against transformers' logits processors, and against the probabilities themselves."""

import pytest
import torch
from rollout_kernels import PROMPT_BIT, SamplingRows, sample
from rollout_kernels.sampling import change_logits, truncate
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

V = 53


def rows(count: int, **fields) -> SamplingRows:
    defaults = {
        "temperature_S": torch.ones(count),
        "noise_S": torch.ones(count),
        "seed_S": torch.arange(count) + 17,
        "index_S": torch.zeros(count, dtype=torch.int64),
    }
    return SamplingRows(**{**defaults, **fields})


def truncation(count: int, top_k: int = V, top_p: float = float("inf"), min_p: float = 0.0) -> dict:
    return {
        "top_k_S": torch.full((count,), top_k),
        "top_p_S": torch.full((count,), top_p),
        "min_p_S": torch.full((count,), min_p),
    }


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(64, V, generator=torch.Generator().manual_seed(1)) * 3


@pytest.mark.parametrize("top_k", [1, 5, V])
@pytest.mark.parametrize("top_p", [0.05, 0.6, 0.95])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.3])
def test_truncation_keeps_what_transformers_keeps(logits, top_k, top_p, min_p):
    mine = truncate(logits, rows(64, **truncation(64, top_k, top_p, min_p)))
    theirs = TopPLogitsWarper(top_p)(None, TopKLogitsWarper(top_k)(None, logits.clone()))
    if min_p:
        theirs = MinPLogitsWarper(min_p)(None, theirs)
    assert torch.equal(mine.isfinite(), theirs.isfinite())
    assert torch.equal(mine[mine.isfinite()], logits[mine.isfinite()])


def test_truncation_that_is_off_drops_nothing(logits):
    sharp = logits * 20  # cumulative sums reach one long before the end
    assert truncate(sharp, rows(64, **truncation(64))).isfinite().all()


def test_repetition_penalty_is_transformers(logits):
    history = torch.randint(0, V, (64, 12), generator=torch.Generator().manual_seed(2))
    counts = torch.zeros(64, V, dtype=torch.int32)
    counts.scatter_(1, history[:, :6], PROMPT_BIT)
    counts.scatter_add_(1, history[:, 6:], torch.ones(64, 6, dtype=torch.int32))
    zero = torch.zeros(64)
    settings = rows(
        64,
        counts_SV=counts,
        repetition_penalty_S=torch.full((64,), 1.3),
        presence_penalty_S=zero,
        frequency_penalty_S=zero,
    )
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(history, logits.clone())
    assert torch.allclose(change_logits(logits, settings), theirs, atol=1e-6)


def test_presence_and_frequency_penalties_count_the_completion_only(logits):
    counts = torch.zeros(64, V, dtype=torch.int32)
    counts[:, 3], counts[:, 4], counts[:, 5] = 2, PROMPT_BIT + 3, PROMPT_BIT
    one = torch.ones(64)
    settings = rows(
        64, counts_SV=counts, repetition_penalty_S=one, presence_penalty_S=0.5 * one, frequency_penalty_S=0.25 * one
    )
    expected = logits.clone()
    expected[:, 3] -= 0.5 + 2 * 0.25
    expected[:, 4] -= 0.5 + 3 * 0.25
    assert torch.allclose(change_logits(logits, settings), expected, atol=1e-6)


def test_bias_is_added_and_banned_tokens_are_never_drawn(logits):
    ids, bias = torch.zeros(64, 4, dtype=torch.int64), torch.zeros(64, 4)
    ids[:, 0], bias[:, 0] = 9, 50.0
    banned = torch.full((64, 4), 9)
    applies = torch.arange(64) % 2 == 0
    done = sample(logits, rows(64, bias_ids_SK=ids, bias_SK=bias, banned_ids_SK=banned, banned_S=applies))
    assert torch.equal(done.tokens_S == 9, ~applies)


def test_greedy_rows_take_the_first_of_the_best(logits):
    logits[:, [7, 30]] = 99.0
    done = sample(logits, rows(64, noise_S=torch.zeros(64)))
    assert (done.tokens_S == 7).all()
    assert torch.equal(sample(logits, rows(64, noise_S=None)).tokens_S, done.tokens_S)


def test_draws_have_the_softmax_distribution():
    """Chi-square over 40,000 fixed seeds at temperature 1.7 with top-k 6: 5 degrees of freedom, 0.1% point 20.5."""
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -2.0, -9.0, -9.5]]).expand(40_000, -1)
    settings = rows(40_000, temperature_S=torch.full((40_000,), 1.7), **truncation(40_000, top_k=6))
    done = sample(logits, settings)
    probabilities = (logits[0, :6].double() / 1.7).softmax(0)
    seen = done.tokens_S.bincount(minlength=8).double()
    assert seen[6:].sum() == 0
    expected = probabilities * 40_000
    assert ((seen[:6] - expected) ** 2 / expected).sum() < 20.5


def test_the_three_logprobs_are_of_the_three_distributions(logits):
    temperature = torch.linspace(0.5, 2.0, 64)
    done = sample(logits, rows(64, temperature_S=temperature, **truncation(64, top_k=4)))
    tokens = done.tokens_S[:, None]

    def expected(values):
        return values.double().log_softmax(1).gather(1, tokens)[:, 0].float()

    tempered = logits / temperature[:, None]
    kept = TopKLogitsWarper(4)(None, tempered.clone())
    assert torch.allclose(done.logprobs_S, expected(tempered), atol=1e-5)
    assert torch.allclose(done.raw_logprobs_S, expected(logits), atol=1e-5)
    assert torch.allclose(done.drawn_logprobs_S, expected(kept), atol=1e-5)
