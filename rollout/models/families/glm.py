"""GLM."""

from rollout.models.families.declare import (
    ATTENTION_BIAS,
    GATE_UP,
    Family,
    If,
    IndexerFamily,
    Key,
    LatentFamily,
    MTPFamily,
    deepseek_moe,
    indexed_by_type,
    sparse_by_type,
    sparse_from,
)
from rollout.models.spec import LayerNames

FAMILIES: dict[str, Family] = {
    "GlmForCausalLM": Family(
        model_type="glm",
        models="GLM-4-9B",
        qkv_bias=ATTENTION_BIAS,
        partial_rope=True,
        interleaved_rope=True,
        dense_names=GATE_UP,
    ),
    "Glm4ForCausalLM": Family(
        model_type="glm4",
        models="GLM-4-0414",
        qkv_bias=ATTENTION_BIAS,
        partial_rope=True,
        interleaved_rope=True,
        norms="around",
        layer_names=LayerNames(
            "input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"
        ),
        dense_names=GATE_UP,
    ),
    "Glm4MoeForCausalLM": Family(
        model_type="glm4_moe",
        models="GLM-4.5, 4.6, 4.7",
        qkv_bias=ATTENTION_BIAS,
        qk_norm=If("use_qk_norm", "head", "none"),
        partial_rope=True,
        mtp=MTPFamily(layers=Key("num_nextn_predict_layers", 1)),
        moe=deepseek_moe(sparse_from("first_k_dense_replace")),
    ),
    "Glm4MoeLiteForCausalLM": Family(
        model_type="glm4_moe_lite",
        models="GLM-4.7-Flash",
        interleaved_rope=Key("rope_interleave"),
        latent=LatentFamily(),
        mtp=MTPFamily(),
        moe=deepseek_moe(sparse_by_type),
    ),
    "GlmMoeDsaForCausalLM": Family(
        model_type="glm_moe_dsa",
        models="GLM-5, GLM-5.1",
        unsupported=("mlp_bias",),
        interleaved_rope=True,
        latent=LatentFamily(indexer=IndexerFamily(interleaved=True, kinds=indexed_by_type)),
        mtp=MTPFamily(),
        moe=deepseek_moe(sparse_by_type),
    ),
}
