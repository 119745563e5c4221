"""Small pieces that Triton kernels share, right both on the device and in Triton's interpreter."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def follow():
    """Wait until the kernel before has written its results, and let the one after start its own preparations.

    What stands before this call in a kernel may read weights, which no kernel writes, and, past a multiprocessor's own
    cache, what was there before the kernel before let this one in; it writes nothing. Launched with `follow_options`,
    it overlaps with the end of the kernel before. A kernel that lets the next one in first, as norms and streamed
    products do, leaves that one nothing to read but weights.
    """
    wait_for_last()
    let_next_begin()


@triton.jit
def wait_for_last():
    """The first half of `follow`: wait until the kernel before, and all that it waited for, has written its results."""
    if not INTERPRETED:
        if cuda_capability_geq(9, 0):  # before Hopper kernels run one after the other
            gdc_wait()


@triton.jit
def let_next_begin():
    """The second half of `follow`: once all programs are here the kernel after may begin."""
    if not INTERPRETED:
        if cuda_capability_geq(9, 0):
            gdc_launch_dependents()


@lru_cache(maxsize=8)
def follow_options(device: torch.device) -> dict[str, Any]:
    """Launch options for a kernel that calls `follow`: programmatic dependent launch, on Hopper and later."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        return {}
    return {"launch_pdl": True}


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


@triton.jit
def two_floats(pair, dtype: tl.constexpr):
    """The two bf16 or f16 values in an int32, as float32: the one at the lower address, the one at the higher."""
    if dtype == tl.bfloat16:
        return (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)
    else:
        low = (pair & 65535).to(tl.int16).to(tl.float16, bitcast=True)
        high = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def widen(x):
    """Bf16 or f16 to float32: for bf16 one instruction a value, where the compiler's own way takes three for two."""
    if x.dtype == tl.bfloat16 and not INTERPRETED:
        bits = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.int32, is_pure=True, pack=2
        )
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def last_to_arrive(arrived_ptr):
    """True in the last of the programs along the first axis to get here: it sees what the others have stored."""
    # All threads have stored; one of them says so, and learns whether the other programs have too.
    tl.debug_barrier()
    last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1
    if last:
        tl.store(arrived_ptr, 0)
    return last
