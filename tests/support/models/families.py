"""Tiny random checkpoints of every supported family, with sizes that no real model has."""

import copy
from pathlib import Path
from typing import Any

import torch
import transformers

_COMMON: dict[str, Any] = {"num_hidden_layers": 3, "eos_token_id": 2, "bos_token_id": 1, "max_position_embeddings": 512}

#: Family: (transformers classes' stem, config). Head sizes, KV heads, vocabularies, biases, windows, rope all differ.
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "Llama",
        {
            "vocab_size": 131,
            "hidden_size": 40,
            "intermediate_size": 52,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 12,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen2": (
        "Qwen2",
        {
            "vocab_size": 101,
            "hidden_size": 48,
            "intermediate_size": 72,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 21,
            "max_window_layers": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "qwen3": (
        "Qwen3",
        {
            "vocab_size": 97,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 33,
            "max_window_layers": 0,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 2.0},
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "vocab_size": 89,
            "hidden_size": 40,
            "intermediate_size": 56,
            "moe_intermediate_size": 18,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 10,
            "attention_bias": True,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "mixtral": (
        "Mixtral",
        {
            "vocab_size": 79,
            "hidden_size": 36,
            "intermediate_size": 44,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 14,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 40,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "olmoe": (
        "Olmoe",
        {
            "vocab_size": 83,
            "hidden_size": 32,
            "intermediate_size": 20,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "clip_qkv": 1.2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}

FAMILIES: tuple[str, ...] = tuple(_CONFIGS)


def make_model(family: str, seed: int = 0, **overrides: Any) -> Any:
    """A transformers model with random float32 weights whose logits spread over several nats.

    `family` is one of `FAMILIES`, or the stem of transformers' classes, and then `overrides` are its whole config.
    """
    stem, config = _CONFIGS.get(family, (family, {}))
    model_class = getattr(transformers, f"{stem}ForCausalLM")
    values = copy.deepcopy({"pad_token_id": None, **_COMMON, **config, **overrides})  # configs change their maps
    model = model_class._from_config(
        model_class.config_class(**values), attn_implementation="eager", dtype=torch.float32
    )
    # The grouped matrix product that transformers prefers refuses widths that are not multiples of 16 bytes.
    model.set_experts_implementation("eager")
    for module in model.modules():  # transformers 5.17 has this bound of gpt-oss as a constant
        if hasattr(module, "limit") and hasattr(model.config, "swiglu_limit"):
            module.limit = model.config.swiglu_limit
    generator = torch.Generator().manual_seed(seed)
    least = -0.5 if stem == "MiniMaxM3VL" else 0.5  # its norms have weights less 1; larger ones would multiply rounding
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (name.endswith(".weight") and "norm" in name.split(".")[-2]) or name.endswith(
                ("router.scale", "_scale")
            ):
                parameter.uniform_(least, least + 1.0, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3, generator=generator)
            else:
                # With sharp, strong attention greedy text depends on its past and does not soon repeat one token.
                gain = 1.5 if name.endswith(("q_proj.weight", "k_proj.weight", "o_proj.weight")) else 1.0
                parameter.normal_(0.0, gain * parameter.shape[-1] ** -0.5, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("_bias"):  # of routers
                buffer.normal_(0.0, 0.3, generator=generator)
            elif name.endswith("tid2eid"):  # other experts for each token
                buffer.copy_(torch.rand(len(buffer), 8, generator=generator).argsort(1)[:, : buffer.shape[1]])
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5, generator=generator)
        last_norm = model.model.norm_f if hasattr(model.model, "norm_f") else model.model.norm
        last_norm.weight.mul_(torch.randint(0, 2, (model.config.hidden_size,), generator=generator) * 2 - 1)
        model.lm_head.weight.normal_(0.0, 4.0 * model.config.hidden_size**-0.5, generator=generator)
    return model.eval()


def make_checkpoint(family: str, folder: Path, seed: int = 0, **overrides: Any) -> Any:
    """Make a model, save it to `folder` as transformers does, and return it."""
    model = make_model(family, seed, **overrides)
    model.save_pretrained(folder)
    return model
