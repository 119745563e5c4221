"""e4m3 codes and e8m0 scales inside kernels: encode float32 values, and decode codes, also into operands of products.

Encoding uses integer arithmetic, and divisions round to nearest. So a value gets the same code on a GPU, in Triton's
interpreter and in torch (`fp8`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_kernels.common.fp8 import LEAST_SCALE
from rollout_kernels.common.triton_math import INTERPRETED, narrow

_LEAST_SCALE = tl.constexpr(LEAST_SCALE)


@triton.jit
def e4m3_code(value):
    """The e4m3 code of a float32 value: rounded to nearest even, saturated at +-448; NaN stays NaN."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Normal codes (from 2^-6): keep three bits of mantissa, change the bias of the exponent from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    # Subnormal codes are multiples of 2^-9: adding 2^23 leaves the multiple in the lowest bits.
    small = (tl.abs(value) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    code = tl.minimum(tl.where(magnitude < 0x3C800000, small, normal), 0x7E)
    code = tl.where(value == value, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def head_scale(most):
    """The scale of a head whose largest magnitude is `most`."""
    return tl.maximum(tl.div_rn(most, 448.0), _LEAST_SCALE)


@triton.jit
def int8_code(value):
    """The int8 code of a float32 value within +-127: rounded to nearest even; of NaN 0."""
    # Adding 1.5 x 2^23 leaves the rounded value in the lowest bits.
    code = (tl.where(value == value, value, 0.0) + 12582912.0).to(tl.int32, bitcast=True)
    return code.to(tl.int8)


@triton.jit
def block_codes(x):
    """Codes [B, 128] and scales [B] of float32 values: a product with the inverse of the scale, rounded to nearest."""
    scale = head_scale(tl.max(tl.abs(x), axis=1))
    x *= tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None]
    return e4m3_code(x) if INTERPRETED else x.to(tl.float8e4nv).to(tl.uint8, bitcast=True), scale


@triton.jit
def operand(codes, dtype: tl.constexpr):
    """The values of codes, e4m3 or int8, in `dtype`: float32, bf16 and f16 represent every code exactly."""
    if codes.dtype == tl.int8:
        return narrow(codes.to(tl.float32), dtype)
    half = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    if INTERPRETED:
        # Triton's interpreter decodes NaN as 480.
        half = tl.where((codes & 0x7F) == 0x7F, float("nan"), half)
    if dtype == tl.float16:
        return half
    else:
        return narrow(half.to(tl.float32), dtype)


@triton.jit
def power_of_two(code):
    """The value of an e8m0 code, 2^(code - 127). 255 (NaN) becomes infinity."""
    # Code 0 is 2^-127, a subnormal float32, which a shift of the code into the exponent cannot represent.
    return tl.maximum(code.to(tl.int32) << 23, 0x400000).to(tl.float32, bitcast=True)
