"""What a lane of a warp does with 16 bytes of an expert's weights: decode, multiply, add to partial sums.

A tile is [R, W]: W stored elements of each of R output rows, 16 bytes a lane. 16-bit weights are read as int32, two
values each, because one shift or mask converts a bf16 to float32. Codes are read as uint8. The 16 codes of a lane share
one scale (in every format the scale is constant over 16 neighbours), so a scale costs one product in 16.

Legend: R rows, W stored elements, A partial sums a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_kernels.common.triton_math import two_floats, widen

#: Bytes that a lane loads at once.
LANE_BYTES = 16
#: Codes that a lane loads at once.
LANE_CODES = tl.constexpr(16)


@triton.jit
def power_of_two(code):
    """The value of an e8m0 code, 2^(code - 127). 255 (NaN) becomes infinity."""
    # Code 0 is 2^-127, a subnormal float32, which a shift of the code into the exponent cannot represent.
    return tl.maximum(code.to(tl.int32) << 23, 0x400000).to(tl.float32, bitcast=True)


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
    """Scales [R, A] of R rows from `row0` and A lanes from code `k0`. `scale_ptr` points to the expert (or half)."""
    # Load one row of R * A scales: Triton distributes them over the lanes in the same order as `_load` does the codes.
    # A load of [R, A] has another order, and every scale then passes through shared memory between two barriers.
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
