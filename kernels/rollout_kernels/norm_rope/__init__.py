"""The operations between the matrix products of a layer: norms, rotary position embedding, the gated activation.

elementwise         the torch ops: the CPU path, and the twins of the kernels
triton_elementwise  the same on a GPU, fused: one kernel between two products
triton_rotate         position embedding alone, in place
"""

from rollout_kernels.norm_rope.elementwise import (
    apply_rope,
    gated,
    head_rms_norm,
    rms_norm,
    rope_cos_sin,
    rotate_heads,
    silu_mul,
)

__all__ = ["apply_rope", "gated", "head_rms_norm", "rms_norm", "rope_cos_sin", "silu_mul", "rotate_heads"]
