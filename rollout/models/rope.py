"""Rotary embeddings: inverse frequencies, and the module that holds them.

Legend: T tokens, D dimensions of a head that turn, F = D / 2 frequencies.
"""

import torch
from rollout_kernels import rope_cos_sin
from torch import nn

from rollout.models.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Radians per position of the dimensions that turn, float32 [F], fastest first."""
    width = rope.width(head_dim)
    if rope.kind == "none":
        return torch.zeros(width // 2)
    if rope.frequencies:
        return torch.tensor(rope.frequencies)
    return 1.0 / rope.theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)


class Rope(nn.Module):
    """Cosines and sines of a step's positions, computed once for all layers that share it; any position works."""

    def __init__(self, rope: RopeSpec, head_dim: int, device: torch.device) -> None:
        super().__init__()
        inv_freq_F = inverse_frequencies(rope, head_dim)
        sign_F = torch.full_like(inv_freq_F, rope.amplitude)
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
