"""OLMo."""

from rollout.models.families.declare import (
    ATTENTION_BIAS,
    NORMS_AFTER,
    DeltaNetFamily,
    Family,
    Key,
    MoEFamily,
    ropes_by_type,
    windows_by_type,
)
from rollout.models.spec import DeltaNetNames, LayerNames

FAMILIES: dict[str, Family] = {
    "Olmo2ForCausalLM": Family(
        model_type="olmo2",
        models="OLMo 2",
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        qk_norm="full",
        norms="after",
        layer_names=NORMS_AFTER,
    ),
    "Olmo3ForCausalLM": Family(
        model_type="olmo3",
        models="OLMo 3",
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        qk_norm="full",
        windows=windows_by_type,
        ropes=ropes_by_type,
        one_rope_map=True,  # in configs as the first releases of transformers 5 read them
        norms="after",
        layer_names=NORMS_AFTER,
    ),
    "OlmoHybridForCausalLM": Family(
        model_type="olmo_hybrid",
        models="OLMo-Hybrid",
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        qk_norm="full",
        optional_rope=True,
        norms="after",
        # transformers saves the first of them under a name of the other layers.
        layer_names=NORMS_AFTER._replace(also_mixer_norm="feedforward_layer_norm"),
        linear=DeltaNetFamily(
            eps=1e-5,
            reflects=Key("linear_allow_neg_eigval"),
            layer_names=LayerNames(
                "attention_layer_norm",
                "feedforward_layer_norm",
                also_mixer_norm="input_layernorm",
                also_feed_forward_norm="post_attention_layernorm",
            ),
            names=DeltaNetNames(
                inputs=tuple(f"linear_attn.{name}_proj" for name in "qkvgba"),
                conv=(
                    ("linear_attn.q_conv1d", "linear_attn.k_conv1d", "linear_attn.v_conv1d"),
                    ("linear_attn.conv1d",),
                ),
                norm="linear_attn.o_norm",
                out="linear_attn.o_proj",
            ),
        ),
    ),
    "OlmoeForCausalLM": Family(
        model_type="olmoe",
        models="OLMoE",
        qkv_bias=ATTENTION_BIAS,
        o_bias=ATTENTION_BIAS,
        qk_norm="full",
        clip_qkv=Key("clip_qkv"),
        moe=MoEFamily(
            experts=Key("num_experts"),
            intermediate=Key("intermediate_size"),
            renormalize=Key("norm_topk_prob"),
        ),
    ),
}
