"""Gemma."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rollout.models.config_rules import FLAG, MOST_LAYERS, Rule, integer, layer_list
from rollout.models.families.declare import (
    ATTENTION_BIAS,
    INSIDE,
    INSIDE_LLAVA,
    NORMS_AROUND,
    Family,
    Key,
    MoEFamily,
    Multimodal,
    Power,
    by_layer,
    ropes_by_type,
    windows_by_type,
)
from rollout.models.spec import ApartNames, DenseNames, KVSource, MoENames

#: The config of a layer may have other heads, and nothing else.
_HEADS: dict[str, Rule] = {"head_dim": integer(2, 8192), "num_key_value_heads": integer(1, 4096)}


def _changes_heads(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(part, Mapping) and all(name in _HEADS and _HEADS[name].allows(part[name]) for name in part)
        for part in value.values()
    )


@by_layer(per_layer_config=Rule("a map from layers to head_dim and num_key_value_heads", _changes_heads))
def _layer_configs(config: Any) -> tuple[Any, ...]:
    """The configs of layers, which may have other heads."""
    return tuple(config.per_layer_config[layer] for layer in range(config.num_hidden_layers))


@by_layer(layer_types=layer_list(str), num_kv_shared_layers=integer(0, MOST_LAYERS), attention_k_eq_v=FLAG)
def _kv(config: Any) -> tuple[KVSource, ...]:
    """The last layers read the KV of the last layer of their kind that has some; values of others may be keys."""
    kinds, own = config.layer_types, config.num_hidden_layers - (config.num_kv_shared_layers or 0)
    if not set(kinds) <= set(kinds[: max(own, 0)]):
        raise ValueError(
            f"num_kv_shared_layers ({config.num_kv_shared_layers}) leaves a kind of layer without one that has KV"
        )
    same = bool(config.attention_k_eq_v)
    made: tuple[KVSource, ...] = tuple("keys" if same and kind == "full_attention" else "own" for kind in kinds[:own])
    return made + ("shared",) * (len(kinds) - own)


@by_layer(num_kv_shared_layers=integer(0, MOST_LAYERS), use_double_wide_mlp=FLAG)
def _widths(config: Any) -> tuple[int, ...]:
    """Layers without KV of their own may have feed-forward blocks of twice the width."""
    shared = config.num_kv_shared_layers or 0
    return (1,) * (config.num_hidden_layers - shared) + (2 if config.use_double_wide_mlp else 1,) * shared


@by_layer(enable_moe_block=FLAG)
def _sparse(config: Any) -> tuple[bool, ...]:
    return (bool(config.enable_moe_block),) * config.num_hidden_layers


_GEMMA = Family(  # what all of them have
    model_type="gemma2",
    models="Gemma 2",
    activation=Key("hidden_activation"),
    qkv_bias=ATTENTION_BIAS,
    o_bias=ATTENTION_BIAS,
    windows=windows_by_type,
    norms="around",
    embed_scale=Power("hidden_size", 0.5),
    embed_scale_rounded=True,
    logit_softcap=Key("final_logit_softcapping"),
    layer_names=NORMS_AROUND,
)
_GEMMA_2 = replace(
    _GEMMA,
    attention_scale=Power("query_pre_attn_scalar", -0.5),
    attention_softcap=Key("attn_logit_softcapping"),
    unit_offset=True,
    bidirectional=Key("use_bidirectional_attention"),
)
FAMILIES: dict[str, Family] = {
    "Gemma2ForCausalLM": _GEMMA_2,
    "Gemma3ForCausalLM": replace(
        _GEMMA_2,
        model_type="gemma3_text",
        models="Gemma 3, text",
        attention_softcap=None,
        qk_norm="head",
        ropes=ropes_by_type,
    ),
    "Gemma4ForCausalLM": replace(
        _GEMMA,
        model_type="gemma4_text",
        models="Gemma 4, text",
        qk_norm="head",
        ropes=ropes_by_type,
        layer_configs=_layer_configs,
        kv=_kv,
        value_norm=True,
        attention_scale=1.0,
        widths=_widths,
        token_inputs=Key("hidden_size_per_layer_input"),
        token_input_vocab=Key("vocab_size_per_layer_input"),
        layer_factor="layer_scalar",
        # Text is causal unless it is "all", which makes `is_causal` false.
        without_effect=("use_bidirectional_attention",),
        moe=MoEFamily(
            experts=Key("num_experts"),
            intermediate=Key("moe_intermediate_size"),
            top_k=Key("top_k_experts"),
            renormalize=True,
            shared_intermediate=Key("intermediate_size"),
            sparse=_sparse,
            apart=ApartNames(
                *("pre_feedforward_layernorm", "post_feedforward_layernorm_1"),
                *("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"),
                *("router.scale", "router.per_expert_scale"),
            ),
            names=MoENames(
                router=("router.proj",),
                gate="experts.{}.gate_proj",
                up="experts.{}.up_proj",
                down="experts.{}.down_proj",
                stacked_gate_up="experts.gate_up_proj",
                stacked_down="experts.down_proj",
                shared=DenseNames(),
            ),
        ),
    ),
}

MULTIMODAL: dict[str, Multimodal] = {
    "Gemma4ForConditionalGeneration": Multimodal(
        model_type="gemma4",
        models="Gemma 4 (its language model)",
        language_models=("Gemma4ForCausalLM",),
        beginnings=INSIDE,
    ),
    "Gemma3ForConditionalGeneration": Multimodal(
        model_type="gemma3",
        models="Gemma 3 (its language model)",
        language_models=(replace(FAMILIES["Gemma3ForCausalLM"], logit_softcap=None),),
        beginnings=INSIDE_LLAVA,
    ),
}
