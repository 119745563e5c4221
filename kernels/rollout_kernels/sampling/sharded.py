"""Drawing tokens where each rank of a tensor group has the logits of a part of the vocabulary.

The random number of a draw belongs to the token's id, and so does each rule that changes a logit. So each rank finds
the best token of its part. The winners cross with the sums for log-probabilities, and every rank merges them in the
order of the ranks: all ranks draw one rank's token, and no rank sends it. Truncation finds the kept tokens by
histograms of all ranks (`sharded_truncation`). This is the torch path; a GPU runs `triton_draw`.

Legend: S rows that sample, K tokens of a rank's part, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout_kernels.parallel import TensorGroup
from rollout_kernels.sampling import reference
from rollout_kernels.sampling.philox import gumbel_noise
from rollout_kernels.sampling.reference import Sampled, SamplingRows
from rollout_kernels.sampling.sharded_truncation import truncate_part


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The part of the vocabulary whose logits a rank has."""

    group: TensorGroup
    first_token: int  # a multiple of 4, for the random numbers
    most_tokens: int  # largest number of any rank
    vocab: int  # tokens of all ranks


def sample_shard(logits_SK: torch.Tensor, rows: SamplingRows, shard: VocabShard) -> Sampled:
    """Draw one token for each row from the float32 logits of all ranks, which are not changed. All ranks call this.

    `rows.first_token` is the first token of the shard.
    """
    assert rows.first_token == shard.first_token, "the settings belong to another part"
    tempered_SK = logits_SK / rows.temperature_S[:, None]
    changed_SK = reference.change_logits(logits_SK, rows)
    drawn_SK = tempered_SK if changed_SK is logits_SK else changed_SK / rows.temperature_S[:, None]
    if rows.top_k_S is not None:
        drawn_SK = truncate_part(drawn_SK, rows, shard.group)
    noisy_SK = drawn_SK
    if rows.noise_S is not None:
        noise_SK = gumbel_noise(rows.seed_S, rows.index_S, logits_SK.shape[1], shard.first_token)
        noisy_SK = torch.addcmul(drawn_SK, noise_SK, rows.noise_S[:, None])
    best_S, at_S = noisy_SK.max(dim=1)
    kinds = [logits_SK, tempered_SK] if drawn_SK is tempered_SK else [logits_SK, tempered_SK, drawn_SK]
    found = [best_S, (at_S + shard.first_token).int().view(torch.float32)]
    for of_SK in kinds:
        found += [of_SK.gather(1, at_S[:, None]).squeeze(1), *_log_sum(of_SK)]
    best_RS, token_RS, *of_kinds = shard.group.all_gather(torch.stack(found)).unbind(1)
    winner_1S = best_RS.argmax(dim=0, keepdim=True)
    tokens_S = token_RS.gather(0, winner_1S).squeeze(0).view(torch.int32).long()
    logprobs = [_logprob(winner_1S, *of_kinds[i : i + 3]) for i in range(0, len(of_kinds), 3)]
    return Sampled(tokens_S, logprobs[1], logprobs[0], logprobs[-1])


def _log_sum(logits_SK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rank's part of the log-sum of each row: the largest logit, and the sum of all relative to it."""
    most_S = logits_SK.amax(dim=1)
    total_S = (logits_SK - most_S[:, None]).exp().sum(dim=1)
    return most_S, total_S.masked_fill(most_S == -torch.inf, 0.0)  # truncation may leave nothing of a part


def _logprob(
    winner_1S: torch.Tensor, logit_RS: torch.Tensor, most_RS: torch.Tensor, sum_RS: torch.Tensor
) -> torch.Tensor:
    """The log-softmax of the winner's logit, from what each rank found."""
    most_S = most_RS.amax(dim=0)
    total_S = (sum_RS * (most_RS - most_S).exp()).sum(dim=0)
    return (logit_RS.gather(0, winner_1S).squeeze(0) - most_S) - total_S.log()
