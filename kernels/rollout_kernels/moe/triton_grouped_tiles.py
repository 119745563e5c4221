"""How a tile of an expert's stored weights becomes what the tensor cores multiply.

Codes become bf16 or f16 without loss. `mxfp8` scales are part of the bf16 weight, where a power of two costs no
precision (above 2^-117, where bf16's normal values times the smallest code end; a scale over 2^7 makes the weight
infinite); f16 has no room for them. Scales of blocks are applied to a tile's float32 sums.

Legend: N outputs, K inputs, M tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_kernels.common.triton_math import INTERPRETED, dot, narrow
from rollout_kernels.moe.triton_warp_lanes import power_of_two


@triton.jit
def _operand(w, code, FORMAT: tl.constexpr, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """A tile of stored weights as the tensor cores take it; of `mxfp8` with its scales, as `tile_scales` gives them."""
    if FORMAT == "plain":
        return w
    elif FORMAT == "mxfp8":
        if code.dtype == tl.int32:
            # Byte by byte with `join`: of an `arange` of shifts Triton can't tell that it may move to the tensor cores'
            # layout, and would take the tile there through shared memory instead.
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
    """Bf16 values of e4m3 codes `w` times 2^(code - 127); infinite (0 becomes NaN) from 2^8 on.

    The code of NaN counts as 480: what `quantize` makes has it only beside a scale that is not a number.
    """
    if INTERPRETED:
        scale = tl.where(code > 134, float("inf"), power_of_two(code))
        return narrow(w.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale, tl.bfloat16)
    else:
        # With its exponent and mantissa where those of a bf16 are, a code is 2^-120 of its value: one product of two
        # pairs puts that right and scales. Two codes become [sign, code] each, and are moved left by 4 bits.
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
    """`acc` [N, M] plus the product of a tile [N, K] and activations [M, K]."""
    operand = _operand(w, scale, FORMAT, x.dtype, BLOCK_N, BLOCK_K)
    if FORMAT == "fp8_block":
        return acc + scale * dot(operand, x.T, tl.zeros_like(acc))
    else:
        return dot(operand, x.T, acc)


@triton.jit
def tile_scales(scale_ptr, row, k, INPUTS: tl.constexpr, FORMAT: tl.constexpr, BLOCK_K: tl.constexpr):
    """Scales of a tile that starts at column `k`, 0 if there are none; `scale_ptr` is that of the expert (or half)."""
    if FORMAT == "mxfp8" and BLOCK_K == 128 and INPUTS % 128 == 0:
        # The four of a row as one int32, [N]: Triton has each thread fetch so few values itself, where it needs them.
        # More, [N, K / 32], it spreads over the threads and then passes on through shared memory, between barriers.
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
