"""The gated activation of a feed-forward block."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` for `gate_up` [..., 2 I], gate first; returns [..., I] in the same dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
