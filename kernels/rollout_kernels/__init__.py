"""The tensor operations of the engine, as free functions; each runs on the device of its tensors.

A folder holds one kind of operation: the op, its torch twin, and its Triton kernel (a module named `triton_*` or
`gluon_*`). The twin is the CPU path and defines what the kernel must compute. Modules with kernels are imported where
they are used, so a machine without Triton can run the twins. The arguments of a kernel stand in rows by kind: pointers,
numbers, strides, constants.

    attention   over a paged KV cache: decode, prefill, writing keys and values
    linear      matrix products with few rows
    moe         mixture of experts: router, experts, formats of their weights
    norm_rope   norms, rotary position embedding, gated activation
    lora        corrections of low-rank adapters
    delta       linear attention with a state: convolution, gated delta rule, gated norm
    sampling    penalties, bans, constraints, truncation, the draw
    step        the begin of a decode step
    parallel    the ranks of a tensor group, and what they exchange
    common      what these share
"""

from rollout_kernels.attention import (
    DecodePlan,
    paged_decode_attention,
    paged_prefill_attention,
    plan_decode,
    plan_paged_decode,
    write_kv,
)
from rollout_kernels.moe import moe_experts, route
from rollout_kernels.norm_rope import apply_rope, gated, head_rms_norm, rms_norm, rope_cos_sin, rotate_heads, silu_mul
from rollout_kernels.sampling import (
    PROMPT_BIT,
    Sampled,
    SamplingRows,
    change_logits,
    gumbel_noise,
    philox_4x32,
    sample,
    truncate,
)

__all__ = [
    "PROMPT_BIT",
    "DecodePlan",
    "Sampled",
    "SamplingRows",
    "apply_rope",
    "change_logits",
    "gated",
    "gumbel_noise",
    "head_rms_norm",
    "moe_experts",
    "paged_decode_attention",
    "paged_prefill_attention",
    "philox_4x32",
    "plan_decode",
    "plan_paged_decode",
    "rms_norm",
    "rope_cos_sin",
    "route",
    "sample",
    "silu_mul",
    "rotate_heads",
    "truncate",
    "write_kv",
]
