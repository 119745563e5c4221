"""Tiles of stored weights: decoded into an operand of the tensor cores, or multiplied and added by a warp's threads.

Codes are decoded to bf16 or f16 without loss. An `mxfp8` scale is multiplied into the bf16 weight; a power of two costs
no precision (down to 2^-117, where the smallest code times the scale is no longer a normal bf16; a scale above 2^7
makes the weight infinite). f16 cannot represent such scales. Scales of blocks are applied to a tile's float32 sums.

Where the threads of a warp multiply, a thread has 16 codes of a row. They share one scale (in every format the scale is
constant over 16 neighbours), so a scale costs one product in 16.

Legend: N outputs, K inputs, M tokens; R rows, W stored elements and A partial sums of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_kernels.common.triton_fp8 import power_of_two
from rollout_kernels.common.triton_math import INTERPRETED, dot, narrow, two_floats, widen

#: Codes that a thread loads at once.
THREAD_CODES = tl.constexpr(16)


@triton.jit
def tile_operand(w, code, FORMAT: tl.constexpr, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The operand of the tensor cores from a tile of stored weights; for `mxfp8`, `code` is from `tile_scales`."""
    if FORMAT == "plain":
        return w
    elif FORMAT == "mxfp8":
        if code.dtype == tl.int32:
            # Unpack bytes with `join`. With an `arange` of shifts Triton cannot see that the conversion may happen in
            # the tensor cores' layout, and moves the tile through shared memory instead.
            pairs = tl.join(tl.join(code, code >> 16), tl.join(code >> 8, code >> 24))
            code = tl.reshape(pairs, [BLOCK_N, 4]) & 255
        grouped = tl.reshape(w, [BLOCK_N, BLOCK_K // 32, 32])
        return tl.reshape(_scaled(grouped, code[:, :, None]), [BLOCK_N, BLOCK_K])
    else:
        half = w.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        if DTYPE == tl.float16:
            return half
        else:
            return narrow(half.to(tl.float32), DTYPE)


@triton.jit
def _scaled(w, code):
    """The e4m3 codes `w` times 2^(code - 127), in bf16. With scales from 2^8 on, results are infinite (0 becomes NaN).

    The code of NaN counts as 480, because `quantize` produces it only together with a NaN scale.
    """
    if INTERPRETED:
        scale = tl.where(code > 134, float("inf"), power_of_two(code))
        return narrow(w.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale, tl.bfloat16)
    else:
        # Moved to the exponent and mantissa bits of a bf16, a code has 2^-120 of its value. One product of two pairs
        # corrects this and applies the scale. Two codes become [sign, code] each, shifted left by 4 bits.
        factor = (tl.minimum(code.to(tl.int32) + 120, 255) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 pair, zero;
            cvt.u32.u16 pair, $1;
            prmt.b32 pair, pair, 0, 0x9180;
            shl.b32 pair, pair, 4;
            and.b32 pair, pair, 0x87f087f0;
            mov.b32 zero, 0x80008000;
            fma.rn.bf16x2 $0, pair, $2, zero;
            }""",
            "=r,h,r",
            [w, factor],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def add_tile(acc, w, x, scale, FORMAT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """`acc` [N, M] plus the product of a tile of weights [N, K] and activations [M, K]."""
    operand = tile_operand(w, scale, FORMAT, x.dtype, BLOCK_N, BLOCK_K)
    if FORMAT == "fp8_block":
        return acc + scale * dot(operand, x.T, tl.zeros_like(acc))
    else:
        return dot(operand, x.T, acc)


@triton.jit
def tile_scales(scale_ptr, row, k, INPUTS: tl.constexpr, FORMAT: tl.constexpr, BLOCK_K: tl.constexpr):
    """Scales of a tile that starts at column `k`, or 0 without scales. `scale_ptr` points to the expert (or half)."""
    if FORMAT == "mxfp8" and BLOCK_K == 128 and INPUTS % 128 == 0:
        # Load the four scales of a row as one int32, [N]: with so few values, each thread loads the ones it needs.
        # A load of [N, K / 32] is spread over the threads, and passes through shared memory between two barriers.
        words = scale_ptr.to(tl.pointer_type(tl.int32)) + row * (INPUTS // 128)
        return tl.load(words + tl.minimum(k // 128, INPUTS // 128 - 1))
    elif FORMAT == "mxfp8":
        group = k // 32 + tl.arange(0, BLOCK_K // 32)
        at = row[:, None] * (INPUTS // 32) + tl.minimum(group, INPUTS // 32 - 1)[None, :]
        return tl.load(scale_ptr + at)
    elif FORMAT == "fp8_block":
        return tl.load(scale_ptr + (tl.min(row) // 128) * ((INPUTS + 127) // 128) + tl.minimum(k, INPUTS - 1) // 128)
    else:
        return tl.zeros([1], tl.float32)


@triton.jit
def add_products(acc, w, x, scale, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """`acc` [R, A] plus the products of `w` and `x`, both [R, W]; A = W if plain, else W / 16. `scale` is [R, A]."""
    if FORMAT == "plain":
        w_low, w_high = two_floats(w, DTYPE)
        x_low, x_high = two_floats(x, DTYPE)
        acc += w_low * x_low
        acc += w_high * x_high
        return acc
    else:
        values = w.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        sums = tl.sum(tl.reshape(values * widen(x), [acc.shape[0], acc.shape[1], THREAD_CODES]), axis=2)
        if FORMAT == "fp8_row":
            return acc + sums
        else:
            return acc + sums * scale


@triton.jit
def load_scales(
    scale_ptr,
    row0, k0, OUTPUTS,
    INPUTS: tl.constexpr, FORMAT: tl.constexpr, R: tl.constexpr, A: tl.constexpr, STEP: tl.constexpr = 1,
):  # fmt: skip
    """Scales [R, A] of R rows from `row0` and A threads from code `k0`. `scale_ptr` points to the expert (or half).

    Rows are every STEP-th one of the matrix.
    """
    # Load one row of R * A scales: Triton distributes them over the threads in the same order as `_load` the codes.
    # A load of [R, A] has another order, and every scale then passes through shared memory between two barriers.
    thread = tl.arange(0, R * A)
    row = tl.minimum(row0 + thread // A, OUTPUTS - 1) * STEP
    k = tl.minimum(k0 + thread % A * THREAD_CODES, INPUTS - 1)
    if FORMAT == "mxfp8":
        scale = power_of_two(tl.load(scale_ptr + row * (INPUTS // 32) + k // 32))
    elif FORMAT == "fp8_block":
        scale = tl.load(scale_ptr + row // 128 * ((INPUTS + 127) // 128) + k // 128)
    else:
        scale = tl.load(scale_ptr + row)
    return tl.reshape(scale, [R, A])
