"""Low-rank adapters in a batch: each token's product gets the correction of the adapter that its row takes.

    y[m] += B[slot of m] (A[slot of m] x[m])

Adapters lie in slots of two buffers for each product, ranks padded with zeros, scaling folded into B. Slot 0 says that
a token takes none, so slot s is entry s - 1. A product of several modules that share an input (q, k and v; gate and up)
has their ranks one after the other in A and their outputs one after the other in B.

Legend: M tokens, K inputs, N outputs, J modules in the product, R rank that a slot holds, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: What a slot's rank can be: a power of two from here to there.
LEAST_RANK, MOST_RANK = 16, 256


@dataclass(frozen=True, slots=True)
class LoraBuffers:
    """The slots of one product."""

    a_SAK: torch.Tensor  # A = J R, module after module
    b_SNR: torch.Tensor  # the same dtype
    ends: tuple[int, ...]  # where each module's outputs end; the last is N

    @property
    def rank(self) -> int:
        """That a slot holds."""
        return self.b_SNR.shape[2]


@dataclass(frozen=True, slots=True)
class Correction:
    """What a kernel that reads a product has yet to add to it: B of a token's slot times the sum of `low_PMA`."""

    low_PMA: torch.Tensor  # float32, P parts of A x; tokens of slot 0 have nothing there
    buffers: LoraBuffers
    slots_M: torch.Tensor  # int32


def padded_rank(rank: int) -> int:
    """The rank of slots that hold adapters of up to `rank`, which must be from 1 to MOST_RANK."""
    assert 1 <= rank <= MOST_RANK
    return max(LEAST_RANK, 1 << (rank - 1).bit_length())


def lora_add(
    y_MN: torch.Tensor, x_MK: torch.Tensor, buffers: LoraBuffers, slots_M: torch.Tensor, segmented: bool = False
) -> None:
    """Add each token's correction to `y_MN` in place; tokens of slot 0 keep what they have, bit for bit.

    Args:
        y_MN: contiguous; float32 or the dtype of `x_MK`.
        x_MK: the product's input, in the dtype of the buffers.
        buffers: the product's slots.
        slots_M: int32, 0 for none.
        segmented: neighbours mostly have the same slot, as in chunks of prompts; for speed alone.
    """
    if x_MK.is_cuda:
        from rollout_kernels.triton_lora import lora_add as on_gpu

        on_gpu(y_MN, x_MK, buffers, slots_M, segmented)
        return
    rank, starts = buffers.rank, (0, *buffers.ends[:-1])
    for slot in torch.unique(slots_M).tolist():
        if slot == 0:
            continue
        at = (slots_M == slot).nonzero().squeeze(1)
        low_MA = x_MK[at].float() @ buffers.a_SAK[slot - 1].float().t()
        b_NR = buffers.b_SNR[slot - 1].float()
        added = [
            low_MA[:, j * rank : (j + 1) * rank] @ b_NR[start:end].t()
            for j, (start, end) in enumerate(zip(starts, buffers.ends, strict=True))
        ]
        y_MN[at] = (y_MN[at].float() + torch.cat(added, dim=1)).to(y_MN.dtype)
