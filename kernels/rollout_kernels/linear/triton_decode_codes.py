"""16-bit weights from codes and scales, for products of many tokens, which cuBLAS computes.

A program decodes a tile of 32 rows and 256 columns. A scale is constant over 32 neighbours in every format, so the
scales of a tile are [32, 8]. The product of a code and its scale is rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_kernels.common.triton_fp8 import operand, power_of_two
from rollout_kernels.common.triton_math import narrow
from rollout_kernels.linear.coded import CodedMatrix, scale_block

_ROWS = 32
_COLUMNS = 256


@triton.jit(do_not_specialize=["N"])
def _decode_kernel(
    codes_ptr, scales_ptr, out_ptr,
    N,
    K: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, POWERS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    live = (n < N)[:, None] & (k < K)[None, :]
    at = n.to(tl.int64)[:, None] * K + k[None, :]
    values = operand(tl.load(codes_ptr + at, mask=live, other=0), tl.float32)
    group = tl.minimum(tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS // 32) * 32, K - 1)
    WIDTH: tl.constexpr = (K + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    scale_row = tl.minimum(n, N - 1) // SCALE_ROWS * WIDTH
    scale = tl.load(scales_ptr + scale_row[:, None] + group[None, :] // SCALE_COLUMNS)
    if POWERS:
        scale = power_of_two(scale)
    scaled = tl.reshape(values, [ROWS, COLUMNS // 32, 32]) * scale[:, :, None]
    tl.store(out_ptr + at, narrow(tl.reshape(scaled, [ROWS, COLUMNS]), out_ptr.dtype.element_ty), mask=live)


def decode_codes(weights: CodedMatrix, dtype: torch.dtype) -> torch.Tensor:
    """The weights [N, K] in `dtype`, as `CodedMatrix.dequantized` computes them."""
    outputs, inputs = weights.codes_NK.shape
    out = torch.empty(outputs, inputs, dtype=dtype, device=weights.codes_NK.device)
    if weights.in_step:
        _decode(weights.codes_NK, weights.scales, out, weights)
        return out
    for part, target in zip(weights.parts(), out.split(weights.widths), strict=True):
        assert part.scales is not None
        _decode(part.values_ENK[0], part.scales[0], target, weights)
    return out


def _decode(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, weights: CodedMatrix) -> None:
    outputs, inputs = codes.shape
    rows, columns = scale_block(weights.format, inputs)
    _decode_kernel[(triton.cdiv(inputs, _COLUMNS), triton.cdiv(outputs, _ROWS))](
        codes, scales, out, outputs,
        K=inputs, SCALE_ROWS=rows, SCALE_COLUMNS=columns, POWERS=weights.format == "mxfp8", ROWS=_ROWS,
        COLUMNS=_COLUMNS, num_warps=4,
    )  # fmt: skip
