"""The codes that a worker makes of weights, for a trainer: `float8_e4m3fn` codes and their scales, bit for bit.

    fp8_block    a float32 scale for each block of 128 x 128; blocks at the right and lower edge may be smaller
    fp8_row      a float32 scale for each row

The rule: a scale is the largest magnitude divided by 448, the largest e4m3 value, in float32; 1 if all values are zero.
A code is the weight divided by its scale in float32, clamped to +-448 and rounded to the nearest code, ties to even.
Both divisions round to nearest. CPU and GPU give the same bits.

Needs torch alone.
"""

import torch
import torch.nn.functional as F

#: Ends the name of the scales of a tensor.
SCALES = "_scale_inv"
_BLOCK = 128
_LARGEST = 448.0


def quantize_fp8_block(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N, K] (`float8_e4m3fn`) and scales [N / 128, K / 128] (float32, rounded up) of a weight [N, K].

    A worker with `weight_dtype = fp8_block` takes both in an update: codes under the weight's name, scales under the
    name + `SCALES`.
    """
    wide = _wide(weight)
    rows, columns = wide.shape
    padded = F.pad(wide, (0, -columns % _BLOCK, 0, -rows % _BLOCK))
    blocks = padded.unflatten(1, (-1, _BLOCK)).unflatten(0, (-1, _BLOCK))  # [rows of blocks, 128, columns, 128]
    scales = _scale(blocks.abs().amax(dim=(1, 3)))
    codes = _codes(blocks / scales[:, None, :, None]).flatten(2, 3).flatten(0, 1)
    return codes[:rows, :columns].contiguous(), scales


def quantize_fp8_row(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N, K] (`float8_e4m3fn`) and scales [N] (float32) of a weight [N, K]."""
    wide = _wide(weight)
    scales = _scale(wide.abs().amax(dim=1))
    return _codes(wide / scales[:, None]), scales


def _wide(weight: torch.Tensor) -> torch.Tensor:
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"a weight must be a floating-point matrix, not {weight.dtype} {list(weight.shape)}")
    return weight.detach().float()


def _scale(largest: torch.Tensor) -> torch.Tensor:
    # The divisor is a tensor: on a GPU, torch replaces division by a Python number with a product by its reciprocal.
    return torch.where(largest == 0, 1.0, largest / torch.full_like(largest, _LARGEST))


def _codes(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
