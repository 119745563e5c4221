"""Models with experts whose makers have one family here."""

from __future__ import annotations

from rollout.models.families.declare import (
    ATTENTION_BIAS,
    SHARED_EXPERTS,
    Family,
    If,
    Key,
    MoEFamily,
    Power,
    ropes_in_windows,
    sparse_from,
    windows_by_type,
)
from rollout.models.spec import LayerNames, MoENames

FAMILIES: dict[str, Family] = {
    "MiniMaxM2ForCausalLM": Family(
        model_type="minimax_m2",
        models="MiniMax-M2",
        qk_norm="full",
        partial_rope=True,
        rope_width=Key("rotary_dim"),  # some releases of transformers 5 make a factor of it
        moe=MoEFamily(
            experts=Key("num_local_experts"),
            intermediate=Key("intermediate_size"),
            renormalize=True,
            scoring="sigmoid",
            router_bias=True,
            names=MoENames(
                router=("block_sparse_moe.gate", "mlp.gate"),
                router_bias=("block_sparse_moe.e_score_correction_bias", "mlp.e_score_correction_bias"),
                gate="block_sparse_moe.experts.{}.w1",
                up="block_sparse_moe.experts.{}.w3",
                down="block_sparse_moe.experts.{}.w2",
            ),
        ),
    ),
    "AfmoeForCausalLM": Family(
        model_type="afmoe",
        models="AFMoE (Trinity)",
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        qk_norm="head",
        windows=windows_by_type,
        ropes=ropes_in_windows,
        attention_gate=True,
        norms="around",
        embed_scale=If("mup_enabled", Power("hidden_size", 0.5), 1.0),
        layer_names=LayerNames(
            "input_layernorm", "pre_mlp_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
        ),
        moe=MoEFamily(
            experts=Key("num_experts"),
            intermediate=Key("moe_intermediate_size"),
            renormalize=True,
            scoring="sigmoid",
            router_bias=True,
            scale=Key("route_scale"),
            sparse=sparse_from("num_dense_layers"),
            shared_experts=Key("num_shared_experts"),
            names=MoENames(router=("mlp.router.gate",), router_bias=("mlp.expert_bias",), shared=SHARED_EXPERTS),
        ),
    ),
    "GptOssForCausalLM": Family(
        model_type="gpt_oss",
        models="gpt-oss",
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        windows=windows_by_type,
        attention_sinks=True,
        mxfp4=True,
        moe=MoEFamily(
            experts=Key("num_local_experts"),
            intermediate=Key("intermediate_size"),
            renormalize=True,
            logit_bias=True,
            clamp_alpha=Key("swiglu_alpha", 1.702),  # transformers 5.17 has both as constants
            clamp_limit=Key("swiglu_limit", 7.0),
            names=MoENames(router=("mlp.router",)),
        ),
    ),
}
