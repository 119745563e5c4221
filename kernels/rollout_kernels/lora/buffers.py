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
