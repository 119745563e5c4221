"""Tiny random checkpoints of models of text and images, by transformers' own classes."""

from pathlib import Path
from typing import Any

import torch
import transformers

_VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
_TEXT: dict[str, Any] = {
    "vocab_size": 91, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 512, "eos_token_id": 2, "bos_token_id": 1,
    "pad_token_id": None,
}  # fmt: skip
_PIXTRAL = {"model_type": "pixtral", "head_dim": 8}
_QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}
_QWEN: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 10, "rms_norm_eps": 1e-2,
    "linear_value_head_dim": 12, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0],
    },
}  # fmt: skip
_EXPERTS = {
    "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 18, "shared_expert_intermediate_size": 22,
}  # fmt: skip
#: Stem of the classes; text_config; vision_config; keys beside the two.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Gemma 3": (
        "Gemma3",
        {
            "sliding_window": 6, "query_pre_attn_scalar": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        _VISION | {"model_type": "siglip_vision_model"},
        {"mm_tokens_per_image": 4},
    ),
    "Gemma 4": (
        "Gemma4",
        {
            "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4,
            "num_kv_shared_layers": 2, "global_head_dim": 16, "num_global_key_value_heads": 1, "rope_parameters": None,
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 91, "pad_token_id": 0,
        },
        {
            "model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16,
        },
        {"audio_config": None},
    ),
    "Magistral": ("Mistral3", {"model_type": "mistral"}, _VISION | _PIXTRAL, {"tie_word_embeddings": False}),
    "Ministral 3": (
        "Mistral3",
        {
            "model_type": "ministral3",
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 5,
                "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
            },
        },
        _VISION | _PIXTRAL,
        {"tie_word_embeddings": True},
    ),
    "Kimi-K2.5": (
        "Kimi_K25",
        {
            "model_type": "kimi_k2", "num_key_value_heads": 4, "q_lora_rank": 22, "kv_lora_rank": 18, "head_dim": 8,
            "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 14, "n_routed_experts": 8, "n_group": 1,
            "topk_group": 1, "num_experts_per_tok": 3, "n_shared_experts": 1, "moe_intermediate_size": 20,
            "first_k_dense_replace": 1, "routed_scaling_factor": 1.7,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        {"projection_hidden_size": 16, "tie_word_embeddings": False},
    ),
    "MiniMax-M3": (
        "MiniMaxM3Sparse",
        {
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"], "num_local_experts": 6,
            "mlp_layer_types": ["dense", "sparse", "sparse"], "dense_intermediate_size": 64, "intermediate_size": 20,
            "shared_intermediate_size": 24, "num_experts_per_tok": 2, "index_n_heads": 2, "index_head_dim": 12,
            "index_block_size": 8, "index_topk_blocks": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
        _VISION | {"hidden_size": 48},
        {"projector_hidden_size": 16, "tie_word_embeddings": False},
    ),
    "Qwen3.5": ("Qwen3_5", _QWEN, _QWEN_VISION, {"tie_word_embeddings": False}),
    "Qwen3.5-MoE": ("Qwen3_5Moe", _QWEN | _EXPERTS, _QWEN_VISION, {"tie_word_embeddings": False}),
}  # fmt: skip


def make_multimodal(name: str, folder: Path, seed: int = 0) -> Any:
    """A model with random float32 weights, saved to `folder` as transformers saves it."""
    stem, text, vision, rest = MODELS[name]
    # Linear attention normalises small values, which multiplies rounding errors, as large weights do.
    gain = 0.9 if "linear_attention" in text.get("layer_types", ()) else 1.5
    model = random_model(stem, seed, gain, text_config=_TEXT | text, vision_config=vision, **rest)
    model.save_pretrained(folder)
    return model


def random_model(stem: str, seed: int, gain: float = 1.5, **config: Any) -> Any:
    """A model of text and images with random float32 weights, by the stem of transformers' classes and its config.

    A product with a gain of 1 keeps the scale of its input.
    """
    model_class = getattr(transformers, f"{stem}ForConditionalGeneration")
    torch.manual_seed(seed)  # for what transformers initialises itself
    made = model_class.config_class(**config)
    model = model_class._from_config(made, attn_implementation="eager", dtype=torch.float32).eval()
    if model_class._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the grouped product refuses some widths
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1:
                strength = 3.0 if key.endswith(("embed_tokens.weight", "lm_head.weight")) else gain
                parameter.normal_(0.0, strength * parameter[0].numel() ** -0.5, generator=generator)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model
