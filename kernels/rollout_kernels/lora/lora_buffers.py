"""The memory of a product's low-rank adapters, and how a batch refers to them.

    y[m] += B[slot of m] @ (A[slot of m] @ x[m])

Each product has two buffers, A and B, of S slots; a slot holds one adapter. Ranks are padded with zeros, and the
scaling is folded into B. Slot number 0 means "no adapter", so slot s is entry s - 1. Some products compute several
modules with one input (q, k and v; gate and up): A then holds the ranks of all modules, module after module, and B
their outputs.

Legend: M tokens, K inputs, N outputs, J modules of the product, R rank of a slot, A = J R, S slots, P parts of K.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

#: The rank of a slot is a power of two in this range.
LEAST_RANK, MOST_RANK = 16, 256
#: Outputs that a program of the expand kernel works on.
TILE_OUTPUTS = 64


@dataclass(frozen=True, slots=True)
class LoraBuffers:
    """The slots of one product."""

    a_SAK: torch.Tensor  # the A matrices, module after module
    b_SNR: torch.Tensor  # the B matrices, in the same dtype
    ends: tuple[int, ...]  # where each module's outputs end; the last is N
    #: Outputs in tiles of one module each, int32 [tiles, 3] on the device: module, first output, where the module ends.
    tiles_X3: torch.Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        tiles = [
            (module, first, end)
            for module, (begin, end) in enumerate(zip((0, *self.ends[:-1]), self.ends, strict=True))
            for first in range(begin, end, TILE_OUTPUTS)
        ]
        object.__setattr__(self, "tiles_X3", torch.tensor(tiles, dtype=torch.int32).to(self.b_SNR.device))

    @property
    def rank(self) -> int:
        """The rank of a slot, R."""
        return self.b_SNR.shape[2]


@dataclass(frozen=True, slots=True)
class Correction:
    """A correction that the consumer of a product adds to it: B of a token's slot times the sum of `low_PMA` over P."""

    low_PMA: torch.Tensor  # float32, partial sums of A x; undefined for tokens of slot 0
    buffers: LoraBuffers
    slots_M: torch.Tensor  # int32


def padded_rank(rank: int) -> int:
    """The rank of slots for adapters of up to `rank` (1 to `MOST_RANK`)."""
    assert 1 <= rank <= MOST_RANK
    return max(LEAST_RANK, 1 << (rank - 1).bit_length())
