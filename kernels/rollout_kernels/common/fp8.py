"""Numbers of eight bits: e4m3 codes with a float32 scale, in torch. `triton_fp8` makes the same bits in kernels.

A code has four significant bits, so what comes back is within 2^-4 of a value, or within 2^-10 of its scale where the
value is below 2^-6 of it. Codes are kept as uint8: torch moves these about, and does not move float8, on every device.
"""

from __future__ import annotations

import torch

#: The largest e4m3 value.
LARGEST = 448.0
#: The smallest scale of keys and values: with it a division neither overflows nor is 0 / 0.
LEAST_SCALE = 2.0**-126


def codes_of(values: torch.Tensor) -> torch.Tensor:
    """e4m3 codes (uint8) of float32 values: to nearest even, the largest where there is no larger; NaN stays NaN."""
    return values.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)


def values_of(codes: torch.Tensor) -> torch.Tensor:
    """The float32 values of e4m3 codes (uint8)."""
    return codes.view(torch.float8_e4m3fn).float()


def quantize_heads(x_TGD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [T, G, D] (uint8) and scales [T, G] (float32) of keys or values: one scale a token and head.

    The scale is the smallest that holds the head's largest value, so nothing needs to be calibrated and nothing
    saturates. A NaN becomes a NaN and leaves its neighbours as they are; an infinity makes its whole head useless:
    zeros that are times infinity, NaN again.
    """
    x = x_TGD.float()
    most_TG = torch.where(x == x, x.abs(), 0.0).amax(dim=-1)
    # A tensor as divisor: on a GPU torch multiplies by the reciprocal of a number.
    scales_TG = (most_TG / torch.full_like(most_TG, LARGEST)).clamp(min=LEAST_SCALE)
    return codes_of(x / scales_TG[..., None]), scales_TG
