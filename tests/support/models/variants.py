"""Tiny random checkpoints of families that differ from Llama in a few facts of their declaration."""

from pathlib import Path
from typing import Any

from tests.support.models.families import make_checkpoint

SIZES: dict[str, Any] = {
    "vocab_size": 91, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
ROPES_BY_TYPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5e3, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
#: By the stem of transformers' classes, and a word where one has two configs: what is not its default.
CONFIGS: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 6, "head_dim": 20},
    "Phi3": {"sliding_window": 6, "tie_word_embeddings": False},
    "Phi3 long": {
        "head_dim": 16, "hidden_size": 64, "tie_word_embeddings": True, "original_max_position_embeddings": 128,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5], "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
        },
    },
    "Ministral": {"sliding_window": 6, "layer_types": LAYER_TYPES, "head_dim": 12},
    "Ministral3": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 5,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
        },
        "head_dim": 20, "max_position_embeddings": 512,
    },
    "Glm": {"attention_bias": True, "head_dim": 16},
    "Glm4": {"attention_bias": True, "head_dim": 16},
    "Gemma2": {
        "sliding_window": 6, "layer_types": LAYER_TYPES, "head_dim": 20, "query_pre_attn_scalar": 7,
        "attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0,
    },
    "Gemma3": {
        "sliding_window": 6, "layer_types": LAYER_TYPES, "head_dim": 20, "query_pre_attn_scalar": 7,
        "rope_parameters": ROPES_BY_TYPE, "tie_word_embeddings": True,
    },
    "Gemma4": {
        "num_hidden_layers": 5, "layer_types": [*LAYER_TYPES, "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "attention_k_eq_v": True, "sliding_window": 6,
        "head_dim": 16, "global_head_dim": 24, "num_global_key_value_heads": 1, "rope_parameters": None,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 91, "final_logit_softcapping": 4.0,
    },
    "Gemma4 alike": {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 6,
        "head_dim": 16, "global_head_dim": 16, "rope_parameters": None, "hidden_size_per_layer_input": 0,
        "attention_bias": True, "tie_word_embeddings": False, "use_bidirectional_attention": "vision",
    },
    "Gemma4 experts": {
        "layer_types": LAYER_TYPES, "sliding_window": 6, "head_dim": 16, "global_head_dim": 24,
        "rope_parameters": None, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 6,
        "top_k_experts": 2, "moe_intermediate_size": 20, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    },
    "SmolLM3": {"no_rope_layers": [1, 0, 1], "attention_bias": False, "use_sliding_window": False},
    "SeedOss": {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False, "head_dim": 20},
    "Qwen2Moe": EXPERTS | {
        "shared_expert_intermediate_size": 40, "mlp_only_layers": [1], "norm_topk_prob": False,
        "use_sliding_window": True, "sliding_window": 6, "layer_types": LAYER_TYPES,
    },
    "Glm4Moe": EXPERTS | {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "use_qk_norm": True, "head_dim": 16,
        "attention_bias": True, "num_mtp_layers": 2,
    },
    "MiMoV2Flash": {
        "head_dim": 18, "v_head_dim": 14, "sliding_window": 6, "layer_types": LAYER_TYPES, "n_routed_experts": 8,
        "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_group": 4, "topk_group": 2,
        "mlp_layer_types": ["dense", "sparse", "sparse"], "attention_value_scale": 0.7,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.334},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e2, "partial_rotary_factor": 0.334},
        },
    },
    "HYV3": EXPERTS | {
        "num_shared_experts": 2, "mlp_layer_types": ["dense", "sparse", "sparse"], "router_scaling_factor": 1.7,
        "head_dim": 16, "attention_bias": True,
    },
    "Exaone4": {"sliding_window": 6, "layer_types": LAYER_TYPES, "head_dim": 12},
    "Exaone4 full": {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    "ExaoneMoe": EXPERTS | {
        "num_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "num_shared_experts": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse"], "routed_scaling_factor": 1.7, "sliding_window": 6,
        "layer_types": LAYER_TYPES, "head_dim": 12,
    },
    "Ernie4_5": {"use_bias": True, "head_dim": 12},
    "Ernie4_5_Moe": {
        "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 20, "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1, "moe_layer_end_index": 1, "moe_norm_min": 0.5,
    },
    "MiniMaxM2": EXPERTS | {
        "num_local_experts": 6, "head_dim": 16, "rotary_dim": 8,
        # Published configs have `rotary_dim` alone, which transformers 5.17 does not read.
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "MiniMaxM3VL": {
        "num_hidden_layers": 3, "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse"], "dense_intermediate_size": 64, "intermediate_size": 20,
        "shared_intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16,
        "routed_scaling_factor": 1.7, "swiglu_limit": 0.9, "bos_token_id": 1, "eos_token_id": 2,
        # Prompts have several times the blocks that a token attends to.
        "index_n_heads": 2, "index_head_dim": 12, "index_block_size": 16, "index_topk_blocks": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "Afmoe": EXPERTS | {
        "num_dense_layers": 1, "num_shared_experts": 2, "route_scale": 1.7, "mup_enabled": True, "head_dim": 12,
        "sliding_window": 6, "layer_types": LAYER_TYPES,
    },
    "GptOss": {
        "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 12, "sliding_window": 6,
        "layer_types": LAYER_TYPES, "swiglu_limit": 0.9,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64,
            "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        },
    },
    "Granite": {
        "attention_multiplier": 0.2, "residual_multiplier": 0.4, "embedding_multiplier": 3.0, "logits_scaling": 2.5,
        "attention_bias": True,
    },
    "Llama4": {
        "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 20, "intermediate_size_mlp": 64,
        "moe_layers": [0, 2], "no_rope_layers": [1, 0, 1], "attention_chunk_size": 16, "floor_scale": 5,
        "attn_scale": 0.3, "head_dim": 12,
    },
    "GraniteMoe": {
        "num_local_experts": 6, "num_experts_per_tok": 2, "attention_multiplier": 0.2, "residual_multiplier": 0.4,
        "embedding_multiplier": 3.0, "logits_scaling": 2.5, "intermediate_size": 20,
    },
    "GraniteMoeShared": {
        "num_local_experts": 6, "num_experts_per_tok": 2, "attention_multiplier": 0.2, "residual_multiplier": 0.4,
        "embedding_multiplier": 3.0, "logits_scaling": 2.5, "intermediate_size": 20,
        "shared_intermediate_size": 40, "attention_bias": True,
    },
    "Olmo2": {"attention_bias": False},
    "Olmo3": {
        "sliding_window": 6, "layer_types": LAYER_TYPES, "rope_parameters": ROPES_BY_TYPE,
    },
}  # fmt: skip


def make_variant(stem: str, folder: Path, seed: int = 0, **sizes: Any) -> Any:
    """Save a random model of one of `CONFIGS` to `folder` and return it."""
    return make_checkpoint(stem.split()[0], folder, seed, **(SIZES | CONFIGS[stem] | sizes))
