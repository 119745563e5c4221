"""Activations as e4m3 codes, with a float32 scale for 128 neighbours of a row: both operands of a product are codes.

A scale is the largest magnitude over 448, as for keys and values (`common.fp8`). A code is the value times the inverse
of the scale, rounded to nearest even; a division for each value would take twice as long. Rows are padded to a multiple
of 16 with zeros, and scales are stored one block after another ([K / 128, M]), as cuBLAS needs them.

Legend: M tokens, K inputs, B blocks of 128 inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from rollout_kernels.common.triton_fp8 import e4m3_code, head_scale
from rollout_kernels.common.triton_math import INTERPRETED, follow_options, let_next_begin, wait_for_last
from rollout_kernels.linear.coded import CodedMatrix
from rollout_kernels.moe.formats import BLOCK

_PADDING = 16


class CodedRows(NamedTuple):
    """Codes and scales of `rows` tokens; M is `rows`, padded."""

    codes_MK: torch.Tensor  # float8_e4m3fn
    scales_BM: torch.Tensor
    rows: int

    def dequantized(self) -> torch.Tensor:
        """The values of the codes, float64 [rows, K]."""
        scales_MK = self.scales_BM.T.double().repeat_interleave(BLOCK, dim=1)
        return (self.codes_MK.double() * scales_MK)[: self.rows]


@triton.jit
def _code_rows_kernel(x_ptr, codes_ptr, scales_ptr, rows, padded, stride_x, K: tl.constexpr, BLOCKS: tl.constexpr):
    row = tl.program_id(0)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    let_next_begin()
    wait_for_last()
    width = tl.where(row < rows, K, 0)
    x = tl.load(x_ptr + row.to(tl.int64) * stride_x + at, mask=at < width, other=0.0).to(tl.float32)
    most = tl.max(tl.abs(x), axis=1)
    scale = head_scale(most)
    x *= tl.div_rn(tl.full(most.shape, 1.0, tl.float32), scale)[:, None]
    code = e4m3_code(x) if INTERPRETED else x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(codes_ptr + row.to(tl.int64) * K + at, code, mask=at < K)
    tl.store(scales_ptr + block * padded + row, scale, mask=block * 128 < K)


def code_rows(x_MK: torch.Tensor) -> CodedRows:
    """Codes of activations in 16 bits or float32, contiguous in K, a multiple of 128."""
    rows, inputs = x_MK.shape
    assert inputs % BLOCK == 0, f"{inputs} columns are no multiple of {BLOCK}"
    padded = triton.cdiv(rows, _PADDING) * _PADDING
    codes_MK = torch.empty(padded, inputs, dtype=torch.uint8, device=x_MK.device)
    scales_BM = torch.empty(inputs // BLOCK, padded, dtype=torch.float32, device=x_MK.device)
    blocks = min(16, triton.next_power_of_2(inputs // BLOCK))
    _code_rows_kernel[(padded, triton.cdiv(inputs, blocks * BLOCK))](
        x_MK,
        codes_MK,
        scales_BM,
        rows,
        padded,
        x_MK.stride(0),
        K=inputs,
        BLOCKS=blocks,
        num_warps=4,
        **follow_options(x_MK.device),
    )
    return CodedRows(codes_MK.view(torch.float8_e4m3fn), scales_BM, rows)


def scaled_product(x_MK: torch.Tensor, weights: CodedMatrix) -> torch.Tensor:
    """`x @ w.T` by cuBLAS, bf16 [M, N], with activations rounded to codes; K is a multiple of 512."""
    rows = code_rows(x_MK)
    blocks = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    codes_KN = weights.codes_NK.view(torch.float8_e4m3fn).T
    out = F.scaled_mm(
        rows.codes_MK, codes_KN, rows.scales_BM.T, blocks[0], weights.scales.T, blocks[1], output_dtype=x_MK.dtype
    )
    return out[: rows.rows]
