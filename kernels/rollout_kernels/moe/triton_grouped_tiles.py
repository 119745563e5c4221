"""A tile of stored weights, decoded into an operand of the tensor cores.

Codes are decoded to bf16 or f16 without loss. An `mxfp8` scale is multiplied into the bf16 weight; a power of two costs
no precision (down to 2^-117, where the smallest code times the scale is no longer a normal bf16; a scale above 2^7
makes the weight infinite). f16 cannot represent such scales. Scales of blocks are applied to a tile's float32 sums.

Legend: N outputs, K inputs, M tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_kernels.common.triton_fp8 import power_of_two
from rollout_kernels.common.triton_math import INTERPRETED, dot, narrow


@triton.jit
def _operand(w, code, FORMAT: tl.constexpr, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
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
    operand = _operand(w, scale, FORMAT, x.dtype, BLOCK_N, BLOCK_K)
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
