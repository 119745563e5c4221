"""Bf16 activations as f16 and a power of two a row, for products with e4m3 codes on the tensor cores.

A code becomes f16 in half an instruction and bf16 in two, so beside codes it pays to have the activations in f16. Bf16
reaches further than f16: so each row is multiplied by the power of two that brings its largest value to between 2^14
and 2^15, just below where f16 ends. That is exact for values down to 2^-28 of the row's largest; the error of smaller
ones is at most 2^-39 of the largest.

Legend: R rows, W width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_kernels.triton_math import follow, follow_options


@triton.jit
def _narrow_kernel(x_ptr, half_ptr, scale_ptr, W: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    follow()
    x = tl.load(x_ptr + row * W + at, mask=at < W, other=0.0).to(tl.float32)
    # The bits of the power of two below the largest value; from 2^-112 on both scale and inverse are normal numbers.
    power = tl.maximum(tl.max(tl.abs(x)).to(tl.int32, bitcast=True) & 0x7F800000, 15 << 23)
    factor = ((141 << 23) - power + (127 << 23)).to(tl.float32, bitcast=True)  # 2^14 over it
    tl.store(half_ptr + row * W + at, (x * factor).to(tl.float16), mask=at < W)
    tl.store(scale_ptr + row, (power - (14 << 23)).to(tl.float32, bitcast=True))


def narrow_rows(x_RW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bf16 `x_RW`, contiguous, as f16 [R, W] and float32 scales [R]: x is about their product."""
    assert x_RW.dtype == torch.bfloat16 and x_RW.is_contiguous()
    rows, width = x_RW.shape
    half_RW = torch.empty_like(x_RW, dtype=torch.float16)
    scales_R = torch.empty(rows, dtype=torch.float32, device=x_RW.device)
    block = triton.next_power_of_2(width)
    _narrow_kernel[(rows,)](
        x_RW,
        half_RW,
        scales_R,
        W=width,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **follow_options(x_RW.device),
    )
    return half_RW, scales_R
