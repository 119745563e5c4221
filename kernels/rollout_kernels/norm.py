"""Root-mean-square normalisation, over hidden states and over attention heads.

Legend: T tokens, H heads, D the normalised dimension.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise `x` [..., D] to unit root mean square and scale it by `weight_D`; computed in float32, in x's dtype."""
    if x.dtype != torch.float32:
        return F.rms_norm(x, weight_D.shape, weight_D, eps)
    return _unit_rms(x, eps).mul_(weight_D)


def head_rms_norm(x_THD: torch.Tensor, weight_HD: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise each head of `x_THD` by itself and scale it by its own row of `weight_HD`."""
    if x_THD.dtype != torch.float32:
        return F.rms_norm(x_THD, x_THD.shape[-1:], None, eps) * weight_HD
    return _unit_rms(x_THD, eps).mul_(weight_HD)


def _unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """The same as F.rms_norm without a weight, in fewer operations: a small model's time is the number of them."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_constant(eps, x.device), norm, norm, value=1.0 / x.shape[-1]).rsqrt_().mul(x)


@lru_cache(maxsize=16)
def _constant(value: float, device: torch.device) -> torch.Tensor:
    return torch.tensor(value, device=device)
