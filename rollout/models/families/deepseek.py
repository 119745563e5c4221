"""DeepSeek, and models that load as DeepSeek."""

from dataclasses import replace

from rollout.models.families.declare import (
    BLOCK_SPARSE,
    IN_BLOCK_SPARSE,
    INSIDE_LLAVA,
    SHARED_EXPERTS,
    Family,
    If,
    IndexerFamily,
    Key,
    KimiDeltaFamily,
    LatentFamily,
    MoEFamily,
    MTPFamily,
    Multimodal,
    deepseek_moe,
    limits_by_layer,
    no_ropes,
    sparse_by_type,
    sparse_from,
)
from rollout.models.spec import KimiDeltaNames, ModelNames, MoENames


def _in_forget_gate(*names: str) -> tuple[tuple[str, tuple[str, str]], ...]:
    """Names that published files have in the mixer, and transformers' classes in a module of their own."""
    return tuple((f".self_attn.{name}", (f".self_attn.{name}", f".self_attn.forget_gate.{name}")) for name in names)


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
