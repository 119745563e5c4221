"""Nemotron-H: each layer is a mixer, or a feed-forward block without a gate."""

from dataclasses import replace
from typing import Any

from rollout.models.config_rules import layer_list
from rollout.models.families.declare import Family, Key, Mamba2Family, by_layer, deepseek_moe, no_ropes
from rollout.models.spec import AttentionNames, DenseNames, LayerNames, Mamba2Names, ModelNames, MoENames

_KINDS = ("linear_attention", "full_attention", "moe", "mlp")


@by_layer(layer_types=layer_list(str))
def _mixers(config: Any) -> tuple[bool, ...]:
    for kind in config.layer_types:
        if kind not in _KINDS:
            raise ValueError(f"layer type {kind!r:.80} is not supported; supported: {', '.join(_KINDS)}")
    return tuple(kind in ("linear_attention", "full_attention") for kind in config.layer_types)


@by_layer(layer_types=layer_list(str))
def _linear(config: Any) -> tuple[bool, ...]:
    """A block that is not a mixer counts, too: what it would be is dropped."""
    if "full_attention" not in config.layer_types:
        raise ValueError("layer_types names no layer with full attention; at least one is needed")
    return tuple(kind == "linear_attention" for kind in config.layer_types)


@by_layer(layer_types=layer_list(str))
def _sparse(config: Any) -> tuple[bool, ...]:
    return tuple(kind == "moe" for kind in config.layer_types)


FAMILIES: dict[str, Family] = {
    "NemotronHForCausalLM": Family(
        model_type="nemotron_h",
        models="Nemotron-H, Nemotron 3",
        eps=Key("layer_norm_epsilon"),
        activation=Key("mlp_hidden_act"),
        linear_activation=Key("mamba_hidden_act"),
        mlp_bias=Key("mlp_bias"),
        unsupported=("attention_bias",),
        without_effect=(
            *("mamba_proj_bias", "n_shared_experts", "time_step_limit", "time_step_max", "time_step_floor"),
            *("chunk_size", "use_mamba_kernels", "num_logits_to_keep", "mamba_ssm_cache_dtype", "residual_in_fp32"),
            *("expand", "rescale_prenorm_residual", "moe_shared_expert_overlap", "mtp_layers_block_type"),
            "mtp_hybrid_override_pattern",
        ),
        ropes=no_ropes,
        mixers=_mixers,
        linear=Mamba2Family(
            heads=Key("mamba_num_heads"),
            head_dim=Key("mamba_head_dim"),
            groups=Key("n_groups"),
            state_dim=Key("ssm_state_size"),
            conv=Key("conv_kernel"),
            conv_bias=Key("use_conv_bias"),
            bias=Key("use_bias"),
            least_step=Key("time_step_min"),
            linear=_linear,
            names=Mamba2Names(
                *("mixer.in_proj", "mixer.conv1d", "mixer.A_log", "mixer.dt_bias", "mixer.D", "mixer.norm"),
                out="mixer.out_proj",
            ),
            layer_names=LayerNames("norm", "norm"),
        ),
        moe=replace(
            deepseek_moe(_sparse),
            shared_experts=None,
            shared_intermediate=Key("moe_shared_expert_intermediate_size"),
            inner=Key("moe_latent_size"),
            names=MoENames(
                router=("mixer.gate",),
                router_bias=("mixer.gate.e_score_correction_bias",),
                gate="",
                up="mixer.experts.{}.up_proj",
                down="mixer.experts.{}.down_proj",
                stacked_gate_up="mixer.experts.up_proj",
                stacked_down="mixer.experts.down_proj",
                shared=DenseNames(("mixer.shared_experts.up_proj",), "mixer.shared_experts.down_proj"),
                narrow="mixer.fc1_latent_proj",
                widen="mixer.fc2_latent_proj",
            ),
        ),
        names=ModelNames(
            *("backbone.embeddings", "backbone.layers.{}.", "backbone.norm_f"),
            beginnings=(("backbone.", ("backbone.", "model.")),),
        ),
        layer_names=LayerNames("norm", "norm"),
        attention_names=AttentionNames(("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"), "mixer.o_proj"),
        dense_names=DenseNames(("mixer.up_proj",), "mixer.down_proj"),
    ),
}
