"""Gemma."""

from __future__ import annotations

from dataclasses import replace

from rollout.models.families.declare import (
    ATTENTION_BIAS,
    INSIDE_LLAVA,
    NORMS_AROUND,
    Family,
    Key,
    Multimodal,
    Power,
    ropes_by_type,
    windows_by_type,
)

FAMILIES: dict[str, Family] = {
    "Gemma2ForCausalLM": Family(
        model_type="gemma2",
        models="Gemma 2",
        activation=Key("hidden_activation"),
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        windows=windows_by_type,
        attention_scale=Power("query_pre_attn_scalar", -0.5),
        attention_softcap=Key("attn_logit_softcapping"),
        norms="around",
        unit_offset=True,
        embed_scale=Power("hidden_size", 0.5),
        embed_scale_rounded=True,
        logit_softcap=Key("final_logit_softcapping"),
        bidirectional=Key("use_bidirectional_attention"),
        layer_names=NORMS_AROUND,
    ),
    "Gemma3ForCausalLM": Family(
        model_type="gemma3_text",
        models="Gemma 3, text",
        activation=Key("hidden_activation"),
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        qk_norm="head",
        windows=windows_by_type,
        ropes=ropes_by_type,
        attention_scale=Power("query_pre_attn_scalar", -0.5),
        norms="around",
        unit_offset=True,
        embed_scale=Power("hidden_size", 0.5),
        embed_scale_rounded=True,
        logit_softcap=Key("final_logit_softcapping"),
        bidirectional=Key("use_bidirectional_attention"),
        layer_names=NORMS_AROUND,
    ),
}

MULTIMODAL: dict[str, Multimodal] = {
    "Gemma3ForConditionalGeneration": Multimodal(
        model_type="gemma3",
        models="Gemma 3 (its language model)",
        language_models=(replace(FAMILIES["Gemma3ForCausalLM"], logit_softcap=None),),
        beginnings=INSIDE_LLAVA,
    ),
}
