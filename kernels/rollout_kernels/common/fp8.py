"""Eight-bit codes in torch: e4m3 or int8, with a float32 scale. `triton_fp8` computes the same bits inside kernels.

A code has four significant bits. The value of a code differs from the original by at most 2^-4 of the original, or by
at most 2^-10 of the scale where the original is below 2^-6 of the scale. Codes are stored as uint8, because torch can
index and copy uint8 on every device, but not float8.

int8 codes have the same distance everywhere, 1/127 of the largest magnitude: a quarter of the error of e4m3 where
magnitudes are alike, as in values. Keys have some large channels, beside which the others would be lost.

Legend: T tokens, G KV heads, D head dimension.
"""

from __future__ import annotations

import torch

#: The largest e4m3 value.
LARGEST = 448.0
#: The smallest scale of keys and values. It prevents division by zero and overflow.
LEAST_SCALE = 2.0**-126


def codes_of(values: torch.Tensor) -> torch.Tensor:
    """The e4m3 codes (uint8) of float32 values: rounded to nearest even, saturated at +-448; NaN stays NaN."""
    return values.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)


def values_of(codes: torch.Tensor) -> torch.Tensor:
    """The float32 values of e4m3 codes (uint8), or of int8."""
    return codes.float() if codes.dtype == torch.int8 else codes.view(torch.float8_e4m3fn).float()


def quantize_heads(x_TGD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [T, G, D] (uint8) and scales [T, G] (float32) of keys or values: one scale for each token and head.

    The scale is the smallest one that can represent the head's largest magnitude. So no calibration is needed and no
    value saturates. A NaN stays a NaN and does not affect the other values of its head. An infinity makes its whole
    head NaN (zero times an infinite scale).
    """
    x = x_TGD.float()
    most_TG = torch.where(x == x, x.abs(), 0.0).amax(dim=-1)
    # The divisor is a tensor: on a GPU, torch replaces division by a Python number with a product by its reciprocal.
    scales_TG = (most_TG / torch.full_like(most_TG, LARGEST)).clamp(min=LEAST_SCALE)
    return codes_of(x / scales_TG[..., None]), scales_TG


def quantize_values(x_TGD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes [T, G, D] and scales [T, G]: as `quantize_heads`, but a NaN, too, makes its whole head NaN."""
    x = x_TGD.float()
    most_TG = x.abs().amax(dim=-1)
    scales_TG = (most_TG / torch.full_like(most_TG, 127.0)).clamp(min=LEAST_SCALE)
    return (x / scales_TG[..., None]).round().nan_to_num(0.0).to(torch.int8), scales_TG
