"""Likeliest tokens and log-probs of prompts where each rank has the logits of a part of the vocabulary."""

from collections.abc import Callable
from operator import attrgetter

import numpy as np
import pytest
import torch
from rollout_kernels.parallel import TensorGroup
from rollout_kernels.sampling import VocabShard

from rollout.engine.device.streams import CpuDevice
from rollout.engine.features.scores.buffers import ScoreBuffers, Scores, Scoring, vocabulary
from tests.support.parallel.ranks import Ranks

ROWS = 12


def _score(logits: torch.Tensor, vocab: int, exact: bool, shard: VocabShard | None) -> Scores:
    scores = ScoreBuffers(CpuDevice(), max_rows=ROWS, chunk_tokens=ROWS, vocab=vocab)
    part, ids = vocabulary(shard), torch.arange(ROWS)
    before, targets = logits.clone(), torch.arange(ROWS) * 7 % vocab
    scores.take_tops(logits, torch.arange(0, ROWS, 2), exact, part)
    assert torch.equal(logits, before), "logits are left as they are"
    narrow = Scoring(ROWS, ranked=True, tops=min(20, vocab))
    scores.narrow.score(logits, ids, targets, None, torch.clone, narrow, exact, part)
    wide = Scoring(ROWS, ranked=True, tops=min(256, vocab), chosen=9, entropy=True)
    chosen = (torch.arange(ROWS * 9).view(ROWS, 9) * 11 % vocab).int()
    scores.wide.score(logits, ids, targets, chosen, torch.clone, wide, exact, part)
    scores.copy(ROWS // 2, narrow, wide)
    return scores.read(tuple(range(ROWS // 2)), narrow, wide)


def _expected(vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the chosen tokens and entropies, in float64."""
    logprobs = _logits(vocab).double().log_softmax(-1)
    chosen = torch.arange(ROWS * 9).view(ROWS, 9) * 11 % vocab
    return logprobs.gather(1, chosen), -(logprobs.exp() * logprobs).sum(-1)


def _logits(vocab: int) -> torch.Tensor:
    logits = torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    logits[3] *= 30  # one token has nearly all of the probability
    return logits


def _scores_of_a_rank(group: TensorGroup, vocab: int, exact: bool) -> Scores:
    most = -(-vocab // (4 * group.size)) * 4
    first = group.rank * most
    return _score(_logits(vocab)[:, first : first + most], vocab, exact, VocabShard(group, first, most, vocab))


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("vocab", [5003, 41])  # of 41 tokens the last rank has fewer than the likeliest 20
def test_ranks_have_the_scores_of_one_rank(
    vocab: int, exact: bool, size: int, start_ranks: Callable[[int], Ranks]
) -> None:
    whole = _score(_logits(vocab), vocab, exact, None)
    results = start_ranks(size).run(_scores_of_a_rank, vocab, exact)
    chosen, entropy = _expected(vocab)
    np.testing.assert_allclose(whole.wide.chosen_NM, chosen, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(whole.wide.entropy_N, entropy, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(whole.wide.ranks_N, whole.narrow.ranks_N)
    ids = "top_ids_CK", "narrow.ids_NK", "narrow.ranks_N", "wide.ids_NK"
    values = "top_logprobs_CK", "narrow.logprobs_N", "narrow.top_logprobs_NK"
    for found in results:
        for name in ids:
            np.testing.assert_array_equal(attrgetter(name)(found), attrgetter(name)(whole))
        for name in (*values, "wide.logprobs_N", "wide.top_logprobs_NK", "wide.chosen_NM", "wide.entropy_N"):
            ours, theirs, first = (attrgetter(name)(scores) for scores in (found, whole, results[0]))
            assert ours.tobytes() == first.tobytes(), "ranks have other bits"
            if exact:
                assert ours.tobytes() == theirs.tobytes()
            else:
                np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
