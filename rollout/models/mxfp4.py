"""Weights of checkpoints in MXFP4: 4-bit numbers with one power of two for 32 of them (OCP microscaling formats 1.0).

A tensor `name` is two in the file. They hold it with its last two dimensions exchanged, [..., outputs, inputs]:

    name_blocks   uint8 [..., outputs, inputs / 32, 16]   two numbers in a byte, the first one in the lower half
    name_scales   uint8 [..., outputs, inputs / 32]       exponent of 2, plus 127
"""

import torch

from rollout.models.cut import CutView

BLOCKS, SCALES = "_blocks", "_scales"
#: Numbers that share an exponent.
GROUP = 32
_BYTES = GROUP // 2
_BIAS = 127
#: The exponent that stands for NaN.
NOT_A_NUMBER = 255
#: Values by the 4 bits: a sign, two bits of exponent, one of mantissa.
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decoded_shape(blocks: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of the tensor that blocks and scales of these shapes hold, or None if they do not fit each other."""
    if len(blocks) < 3 or blocks[-1] != _BYTES or blocks[:-1] != scales:
        return None
    *rest, outputs, groups, _ = blocks
    return (*rest, groups * GROUP, outputs)


def decode_into(view: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor) -> None:
    """Write the tensor [E, inputs, outputs] that `blocks` and `scales` hold to `view`, one expert after the other.

    They are decoded on the view's device, where they are the smaller copy. All products are exact.
    A view of a shard takes the experts that it keeps, or its part of each one.
    """
    device, numbers = view.device, (*_NUMBERS, *(-number for number in _NUMBERS))
    pairs = torch.tensor([(numbers[byte & 15], numbers[byte >> 4]) for byte in range(256)], device=device)
    powers = torch.exp2(torch.arange(NOT_A_NUMBER, dtype=torch.float64) - _BIAS).float().to(device)
    targets = view.destinations() if isinstance(view, CutView) else view
    for target, block, scale in zip(targets, blocks, scales, strict=True):
        if target is None:
            continue
        values = pairs[block.to(device).int()].flatten(-2)  # [outputs, groups, 32]
        values *= powers[scale.to(device).int()][..., None]
        target.copy_(values.flatten(-2).t())
