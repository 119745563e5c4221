"""How a lane of a warp turns 16 bytes of an expert's weights into partial sums.

A tile is [R, W]: R output rows, W stored elements of each, 16 bytes a lane. Weights in 16 bits are read as int32, two
values each, because one shift or mask makes a float32 of a bf16. Codes are read as uint8; 16 of them, a lane's share,
have one scale (in every format the scale is constant over 16 neighbours), so a scale costs one product in 16.

Legend: R rows, W stored elements, A partial sums a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_kernels.common.triton_math import two_floats, widen

#: Bytes that a lane reads at once.
LANE_BYTES = 16
#: Codes that a lane reads at once.
LANE_CODES = tl.constexpr(16)


@triton.jit
def power_of_two(code):
    """The value of an e8m0 code, 2^(code - 127). 255 (not a number) becomes infinity."""
    # Code 0 is 2^-127: below the smallest normal float32, so it has no exponent to be shifted to.
    return tl.maximum(code.to(tl.int32) << 23, 0x400000).to(tl.float32, bitcast=True)


@triton.jit
def add_products(acc, w, x, scale, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """`acc` [R, A] plus the products of `w` and `x` [R, W]; A = W if plain, else W / 16. `scale` is [R, A]."""
    if FORMAT == "plain":
        w_low, w_high = two_floats(w, DTYPE)
        x_low, x_high = two_floats(x, DTYPE)
        acc += w_low * x_low
        acc += w_high * x_high
        return acc
    else:
        values = w.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        sums = tl.sum(tl.reshape(values * widen(x), [acc.shape[0], acc.shape[1], LANE_CODES]), axis=2)
        if FORMAT == "fp8_row":
            return acc + sums
        else:
            return acc + sums * scale


@triton.jit
def load_scales(
    scale_ptr,
    row0,
    k0,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    FORMAT: tl.constexpr,
    R: tl.constexpr,
    A: tl.constexpr,
):
    """[R, A] scales of `R` rows from `row0`, `A` lanes from code `k0`; `scale_ptr` is that of the expert (or half)."""
    # As one row of R A scales: Triton hands these to the lanes in the order in which `_load` hands them the codes. From
    # a load of [R, A] it makes another order, and every scale then crosses shared memory between two barriers.
    lane = tl.arange(0, R * A)
    row = tl.minimum(row0 + lane // A, OUTPUTS - 1)
    k = tl.minimum(k0 + lane % A * LANE_CODES, INPUTS - 1)
    if FORMAT == "mxfp8":
        scale = power_of_two(tl.load(scale_ptr + row * (INPUTS // 32) + k // 32))
    elif FORMAT == "fp8_block":
        scale = tl.load(scale_ptr + row // 128 * ((INPUTS + 127) // 128) + k // 128)
    else:
        scale = tl.load(scale_ptr + row)
    return tl.reshape(scale, [R, A])
