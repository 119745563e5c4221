"""Small pieces that Triton kernels share, right both on the device and in Triton's interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, acc):
    """`acc + a b` in float32; float32 operands are multiplied as such, not rounded to tf32."""
    # Triton's interpreter multiplies the raw bits of bf16 operands.
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Float32 to `dtype`, rounded to nearest even."""
    # Triton's interpreter truncates float32 to bf16.
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 32767 + ((bits >> 16) & 1)) & -65536
        return bits.to(tl.float32, bitcast=True).to(dtype)
    else:
        return x.to(dtype)
