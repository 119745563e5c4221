"""Free functions on tensors that the engine is built from; each runs on the device of its tensors."""

from rollout_kernels.activation import silu_mul
from rollout_kernels.attention import (
    DecodePlan,
    paged_decode_attention,
    paged_prefill_attention,
    plan_decode,
    plan_paged_decode,
    write_kv,
)
from rollout_kernels.moe import moe_experts, route
from rollout_kernels.norm import head_rms_norm, rms_norm
from rollout_kernels.philox import gumbel_noise, philox_4x32
from rollout_kernels.rope import apply_rope, rope_cos_sin
from rollout_kernels.sampling import PROMPT_BIT, Sampled, SamplingRows, change_logits, sample, truncate

__all__ = [
    "PROMPT_BIT",
    "DecodePlan",
    "Sampled",
    "SamplingRows",
    "apply_rope",
    "change_logits",
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
    "truncate",
    "write_kv",
]
