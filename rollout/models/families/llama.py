"""Llama, and models of its form by many makers."""

from rollout.models.families.declare import (
    ATTENTION_BIAS,
    GATE_UP,
    Family,
    Key,
    MTPFamily,
    ropes_where_listed,
    same_window,
    windows_by_type,
)
from rollout.models.spec import AttentionNames

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        model_type="llama",
        models="Llama 3 to 3.3",
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        mlp_bias=Key("mlp_bias"),
    ),
    "MiMoForCausalLM": Family(
        model_type="mimo",
        models="MiMo-7B",
        read_as="qwen2",  # transformers has no MiMo
        qkv_bias=True,
        windows=windows_by_type,
        unused=("model.mtp_layers.",),
        mtp=MTPFamily(
            layers=Key("num_nextn_predict_layers", 1),
            prefix="model.mtp_layers.{}.",
            from_zero=True,
            fc="input_proj",
            embed_norm="token_layernorm",
            hidden_norm="hidden_layernorm",
            norm="final_layernorm",
            hidden_first=True,
        ),
    ),
    "Phi3ForCausalLM": Family(
        model_type="phi3",
        models="Phi-3, Phi-4, Phi-4-mini",
        windows=same_window,
        attention_names=AttentionNames(qkv=("self_attn.qkv_proj",)),
        partial_rope=True,
        dense_names=GATE_UP,
    ),
    "SmolLM3ForCausalLM": Family(
        model_type="smollm3",
        models="SmolLM3",
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        mlp_bias=Key("mlp_bias"),
        windows=windows_by_type,
        ropes=ropes_where_listed,
    ),
    "SeedOssForCausalLM": Family(
        model_type="seed_oss",
        models="Seed-OSS",
        qkv_bias=ATTENTION_BIAS,
        o_bias=Key("attention_out_bias"),
        mlp_bias=Key("mlp_bias"),
    ),
}
