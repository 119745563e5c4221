"""Models with experts whose makers have one family here."""

from dataclasses import replace

from rollout.models.families.declare import (
    ATTENTION_BIAS,
    BLOCK_SPARSE,
    IN_BLOCK_SPARSE,
    INSIDE_LLAVA,
    NORMS_AFTER,
    SHARED_EXPERTS,
    BlocksFamily,
    Family,
    If,
    Key,
    MoEFamily,
    Multimodal,
    Power,
    deepseek_moe,
    ropes_by_type,
    ropes_in_windows,
    ropes_in_windows_if_any,
    same_limits,
    sparse_by_interval,
    sparse_by_type,
    sparse_from,
    windows_by_type,
)
from rollout.models.spec import AttentionNames, DenseNames, LayerNames, ModelNames, MoENames

_USE_BIAS = Key("use_bias")
_ERNIE = Family(
    model_type="ernie4_5",
    models="ERNIE 4.5",
    qkv_bias=_USE_BIAS,
    o_bias=_USE_BIAS,
    mlp_bias=_USE_BIAS,
    interleaved_rope=True,
)

FAMILIES: dict[str, Family] = {
    "MiMoV2FlashForCausalLM": Family(
        model_type="mimo_v2_flash",
        models="MiMo-V2-Flash",
        qkv_bias=ATTENTION_BIAS,
        windows=windows_by_type,
        ropes=ropes_by_type,
        partial_rope=True,
        value_dim=Key("v_head_dim"),
        value_scale=Key("attention_value_scale"),
        window_kv_heads=2,
        window_sinks=True,
        moe=replace(deepseek_moe(sparse_by_type), shared_experts=None),
        unused=("model.mtp.",),
        names=ModelNames(parts=((".attention_sink_bias", (".attention_sink_bias", ".sinks")),)),
        attention_names=AttentionNames(sinks="self_attn.attention_sink_bias"),
    ),
    "HYV3ForCausalLM": Family(
        model_type="hy_v3",
        models="Hunyuan 3",
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        mlp_bias=Key("mlp_bias"),
        qk_norm="head",
        moe=MoEFamily(
            experts=Key("num_experts"),
            intermediate=Key("moe_intermediate_size"),
            renormalize=True,
            scoring="sigmoid",
            router_bias=True,
            router_float32=True,
            scale=Key("router_scaling_factor"),
            sparse=sparse_by_type,
            shared_experts=Key("num_shared_experts"),
            names=MoENames(
                router=("mlp.router.gate", "mlp.gate"),
                router_bias=("mlp.expert_bias", "mlp.e_score_correction_bias"),
                shared=DenseNames(("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"), "mlp.shared_mlp.down_proj"),
            ),
        ),
        unused=("model.layers.80.",),  # the layer for multi-token prediction of the published checkpoint
        names=ModelNames(parts=((".mlp.shared_mlp.", (".mlp.shared_mlp.", ".mlp.shared_experts.")),)),
    ),
    "Exaone4ForCausalLM": Family(
        model_type="exaone4",
        models="EXAONE 4",
        qk_norm="head",
        windows=windows_by_type,
        ropes=ropes_in_windows_if_any,
        norms="after",
        layer_names=NORMS_AFTER,
    ),
    "ExaoneMoeForCausalLM": Family(
        model_type="exaone_moe",
        models="K-EXAONE",
        qk_norm="head",
        windows=windows_by_type,
        ropes=ropes_in_windows_if_any,
        moe=replace(
            deepseek_moe(sparse_by_type),
            experts=Key("num_experts"),
            shared_experts=Key("num_shared_experts"),
            names=MoENames(
                router_bias=("mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias"), shared=SHARED_EXPERTS
            ),
        ),
    ),
    "Ernie4_5ForCausalLM": _ERNIE,
    "Ernie4_5_MoeForCausalLM": replace(
        _ERNIE,
        model_type="ernie4_5_moe",
        models="ERNIE 4.5 with experts",
        unused=("model.mtp_",),
        moe=MoEFamily(
            experts=Key("moe_num_experts"),
            intermediate=Key("moe_intermediate_size"),
            top_k=Key("moe_k"),
            renormalize=True,
            router_bias=True,
            router_float32=True,
            least_sum=Key("moe_norm_min"),
            sparse=sparse_by_interval,
            shared_experts=Key("moe_num_shared_experts"),
            names=MoENames(
                router_bias=(
                    "mlp.moe_statics.e_score_correction_bias",
                    "mlp.gate.moe_statics.e_score_correction_bias",
                ),
                bias_row=True,
                shared=SHARED_EXPERTS,
            ),
        ),
    ),
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
            names=BLOCK_SPARSE,
        ),
        names=ModelNames(parts=(IN_BLOCK_SPARSE,)),
    ),
    "MiniMaxM3VLForCausalLM": Family(
        model_type="minimax_m3_vl_text",
        models="MiniMax-M3, text",
        limit=Key("swiglu_limit"),
        qk_norm="head",
        unit_offset=True,
        partial_rope=True,
        rope_width=Key("rotary_dim"),  # transformers 5.24 reads a factor alone
        blocks=BlocksFamily(),
        intermediate=Key("dense_intermediate_size"),
        dense_names=DenseNames(joined="mlp.gate_up_proj"),
        moe=MoEFamily(
            experts=Key("num_local_experts"),
            intermediate=Key("intermediate_size"),
            renormalize=True,
            scoring="sigmoid",
            router_bias=True,
            scale=Key("routed_scaling_factor"),
            shared_intermediate=Key("shared_intermediate_size"),
            sparse=sparse_by_type,
            limits=same_limits,
            names=BLOCK_SPARSE,
        ),
        names=ModelNames(parts=(IN_BLOCK_SPARSE, (".self_attn.index_", (".self_attn.index_", ".self_attn.indexer.")))),
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

MULTIMODAL: dict[str, Multimodal] = {
    "MiniMaxM3SparseForConditionalGeneration": Multimodal(
        model_type="minimax_m3_vl",
        models="MiniMax-M3 (its language model)",
        language_models=("MiniMaxM3VLForCausalLM",),
        beginnings=INSIDE_LLAVA,
    ),
}
