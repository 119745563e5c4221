"""Mistral, Mixtral and Ministral."""

from dataclasses import replace

from rollout.models.families.declare import (
    BLOCK_SPARSE,
    IN_BLOCK_SPARSE,
    INSIDE_LLAVA,
    Family,
    Key,
    LatentFamily,
    MoEFamily,
    Multimodal,
    deepseek_moe,
    same_window,
    sparse_from,
    windows_by_type,
)
from rollout.models.spec import ModelNames

FAMILIES: dict[str, Family] = {
    "MixtralForCausalLM": Family(
        model_type="mixtral",
        models="Mixtral",
        windows=same_window,
        moe=MoEFamily(
            experts=Key("num_local_experts"),
            intermediate=Key("intermediate_size"),
            renormalize=True,
            names=BLOCK_SPARSE,
        ),
        names=ModelNames(parts=(IN_BLOCK_SPARSE,)),
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
    "Mistral4ForCausalLM": Family(
        model_type="mistral4",
        models="Mistral 4, text",
        interleaved_rope=Key("rope_interleave"),
        grown_queries=True,
        latent=LatentFamily(),
        moe=replace(
            deepseek_moe(sparse_from("first_k_dense_replace")),
            scoring="softmax",
            router_bias=False,
            router_float32=False,
        ),
    ),
}

MULTIMODAL: dict[str, Multimodal] = {
    "Mistral3ForConditionalGeneration": Multimodal(
        model_type="mistral3",
        models="Mistral Small 3, Magistral, Ministral 3, Mistral 4 (their language model)",
        language_models=("MistralForCausalLM", "Ministral3ForCausalLM", "Mistral4ForCausalLM"),
        beginnings=INSIDE_LLAVA,
    ),
}
