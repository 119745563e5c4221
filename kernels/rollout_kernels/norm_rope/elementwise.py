"""Norms, rotary position embedding and the gated activation, in torch.

These are the CPU path and the twins of the fused kernels in `triton_elementwise`.

The rotary embedding has the half-split layout of most Hugging Face checkpoints: a head becomes
`x * cos + rotate_half(x) * sin`. The sine carries the sign of `rotate_half`, so a rotation is a roll, a product and a
fused multiply-add over query and key heads together. Some checkpoints interleave the halves: a dimension turns with its
neighbour. In some only the first dimensions of a head turn.

Legend: T tokens, H heads, D head or hidden dimension, R dimensions of a head that turn.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float, unit_offset: bool = False) -> torch.Tensor:
    """Normalise `x` [..., D] to unit root mean square and scale it by `weight_D`; returns x's dtype.

    Computed in float32. With `unit_offset` the scale is `weight_D` plus 1, not rounded. Source: B. Zhang, R. Sennrich,
    "Root mean square layer normalization", NeurIPS 2019.
    """
    if unit_offset:
        return _unit_rms(x.float(), eps).mul_(weight_D.float() + 1.0).to(x.dtype)
    if x.dtype != torch.float32:
        return F.rms_norm(x, weight_D.shape, weight_D, eps)
    return _unit_rms(x, eps).mul_(weight_D)


def head_rms_norm(x_THD: torch.Tensor, weight_HD: torch.Tensor, eps: float, unit_offset: bool = False) -> torch.Tensor:
    """Normalise each head of `x_THD` on its own and scale it by its row of `weight_HD`, plus 1 with `unit_offset`.

    Returns x's dtype.
    """
    if unit_offset:
        return _unit_rms(x_THD.float(), eps).mul_(weight_HD.float() + 1.0).to(x_THD.dtype)
    if x_THD.dtype != torch.float32:
        return F.rms_norm(x_THD, x_THD.shape[-1:], None, eps) * weight_HD
    return _unit_rms(x_THD, eps).mul_(weight_HD)


def _unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """F.rms_norm without a weight, in fewer torch operations: their number dominates the time of a small model."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_constant(eps, x.device), norm, norm, value=1.0 / x.shape[-1]).rsqrt_().mul(x)


@lru_cache(maxsize=16)
def _constant(value: float, device: torch.device) -> torch.Tensor:
    return torch.tensor(value, device=device)


def rope_cos_sin(
    positions_T: torch.Tensor, inv_freq_D: torch.Tensor, sign_D: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines of a step's positions, float32 [T, 1, D] each.

    Source: J. Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021.

    Args:
        positions_T: positions, any integer dtype; or [T, D], a position for each dimension.
        inv_freq_D: float32, the D / 2 inverse frequencies, twice: one half after the other, or interleaved.
        sign_D: float32, minus the attention factor for each first one, plus the attention factor for each second.
    """
    positions_T1X = positions_T.to(torch.float32).view(len(positions_T), 1, -1)
    angles_T1D = positions_T1X * inv_freq_D
    # The last sign is the attention factor itself.
    return angles_T1D.cos() * sign_D[-1:], angles_T1D.sin_() * sign_D


def apply_rope(
    x_THD: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """Turn the first R dimensions of every head of `x_THD` by the result of `rope_cos_sin`; the others stay.

    Computed in float32, returned in x's dtype. With `interleaved` neighbours turn together, else halves of the R.
    """
    width = cos_T1R.shape[-1]
    if width < x_THD.shape[-1]:
        turned_THR = apply_rope(x_THD[..., :width], cos_T1R, sin_T1R, interleaved)
        return torch.cat((turned_THR, x_THD[..., width:]), dim=-1)
    float_THD = x_THD.float()
    if interleaved:
        other_THD = float_THD.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        other_THD = float_THD.roll(width // 2, -1)
    return torch.addcmul(float_THD * cos_T1R, other_THD, sin_T1R).to(x_THD.dtype)


def rotate_heads(heads_TAD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> None:
    """Turn all heads in place: halves of a head turn together, by the angles of the token. Computed in float32.

    Args:
        heads_TAD: heads of each token are contiguous; tokens may be further apart.
        cos_TD: cosines, float32, a value for each dimension.
        sin_TD: sines, likewise.
    """
    if heads_TAD.is_cuda:
        from rollout_kernels.norm_rope import triton_rotate

        triton_rotate.rotate_heads(heads_TAD, cos_TD, sin_TD)
        return
    first, second = sin_TD.chunk(2, dim=-1)
    heads_TAD.copy_(apply_rope(heads_TAD, cos_TD[:, None], torch.cat((-first, second), dim=-1)[:, None]))


def gated(
    gate_up: torch.Tensor,
    activation: Literal["silu", "bounded_silu", "gelu", "gelu_tanh", "relu2", "clamped"] = "silu",
    limit: float | None = None,
) -> torch.Tensor:
    """`activation(gate) * up` for `gate_up` [..., 2 I], where gate comes first; returns [..., I] in the same dtype.

    `relu2` has no gate: it is the square of relu of [..., I]. A limit bounds the activated gate from above, and the
    values on both sides. `bounded_silu`, whose gate is bounded before its activation, and `clamped`, with an alpha of
    1.702, need a limit.
    """
    if activation == "relu2":
        return F.relu(gate_up).square()
    if activation == "silu" and limit is None:
        return silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "clamped":
        assert limit is not None
        return clamped(gate, up, 1.702, limit)
    if activation == "bounded_silu":
        gate = gate.clamp(max=limit)
    if activation in ("silu", "bounded_silu"):
        gate = F.silu(gate)
    else:
        gate = F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    return gate.mul_(up) if limit is None else gate.clamp_(max=limit).mul_(up.clamp(-limit, limit))


def clamped(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """`g sigmoid(alpha g) (u + 1)`: gates are at most `limit`, values from `-limit` to `limit`.

    Source: the GLU of gpt-oss (arXiv 2508.10925).
    """
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` for `gate_up` [..., 2 I], where gate comes first; returns [..., I] in the same dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
