"""Rotary embeddings: inverse frequencies for every kind of scaling, and the module that holds them.

Legend: T tokens, D dimensions of a head that turn, F = D / 2 frequencies.
"""

from __future__ import annotations

import math

import torch
from rollout_kernels import rope_cos_sin
from torch import nn

from rollout.models.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Radians per position of the dimensions that turn, float32 [F], fastest first."""
    width = rope.width(head_dim)
    if rope.kind == "none":
        return torch.zeros(width // 2)
    inv_freq_F = 1.0 / rope.theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    if rope.kind == "linear":
        return inv_freq_F / rope.factor
    if rope.kind == "llama3":
        return _llama3(inv_freq_F, rope)
    if rope.kind == "yarn":
        return _yarn(inv_freq_F, rope, width)
    if rope.kind == "longrope":
        return inv_freq_F / torch.tensor(rope.factors)
    return inv_freq_F


def _llama3(inv_freq_F: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Divide slow frequencies by the factor, keep fast ones, interpolate between the two (Llama 3.1)."""
    turns_F = rope.original_max_positions * inv_freq_F / (2 * math.pi)
    kept_F = ((turns_F - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return inv_freq_F * kept_F + inv_freq_F / rope.factor * (1 - kept_F)


def _yarn(inv_freq_F: torch.Tensor, rope: RopeSpec, width: int) -> torch.Tensor:
    """As llama3, but the ramp is over dimensions rather than frequencies (arXiv 2309.00071, section 3.2)."""

    def dimension(turns: float) -> float:
        period = rope.original_max_positions / (turns * 2 * math.pi)
        return width * math.log(period) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp_F = ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0, 1)
    return inv_freq_F * (1 - ramp_F) + inv_freq_F / rope.factor * ramp_F


class Rope(nn.Module):
    """Cosines and sines of a step's positions, computed once for all layers that share it; any position works."""

    def __init__(self, rope: RopeSpec, head_dim: int, device: torch.device) -> None:
        super().__init__()
        inv_freq_F = inverse_frequencies(rope, head_dim)
        sign_F = torch.full_like(inv_freq_F, rope.attention_factor)
        self.inv_freq_D: torch.Tensor
        self.sign_D: torch.Tensor
        signs = (-sign_F, sign_F)
        axes_F = torch.tensor(rope.axes or (0,) * len(inv_freq_F), dtype=torch.int64)
        axes_D = axes_F.repeat_interleave(2) if rope.interleaved else axes_F.repeat(2)
        self.axes_D: torch.Tensor
        self.register_buffer("axes_D", axes_D.to(device), persistent=False)
        if rope.interleaved:
            inv_freq_D, sign_D = inv_freq_F.repeat_interleave(2), torch.stack(signs, 1).flatten()
        else:
            inv_freq_D, sign_D = inv_freq_F.repeat(2), torch.cat(signs)
        self.register_buffer("inv_freq_D", inv_freq_D.to(device), persistent=False)
        self.register_buffer("sign_D", sign_D.to(device), persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The cosines and sines of `apply_rope`. Positions are [T], or [3, T] by axis."""
        if positions.dim() == 2:
            positions_TD = positions.index_select(0, self.axes_D).t().contiguous()
            return rope_cos_sin(positions_TD, self.inv_freq_D, self.sign_D)
        return rope_cos_sin(positions, self.inv_freq_D, self.sign_D)
