"""Top-k, top-p and min-p where each rank has the logits of a part of the vocabulary: the torch path.

As in `triton_truncate`, the search finds the smallest key that stays digit by digit, from histograms over the tokens
whose higher digits are known. A histogram of the whole vocabulary is the sum of the ranks' histograms, in whole
numbers. So histograms cross instead of the logits, and every rank finds what one rank finds:

    1 exchange   the largest logit of each rank
    3 exchanges  number of tokens by digit: find the key of the k-th token
    3 exchanges  probability by digit, over the tokens that top-k keeps: find the key at which top-p is reached

Of tokens with the found key the first ones stay, by index. The last histogram says how many of them are on earlier
ranks.

Legend: S rows that sample, K tokens of a rank's part, R ranks, B bins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rollout_kernels.parallel import TensorGroup
from rollout_kernels.sampling.reference import SamplingRows

#: Lowest bit and number of bits of each digit of a key, the highest first.
DIGITS = ((21, 11), (10, 11), (0, 10))


def truncate_part(logits_SK: torch.Tensor, rows: SamplingRows, group: TensorGroup) -> torch.Tensor:
    """The rank's part of the logits of all ranks after `truncate`; all ranks call this."""
    assert rows.top_k_S is not None and rows.top_p_S is not None and rows.min_p_S is not None
    best_S = group.all_gather(logits_SK.amax(dim=1)).amax(dim=0)
    top_k_S, top_p_S, finite_S = rows.top_k_S, rows.top_p_S.double(), best_S.isfinite()
    weights_SK, key_SK = (logits_SK - best_S[:, None]).exp(), _keys(logits_SK)
    counted_SK = (logits_SK != -torch.inf).long()
    kth = _find(key_SK, counted_SK, lambda total_S: torch.minimum(top_k_S, total_S), group)

    units_SK = _units(weights_SK).mul_(counted_SK).masked_fill_(key_SK < kth.key_S[:, None], 0)
    units_SK.masked_fill_(~finite_S[:, None], 0)
    dropped_S = (kth.found_S - kth.left_S) * _units((_values(kth.key_S) - best_S).exp()).masked_fill(~finite_S, 0)

    def share(total_S: torch.Tensor) -> torch.Tensor:
        mass_S = total_S - dropped_S
        bound_S = (top_p_S * mass_S).ceil().clamp(max=2.0**62).long()
        return torch.minimum(bound_S.clamp(min=1), mass_S)

    pth = _find(key_SK, units_SK, share, group)
    one_S = _units((_values(pth.key_S) - best_S).exp()).clamp(min=1)
    by_p_S = finite_S & top_p_S.isfinite()
    smallest_S = torch.where(by_p_S, pth.key_S, kth.key_S)
    # The number of tokens with this key that stay on all ranks, less the tokens on the ranks before.
    by_p = -(-pth.left_S // one_S) - pth.before_S // one_S
    stay_S = torch.where(by_p_S, by_p, kth.left_S - kth.before_S)
    equal_SK = (key_SK == smallest_S[:, None]).long()
    goes_SK = (equal_SK != 0) & (equal_SK.cumsum(dim=1) > stay_S[:, None])
    goes_SK |= (key_SK < smallest_S[:, None]) | ((weights_SK < rows.min_p_S[:, None]) & finite_S[:, None])
    return logits_SK.masked_fill(goes_SK, -torch.inf)


@dataclass(frozen=True, slots=True)
class _Found:
    """The key at which an amount is reached, and amounts of the tokens with this key; int64 [S]."""

    key_S: torch.Tensor
    left_S: torch.Tensor  # the part that stays
    found_S: torch.Tensor  # the sum over all ranks
    before_S: torch.Tensor  # the sum over the ranks before this one


def _find(
    key_SK: torch.Tensor, amount_SK: torch.Tensor, bound_of: Callable[[torch.Tensor], torch.Tensor], group: TensorGroup
) -> _Found:
    """Search for the key at which the amount of larger and equal keys reaches `bound_of(the whole amount)`."""
    found_S = left_S = before_S = key_S = torch.zeros_like(key_SK[:, 0])
    for shift, bits in DIGITS:
        above = shift + bits
        here_SK = (key_SK >> above) == (key_S >> above)[:, None]
        digit_SK = (key_SK >> shift) & ((1 << bits) - 1)
        own_SB = key_SK.new_zeros(len(key_SK), 1 << bits)
        own_SB.scatter_add_(1, digit_SK, amount_SK.masked_fill(~here_SK, 0))
        parts_RSB = group.all_gather(own_SB)
        all_SB = parts_RSB.sum(dim=0)
        reached_SB = all_SB.flip(1).cumsum(dim=1).flip(1)  # sums over this digit and all larger ones
        if above == 32:
            left_S = bound_of(reached_SB[:, 0])
        over_SB = reached_SB - all_SB
        hit_SB = (over_SB < left_S[:, None]) & (left_S[:, None] <= reached_SB)
        digit_S1 = hit_SB.long().argmax(dim=1, keepdim=True)
        left_S = left_S - over_SB.gather(1, digit_S1).squeeze(1) * hit_SB.any(dim=1)
        key_S = key_S + (digit_S1.squeeze(1) << shift)
        found_S = all_SB.gather(1, digit_S1).squeeze(1)
        before_S = parts_RSB[: group.rank].sum(dim=0).gather(1, digit_S1).squeeze(1)
    return _Found(key_S, left_S, found_S, before_S)


def _units(weights: torch.Tensor) -> torch.Tensor:
    """Each probability over the largest one, in units of 2^-40."""
    return (weights * 2.0**40).long()


def _keys(logits: torch.Tensor) -> torch.Tensor:
    """Integers in the order of a sort, int64, 0 < key < 2^32: NaN is the largest, both zeros are equal."""
    bits = torch.where(logits == 0.0, 0.0, logits).view(torch.int32)
    bits = bits.masked_fill(logits.isnan(), 0x7FFFFFFF)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() + 2**31


def _values(key: torch.Tensor) -> torch.Tensor:
    """The logits of keys."""
    bits = (key - 2**31).int()
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(torch.float32)
