"""Drawing tokens from logits.

reference           the torch path: penalties, bans, constraints, truncation, the draw and its log-probabilities
philox              the random numbers of a draw: a function of seed and position
sharded             the draw where each rank of a tensor group has a part of the vocabulary
sharded_truncation  top-k, top-p and min-p of such a draw
triton_draw         the draw on a GPU, without materialised noise
triton_truncate     top-k, top-p and min-p on a GPU, without a sort
triton_allow        the mask of a constraint on a GPU
"""

from rollout_kernels.sampling.philox import gumbel_noise, philox_4x32
from rollout_kernels.sampling.reference import (
    PROMPT_BIT,
    Sampled,
    SamplingRows,
    allow_only,
    change_logits,
    sample,
    truncate,
)
from rollout_kernels.sampling.sharded import VocabShard, sample_shard

__all__ = [
    "PROMPT_BIT",
    "Sampled",
    "SamplingRows",
    "VocabShard",
    "allow_only",
    "change_logits",
    "gumbel_noise",
    "philox_4x32",
    "sample",
    "sample_shard",
    "truncate",
]
