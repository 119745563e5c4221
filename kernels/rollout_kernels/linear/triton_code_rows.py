"""Activations as e4m3 codes, with a float32 scale for 128 neighbours of a row: both operands of a product are codes.

A scale is the largest magnitude over 448, as for keys and values (`common.fp8`). A code is the value times the inverse
of the scale, rounded to nearest even; a division for each value would take twice as long. There is memory for a
multiple of 16 rows, and scales are stored one block after another ([K / 128, M]), as cuBLAS needs them.

Legend: M tokens, K inputs, B blocks of 128 inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from rollout_kernels.common.triton_fp8 import block_codes
from rollout_kernels.common.triton_math import follow_options, let_next_begin, wait_for_last
from rollout_kernels.linear.coded import CodedMatrix, CodedRows
from rollout_kernels.moe.formats import BLOCK

_PADDING = 16


@triton.jit
def _code_rows_kernel(x_ptr, codes_ptr, scales_ptr, padded, stride_x, K: tl.constexpr, BLOCKS: tl.constexpr):
    row = tl.program_id(0)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    let_next_begin()
    wait_for_last()
    codes, scales = block_codes(
        tl.load(x_ptr + row.to(tl.int64) * stride_x + at, mask=at < K, other=0.0).to(tl.float32)
    )
    tl.store(codes_ptr + row.to(tl.int64) * K + at, codes, mask=at < K)
    tl.store(scales_ptr + block * padded + row, scales, mask=block * 128 < K)


def empty_rows(rows: int, inputs: int, device: torch.device) -> CodedRows:
    """Memory for the codes of `rows` tokens; `inputs` is a multiple of 128."""
    assert inputs % BLOCK == 0, f"{inputs} columns are no multiple of {BLOCK}"
    padded = triton.cdiv(rows, _PADDING) * _PADDING
    codes_MK = torch.empty(padded, inputs, dtype=torch.float8_e4m3fn, device=device)
    return CodedRows(codes_MK, torch.empty(inputs // BLOCK, padded, dtype=torch.float32, device=device), rows)


def code_rows(x_MK: torch.Tensor) -> CodedRows:
    """Codes of activations in 16 bits or float32, contiguous in K, a multiple of 128."""
    rows, inputs = x_MK.shape
    made = empty_rows(rows, inputs, x_MK.device)
    blocks = min(16, triton.next_power_of_2(inputs // BLOCK))
    _code_rows_kernel[(rows, triton.cdiv(inputs, blocks * BLOCK))](
        x_MK, made.codes_MK.view(torch.uint8), made.scales_BM, len(made.codes_MK), x_MK.stride(0),
        K=inputs, BLOCKS=blocks, num_warps=4, **follow_options(x_MK.device),
    )  # fmt: skip
    return made


def scaled_product(rows: CodedRows, weights: CodedMatrix) -> torch.Tensor:
    """`x @ w.T` by cuBLAS, [M, N] in bf16; K is a multiple of 512."""
    blocks = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    codes_KN = weights.codes_NK.view(torch.float8_e4m3fn).T
    out = F.scaled_mm(
        rows.codes_MK, codes_KN, rows.scales_BM.T, blocks[0], weights.scales.T, blocks[1], output_dtype=torch.bfloat16
    )
    return out[: rows.rows]
