"""Llama 4."""

from typing import Any

from rollout.models.config_rules import FLAG, NUMBER, integer, layer_list
from rollout.models.families.declare import (
    ATTENTION_BIAS,
    Family,
    If,
    Key,
    MoEFamily,
    by_layer,
    chunks_by_type,
    ropes_where_listed,
)
from rollout.models.spec import DenseNames, MoENames, QueryGrowth


@by_layer(moe_layers=layer_list(int))
def _sparse(config: Any) -> tuple[bool, ...]:
    return tuple(layer in config.moe_layers for layer in range(config.num_hidden_layers))


@by_layer(
    no_rope_layers=layer_list(int), attn_temperature_tuning=FLAG, attn_scale=NUMBER, floor_scale=integer(1, 1 << 31)
)
def _growths(config: Any) -> tuple[QueryGrowth | None, ...]:
    """Queries of layers without a rotary embedding grow."""
    growth = QueryGrowth(config.attn_scale, config.floor_scale, 1) if config.attn_temperature_tuning else None
    return tuple(None if has_rope else growth for has_rope in config.no_rope_layers)


def _dense(module: str) -> DenseNames:
    return DenseNames((f"{module}.gate_proj", f"{module}.up_proj"), f"{module}.down_proj")


FAMILIES: dict[str, Family] = {
    "Llama4ForCausalLM": Family(
        model_type="llama4_text",
        models="Llama 4, text",
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        qk_norm=If("use_qk_norm", "unit", "none"),
        ropes=ropes_where_listed,
        interleaved_rope=True,
        chunks=chunks_by_type,
        growths=_growths,
        intermediate=Key("intermediate_size_mlp"),
        without_effect=("interleave_moe_layer_step", "for_llm_compressor", "attn_dropout"),
        moe=MoEFamily(
            experts=Key("num_local_experts"),
            intermediate=Key("intermediate_size"),
            renormalize=False,
            scoring="sigmoid",
            weights_inputs=True,
            turned=True,
            sparse=_sparse,
            shared_intermediate=Key("intermediate_size"),
            names=MoENames(
                router=("feed_forward.router",),
                stacked_gate_up="feed_forward.experts.gate_up_proj",
                stacked_down="feed_forward.experts.down_proj",
                shared=_dense("feed_forward.shared_expert"),
            ),
        ),
        dense_names=_dense("feed_forward"),
    ),
}
