"""`gated_norm` on a GPU: a program for each head of a token. Legend: T tokens, H heads, V dimension of a value."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_kernels.common.triton_math import narrow


@triton.jit
def _gated_norm_kernel(
    out_ptr, z_ptr, weight_ptr, result_ptr, stride_z, eps, H: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr
):
    token, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H  # neighbours start together
    v = tl.arange(0, BLOCK)
    live = v < V
    x = tl.load(out_ptr + (token * H + head) * V + v, mask=live, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + token * stride_z + head * V + v, mask=live, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + v, mask=live, other=0.0).to(tl.float32)
    x = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / V + eps)) * weight * (z / (1.0 + tl.exp(-z)))
    tl.store(result_ptr + (token * H + head) * V + v, narrow(x, result_ptr.dtype.element_ty), mask=live)


def gated_norm(out_THV: torch.Tensor, z_THV: torch.Tensor, weight_V: torch.Tensor, eps: float) -> torch.Tensor:
    """As `rollout_kernels.delta.gated_norm`; the heads of `z_THV` lie side by side."""
    tokens, heads, width = out_THV.shape
    assert out_THV.is_contiguous() and z_THV.stride(1) == width and z_THV.stride(2) == 1
    result_TV = torch.empty(tokens, heads * width, dtype=z_THV.dtype, device=z_THV.device)
    _gated_norm_kernel[(tokens * heads,)](
        out_THV,
        z_THV,
        weight_V,
        result_TV,
        z_THV.stride(0),
        eps,
        H=heads,
        V=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=1,
    )
    return result_TV
