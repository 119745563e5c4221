"""Bounds on what a config.json may ask for, checked on its JSON before anything is made after it.

transformers makes lists as long as `num_hidden_layers` says when it reads a config, and a model is as large as its
config says: a number that no model has is refused here, whatever comes after would do with it. The bounds are several
times what the largest models have.
"""

from __future__ import annotations

from typing import Any

from rollout.models.errors import CheckpointError

_SIZES: dict[str, tuple[int, int]] = {
    "hidden_size": (1, 1 << 18),
    "intermediate_size": (1, 1 << 22),
    "moe_intermediate_size": (1, 1 << 22),
    "num_hidden_layers": (1, 2048),
    "num_attention_heads": (1, 4096),
    "num_key_value_heads": (1, 4096),
    "head_dim": (2, 8192),
    "vocab_size": (1, 1 << 24),
    "max_position_embeddings": (2, 1 << 26),
    "num_experts": (0, 4096),
    "num_local_experts": (0, 4096),
    "num_experts_per_tok": (1, 4096),
    "decoder_sparse_step": (1, 2048),
    "sliding_window": (1, 1 << 31),
    "max_window_layers": (0, 2048),
}
_FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob")
_NUMBERS = ("rms_norm_eps", "rope_theta", "clip_qkv")
_LAYER_LISTS: dict[str, type] = {"mlp_only_layers": int, "layer_types": str}
_ROPE_MAPS = ("rope_parameters", "rope_scaling")
_ROPE_NUMBERS = (
    *("rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "attention_factor", "partial_rotary_factor"),
)
_MAX_NUMBER = 1e12
#: Experts of all layers together: each has tensors of its own.
_MAX_EXPERTS = 1 << 16


def check_config(content: dict[str, Any], where: str) -> None:
    """Raise CheckpointError, naming the key, for a value of the wrong type or beyond the bounds. None is no value."""
    for name, (least, most) in _SIZES.items():
        value = content.get(name)
        if value is not None and not (type(value) is int and least <= value <= most):
            raise _bad(where, name, value, f"an integer from {least} to {most}")
    for name in _FLAGS:
        value = content.get(name)
        if value is not None and type(value) is not bool:
            raise _bad(where, name, value, "true or false")
    for name in _NUMBERS:
        _check_number(content.get(name), where, name)
    for name, kind in _LAYER_LISTS.items():
        value = content.get(name)
        if value is not None and not _is_list_of(value, kind):
            raise _bad(where, name, value, f"a list of at most {_SIZES['num_hidden_layers'][1]}, one entry a layer")
    for name in _ROPE_MAPS:
        _check_rope(content.get(name), where, name)
    _check_experts(content, where)


def check_token_ids(value: Any, vocab: int, where: str, name: str) -> tuple[int, ...]:
    """Ascending token ids from an id, a list of ids or None. Raises CheckpointError for what is no token id."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab:
            raise _bad(where, name, token, f"token ids from 0 to {vocab - 1}")
    return tuple(sorted(set(ids)))


def _check_rope(value: Any, where: str, name: str) -> None:
    if value is None:
        return
    if not isinstance(value, dict):
        raise _bad(where, name, value, "a map")
    for key in ("rope_type", "type"):
        if key in value and type(value[key]) is not str:
            raise _bad(where, f"{name}.{key}", value[key], "a string")
    for key in _ROPE_NUMBERS:
        _check_number(value.get(key), where, f"{name}.{key}")
    for key in ("mscale", "mscale_all_dim"):
        _check_number(value.get(key) or None, where, f"{name}.{key}")  # 0 says that there is none


def _check_number(value: Any, where: str, name: str) -> None:
    if value is None:
        return
    if type(value) not in (int, float) or not 0 < value <= _MAX_NUMBER:  # NaN is not in it either
        raise _bad(where, name, value, f"a number above 0 and up to {_MAX_NUMBER:g}")


def _check_experts(content: dict[str, Any], where: str) -> None:
    layers = content.get("num_hidden_layers") or 0
    for name in ("num_experts", "num_local_experts"):
        experts = content.get(name) or 0
        if layers * experts > _MAX_EXPERTS:
            raise _bad(where, name, experts, f"at most {_MAX_EXPERTS} over all {layers} layers")


def _is_list_of(value: Any, kind: type) -> bool:
    most = _SIZES["num_hidden_layers"][1]
    return isinstance(value, list) and len(value) <= most and all(type(item) is kind for item in value)


def _bad(where: str, name: str, value: Any, wanted: str) -> CheckpointError:
    return CheckpointError(f"{where}: {name} is {value!r:.60}; it must be {wanted}")
