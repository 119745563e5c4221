"""Shapes of models for benchmarks with random weights, and the bytes that a decode step must read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
SHAPES = tuple(_OWN)


@dataclass(frozen=True, slots=True)
class StepBytes:
    """The least bytes that a decode step of a bfloat16 model reads."""

    weights: int  # once per step; without an embedding that is not the output layer
    kv_per_token: int  # of context
    expert: int = 0  # one expert in every sparse layer; not part of `weights`
    experts: int = 0  # of a layer
    top_k: int = 0

    def of_step(self, rows: int, context_tokens: float, distinct: float | None = None) -> float:
        """Bytes of a step whose rows hold `context_tokens` together and choose `distinct` experts a layer.

        Without `distinct`, the mean number under even routing.
        """
        if distinct is None:
            distinct = self.even_experts(rows)
        return self.weights + self.expert * distinct + self.kv_per_token * context_tokens

    def even_experts(self, rows: int) -> float:
        """Distinct experts of a layer when every row chooses `top_k` of them at random."""
        return self.experts * (1 - (1 - self.top_k / self.experts) ** rows) if self.experts else 0.0


def model_config(shape: str) -> dict[str, Any]:
    """The `config.json` of a shape."""
    return {**_QWEN3, **_OWN[shape], "max_window_layers": _OWN[shape]["num_hidden_layers"]}


def write_checkpoint(shape: str, folder: Path) -> Path:
    """Make `folder` a checkpoint without weights: the config that `load_format=random` needs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model_config(shape), indent=1))
    return folder


def kv_pages(rows: int, context_tokens: int, page_size: int) -> int:
    """Number of pages for `rows` rows of `context_tokens` tokens, and a few more."""
    return rows * (context_tokens // page_size + 2) + 8


def step_bytes(shape: str, width: int = 2) -> StepBytes:
    """The least bytes that a decode step reads, with `width` bytes per number."""
    c = model_config(shape)
    hidden, dim = c["hidden_size"], c["head_dim"]
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    attention = hidden * dim * (2 * heads + 2 * kv_heads) + 2 * dim
    layers, experts = c["num_hidden_layers"], c.get("num_experts", 0)
    block = hidden * experts if experts else 3 * hidden * c["intermediate_size"]
    numbers = layers * (attention + block + 2 * hidden) + hidden + c["vocab_size"] * hidden
    expert = layers * 3 * hidden * c["moe_intermediate_size"] if experts else 0
    return StepBytes(
        numbers * width,
        layers * kv_heads * dim * 2 * width,
        expert * width,
        experts,
        c["num_experts_per_tok"] if experts else 0,
    )
