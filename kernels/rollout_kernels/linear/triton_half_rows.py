"""Activations as f16 for products of codes: e4m3 codes become f16 in one instruction for two, bf16 takes four.

A row is multiplied by a power of two that brings its largest finite magnitude into [2^14, 2^15). So every bf16 value of
at least 2^-28 of the largest is exact; a smaller one differs by at most 2^-39 of it. Infinities and NaN stay.

Columns change places within blocks of 128, so that a thread of the tensor cores has 32 codes that lie together:

    place   16 j + 8 h + 2 t + e    t thread of four, j product, h half of its inputs, e of two neighbours
    column  32 t + 4 j + 2 h + e
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_kernels.common.triton_math import follow_options, let_next_begin, wait_for_last

#: Columns that change places among each other.
BLOCK = 128


@triton.jit
def _half_rows_kernel(x_ptr, out_ptr, scale_ptr, stride_x, K: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    to = tl.arange(0, WIDTH)
    column = to // 128 * 128 + to // 2 % 4 * 32 + to // 16 % 8 * 4 + to // 8 % 2 * 2 + to % 2
    let_next_begin()
    wait_for_last()
    x = tl.load(x_ptr + row.to(tl.int64) * stride_x + column, mask=to < K, other=0.0).to(tl.float32)
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    exponent = tl.max(tl.where(magnitude < 0x7F800000, magnitude, 0), axis=0) >> 23
    exponent = tl.maximum(exponent, 15)  # below it, the scale would be no normal float32
    half = (x * ((268 - exponent) << 23).to(tl.float32, bitcast=True)).to(tl.float16)
    tl.store(out_ptr + row.to(tl.int64) * K + to, half, mask=to < K)
    tl.store(scale_ptr + row, ((exponent - 14) << 23).to(tl.float32, bitcast=True))


def half_rows(x_MK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """f16 [M, K] with columns in other places, and the float32 scale [M] that a row has to be multiplied by.

    K must be a multiple of `BLOCK`.
    """
    rows, inputs = x_MK.shape
    assert inputs % BLOCK == 0, f"{inputs} columns are no multiple of {BLOCK}"
    half_MK = torch.empty(rows, inputs, dtype=torch.float16, device=x_MK.device)
    scale_M = torch.empty(rows, dtype=torch.float32, device=x_MK.device)
    width = triton.next_power_of_2(inputs)
    _half_rows_kernel[(rows,)](
        x_MK, half_MK, scale_M, x_MK.stride(0),
        K=inputs, WIDTH=width, num_warps=max(4, min(16, width // 512)), **follow_options(x_MK.device),
    )  # fmt: skip
    return half_MK, scale_M
