"""Truncation without a sort keeps the same tokens as its twin, which sorts."""

from dataclasses import replace

import pytest
import torch
from rollout_kernels import SamplingRows
from rollout_kernels.sampling import truncate as twin
from rollout_kernels.sampling.triton_truncate import truncate

from tests.support.kernels.grids import nightly
from tests.support.kernels.truncation_cases import DEVICE, INF, OFF, limits, random_limits, random_logits

NAN = float("nan")
V = 4500  # three blocks


def check(logits: torch.Tensor, rows: SamplingRows) -> None:
    """The same tokens stay, except for tokens at which top-p or min-p is reached to six digits.

    Exponentials of different libraries differ in rounding, which may move the border by such a token.
    """
    got = logits.clone()
    truncate(got, rows)
    limits_S = {name: getattr(rows, name).cpu() for name in ("top_k_S", "top_p_S", "min_p_S")}
    got, logits, rows = got.cpu(), logits.cpu(), replace(rows, **limits_S)
    expected = twin(logits, rows)
    for row in (got != expected).logical_and(~(got.isnan() & expected.isnan())).any(1).nonzero()[:, 0].tolist():
        _check_border(logits[row], got[row] > -INF, expected[row] > -INF, rows, row)


def _check_border(logits: torch.Tensor, mine: torch.Tensor, theirs: torch.Tensor, rows: SamplingRows, row: int) -> None:
    assert rows.top_k_S is not None and rows.top_p_S is not None and rows.min_p_S is not None
    values, order = logits.double().sort(descending=True, stable=True)
    weights = (values - values[0]).exp()
    kept = weights[: int(rows.top_k_S[row])]
    before = (kept.cumsum(0) - kept) / kept.sum()
    odd = (mine != theirs)[order][: len(kept)]
    assert (mine != theirs).sum() == odd.sum(), "top-k is exact"
    near = (before - rows.top_p_S[row]).abs() < 2e-6
    near |= (kept / rows.min_p_S[row] - 1).abs() < 1e-5
    assert near[odd].all(), f"row {row}: before {before[odd]} weights {kept[odd]}"


@pytest.mark.parametrize("seed", [0, *nightly(1, 2, 3)])
@pytest.mark.parametrize("vocab", [1, 53, V])
def test_the_tokens_that_stay_are_the_twins(vocab, seed):
    check(random_logits(12, vocab, seed), random_limits(12, vocab, seed + 100))


@pytest.mark.parametrize("seed", [0, *nightly(1)])
def test_of_equal_logits_the_first_stay(seed):
    few = torch.randint(-2, 3, (16, V), generator=torch.Generator().manual_seed(seed)).float().to(DEVICE)
    few[3], few[4], few[5] = 1.5, 0.0, -2.0
    few[4, ::2] = -0.0  # equal to zero
    check(few, random_limits(16, V, seed))
    check(few, limits([4000, 3, OFF, 100] * 4, [INF, 0.5, 0.7, 0.999] * 4, [0.0] * 16))


def test_ties_that_top_k_drops_do_not_count_for_top_p():
    logits = torch.zeros(2, 100, device=DEVICE)
    truncate(logits, limits([10, 10], [0.5, INF], [0.0, 0.0]))
    assert (logits > -INF).sum(1).tolist() == [5, 10] and (logits[0, :5] == 0).all()


@pytest.mark.filterwarnings("ignore:invalid value")
def test_banned_tokens_are_no_candidates():
    logits = random_logits(8, V, 3)
    logits[:, torch.arange(V) % 300 != 7] = -INF
    logits[2:4] = -INF
    logits[3, 4444] = -50.0
    check(logits, limits([3, OFF, 5, 5, OFF, 1, 2000, 15], [0.9, 0.9, 0.5, 0.5, INF, 0.2, 0.99, 1.0], [0.0] * 8))


@pytest.mark.filterwarnings("ignore:invalid value")
def test_of_rows_without_a_finite_best_only_the_first_k_stay():
    logits = random_logits(4, V, 4)
    logits[0, 100], logits[1, 4321], logits[2, [5, 4400]], logits[3, 9] = NAN, INF, NAN, -NAN
    check(logits, limits([3, 50, 1, OFF], [0.5, 0.5, INF, 0.5], [0.1, 0.1, 0.0, 0.5]))


def test_rows_without_limits_and_padding_do_not_change():
    logits = random_logits(3, V, 5)
    got = logits.clone()
    truncate(got, limits([OFF, V, 0], [INF, INF, 1.0], [0.0, 0.0, 1.0]))
    assert torch.equal(got, logits)


def test_a_row_is_cut_independently_of_the_other_rows():
    logits, rows = random_logits(6, V, 6), random_limits(6, V, 6)
    got = logits.clone()
    truncate(got, rows)
    for row in range(6):
        alone = logits[row : row + 1].clone()
        truncate(alone, limits(*([x[row].item()] for x in (rows.top_k_S, rows.top_p_S, rows.min_p_S))))
        assert torch.equal(alone[0], got[row])


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
def test_a_whole_vocabulary_is_cut_as_by_the_twin(seed):
    check(random_logits(32, 151_936, seed), random_limits(32, 151_936, seed))


@pytest.mark.gpu
def test_a_captured_graph_takes_the_limits_and_logits_of_each_replay():
    source, rows = random_logits(32, 151_936, 0), random_limits(32, 151_936, 0)
    got = source.clone()
    truncate(got, rows)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got.copy_(source)
        truncate(got, rows)
    for seed in range(1, 4):
        source.copy_(random_logits(32, 151_936, seed))
        now = random_limits(32, 151_936, seed)
        for name in ("top_k_S", "top_p_S", "min_p_S"):
            getattr(rows, name).copy_(getattr(now, name))
        graph.replay()
        expected = source.clone()
        truncate(expected, now)
        assert torch.equal(got, expected)
        check(source, now)
