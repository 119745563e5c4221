"""Granite."""

from dataclasses import replace

from rollout.models.families.declare import (
    ATTENTION_BIAS,
    Family,
    Key,
    Mamba2Family,
    MoEFamily,
    ropes_if_named,
    sparse_if_any,
)
from rollout.models.spec import DenseNames, ModelNames, MoENames

_GRANITE = Family(
    model_type="granite",
    models="Granite 3",
    qkv_bias=ATTENTION_BIAS,
    o_bias=ATTENTION_BIAS,
    mlp_bias=Key("mlp_bias"),
    attention_scale=Key("attention_multiplier"),
    residual_scale=Key("residual_multiplier"),
    embed_scale=Key("embedding_multiplier"),
    logit_divisor=Key("logits_scaling"),
)
_SHARED = DenseNames(("shared_mlp.input_linear",), "shared_mlp.output_linear")
_MOE = MoEFamily(
    experts=Key("num_local_experts"),
    intermediate=Key("intermediate_size"),
    renormalize=True,
    names=MoENames(
        router=("block_sparse_moe.router.layer", "block_sparse_moe.router"),
        gate="block_sparse_moe.experts.{}.gate_proj",
        up="block_sparse_moe.experts.{}.up_proj",
        down="block_sparse_moe.experts.{}.down_proj",
        stacked_gate_up="block_sparse_moe.input_linear.weight",
        stacked_down="block_sparse_moe.output_linear.weight",
        shared=_SHARED,
    ),
)
_WITH_EXPERTS = replace(
    _GRANITE,
    mlp_bias=False,
    moe=_MOE,
    names=ModelNames(
        parts=tuple(
            (f".block_sparse_moe.{name}", (f".block_sparse_moe.{name}", f".block_sparse_moe.experts.{other}"))
            for name, other in (("input_linear.weight", "gate_up_proj"), ("output_linear.weight", "down_proj"))
        )
    ),
)
_MOE_SHARED = replace(_MOE, shared_intermediate=Key("shared_intermediate_size"))

FAMILIES: dict[str, Family] = {
    "GraniteForCausalLM": _GRANITE,
    "GraniteMoeForCausalLM": replace(_WITH_EXPERTS, model_type="granitemoe", models="Granite 3 with experts"),
    "GraniteMoeSharedForCausalLM": replace(
        _WITH_EXPERTS, model_type="granitemoeshared", models="Granite 3 with a shared expert", moe=_MOE_SHARED
    ),
    "GraniteMoeHybridForCausalLM": replace(
        _WITH_EXPERTS,
        model_type="granitemoehybrid",
        models="Granite 4",
        ropes=ropes_if_named,
        linear=Mamba2Family(steps=Key("time_step_limit")),
        intermediate=Key("shared_intermediate_size"),
        dense_names=_SHARED,
        moe=replace(_MOE_SHARED, sparse=sparse_if_any),
    ),
}
