"""Norm and gate of the recurrence's output. Legend: T tokens, H value heads, V dimension of a value."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rollout_kernels.norm_rope.elementwise import rms_norm


def gated_norm(out_THV: torch.Tensor, z_THV: torch.Tensor, weight_V: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm(out) * silu(z)`, each head on its own; computed in float32, [T, H V] in the dtype of `z_THV`."""
    if out_THV.is_cuda:
        from rollout_kernels.delta.triton_norm import gated_norm as on_gpu

        return on_gpu(out_THV, z_THV, weight_V, eps)
    normed_THV = rms_norm(out_THV.float(), weight_V.float(), eps)
    return (normed_THV * F.silu(z_THV.float())).to(z_THV.dtype).flatten(1)
