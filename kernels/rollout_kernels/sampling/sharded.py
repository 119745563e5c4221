"""Drawing tokens where each rank of a tensor group has the logits of a part of the vocabulary.

The random number of a draw belongs to the token's id. So each rank finds the best of its part as one rank would, the
winners cross with the sums for log-probabilities, and every rank merges them in the order of the ranks: all ranks draw
the token that one rank draws, and none sends it to the others. This is the torch path; `triton_draw` is that of a GPU.

Legend: S rows that sample, K tokens of a rank's part, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout_kernels.parallel import TensorGroup
from rollout_kernels.sampling.philox import gumbel_noise
from rollout_kernels.sampling.reference import Sampled, SamplingRows


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The part of the vocabulary whose logits a rank has."""

    group: TensorGroup
    first_token: int  # a multiple of 4, for the random numbers
    most_tokens: int  # of any rank


def sample_shard(logits_SK: torch.Tensor, rows: SamplingRows, shard: VocabShard) -> Sampled:
    """Draw one token for each row from the float32 logits of all ranks, which are not changed. All ranks call this.

    `rows` may have temperatures and noise only: rules that change the logits need all of them.
    """
    plain = SamplingRows(rows.temperature_S, rows.noise_S, rows.seed_S, rows.index_S)
    assert rows == plain, "rules that change the logits need all of them"
    tempered_SK = logits_SK / rows.temperature_S[:, None]
    noisy_SK = tempered_SK
    if rows.noise_S is not None:
        noise_SK = gumbel_noise(rows.seed_S, rows.index_S, logits_SK.shape[1], shard.first_token)
        noisy_SK = torch.addcmul(tempered_SK, noise_SK, rows.noise_S[:, None])
    best_S, at_S = noisy_SK.max(dim=1)
    found = [best_S, (at_S + shard.first_token).int().view(torch.float32), _at(logits_SK, at_S), _at(tempered_SK, at_S)]
    for of_SK in (logits_SK, tempered_SK):  # parts of their log-sums
        most_S = of_SK.amax(dim=1)
        found += [most_S, (of_SK - most_S[:, None]).exp().sum(dim=1)]
    best_RS, token_RS, raw_RS, tempered_RS, *sums = shard.group.all_gather(torch.stack(found)).unbind(1)
    winner_1S = best_RS.argmax(dim=0, keepdim=True)
    raw_S, tempered_S = (logit_RS.gather(0, winner_1S).squeeze(0) for logit_RS in (raw_RS, tempered_RS))
    logprobs_S = _logprob(tempered_S, *sums[2:])
    tokens_S = token_RS.gather(0, winner_1S).squeeze(0).view(torch.int32).long()
    return Sampled(tokens_S, logprobs_S, _logprob(raw_S, *sums[:2]), logprobs_S)


def _at(logits_SK: torch.Tensor, at_S: torch.Tensor) -> torch.Tensor:
    return logits_SK.gather(1, at_S[:, None]).squeeze(1)


def _logprob(logit_S: torch.Tensor, most_RS: torch.Tensor, sum_RS: torch.Tensor) -> torch.Tensor:
    """The log-softmax of a logit, from the largest logit of each rank and the sum of the others relative to it."""
    most_S = most_RS.amax(dim=0)
    total_S = (sum_RS * (most_RS - most_S).exp()).sum(dim=0)
    return (logit_S - most_S) - total_S.log()
