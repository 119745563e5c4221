"""Likeliest tokens and log-probs of prompts where each rank has the logits of a part of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from rollout_kernels.parallel import TensorGroup
from rollout_kernels.sampling import VocabShard

from rollout.engine.device.streams import CpuDevice
from rollout.engine.features.scores.buffers import ScoreBuffers, Scores, vocabulary
from tests.support.parallel.ranks import Ranks

ROWS = 12


def _score(logits: torch.Tensor, vocab: int, exact: bool, shard: VocabShard | None) -> Scores:
    scores = ScoreBuffers(CpuDevice(), max_rows=ROWS, chunk_tokens=ROWS, vocab=vocab)
    part, ids = vocabulary(shard), torch.arange(ROWS)
    before, targets = logits.clone(), torch.arange(ROWS) * 7 % vocab
    scores.take_tops(logits, torch.arange(0, ROWS, 2), exact, part)
    assert torch.equal(logits, before), "logits are left as they are"
    scores.score_prompt(logits, ids, targets, torch.clone, exact, ranked=True, tops=True, vocab=part)
    scores.copy(ROWS // 2, ROWS, ranked=True, prompt_tops=True)
    return scores.read(tuple(range(ROWS // 2)), ROWS, ranked=True, prompt_tops=True)


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
    for found in results:
        for name in ("top_ids_CK", "prompt_ids_NK", "prompt_ranks_N"):
            np.testing.assert_array_equal(getattr(found, name), getattr(whole, name))
        for name in ("top_logprobs_CK", "prompt_N", "prompt_logprobs_NK"):
            ours, theirs, first = (getattr(scores, name) for scores in (found, whole, results[0]))
            assert ours.tobytes() == first.tobytes(), "ranks have other bits"
            if exact:
                assert ours.tobytes() == theirs.tobytes()
            else:
                np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
