"""Rotary position embedding, in the half-split layout of Hugging Face checkpoints.

A head is rotated as `x * cos + rotate_half(x) * sin`. The sign of `rotate_half` is folded into the sine, so that the
rotation is a roll, a product and a fused multiply-add, over query and key heads together.

Legend: T tokens, H heads, D head dimension, F = D / 2 frequencies.
"""

from __future__ import annotations

import torch


def rope_cos_sin(
    positions_T: torch.Tensor, inv_freq_D: torch.Tensor, sign_D: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines of a step's positions, float32 [T, 1, D] each.

    Args:
        positions_T: positions, any integer dtype.
        inv_freq_D: float32, the F inverse frequencies twice over.
        sign_D: float32, minus the attention factor in the first half, plus in the second.
    """
    angles_T1D = positions_T.to(torch.float32)[:, None, None] * inv_freq_D
    # The second half of the sign vector is the attention factor itself.
    return angles_T1D.cos() * sign_D[-1:], angles_T1D.sin_() * sign_D


def apply_rope(x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
    """Rotate every head of `x_THD`; computed in float32, returned in its dtype. Takes what `rope_cos_sin` gives."""
    x = x_THD.float()
    rolled = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * cos_T1D, rolled, sin_T1D).to(x_THD.dtype)
