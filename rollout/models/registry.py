"""The supported families by architecture, and the keys of config.json that they read.

`config_rules` collects the rules of a family for the check of an untrusted config.json.
"""

from dataclasses import fields, replace
from typing import Any

from rollout.config import ModelImpl
from rollout.models.config_rules import FLAG, MOST_LAYERS, NUMBER, Rule, integer, layer_list
from rollout.models.families import FAMILIES, MULTIMODAL
from rollout.models.families.declare import (
    WIDTH,
    WINDOW,
    ByLayer,
    Family,
    If,
    Key,
    PartFamily,
    Power,
)
from rollout.models.vision_spec import TowerFamily

#: Keys that `spec_from_config` reads for every family, and those that transformers makes lists or other keys of.
_COMMON: dict[str, Rule] = {
    "hidden_size": integer(1, 1 << 18),
    "intermediate_size": WIDTH,
    "num_hidden_layers": integer(1, MOST_LAYERS),
    "num_attention_heads": integer(1, 4096),
    "num_key_value_heads": integer(1, 4096),
    "head_dim": integer(2, 8192),
    "vocab_size": integer(1, 1 << 24),
    "max_position_embeddings": integer(2, 1 << 26),
    "rms_norm_eps": NUMBER,
    "rope_theta": NUMBER,
    "tie_word_embeddings": FLAG,
    "layer_types": layer_list(str),
    "sliding_window": WINDOW,
    "use_sliding_window": FLAG,
    "max_window_layers": integer(0, MOST_LAYERS),
}


#: Keys that transformers' config classes turn into other keys, which are read here.
_MADE_INTO_OTHERS = frozenset(
    (
        *("rope_parameters", "rope_scaling", "partial_rotary_factor", "original_max_position_embeddings"),
        *("rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern", "max_window_layers"),
        *("full_attention_interval", "qk_head_dim", "no_rope_layer_interval", "global_attn_every_n_layers"),
        *("mamba_expand", "compress_rope_theta"),
    )
)
#: Keys that they turn into this key.
_MADE_INTO: dict[str, frozenset[str]] = {
    "mlp_layer_types": frozenset({"first_k_dense_replace", "num_hash_layers"}),
    "per_layer_config": frozenset({"global_head_dim", "num_global_key_value_heads"}),
    "layer_types": frozenset({"hybrid_override_pattern", "layers_block_type", "compress_ratios"}),
    "compress_rates": frozenset({"compress_rate_csa", "compress_rate_hca"}),
    "linear_head_dim": frozenset({"linear_attn_config"}),
    "index_topk_blocks": frozenset({"sparse_attention_config"}),
    "indexer_types": frozenset({"index_topk_freq", "index_skip_topk_offset", "index_topk_pattern"}),
}
#: Keys on which no forward of a family here depends: names, token ids, training, what transformers returns and caches,
#: and what models of the hub have for their own code alone.
WITHOUT_EFFECT = frozenset(
    (
        *("architectures", "model_type", "_name_or_path", "name_or_path", "auto_map", "transformers_version"),
        *("dtype", "torch_dtype", "tokenizer_class", "_commit_hash", "unsloth_fixed", "unsloth_version", "model_name"),
        *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "experts_implementation"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"),
        *("return_dict", "use_return_dict", "output_attentions", "output_hidden_states", "output_router_logits"),
        *("use_cache", "cache_implementation", "torchscript", "chunk_size_feed_forward", "is_encoder_decoder"),
        *("is_decoder", "add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder", "pruned_heads"),
        *("attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop", "residual_dropout"),
        *("initializer_range", "initializer_factor", "pretraining_tp", "ep_size", "aux_loss_alpha", "seq_aux"),
        *("router_aux_loss_coef", "router_jitter_noise", "router_z_loss_coef", "load_balance_coeff"),
        *("linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max", "linear_dt_min"),
        *("moe_layer_freq", "scoring_func", "num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers"),
        *("mtp_use_dedicated_embeddings", "mamba_ssm_dtype", "attn_output_gate", "model_max_length", "topk_method"),
        *("image_token_id", "video_token_id", "vision_token_id", "vision_start_token_id", "vision_end_token_id"),
        *("experts_per_token", "initial_context_length", "use_mrope", "enable_moe_fp32_combine", "mamba_chunk_size"),
        "merged_hidden_size",
    )
)
#: Keys that are off while they are null, also for families that do not read them.
OFF_IF_NULL = frozenset(
    (
        *("sliding_window", "layer_types", "attention_chunk_size", "clip_qkv", "use_bidirectional_attention"),
        *("attn_logit_softcapping", "final_logit_softcapping"),
    )
)
#: Keys of the maps `rope_parameters` and `rope_scaling`.
ROPE_KEYS = frozenset(
    (
        *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor"),
        *("low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "truncate"),
        *("mscale", "mscale_all_dim", "short_factor", "long_factor", "short_mscale", "long_mscale", "finetuned"),
        *("mrope_section", "mrope_interleaved", "llama_4_scaling_beta", "max_position_embeddings"),
    )
)
_SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings"),
    *("num_key_value_heads", "head_dim"),
)
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok")


class UnsupportedVariantError(ValueError):
    """A native family lacks what a config.json asks for; transformers' own code may have it."""


def supported_architectures() -> tuple[str, ...]:
    """Names as they stand in the `architectures` of a config.json."""
    return (*FAMILIES, *MULTIMODAL)


def is_native(architecture: str, impl: ModelImpl) -> bool:
    """True if a model is a `Decoder`: not if it runs through transformers' own code."""
    return impl == "native" or (impl == "auto" and architecture in supported_architectures())


def check_supported(architecture: str) -> None:
    """Raise ValueError for an architecture without a declaration; the message lists the declared ones."""
    if architecture not in supported_architectures():
        raise ValueError(
            f"architecture {architecture!r:.80} is not native; native: {', '.join(supported_architectures())}. Use "
            "model_impl = auto to run others through transformers' own code"
        )


def check_model_type(architecture: str, model_type: Any) -> None:
    """Raise ValueError if the `model_type` of a config.json does not belong to its architecture."""
    expected = [(MULTIMODAL.get(architecture) or FAMILIES[architecture]).model_type]
    if architecture in FAMILIES:
        expected += FAMILIES[architecture].other_types
    if model_type not in expected:
        allowed = " or ".join(map(repr, expected))
        raise ValueError(f"model_type {model_type!r:.80} does not belong to {architecture}; it must be {allowed}")


def has_text_config(architecture: str) -> bool:
    """True if the config of the language model is the map `text_config` of config.json."""
    return architecture in MULTIMODAL


def flat_model_type(architecture: str) -> str | None:
    """The `model_type` of a language model whose config may be part of the whole config; None if it may not be."""
    whole = MULTIMODAL[architecture]
    (language_model, *_) = whole.language_models
    return language_model.model_type if whole.flat and isinstance(language_model, Family) else None


def family_of(architecture: str, model_type: Any) -> Family:
    """The declaration of a supported architecture; `model_type` comes from its language model's config.

    Raises ValueError if the architecture has no such language model.
    """
    if architecture in FAMILIES:
        return FAMILIES[architecture]
    whole = MULTIMODAL[architecture]
    declared_families = [FAMILIES[entry] if isinstance(entry, str) else entry for entry in whole.language_models]
    families = {name: family for family in declared_families for name in (family.model_type, *family.other_types)}
    if model_type not in families:
        raise ValueError(
            f"text_config: model_type {model_type!r:.80} does not belong to {architecture}; it must be "
            f"{' or '.join(map(repr, families))}"
        )
    family = families[model_type]
    return replace(family, names=family.names._replace(beginnings=whole.beginnings))


def config_rules(family: Family) -> dict[str, Rule]:
    """Rules for the keys of config.json that this family reads, where they are not null."""
    return _COMMON | _rules(family)


def known_keys(family: Family) -> frozenset[str]:
    """The known form of a config: keys that this family reads, and keys that do not affect transformers' forward.

    Where transformers knows a key by several names, its own name counts.
    """
    own = _rules(family).keys()
    common = _COMMON.keys() - {"layer_types", "sliding_window", "use_sliding_window"}
    windows = {"use_sliding_window"} if "sliding_window" in own else set()
    # Families that read another key for their activation do not read `hidden_act`. Quantization is read for all.
    others = {"hidden_act", "quantization_config"}
    others |= {name for key in own & _MADE_INTO.keys() for name in _MADE_INTO[key]}
    return frozenset(own | common | windows | others | _MADE_INTO_OTHERS | WITHOUT_EFFECT | {*family.without_effect})


def size_rules() -> dict[str, Rule]:
    """Rules for the keys of any config.json that give sizes, where they are not null."""
    return {name: _COMMON[name] for name in _SIZES} | dict.fromkeys(_EXPERT_COUNTS, integer(0, 1 << 14))


def _rules(declaration: Family | PartFamily) -> dict[str, Rule]:
    rules: dict[str, Rule] = dict.fromkeys(getattr(declaration, "unsupported", ()), FLAG)
    for entry in fields(declaration):
        match getattr(declaration, entry.name):
            case Key(name) | Power(name, _):
                rules[name] = entry.metadata["rule"]
            case If(name, Power(used, _) | Key(used)):
                rules |= {name: FLAG, used: entry.metadata["rule"]}
            case If(name):
                rules[name] = FLAG
            case ByLayer() as values:
                rules |= values.rules
            case part if isinstance(part, PartFamily):
                rules |= _rules(part)
    return rules


def tower_family(architecture: str) -> TowerFamily | None:
    """The declaration of the vision tower of a supported architecture; None if it has none that is served."""
    whole = MULTIMODAL.get(architecture)
    return None if whole is None else whole.tower
