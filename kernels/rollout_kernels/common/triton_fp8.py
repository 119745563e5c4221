"""What kernels do with e4m3 codes: make them, and turn them into what the tensor cores multiply.

Codes are made by integer arithmetic and divisions round to nearest, so that a value comes out the same on a GPU, in
Triton's interpreter and in torch (`fp8`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_kernels.common.fp8 import LEAST_SCALE
from rollout_kernels.common.triton_math import INTERPRETED, narrow

_LEAST_SCALE = tl.constexpr(LEAST_SCALE)


@triton.jit
def e4m3_code(value):
    """The e4m3 code of a float32, rounded to nearest even; 448 where the value is larger, NaN where it is NaN."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # From 2^-6 on: three bits of mantissa are kept, and the exponent's bias goes from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    # Below, codes are multiples of 2^-9: adding 2^23 leaves their number in the lowest bits.
    small = (tl.abs(value) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    code = tl.minimum(tl.where(magnitude < 0x3C800000, small, normal), 0x7E)
    code = tl.where(value == value, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def head_scale(most):
    """The scale of a head whose largest magnitude is `most`."""
    return tl.maximum(tl.div_rn(most, 448.0), _LEAST_SCALE)


@triton.jit
def operand(codes, dtype: tl.constexpr):
    """Codes as values of `dtype` (float32, bf16 or f16), each of which holds them all."""
    half = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    if INTERPRETED:
        # Triton's interpreter takes the code of NaN for 480.
        half = tl.where((codes & 0x7F) == 0x7F, float("nan"), half)
    if dtype == tl.float16:
        return half
    else:
        return narrow(half.to(tl.float32), dtype)
