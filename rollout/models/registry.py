"""The supported architectures, and how each family's config becomes a `ModelSpec`.

A family is one function from its transformers config to the fields in which it differs from Llama.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rollout.models.spec import ModelSpec, MoESpec, RopeSpec

Windows = tuple[int | None, ...]


def spec_from_config(config: Any, architecture: str) -> ModelSpec:
    """Resolve a transformers config.

    Raises:
        ValueError: the architecture is not supported, or the config asks for something that its family's
            implementation here does not have; the message says what.
    """
    check_supported(architecture)
    activation = getattr(config, "hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"hidden_act {activation!r} is not supported; supported: silu")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError("quantized checkpoints are not supported; use one with float32, bfloat16 or float16 weights")
    heads = config.num_attention_heads
    fields: dict[str, Any] = {
        "architecture": architecture,
        "hidden": config.hidden_size,
        "layers": config.num_hidden_layers,
        "heads": heads,
        "kv_heads": config.num_key_value_heads or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "intermediate": config.intermediate_size,
        "vocab": config.vocab_size,
        "eps": config.rms_norm_eps,
        "tied": bool(config.tie_word_embeddings),
        "qkv_bias": False,
        "o_bias": False,
        "mlp_bias": False,
        "qk_norm": "none",
        "clip_qkv": None,
        "windows": (None,) * config.num_hidden_layers,
        "moe": None,
    }
    rope = _rope(config)
    fields |= {"rope": rope, "max_positions": _max_positions(config, rope)}
    spec = ModelSpec(**(fields | _FAMILIES[architecture](config)))
    _check_shapes(spec)
    return spec


def supported_architectures() -> tuple[str, ...]:
    """Names as they stand in the `architectures` of a config.json."""
    return tuple(_FAMILIES)


def check_supported(architecture: str) -> None:
    """Raise ValueError, listing what is supported, for any other architecture."""
    if architecture not in _FAMILIES:
        raise ValueError(
            f"architecture {architecture!r:.80} is not supported; supported: {', '.join(supported_architectures())}"
        )


def check_model_type(architecture: str, model_type: Any) -> None:
    """Raise ValueError if the `model_type` of a config.json is not the one of its architecture."""
    if model_type != _MODEL_TYPES[architecture]:
        raise ValueError(
            f"model_type {model_type!r:.80} does not go with {architecture}; it must be {_MODEL_TYPES[architecture]!r}"
        )


def _check_shapes(spec: ModelSpec) -> None:
    if spec.heads % spec.kv_heads:
        raise ValueError(f"num_attention_heads ({spec.heads}) is not a multiple of the KV heads ({spec.kv_heads})")
    if spec.head_dim % 2:
        raise ValueError(f"head_dim ({spec.head_dim}) must be even for rotary embeddings")
    if len(spec.windows) != spec.layers:
        raise ValueError(f"layer_types names {len(spec.windows)} layers of {spec.layers}")
    if any(window is not None and window < 1 for window in spec.windows):
        raise ValueError("sliding_window must be at least 1")
    if spec.moe is not None and not 1 <= spec.moe.top_k <= spec.moe.experts:
        raise ValueError(f"num_experts_per_tok ({spec.moe.top_k}) must be between 1 and {spec.moe.experts}")


# --- rotary embedding ------------------------------------------------------------------------------------------------


def _rope(config: Any) -> RopeSpec:
    # transformers folds the older `rope_theta` and `rope_scaling` keys into this one when it reads a config.
    params = dict(config.rope_parameters or {})
    kind = params.get("rope_type", "default")
    theta = params.get("rope_theta")
    if theta is None:
        raise ValueError("config.json gives no rope_theta")
    if theta <= 1:
        raise ValueError(f"rope_theta ({theta}) must be more than 1")
    if params.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    if kind == "default":
        return RopeSpec("default", theta)
    factor = params.get("factor")
    if kind == "linear":
        return RopeSpec("linear", theta, factor=_required(factor, "factor", kind))
    original = params.get("original_max_position_embeddings") or config.max_position_embeddings
    if kind == "llama3":
        return RopeSpec(
            "llama3",
            theta,
            factor=_required(factor, "factor", kind),
            original_max_positions=original,
            low_freq_factor=_required(params.get("low_freq_factor"), "low_freq_factor", kind),
            high_freq_factor=_required(params.get("high_freq_factor"), "high_freq_factor", kind),
        )
    if kind == "yarn":
        factor = factor or config.max_position_embeddings / original
        return RopeSpec(
            "yarn",
            theta,
            factor=factor,
            original_max_positions=original,
            beta_fast=params.get("beta_fast") or 32.0,
            beta_slow=params.get("beta_slow") or 1.0,
            truncate=params.get("truncate", True),
            attention_factor=_yarn_attention_factor(params, factor),
        )
    raise ValueError(f"rope_type {kind!r:.80} is not supported; supported: default, linear, llama3, yarn")


def _required(value: float | None, name: str, kind: str) -> float:
    if value is None:
        raise ValueError(f"config.json: rope scaling {kind!r} needs {name!r}")
    return value


def _yarn_attention_factor(params: dict[str, Any], factor: float) -> float:
    """The temperature of the YaRN paper (arXiv 2309.00071, section 3.4), as checkpoints override it."""

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if params.get("attention_factor") is not None:
        return params["attention_factor"]
    mscale, mscale_all = params.get("mscale"), params.get("mscale_all_dim")
    return magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(1.0)


def _max_positions(config: Any, rope: RopeSpec) -> int:
    """Longest context that the model was made for; checkpoints extended by YaRN may still state the original one."""
    extended = int(rope.factor * rope.original_max_positions) if rope.kind == "yarn" else 0
    return max(config.max_position_embeddings, extended)


# --- families --------------------------------------------------------------------------------------------------------


def _llama(config: Any) -> dict[str, Any]:
    return {"qkv_bias": config.attention_bias, "o_bias": config.attention_bias, "mlp_bias": config.mlp_bias}


def _qwen2(config: Any) -> dict[str, Any]:
    return {"qkv_bias": True, "windows": _windows_by_type(config)}


def _qwen3(config: Any) -> dict[str, Any]:
    bias = config.attention_bias
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": "head", "windows": _windows_by_type(config)}


def _qwen3_moe(config: Any) -> dict[str, Any]:
    bias = config.attention_bias
    sparse = tuple(
        layer not in config.mlp_only_layers and config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0
        for layer in range(config.num_hidden_layers)
    )
    moe = MoESpec(
        experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        intermediate=config.moe_intermediate_size,
        renormalize=config.norm_topk_prob,
        layers=sparse,
        naming="mlp",
    )
    window = config.sliding_window if config.use_sliding_window else None
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": "head",
        "windows": (window,) * config.num_hidden_layers,
        "moe": moe if any(sparse) else None,
    }


def _mixtral(config: Any) -> dict[str, Any]:
    moe = MoESpec(
        experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        intermediate=config.intermediate_size,
        renormalize=True,
        layers=(True,) * config.num_hidden_layers,
        naming="block_sparse_moe",
    )
    return {"windows": (config.sliding_window,) * config.num_hidden_layers, "moe": moe}


def _olmoe(config: Any) -> dict[str, Any]:
    moe = MoESpec(
        experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        intermediate=config.intermediate_size,
        renormalize=config.norm_topk_prob,
        layers=(True,) * config.num_hidden_layers,
        naming="mlp",
    )
    bias = config.attention_bias
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": "full", "clip_qkv": config.clip_qkv, "moe": moe}


def _windows_by_type(config: Any) -> Windows:
    """Windows of Qwen2 and Qwen3, whose configs name each layer's kind of attention."""
    windows: list[int | None] = []
    for kind in config.layer_types:
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"layer type {kind!r} is not supported; supported: full_attention, sliding_attention")
        windows.append(config.sliding_window if kind == "sliding_attention" else None)
    return tuple(windows)


_FAMILIES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "LlamaForCausalLM": _llama,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "MixtralForCausalLM": _mixtral,
    "OlmoeForCausalLM": _olmoe,
}

#: What `model_type` says in the config.json of each architecture: the config class that transformers reads it with.
_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "OlmoeForCausalLM": "olmoe",
}
