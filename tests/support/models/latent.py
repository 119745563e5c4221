"""Tiny random checkpoints of models with latent attention."""

from pathlib import Path
from typing import Any

import torch

from tests.support.models.families import make_model

_COMMON: dict[str, Any] = {
    "vocab_size": 83,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 22,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "rms_norm_eps": 1e-4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 18,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
#: By the stem of transformers' classes, and a word where one has several configs: what is not the same for all.
LATENT: dict[str, dict[str, Any]] = {
    # As DeepSeek-V3: the queries have a latent, experts come from groups, scores and turns are scaled by YaRN.
    "DeepseekV3": {
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "attention_bias": True,
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.3},
    },
    # As Moonlight: queries are a product of the token; five heads; halves turn.
    "DeepseekV3 moonlight": {
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "rope_interleave": False,
    },
    # As DeepSeek-V2-Lite.
    "DeepseekV2": {"q_lora_rank": None, "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    "DeepseekV2 groups": {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    # Prompts are several times longer than what a token attends to; many heads, so that hardly any scores are 0.
    "DeepseekV32": {
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "index_n_heads": 16,
        "index_head_dim": 12,
        "index_topk": 9,
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.3},
    },
    "GlmMoeDsa": {
        "num_hidden_layers": 4,
        "n_shared_experts": 1,
        "index_n_heads": 16,
        "index_head_dim": 12,
        "index_topk": 9,
        "indexer_types": ["full", "shared", "full", "shared"],
    },
    # One layer of each kind of windows; prompts are longer than the window, and than what an indexer chooses.
    "DeepseekV4": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "layer_types": [
            *("sliding_attention", "compressed_sparse_attention"),
            *("heavily_compressed_attention", "compressed_sparse_attention"),
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "sliding_window": 9,
        "o_groups": 2,
        "o_lora_rank": 10,
        "index_n_heads": 16,
        "index_head_dim": 12,
        "index_topk": 5,
        "hc_mult": 3,
        "swiglu_limit": 0.9,
        "partial_rotary_factor": 8 / 24,
        "rope_parameters": {**_YARN, "rope_theta": 1.6e5},
    },
    "Mistral4": {
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
    },
    # As GLM-4.7-Flash: values are wider than what does not turn.
    "Glm4MoeLite": {"v_head_dim": 20, "norm_topk_prob": True, "n_shared_experts": 1},
}


def config_of(name: str) -> dict[str, Any]:
    """The config of one of `LATENT`."""
    config = {**_COMMON, **LATENT[name]}
    if name == "DeepseekV4":
        others = ("intermediate_size", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return {key: value for key, value in config.items() if key not in (*others, "first_k_dense_replace")}
    if name == "Glm4MoeLite":
        del config["first_k_dense_replace"]  # its default is the same
    return config


def make_latent(name: str, folder: Path, seed: int = 0, **changes: Any) -> Any:
    """Save a random model to `folder` and return it."""
    model = make_model(name.split()[0], seed, **{**config_of(name), **changes})
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("_b_proj.weight", "_with_mqa.weight")):
                parameter.mul_(1.5)  # as `make_model` does for other queries and keys
    model.save_pretrained(folder)
    return model
