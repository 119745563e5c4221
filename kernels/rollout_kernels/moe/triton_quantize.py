"""Codes and scales from weights on a GPU, equal bit for bit to the twins in `quantize`.

    mxfp8        a program handles 128 groups of 32
    fp8_row      a program handles 16 rows, and reads them twice: for their largest magnitudes, then for their codes
    fp8_block    a program handles a block of 128 x 128

Divisions round to nearest, and encoding uses integer arithmetic, so a weight gets the same code on every device.

Legend: E experts, N outputs, K inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_kernels.common.triton_fp8 import e4m3_code
from rollout_kernels.moe.formats import ExpertWeights, Format, scale_dtype, scale_shape

_GROUPS = 128
_ROWS = 16
_CHUNK = 256


@triton.jit
def _scale(amax):
    return tl.where(amax == 0.0, 1.0, tl.div_rn(amax, 448.0))


@triton.jit(do_not_specialize=["groups"])
def _mxfp8_kernel(w_ptr, codes_ptr, scales_ptr, groups, GROUPS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    live = group < groups
    w = tl.load(w_ptr + at, mask=live[:, None], other=0.0).to(tl.float32)
    # The maximum of the bits, not of the values: a maximum of values ignores NaN.
    bits = tl.max(w.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    power = tl.maximum((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32), 1)
    inverse = ((254 - power) << 23).to(tl.float32, bitcast=True)
    tl.store(codes_ptr + at, e4m3_code(w * inverse[:, None]), mask=live[:, None])
    tl.store(scales_ptr + group, tl.where(bits < 0x7F800000, power, 255).to(tl.uint8), mask=live)


@triton.jit(do_not_specialize=["rows", "K"])
def _row_kernel(w_ptr, codes_ptr, scales_ptr, rows, K, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, CHUNK)
    most = tl.zeros([ROWS, CHUNK], tl.float32)
    for start in range(0, K, CHUNK):
        live = (row < rows)[:, None] & (start + k < K)[None, :]
        w = tl.load(w_ptr + row[:, None] * K + start + k[None, :], mask=live, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(w))
    scale = _scale(tl.max(most, axis=1))
    tl.store(scales_ptr + row, scale, mask=row < rows)
    for start in range(0, K, CHUNK):
        live = (row < rows)[:, None] & (start + k < K)[None, :]
        at = row[:, None] * K + start + k[None, :]
        w = tl.load(w_ptr + at, mask=live, other=0.0).to(tl.float32)
        tl.store(codes_ptr + at, e4m3_code(tl.div_rn(w, tl.broadcast_to(scale[:, None], w.shape))), mask=live)


@triton.jit(do_not_specialize=["N", "K"])
def _block_kernel(w_ptr, codes_ptr, scales_ptr, N, K):
    matrix = tl.program_id(2).to(tl.int64)
    n = tl.program_id(1) * 128 + tl.arange(0, 128)[:, None]
    k = tl.program_id(0) * 128 + tl.arange(0, 128)[None, :]
    live = (n < N) & (k < K)
    at = matrix * N * K + n * K + k
    w = tl.load(w_ptr + at, mask=live, other=0.0).to(tl.float32)
    scale = _scale(tl.max(tl.max(tl.abs(w), axis=1), axis=0))
    tl.store(codes_ptr + at, e4m3_code(tl.div_rn(w, scale)), mask=live)
    block = (matrix * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    tl.store(scales_ptr + block, scale)


def empty_weights(
    experts: int, outputs: int, inputs: int, format: Format, halves: int, device: torch.device
) -> ExpertWeights:
    """Uninitialised memory for quantised weights; `format` is not `plain`."""
    shape = scale_shape(experts, outputs, inputs, format, halves)
    assert shape is not None, "plain weights are not quantised"
    values_ENK = torch.empty(experts, outputs, inputs, dtype=torch.uint8, device=device)
    dtype = scale_dtype(format)
    return ExpertWeights(values_ENK, torch.empty(shape, dtype=dtype, device=device), format, halves)


def quantize_into(w_ENK: torch.Tensor, out: ExpertWeights) -> None:
    """Write the codes and scales of `w_ENK` (bf16, f16 or float32, contiguous) to `out`, on the same device.

    `out` may be a `part` of larger weights: one expert, or one half of it.
    """
    assert out.scales is not None and w_ENK.is_contiguous() and w_ENK.shape == out.values_ENK.shape
    experts, outputs, inputs = w_ENK.shape
    if out.format == "mxfp8":
        groups = w_ENK.numel() // 32
        _mxfp8_kernel[(triton.cdiv(groups, _GROUPS),)](
            w_ENK, out.values_ENK, out.scales, groups, GROUPS=_GROUPS, num_warps=4
        )
    elif out.format == "fp8_row":
        rows = experts * outputs
        _row_kernel[(triton.cdiv(rows, _ROWS),)](
            w_ENK, out.values_ENK, out.scales, rows, inputs, ROWS=_ROWS, CHUNK=_CHUNK, num_warps=4
        )
    else:
        rows = outputs // out.halves
        blocks = (triton.cdiv(inputs, 128), triton.cdiv(rows, 128), experts * out.halves)
        _block_kernel[blocks](w_ENK, out.values_ENK, out.scales, rows, inputs, num_warps=8)


def quantize_in_pieces(w_ENK: torch.Tensor, out: ExpertWeights, at_once: int, non_blocking: bool = False) -> None:
    """`quantize_into` for weights on any device: `at_once` experts at a time are copied to the device of `out`."""
    assert out.scales is not None
    for start in range(0, len(w_ENK), at_once):
        some = slice(start, start + at_once)
        piece = w_ENK[some].to(out.values_ENK.device, non_blocking=non_blocking).contiguous()
        quantize_into(piece, ExpertWeights(out.values_ENK[some], out.scales[some], out.format, out.halves))


def quantize_on_device(w_ENK: torch.Tensor, format: Format, halves: int = 1) -> ExpertWeights:
    """Weights of experts in `format`, as `quantize.quantize` returns them."""
    if format == "plain":
        return ExpertWeights(w_ENK, None, format, halves)
    experts, outputs, inputs = w_ENK.shape
    out = empty_weights(experts, outputs, inputs, format, halves, w_ENK.device)
    quantize_into(w_ENK, out)
    return out
