"""Qwen."""

from rollout.models.families.declare import (
    ATTENTION_BIAS,
    INSIDE,
    DeltaNetFamily,
    Family,
    Key,
    MoEFamily,
    MTPFamily,
    Multimodal,
    same_window_if_used,
    sparse_by_step,
    windows_by_type,
)
from rollout.models.spec import DeltaNetNames, ModelNames
from rollout.models.vision_spec import TowerFamily

_QWEN3_5_MOE = MoEFamily(
    experts=Key("num_experts"),
    intermediate=Key("moe_intermediate_size"),
    renormalize=True,
    shared_intermediate=Key("shared_expert_intermediate_size"),
    shared_gate=True,
)


def _qwen3_mtp(layers: Key) -> MTPFamily:
    return MTPFamily(
        layers=layers,
        prefix="mtp.",
        layer="layers.0.",
        fc="fc",
        embed_norm="pre_fc_norm_embedding",
        hidden_norm="pre_fc_norm_hidden",
        norm="norm",
    )


def _qwen3_5(model_type: str, models: str, moe: MoEFamily | None = None) -> Family:
    return Family(
        model_type=model_type,
        models=models,
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        qk_norm="head",
        partial_rope=True,
        rope_alternating=(11, 11, 10),
        unit_offset=True,
        query_gate=True,
        linear=DeltaNetFamily(),
        moe=moe,
        mtp=_qwen3_mtp(Key("mtp_num_hidden_layers", 1)),
        names=ModelNames(beginnings=INSIDE),
    )


FAMILIES: dict[str, Family] = {
    "Qwen2ForCausalLM": Family(
        model_type="qwen2",
        models="Qwen2, Qwen2.5",
        qkv_bias=True,
        windows=windows_by_type,
    ),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        models="Qwen3",
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        qk_norm="head",
        windows=windows_by_type,
    ),
    "Qwen3MoeForCausalLM": Family(
        model_type="qwen3_moe",
        models="Qwen3-MoE",
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        qk_norm="head",
        windows=same_window_if_used,
        moe=MoEFamily(
            experts=Key("num_experts"),
            intermediate=Key("moe_intermediate_size"),
            renormalize=Key("norm_topk_prob"),
            sparse=sparse_by_step,
        ),
    ),
    "Qwen3_5ForCausalLM": _qwen3_5("qwen3_5_text", "Qwen3.5, Qwen3.6"),
    "Qwen3_5MoeForCausalLM": _qwen3_5("qwen3_5_moe_text", "Qwen3.5-MoE, Qwen3.6-MoE", _QWEN3_5_MOE),
    "Qwen3NextForCausalLM": Family(
        model_type="qwen3_next",
        models="Qwen3-Next",
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        qk_norm="head",
        partial_rope=True,
        unit_offset=True,
        query_gate=True,
        linear=DeltaNetFamily(
            interleaved=True,
            names=DeltaNetNames(inputs=("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")),
        ),
        moe=MoEFamily(
            experts=Key("num_experts"),
            intermediate=Key("moe_intermediate_size"),
            renormalize=Key("norm_topk_prob"),
            shared_intermediate=Key("shared_expert_intermediate_size"),
            shared_gate=True,
            sparse=sparse_by_step,
        ),
        mtp=_qwen3_mtp(Key("num_nextn_predict_layers", 1)),
    ),
    "Qwen2MoeForCausalLM": Family(
        model_type="qwen2_moe",
        models="Qwen1.5-MoE, Qwen2-MoE",
        qkv_bias=Key("qkv_bias"),
        windows=windows_by_type,
        moe=MoEFamily(
            experts=Key("num_experts"),
            intermediate=Key("moe_intermediate_size"),
            renormalize=Key("norm_topk_prob"),
            sparse=sparse_by_step,
            shared_intermediate=Key("shared_expert_intermediate_size"),
            shared_gate=True,
        ),
    ),
}

MULTIMODAL: dict[str, Multimodal] = {
    "Qwen3_5ForConditionalGeneration": Multimodal(
        model_type="qwen3_5",
        models="Qwen3.5, Qwen3.6 with a vision tower",
        language_models=("Qwen3_5ForCausalLM",),
        beginnings=INSIDE,
        tower=TowerFamily(model_type="qwen3_5_vision", module="Qwen3_5VisionModel", single_frames=True),
    ),
    "Qwen3_5MoeForConditionalGeneration": Multimodal(
        model_type="qwen3_5_moe",
        models="Qwen3.5-MoE, Qwen3.6-MoE with a vision tower",
        language_models=("Qwen3_5MoeForCausalLM",),
        beginnings=INSIDE,
        tower=TowerFamily(model_type="qwen3_5_moe_vision", module="Qwen3_5MoeVisionModel", single_frames=True),
    ),
    "Qwen3VLForConditionalGeneration": Multimodal(
        model_type="qwen3_vl",
        models="Qwen3-VL",
        language_models=(
            Family(
                model_type="qwen3_vl_text",
                qkv_bias=ATTENTION_BIAS,
                o_bias=ATTENTION_BIAS,
                qk_norm="head",
                rope_alternating=(24, 20, 20),
            ),
        ),
        beginnings=INSIDE,
        tower=TowerFamily(model_type="qwen3_vl_vision", module="Qwen3VLVisionModel", single_frames=True),
    ),
    "Qwen3VLMoeForConditionalGeneration": Multimodal(
        model_type="qwen3_vl_moe",
        models="Qwen3-VL-MoE",
        language_models=(
            Family(
                model_type="qwen3_vl_moe_text",
                qkv_bias=ATTENTION_BIAS,
                o_bias=ATTENTION_BIAS,
                qk_norm="head",
                rope_alternating=(24, 20, 20),
                turned_experts=True,
                moe=MoEFamily(
                    experts=Key("num_experts"),
                    intermediate=Key("moe_intermediate_size"),
                    renormalize=True,
                    sparse=sparse_by_step,
                ),
            ),
        ),
        beginnings=INSIDE,
        tower=TowerFamily(model_type="qwen3_vl_moe_vision", module="Qwen3VLMoeVisionModel", single_frames=True),
    ),
    "Qwen2_5_VLForConditionalGeneration": Multimodal(
        model_type="qwen2_5_vl",
        models="Qwen2.5-VL",
        language_models=(
            Family(
                model_type="qwen2_5_vl_text",
                qkv_bias=True,
                windows=windows_by_type,
                rope_blocks=(16, 24, 24),
            ),
        ),
        beginnings=(("model.", ("model.", "model.language_model.")),),
        tower=TowerFamily(
            model_type="qwen2_5_vl_vision",
            module="Qwen2_5_VisionTransformerPretrainedModel",
            single_frames=False,
            beginnings=("visual.", "model.visual."),
        ),
        flat=True,
    ),
}
