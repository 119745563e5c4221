"""Layers of real models of the families that `scripts.bench.shapes` has no shape of, for the check of correctness.

Each is a config.json as published, less the values that are the defaults of its class in transformers, with three
changes: windows are shorter than the prompts of the check, so that they matter; MiniMax-M2 has half of its experts, so
that a card holds its layers in three copies; logits of Granite are not divided, for the entropy of random weights.
"""

import json
from typing import Any

#: (architecture, model type, layers that show each kind of layer, config)
_SIZES: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "qwen2.5-7b": (
        "Qwen2ForCausalLM",
        "qwen2",
        4,
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "rope_theta": 1000000.0,
            "vocab_size": 152064,
        },
    ),
    "gemma-2-9b": (
        "Gemma2ForCausalLM",
        "gemma2",
        4,
        {
            "hidden_size": 3584,
            "intermediate_size": 14336,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "sliding_window": 512,
        },
    ),
    "olmo-2-7b": (
        "Olmo2ForCausalLM",
        "olmo2",
        4,
        {"max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 500000.0, "vocab_size": 100352},
    ),
    "mistral-small-24b": (
        "MistralForCausalLM",
        "mistral",
        4,
        {
            "hidden_size": 5120,
            "intermediate_size": 32768,
            "rope_theta": 1000000000.0,
            "sliding_window": None,
            "vocab_size": 131072,
        },
    ),
    "ministral-8b": (
        "MinistralForCausalLM",
        "ministral",
        4,
        {
            "head_dim": 128,
            "intermediate_size": 12288,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"],
            "rope_theta": 100000000.0,
            "sliding_window": 512,
            "vocab_size": 131072,
        },
    ),
    "phi-4": (
        "Phi3ForCausalLM",
        "phi3",
        4,
        {
            "hidden_size": 5120,
            "intermediate_size": 17920,
            "max_position_embeddings": 16384,
            "num_attention_heads": 40,
            "num_key_value_heads": 10,
            "original_max_position_embeddings": 16384,
            "rope_theta": 250000.0,
            "vocab_size": 100352,
        },
    ),
    "phi-4-mini": (
        "Phi3ForCausalLM",
        "phi3",
        4,
        {
            "intermediate_size": 8192,
            "max_position_embeddings": 16384,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "original_max_position_embeddings": 16384,
            "partial_rotary_factor": 0.75,
            "tie_word_embeddings": True,
            "vocab_size": 200064,
        },
    ),
    "granite-3.3-8b": (
        "GraniteForCausalLM",
        "granite",
        4,
        {
            "attention_multiplier": 0.0078125,
            "embedding_multiplier": 12.0,
            "intermediate_size": 12800,
            "logits_scaling": 1.0,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "residual_multiplier": 0.22,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000000.0,
            "tie_word_embeddings": True,
            "vocab_size": 49159,
        },
    ),
    "seed-oss-36b": (
        "SeedOssForCausalLM",
        "seed_oss",
        4,
        {"hidden_size": 5120, "rope_theta": 10000000.0},
    ),
    "smollm3-3b": (
        "SmolLM3ForCausalLM",
        "smollm3",
        4,
        {"max_position_embeddings": 65536, "rope_theta": 5000000.0},
    ),
    "glm-4-9b": ("GlmForCausalLM", "glm", 4, {}),
    "glm-4-9b-0414": ("Glm4ForCausalLM", "glm4", 4, {"attention_bias": False, "rms_norm_eps": 1e-5}),
    "minimax-m2": ("MiniMaxM2ForCausalLM", "minimax_m2", 2, {"num_local_experts": 128}),
    "trinity-mini": (
        "AfmoeForCausalLM",
        "afmoe",
        4,
        {
            "max_position_embeddings": 131072,
            "moe_intermediate_size": 1024,
            "mup_enabled": True,
            "num_attention_heads": 32,
            "num_dense_layers": 2,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 4,
            "num_shared_experts": 1,
            "route_scale": 2.826,
            "sliding_window": 512,
        },
    ),
    "qwen1.5-moe-a2.7b": ("Qwen2MoeForCausalLM", "qwen2_moe", 4, {"rope_theta": 1000000.0}),
    "qwen3-next-80b-a3b": (
        "Qwen3NextForCausalLM",
        "qwen3_next",
        4,
        {"max_position_embeddings": 262144, "rope_theta": 10000000.0},
    ),
    "olmo-hybrid-7b": ("OlmoHybridForCausalLM", "olmo_hybrid", 4, {}),
    "deepseek-v2-lite": (
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        3,
        {
            "first_k_dense_replace": 1,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "max_position_embeddings": 16384,
            "moe_intermediate_size": 1408,
            "num_attention_heads": 16,
            "num_experts_per_tok": 6,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
        },
    ),
}
FAMILY_SIZES = tuple(_SIZES)
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
#: Keys with an entry for each layer.
_BY_LAYER = ("layer_types", "no_rope_layers")


def family_config(name: str, layers: int = 0) -> dict[str, Any]:
    """The config.json of some layers of a model, with all values."""
    from transformers import AutoConfig

    architecture, model_type, usual, values = _SIZES[name]
    layers = layers or usual
    config = AutoConfig.for_model(model_type, **values, num_hidden_layers=layers).to_dict()
    for key in _BY_LAYER:
        if config.get(key) is not None:
            config[key] = config[key][:layers]
    return json.loads(json.dumps({**config, **_TOKENS, "architectures": [architecture]}))
