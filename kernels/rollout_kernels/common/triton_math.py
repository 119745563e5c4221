"""Device functions that several Triton kernels share: overlapping launches, matrix products, rounding.

They give the same results on a GPU and in Triton's interpreter.

Launches overlap by programmatic dependent launch (Hopper and later), within one stream:

    kernel A   ... writes its results ................|
    kernel B        starts, prefetches weights, waits | reads A's results ... writes its own
                    ^ A has called `let_next_begin`   ^ `wait_for_last` of B returns

Before its wait, a kernel may prefetch only data that no kernel writes (weights), or data that was complete before the
predecessor could start, past the L1 cache. It writes nothing before its wait. A kernel that calls `let_next_begin`
before its own wait (norms, streamed products) leaves its successor only weights to prefetch.

Related kernels take their compile-time values as one constant, a named tuple such as `RouterConstants`, and pass
pointers to device functions in named tuples that they make themselves. Triton 3.6 sets two limits on a constant:

    fields are numbers      Triton writes them as JSON when a compilation is watched, and cannot write a dtype
    `E: tl.constexpr = C.E` before a field is a shape, the end of a `static_range` or an argument of a function
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

#: Activations that the kernels have: SiLU, GELU with tanh in the place of erf, of values without a gate the squared
#: ReLU, and of gates and values together, in experts, `rollout_kernels.norm_rope.elementwise.clamped`.
Activation = Literal["silu", "bounded_silu", "gelu_tanh", "relu2", "clamped"]
TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
NANS = tl.constexpr(tl.PropagateNan.ALL)  # Bounds without it turn NaN into themselves on a GPU.


@triton.jit
def follow():
    """Wait until the previous kernel has written its results, then allow the next kernel to start.

    Code before this call overlaps with the end of the previous kernel, if the launch has `follow_options`. The module
    docstring says what such code may read.
    """
    wait_for_last()
    let_next_begin()


@triton.jit
def wait_for_last():
    """The first half of `follow`: wait until the previous kernel, and every kernel it waited for, has finished."""
    if not INTERPRETED:
        if cuda_capability_geq(9, 0):  # before Hopper, kernels of a stream never overlap
            gdc_wait()


@triton.jit
def let_next_begin():
    """The second half of `follow`: once all programs have called this, the next kernel may start."""
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
    """`acc + a @ b` in float32. Float32 operands keep their precision (no tf32)."""
    # Triton's interpreter multiplies the raw bits of bf16 operands.
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Convert float32 to `dtype`, rounded to nearest even."""
    # Triton's interpreter truncates float32 to bf16.
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 32767 + ((bits >> 16) & 1)) & -65536
        return bits.to(tl.float32, bitcast=True).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def two_floats(pair, dtype: tl.constexpr):
    """The two bf16 or f16 values in an int32, as float32: first the value at the lower address."""
    if dtype == tl.bfloat16:
        return (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)
    else:
        low = (pair & 65535).to(tl.int16).to(tl.float16, bitcast=True)
        high = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def widen(x):
    """Convert bf16 or f16 to float32. For bf16 this takes one instruction a value; the compiler's own takes 1.5."""
    if x.dtype == tl.bfloat16 and not INTERPRETED:
        bits = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.int32, is_pure=True, pack=2
        )
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def last_to_arrive(arrived_ptr):
    """True in the last program along the first grid axis that calls this; that program sees the stores of the others.

    The counter at `arrived_ptr` (int32) must be 0 before the launch, and is 0 again afterwards.
    """
    # The barrier makes sure that all threads have stored before one thread counts the program as arrived.
    tl.debug_barrier()
    last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1
    if last:
        tl.store(arrived_ptr, 0)
    return last


@triton.jit
def clamped_glu(gate, up, alpha, limit):
    """The GLU that `rollout_kernels.moe.clamped_glu` defines."""
    # NaN stays NaN: it must reach the logits.
    gate = tl.minimum(gate, limit, NANS)
    up = tl.clamp(up, -limit, limit, NANS) + 1.0
    return gate / (1.0 + tl.exp(-alpha * gate)) * up


@triton.jit
def activated(gate, ACTIVATION: tl.constexpr):
    """The `Activation` of float32 gates."""
    if ACTIVATION == "silu" or ACTIVATION == "bounded_silu":
        return gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "relu2":
        gate = tl.maximum(gate, 0.0, NANS)
        return gate * gate
    else:
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u; here u = sqrt(2 / pi) (g + 0.044715 g^3).
        return gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))


@triton.jit
def gated(gate, up, limit, ACTIVATION: tl.constexpr, LIMITED: tl.constexpr):
    """`rollout_kernels.gated` of float32 gates and values; without a limit `limit` has no meaning."""
    if ACTIVATION == "clamped":
        return clamped_glu(gate, up, 1.702, limit)
    if ACTIVATION == "bounded_silu":
        gate = tl.minimum(gate, limit, NANS)
    gate = activated(gate, ACTIVATION)
    if LIMITED:
        gate, up = tl.minimum(gate, limit, NANS), tl.clamp(up, -limit, limit, NANS)
    return gate * up
