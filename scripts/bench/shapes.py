"""Shapes of models for benchmarks with random weights, and the bytes that a decode step must read.

A shape may be cut to its first layers, as many as a card has memory for. `shrunk` makes a toy of a shape, for a CPU.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout.models.spec import ModelSpec

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_OWN: dict[str, dict[str, Any]] = {
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "qwen3-32b": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
    "qwen3-1.7b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    },
    "qwen3-235b-a22b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 1536,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    },
    # For trying a benchmark without a GPU; the results mean nothing.
    "toy": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "toy-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "torch_dtype": "bfloat16"}
_THREE_LINEAR = ("linear_attention",) * 3 + ("full_attention",)
_QWEN3_5: dict[str, Any] = {
    **_TOKENS,
    "head_dim": 256,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "mtp_num_hidden_layers": 0,
    "mamba_ssm_dtype": "float32",  # of the states; without it vLLM keeps them in 16 bits, half the bytes
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
    "vocab_size": 248320,
}
#: Families beside Qwen3, with the whole of their config.json.
OTHERS: dict[str, dict[str, Any]] = {
    "qwen3.5-27b": {
        **_QWEN3_5,
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "layer_types": _THREE_LINEAR * 16,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
    },
    "qwen3.5-35b-a3b": {
        **_QWEN3_5,
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "layer_types": _THREE_LINEAR * 10,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    "gpt-oss-20b": {
        **_TOKENS,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "layer_types": ("sliding_attention", "full_attention") * 12,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
    "glm-4.5-air": {
        **_TOKENS,
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 0,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000, "partial_rotary_factor": 0.5},
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_qk_norm": False,
        "vocab_size": 151552,
    },
    "glm-4.7-flash": {
        **_TOKENS,
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "kv_lora_rank": 512,
        "max_position_embeddings": 202752,
        "mlp_layer_types": ("dense", *("sparse",) * 46),
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 20,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 47,
        "num_key_value_heads": 20,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
        "routed_scaling_factor": 1.8,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "v_head_dim": 256,
        "vocab_size": 154880,
    },
    "moonlight-16b-a3b": {
        **_TOKENS,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "kv_lora_rank": 512,
        "max_position_embeddings": 8192,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000},
        "routed_scaling_factor": 2.446,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
    "gemma-3-12b": {
        **_TOKENS,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attention_bias": False,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "layer_types": (("sliding_attention",) * 5 + ("full_attention",)) * 8,
        "max_position_embeddings": 131072,
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000, "factor": 8.0},
        },
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "vocab_size": 262208,
    },
    "olmo-2-7b": {
        **_TOKENS,
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": False,
        "vocab_size": 100352,
    },
    "glm-4-9b-0414": {
        **_TOKENS,
        "architectures": ["Glm4ForCausalLM"],
        "model_type": "glm4",
        "attention_bias": True,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "tie_word_embeddings": False,
        "vocab_size": 151552,
    },
    "llama-3.1-70b": {
        **_TOKENS,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
    "olmo-3-7b": {
        **_TOKENS,
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "layer_types": (("sliding_attention",) * 3 + ("full_attention",)) * 8,
        "max_position_embeddings": 65536,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000},
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500000,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "attention_factor": 1.2079441541679836,
            },
        },
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 100278,
    },
}
OTHER_SHAPES = tuple(OTHERS)
SHAPES = (*_OWN, *OTHERS)
#: Sizes of a toy; a config gets those whose names it has.
_TOY: dict[str, Any] = {
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "kv_lora_rank": 32,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 2048,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "query_pre_attn_scalar": 16,
    "shared_expert_intermediate_size": 32,
    "sliding_window": 24,
    "v_head_dim": 16,
    "vocab_size": 320,
}
#: Keys with an entry for each layer.
_BY_LAYER = ("layer_types", "mlp_layer_types")


@dataclass(frozen=True, slots=True)
class StepBytes:
    """The least bytes that a decode step of a bfloat16 model reads, and of states also writes."""

    weights: int  # once per step; without an embedding that is not the output layer
    kv_per_token: int  # of context, in layers without a window
    expert: int = 0  # one expert in every sparse layer; not part of `weights`
    experts: int = 0  # of a layer
    top_k: int = 0
    state: int = 0  # of a row in linear attention: it is read and written
    windows: tuple[tuple[int, int], ...] = ()  # of layers with windows: tokens that a row sees, bytes a token

    def of_step(self, rows: int, context_tokens: float, distinct: float | None = None) -> float:
        """Bytes of a step whose rows hold `context_tokens` together and choose `distinct` experts a layer.

        Without `distinct`, the mean number under even routing. In layers with windows all rows count as equally long.
        """
        if distinct is None:
            distinct = self.even_experts(rows)
        kept = self.kv_per_token * context_tokens + rows * 2 * self.state
        kept += sum(min(rows * window, context_tokens) * per_token for window, per_token in self.windows)
        return self.weights + self.expert * distinct + kept

    def even_experts(self, rows: int) -> float:
        """Distinct experts of a layer when every row chooses `top_k` of them at random."""
        return self.experts * (1 - (1 - self.top_k / self.experts) ** rows) if self.experts else 0.0


def model_config(shape: str, layers: int = 0) -> dict[str, Any]:
    """The `config.json` of a shape, or of its first `layers` layers."""
    if shape in OTHERS:
        config = json.loads(json.dumps(OTHERS[shape]))  # as a file has it: lists
    else:
        config = {**_QWEN3, **_OWN[shape], "max_window_layers": _OWN[shape]["num_hidden_layers"]}
    if not layers:
        return config
    if not 0 < layers <= config["num_hidden_layers"]:
        raise ValueError(f"{shape} has {config['num_hidden_layers']} layers, not {layers}")
    cut = {key: config[key][:layers] for key in _BY_LAYER if key in config}
    counts = {key: layers for key in ("num_hidden_layers", "max_window_layers") if key in config}
    return {**config, **cut, **counts}


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """The same kinds of layers with tiny sizes."""
    toy = {**config, **{key: value for key, value in _TOY.items() if config.get(key) is not None}}
    if "kv_lora_rank" in toy:  # each head has its own keys
        toy["num_key_value_heads"] = toy["num_attention_heads"]
    return toy


#: Keys that count the layers for multi-token prediction.
_MTP_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
#: Tokens of a draft model's vocabulary, as in most published ones.
DRAFT_VOCAB = 32_000


def write_checkpoint(shape: str, folder: Path, layers: int = 0, mtp: bool = False) -> Path:
    """Make `folder` a checkpoint without weights: the config that `load_format=random` needs.

    With `mtp` it has a layer for multi-token prediction. Raises ValueError for a shape that has none.
    """
    config = model_config(shape, layers)
    counts = [key for key in _MTP_COUNTS if key in config]
    if mtp and not counts:
        raise ValueError(f"{shape} has no layer for multi-token prediction")
    folder.mkdir(parents=True, exist_ok=True)
    config |= dict.fromkeys(counts, 1) if mtp else {}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def write_draft_checkpoint(shape: str, folder: Path, layers: int = 0) -> Path:
    """The same for a draft model of a shape: an EAGLE-3 head with a layer like the model's dense ones."""
    config = model_config(shape, layers)
    config = config.get("text_config", config)
    heads, count = config["num_attention_heads"], config["num_hidden_layers"]
    head = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": config["num_key_value_heads"],
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "vocab_size": config["vocab_size"],
        "draft_vocab_size": min(DRAFT_VOCAB, config["vocab_size"]),
        "rms_norm_eps": config["rms_norm_eps"],
        "rope_theta": 1e6,
        "max_position_embeddings": config["max_position_embeddings"],
        "eagle_aux_hidden_state_layer_ids": [2, count // 2, count - 3] if count > 5 else [0, 1],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(head, indent=1))
    return folder


def kv_pages(rows: int, context_tokens: int, page_size: int) -> int:
    """Number of pages for `rows` rows of `context_tokens` tokens, and a few more."""
    return rows * (context_tokens // page_size + 2) + 8


def model_spec(shape: str, layers: int = 0) -> ModelSpec:
    """A shape, or its first `layers` layers, as the models read it from its config.json."""
    # Imported here: the process of vLLM needs its environment first.
    from transformers import AutoConfig

    from rollout.models.config_spec import spec_from_config

    config = model_config(shape, layers)
    return spec_from_config(AutoConfig.for_model(**config).get_text_config(), config["architectures"][0])


@functools.lru_cache(maxsize=16)
def step_bytes(shape: str, width: int = 2, layers: int = 0, format: str = "plain") -> StepBytes:
    """The least bytes that a decode step reads, with `width` bytes per number; states are in float32.

    `format` is that of the weights that may be codes.
    """
    # Imported here, as for `model_spec`.
    import torch

    from rollout.models.decoder import Decoder
    from rollout.models.layers import SparseFeedForward
    from rollout.models.spec import AttentionSpec

    spec = model_spec(shape, layers)
    dtype = {2: torch.bfloat16, 4: torch.float32}[width]
    model = Decoder(spec, dtype, torch.device("meta"), format)  # type: ignore[arg-type]  # shapes without memory
    blocks = [module for module in model.modules() if isinstance(module, SparseFeedForward)]
    chosen = [tensor[: b.spec.experts] for b in blocks for tensor in (b.gate_up, b.down, *(b.biases or ()))]
    chosen += [tensor for b in blocks for tensor in (b.gate_up_scales, b.down_scales) if tensor is not None]
    of_experts = sum(tensor.nbytes for tensor in chosen)  # a shared expert that is stored with them is read anyway
    everything = sum(parameter.nbytes for parameter in model.parameters())
    windows: dict[int, int] = {}
    kv = 0
    for layer in spec.layers:
        shape_of_kv = getattr(layer.mixer, "kv_shape", None)
        if shape_of_kv is None:
            continue
        size = shape_of_kv.bytes_per_token(dtype)
        window = layer.mixer.window if isinstance(layer.mixer, AttentionSpec) else None
        if window is None:
            kv += size
        else:
            windows[window] = windows.get(window, 0) + size
    return StepBytes(
        everything - of_experts - (0 if spec.tied else model.embed.nbytes),
        kv,
        of_experts // spec.moe.experts if spec.moe else 0,
        spec.moe.experts if spec.moe else 0,
        spec.moe.router.top_k if spec.moe else 0,
        spec.state_bytes(dtype),
        tuple(sorted(windows.items())),
    )
