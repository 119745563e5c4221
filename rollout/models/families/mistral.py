"""Mistral, Mixtral and Ministral."""

from __future__ import annotations

from rollout.models.families.declare import (
    INSIDE_LLAVA,
    Family,
    Key,
    MoEFamily,
    Multimodal,
    same_window,
    windows_by_type,
)
from rollout.models.spec import MoENames

FAMILIES: dict[str, Family] = {
    "MixtralForCausalLM": Family(
        model_type="mixtral",
        models="Mixtral",
        windows=same_window,
        moe=MoEFamily(
            experts=Key("num_local_experts"),
            intermediate=Key("intermediate_size"),
            renormalize=True,
            names=MoENames(
                router=("block_sparse_moe.gate", "mlp.gate"),
                gate="block_sparse_moe.experts.{}.w1",
                up="block_sparse_moe.experts.{}.w3",
                down="block_sparse_moe.experts.{}.w2",
            ),
        ),
    ),
    "MistralForCausalLM": Family(
        model_type="mistral",
        models="Mistral, Magistral",
        windows=same_window,
    ),
    "MinistralForCausalLM": Family(
        model_type="ministral",
        models="Ministral (2024)",
        windows=windows_by_type,
    ),
    "Ministral3ForCausalLM": Family(
        model_type="ministral3",
        models="Ministral 3, text",
        windows=same_window,
        grown_queries=True,
    ),
}

MULTIMODAL: dict[str, Multimodal] = {
    "Mistral3ForConditionalGeneration": Multimodal(
        model_type="mistral3",
        models="Mistral Small 3, Magistral, Ministral 3 (their language model)",
        language_models=("MistralForCausalLM", "Ministral3ForCausalLM"),
        beginnings=INSIDE_LLAVA,
    ),
}
