"""Logits of the whole vocabulary, joined from the parts of the ranks."""

import torch
import torch.nn.functional as F

from rollout.models.decoder import Decoder


def join_logits(model: Decoder, logits_SK: torch.Tensor) -> torch.Tensor:
    """Logits of the whole vocabulary, float32 [S, V], on every rank; `compute_logits` gives `logits_SK`."""
    shard = model.vocab_shard
    if shard is None:
        return logits_SK
    padded_SK = F.pad(logits_SK, (0, shard.most_tokens - logits_SK.shape[1]))
    return shard.group.all_gather(padded_SK).permute(1, 0, 2).flatten(1)[:, : shard.vocab]
