"""DeepSeek, and models that load as DeepSeek."""

from dataclasses import replace

from rollout.models.families.declare import (
    BLOCK_SPARSE,
    IN_BLOCK_SPARSE,
    INSIDE_LLAVA,
    SHARED_EXPERTS,
    CompressedFamily,
    Family,
    If,
    IndexerFamily,
    Key,
    KimiDeltaFamily,
    LatentFamily,
    MoEFamily,
    MTPFamily,
    Multimodal,
    all_sparse,
    deepseek_moe,
    limits_by_layer,
    no_ropes,
    one_limit,
    ropes_of_entries,
    same_window,
    sparse_by_type,
    sparse_from,
    tables_by_type,
)
from rollout.models.spec import KimiDeltaNames, ModelNames, MoENames


def _in_forget_gate(*names: str) -> tuple[tuple[str, tuple[str, str]], ...]:
    """Names that published files have in the mixer, and transformers' classes in a module of their own."""
    return tuple((f".self_attn.{name}", (f".self_attn.{name}", f".self_attn.forget_gate.{name}")) for name in names)


#: Parts of names of DeepSeek-V4, and what files have for them, as transformers saves them.
_IN_FILES_OF_V4 = (
    "lm_head head .input_layernorm .attn_norm .post_attention_layernorm .ffn_norm .attn_hc. .hc_attn_ "
    ".ffn_hc. .hc_ffn_ .mlp. .ffn. .gate.e_score_correction_bias .gate.bias .gate_proj .w1 .down_proj .w2 "
    ".up_proj .w3 .self_attn. .attn. .compressor.indexer.scorer.weights_proj .indexer.weights_proj "
    ".compressor.indexer.q_b_proj .indexer.wq_b .compressor.indexer. .indexer.compressor. "
    ".compressor.w1 .compressor.wgate .kv_proj .wkv .q_a_proj .wq_a .q_b_proj .wq_b .o_a_proj .wo_a "
    ".o_b_proj .wo_b .position_bias .ape .q_a_norm .q_norm .kv_norm .norm .sinks .attn_sink"
).split()

FAMILIES: dict[str, Family] = {
    "DeepseekV3ForCausalLM": Family(
        model_type="deepseek_v3",
        other_types=("kimi_k2",),
        models="DeepSeek-V3, DeepSeek-R1, Moonlight, Kimi-K2",
        interleaved_rope=Key("rope_interleave"),
        latent=LatentFamily(),
        mtp=MTPFamily(),
        moe=deepseek_moe(sparse_from("first_k_dense_replace")),
    ),
    "DeepseekV32ForCausalLM": Family(
        model_type="deepseek_v32",
        models="DeepSeek-V3.2",
        unsupported=("mlp_bias",),
        interleaved_rope=True,
        latent=LatentFamily(indexer=IndexerFamily()),
        mtp=MTPFamily(),
        moe=deepseek_moe(sparse_by_type),
    ),
    "DeepseekV4ForCausalLM": Family(
        model_type="deepseek_v4",
        models="DeepSeek-V4",
        unsupported=("attention_bias", "mlp_bias"),
        without_effect=("norm_topk_prob", "qk_rope_head_dim"),
        windows=same_window,
        ropes=ropes_of_entries,
        partial_rope=True,
        interleaved_rope=True,
        compressed=CompressedFamily(),
        moe=replace(
            deepseek_moe(all_sparse),
            renormalize=True,
            scoring="sqrtsoftplus",
            groups=1,
            top_groups=1,
            limits=one_limit,
            bounds_gates=True,
            tables=tables_by_type,
        ),
        names=ModelNames(renamed=tuple(zip(_IN_FILES_OF_V4[::2], _IN_FILES_OF_V4[1::2], strict=True))),
    ),
    "KimiLinearForCausalLM": Family(
        model_type="kimi_linear",
        models="Kimi-Linear",
        ropes=no_ropes,
        latent=LatentFamily(),
        linear=KimiDeltaFamily(),
        moe=replace(
            deepseek_moe(sparse_by_type),
            experts=Key("num_local_experts"),
            names=BLOCK_SPARSE,
        ),
        names=ModelNames(
            parts=(
                IN_BLOCK_SPARSE,
                (".mlp.", (".mlp.", ".block_sparse_moe.")),  # transformers saves dense blocks as the second
                *_in_forget_gate("f_a_proj", "f_b_proj", "A_log", "dt_bias"),
            )
        ),
    ),
    "BailingHybridForCausalLM": Family(
        model_type="bailing_hybrid",
        models="Ling-3",
        unsupported=("attention_bias",),
        without_effect=("layer_group_size", "mtp_loss_scaling_factor", "short_conv_kernel_size"),
        interleaved_rope=True,
        latent=LatentFamily(gate=True),
        linear=KimiDeltaFamily(
            latents=False,
            bound=If("kda_safe_gate", Key("kda_lower_bound"), None),
            names=KimiDeltaNames(
                tuple(f"self_attn.{name}_proj" for name in ("q", "k", "v", "b", "f", "g")),
            ),
        ),
        mtp=MTPFamily(norm="final_layernorm"),
        moe=replace(deepseek_moe(sparse_by_type), experts=Key("num_local_experts"), limits=limits_by_layer),
        names=ModelNames(
            beginnings=(("model.embed_tokens", ("model.word_embeddings", "model.embed_tokens")),),
            parts=(
                *_in_forget_gate("f_proj", "A_log", "dt_bias"),
                (".self_attn.o_proj", (".self_attn.dense", ".self_attn.o_proj")),
                (".self_attn.", (".attention.", ".self_attn.")),
                (".e_score_correction_bias", (".expert_bias", ".e_score_correction_bias")),
            ),
        ),
    ),
    "DeepseekV2ForCausalLM": Family(
        model_type="deepseek_v2",
        models="DeepSeek-V2, DeepSeek-V2-Lite",
        interleaved_rope=True,
        latent=LatentFamily(),
        unsupported=("norm_topk_prob", "mlp_bias"),
        moe=MoEFamily(
            experts=Key("n_routed_experts"),
            intermediate=Key("moe_intermediate_size"),
            renormalize=False,
            router_float32=True,
            groups=Key("n_group"),
            top_groups=Key("topk_group"),
            group_best=1,
            grouped=Key("topk_method"),
            scale=Key("routed_scaling_factor"),
            sparse=sparse_from("first_k_dense_replace"),
            shared_experts=Key("n_shared_experts"),
            names=MoENames(shared=SHARED_EXPERTS),
        ),
    ),
}

# Names in published files of Ling-3.
FAMILIES["BailingMoeV3ForCausalLM"] = replace(FAMILIES["BailingHybridForCausalLM"], read_as="bailing_hybrid")

MULTIMODAL: dict[str, Multimodal] = {
    "Kimi_K25ForConditionalGeneration": Multimodal(
        model_type="kimi_k25",
        models="Kimi-K2.5, Kimi-K2.6 (their language model)",
        language_models=("DeepseekV3ForCausalLM",),
        beginnings=(
            # transformers 5.24 saves the last but one.
            (
                "model.layers.",
                (
                    *("language_model.model.layers.", "model.language_model.layers."),
                    *("language_model.model.blocks.", "model.layers."),
                ),
            ),
            *INSIDE_LLAVA,
        ),
    ),
}
