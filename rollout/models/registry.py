"""The supported families: one declaration each, and how a transformers config becomes a `ModelSpec` by it.

A declaration says what differs from Llama. A value is a constant, or a `Key`: the value of that key of config.json.
Where a value depends on the layer, the declaration names a function from the config to a tuple of values, one a layer.

A family reads no key without a rule: a `Key` has the rule of its field, a function reads the keys that it lists, and
`_COMMON` has those of all families. `config_rules` collects them for the check of an untrusted config.json.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rollout.config import ModelImpl
from rollout.models.config_rules import FLAG, MOST_LAYERS, NUMBER, TEXT, Rule, integer, layer_list
from rollout.models.longrope import first_border, rope_maps
from rollout.models.spec import (
    Activation,
    AttentionNames,
    AttentionSpec,
    ClampedGLUSpec,
    DeltaNetNames,
    DeltaNetSpec,
    DenseNames,
    DenseSpec,
    DraftNames,
    DraftSpec,
    FeedForwardSpec,
    KVMixerSpec,
    LatentNames,
    LatentSpec,
    LayerNames,
    LayerSpec,
    MixerSpec,
    ModelNames,
    ModelSpec,
    MoENames,
    MoESpec,
    NormPlace,
    QKNorm,
    QueryGrowth,
    RopeKind,
    RopeSpec,
    RouterSpec,
    Scoring,
)
from rollout.models.vision_spec import TowerFamily, TowerSpec

#: Experts of all layers together; each has its own tensors.
_MAX_EXPERTS = 1 << 16
_WIDTH = integer(1, 1 << 22)
_WINDOW = integer(0, 1 << 31)  # transformers writes 0 where windows are not used

#: Keys that `spec_from_config` reads for every family, and those that transformers makes lists or other keys of.
_COMMON: dict[str, Rule] = {
    "hidden_size": integer(1, 1 << 18),
    "intermediate_size": _WIDTH,
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
    "sliding_window": _WINDOW,
    "use_sliding_window": FLAG,
    "max_window_layers": integer(0, MOST_LAYERS),
}


#: Keys of which transformers' config classes make others; here these others are read.
_MADE_INTO_OTHERS = frozenset(
    (
        *("rope_parameters", "rope_scaling", "partial_rotary_factor", "original_max_position_embeddings"),
        *("rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern", "max_window_layers"),
        *("full_attention_interval", "qk_head_dim", "no_rope_layer_interval", "global_attn_every_n_layers"),
    )
)
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
        *("experts_per_token", "initial_context_length", "use_mrope"),
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


class Key(NamedTuple):
    """The value of this key of config.json; `default` where neither it nor transformers' config class has the key."""

    name: str
    default: Any = None


class Power(NamedTuple):
    """The value of this key of config.json, raised to a power."""

    name: str
    exponent: float


class If(NamedTuple):
    """A value where the flag under this key of config.json is true, and another one elsewhere."""

    name: str
    value: Any
    otherwise: Any


#: Kinds of scaled rotary embeddings. Their frequencies do not depend on the length of a sequence.
_SCALED_ROPES: tuple[RopeKind, ...] = ("linear", "llama3", "yarn", "longrope")
#: Activations by their names in config.json.
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


# --- what a value is in each layer -----------------------------------------------------------------------------------

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ByLayer(Generic[T]):
    """A value that depends on the layer: a function of the config, and the keys that it may read."""

    function: Callable[[Any], tuple[T, ...]]
    rules: Mapping[str, Rule]

    def __call__(self, config: Any) -> tuple[T, ...]:
        """One value a layer. Raises ValueError if the keys are for another number of layers."""
        count = config.num_hidden_layers
        given = {name: getattr(config, name) for name in self.rules}
        values = self.function(SimpleNamespace(num_hidden_layers=count, **given))
        if len(values) != count:
            raise ValueError(f"{' and '.join(self.rules)} names {len(values)} layers of {count}")
        return values


def by_layer(**rules: Rule) -> Callable[[Callable[[Any], tuple[T, ...]]], ByLayer[T]]:
    """Decorate a function from a config to one value a layer; it sees `num_hidden_layers` and the keys named here."""
    return lambda function: ByLayer(function, rules)


@by_layer()
def no_windows(config: Any) -> tuple[int | None, ...]:
    """Every token sees all tokens before it."""
    return (None,) * config.num_hidden_layers


@by_layer(sliding_window=_WINDOW)
def same_window(config: Any) -> tuple[int | None, ...]:
    """One window for all layers, or none."""
    return (config.sliding_window,) * config.num_hidden_layers


@by_layer(sliding_window=_WINDOW, use_sliding_window=FLAG)
def same_window_if_used(config: Any) -> tuple[int | None, ...]:
    """One window for all layers, if a flag says so."""
    return (config.sliding_window if config.use_sliding_window else None,) * config.num_hidden_layers


@by_layer(layer_types=layer_list(str), sliding_window=_WINDOW)
def windows_by_type(config: Any) -> tuple[int | None, ...]:
    """The config names the kind of attention of each layer."""
    windows: list[int | None] = []
    for kind in config.layer_types:
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"layer type {kind!r} is not supported; supported: full_attention, sliding_attention")
        if kind == "sliding_attention" and config.sliding_window is None:
            raise ValueError("layer_types names sliding_attention, and there is no sliding_window: add it")
        windows.append(config.sliding_window if kind == "sliding_attention" else None)
    return tuple(windows)


@by_layer()
def same_rope(config: Any) -> tuple[str, ...]:
    """All layers take the whole of `rope_parameters`."""
    return ("",) * config.num_hidden_layers


@by_layer(layer_types=layer_list(str))
def ropes_by_type(config: Any) -> tuple[str, ...]:
    """`rope_parameters` has a map for each kind of attention."""
    return tuple(config.layer_types)


@by_layer(no_rope_layers=layer_list(int))
def ropes_where_listed(config: Any) -> tuple[str | None, ...]:
    """The config lists 1 for each layer with a rotary embedding, 0 for each without."""
    return tuple("" if has_rope else None for has_rope in config.no_rope_layers)


@by_layer(layer_types=layer_list(str))
def linear_by_type(config: Any) -> tuple[bool, ...]:
    """The config names the layers with linear attention."""
    for kind in config.layer_types:
        if kind not in ("full_attention", "linear_attention"):
            raise ValueError(f"layer type {kind!r:.80} is not supported; supported: full_attention, linear_attention")
    return tuple(kind == "linear_attention" for kind in config.layer_types)


@by_layer(layer_types=layer_list(str))
def ropes_in_windows(config: Any) -> tuple[str | None, ...]:
    """Layers with a window have a rotary embedding, the others none."""
    return tuple("" if kind == "sliding_attention" else None for kind in config.layer_types)


@by_layer()
def all_sparse(config: Any) -> tuple[bool, ...]:
    """Every layer has experts."""
    return (True,) * config.num_hidden_layers


@by_layer(mlp_only_layers=layer_list(int), num_experts=integer(0, 4096), decoder_sparse_step=integer(1, MOST_LAYERS))
def sparse_by_step(config: Any) -> tuple[bool, ...]:
    """Every n-th layer is sparse, except the layers in a list."""
    return tuple(
        layer not in config.mlp_only_layers and config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0
        for layer in range(config.num_hidden_layers)
    )


def sparse_from(key: str) -> ByLayer[bool]:
    """The first layers are dense; `key` says how many."""

    def sparse(config: Any) -> tuple[bool, ...]:
        return tuple(layer >= getattr(config, key) for layer in range(config.num_hidden_layers))

    return ByLayer(sparse, {key: integer(0, MOST_LAYERS)})


@by_layer(mlp_layer_types=layer_list(str))
def sparse_by_type(config: Any) -> tuple[bool, ...]:
    """The config names the kind of feed-forward block of each layer."""
    for kind in config.mlp_layer_types:
        if kind not in ("sparse", "dense"):
            raise ValueError(f"MLP layer type {kind!r:.80} is not supported; supported: sparse, dense")
    return tuple(kind == "sparse" for kind in config.mlp_layer_types)


# --- the declarations ------------------------------------------------------------------------------------------------


def declared(rule: Rule, default: Any = MISSING) -> Any:
    """A field of a declaration: a constant, or the `Key` of a value that obeys the rule."""
    return field(default=default, metadata={"rule": rule})


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEFamily:
    """The mixture of experts of a family."""

    experts: Key = declared(integer(0, 4096))
    intermediate: Key = declared(_WIDTH)  # width of one expert
    top_k: Key = declared(integer(1, 4096), Key("num_experts_per_tok"))
    renormalize: bool | Key = declared(FLAG)
    scoring: Scoring = "softmax"
    router_bias: bool = False
    router_float32: bool = False
    groups: int | Key = declared(integer(1, 4096), 1)
    top_groups: int | Key = declared(integer(1, 4096), 1)
    group_best: int = 2
    grouped: Key | None = declared(TEXT, None)  # "greedy": there are no groups; "group_limited_greedy": there are
    scale: float | Key = declared(NUMBER, 1.0)
    shared_intermediate: Key | None = declared(_WIDTH, None)  # width of the expert that every token takes
    shared_experts: Key | None = declared(integer(0, 4096), None)  # its width in experts, where a config says that
    shared_gate: bool = False
    logit_bias: bool = False
    clamp_alpha: Key | None = declared(NUMBER, None)  # given with the limit: experts have biases and a clamped GLU
    clamp_limit: Key | None = declared(NUMBER, None)
    sparse: ByLayer[bool] = all_sparse
    names: MoENames = MoENames()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetFamily:
    """The layers of a family that have gated DeltaNet instead of attention."""

    key_heads: Key = declared(integer(1, 4096), Key("linear_num_key_heads"))
    value_heads: Key = declared(integer(1, 4096), Key("linear_num_value_heads"))
    key_dim: Key = declared(integer(1, 8192), Key("linear_key_head_dim"))
    value_dim: Key = declared(integer(1, 8192), Key("linear_value_head_dim"))
    conv: Key = declared(integer(2, 64), Key("linear_conv_kernel_dim"))
    eps: float | Key = declared(NUMBER, Key("rms_norm_eps"))  # epsilon of the norm of the outputs
    reflects: bool | Key = declared(FLAG, False)  # beta goes up to 2
    interleaved: bool = False
    linear: ByLayer[bool] = linear_by_type
    names: DeltaNetNames = DeltaNetNames()
    #: Keys of the layers with DeltaNet.
    norms: NormPlace = "before"
    layer_names: LayerNames = LayerNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentFamily:
    """The latent attention of a family."""

    q_rank: Key = declared(_WIDTH, Key("q_lora_rank"))
    kv_rank: Key = declared(_WIDTH, Key("kv_lora_rank"))
    nope_dim: Key = declared(integer(1, 8192), Key("qk_nope_head_dim"))
    rope_dim: Key = declared(integer(2, 8192), Key("qk_rope_head_dim"))
    value_dim: Key = declared(integer(1, 8192), Key("v_head_dim"))
    bias: Key = declared(FLAG, Key("attention_bias"))
    eps: float = 1e-6  # epsilon of the norms of latents; transformers' default, whatever `rms_norm_eps` is
    names: LatentNames = LatentNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPFamily:
    """The layers of a family's checkpoints that predict further tokens. The first one may draft; see `DraftSpec`."""

    #: How many there are.
    layers: Key = declared(integer(0, MOST_LAYERS), Key("num_nextn_predict_layers", 0))
    #: The prefix of one's tensors; `{}`: its number, counted on from the layers of the model.
    prefix: str = "model.layers.{}."
    from_zero: bool = False  # they have numbers of their own
    layer: str = ""  # the beginning of its blocks' names, after the prefix
    fc: str = "eh_proj"
    embed_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    norm: str = "shared_head.norm"
    hidden_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The differences from Llama without biases. For the fields see the specs that are built from them."""

    model_type: str  # in config.json
    models: str = ""  # names of its models, for the docs
    read_as: str | None = None  # the model type that transformers reads config.json as; None: its own
    #: Other names that `model_type` may have, of models with the same architecture; read as the first one.
    other_types: tuple[str, ...] = ()
    activation: Key = declared(TEXT, Key("hidden_act"))
    qkv_bias: bool | Key = declared(FLAG, False)
    o_bias: bool | Key = declared(FLAG, False)
    mlp_bias: bool | Key = declared(FLAG, False)
    qk_norm: QKNorm | If = declared(FLAG, "none")
    clip_qkv: Key | None = declared(NUMBER, None)
    windows: ByLayer[int | None] = no_windows
    #: The map inside `rope_parameters` that a layer takes; empty: all of it. None: the layer has no rotary embedding.
    ropes: ByLayer[Any] = same_rope
    partial_rope: bool = False  # `partial_rotary_factor` may be less than 1
    #: How many dimensions of a head turn; used where `rope_parameters` has no such factor.
    rope_width: Key | None = declared(integer(2, 8192), None)
    #: `rope_parameters` may be one map: layers with full attention take it, the others only its `rope_theta`.
    one_rope_map: bool = False
    #: `mrope_section` of `rope_parameters` says how many frequencies take each of three positions: in turns, or one
    #: block of frequencies after the other. The value is what transformers takes where the key is absent.
    rope_turns: tuple[int, int, int] | None = None
    rope_blocks: tuple[int, int, int] | None = None
    interleaved_rope: bool | Key = declared(FLAG, False)
    optional_rope: bool = False  # without a `rope_theta` no layer has a rotary embedding
    attention_gate: bool = False
    query_gate: bool = False
    attention_sinks: bool = False
    grown_queries: bool = False  # `llama_4_scaling_beta` of `rope_parameters` says by what
    attention_scale: Key | Power | None = declared(NUMBER, None)
    attention_softcap: Key | None = declared(NUMBER, None)
    linear: DeltaNetFamily | None = None
    latent: LatentFamily | None = None  # all layers have it
    norms: NormPlace = "before"
    unit_offset: bool = False
    residual_scale: float | Key = declared(NUMBER, 1.0)
    embed_scale: float | Key | Power | If = declared(NUMBER, 1.0)
    embed_scale_rounded: bool = False
    logit_divisor: float | Key = declared(NUMBER, 1.0)
    logit_softcap: Key | None = declared(NUMBER, None)
    bidirectional: Key | None = declared(FLAG, None)  # true: tokens see those after them, which is refused
    #: Flags that must be false or absent, because neither transformers nor this code does what they ask for.
    unsupported: tuple[str, ...] = ()
    moe: MoEFamily | None = None
    turned_experts: bool = False  # files have tensors of all experts with inputs before outputs; updates have not
    mxfp4: bool = False  # checkpoints may have experts in this format; they are decoded when they are loaded
    #: Beginnings of the names of tensors that text needs none of: prediction of several tokens at once, images. A
    #: tensor of a draft model is used whatever its name begins with.
    unused: tuple[str, ...] = (
        *("mtp.", "visual.", "vision_tower.", "multi_modal_projector."),
        *("model.visual.", "model.vision_tower.", "model.multi_modal_projector."),
    )
    mtp: MTPFamily | None = None  # layers for the prediction of several tokens at once, where they can draft
    names: ModelNames = ModelNames()
    layer_names: LayerNames = LayerNames()
    attention_names: AttentionNames = AttentionNames()
    dense_names: DenseNames = DenseNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class Multimodal:
    """A model of text and images: it is served for text alone, or with images where `tower` is declared.

    The config of the language model is the map `text_config` of config.json.
    """

    model_type: str  # in config.json
    models: str  # names of its models, for the docs
    #: What its language model may be, one of `FAMILIES` or of its own; the `model_type` of `text_config` says which.
    language_models: tuple[str | Family, ...]
    #: See `ModelNames`.
    beginnings: tuple[tuple[str, tuple[str, ...]], ...]
    tower: TowerFamily | None = None
    flat: bool = False  # files may have the keys of `text_config` beside `vision_config`


_ATTENTION_BIAS = Key("attention_bias")
#: How the names of a language model begin in a model of text and images, and in the language model alone.
_INSIDE = (("model.", ("model.language_model.", "model.")),)
#: The same, with what files on the hub have: transformers' module has the second spelling.
_INSIDE_LLAVA = (
    ("model.", ("language_model.model.", "model.language_model.", "model.")),
    ("lm_head", ("language_model.lm_head", "lm_head")),
)
_QWEN3_5_MOE = MoEFamily(
    experts=Key("num_experts"),
    intermediate=Key("moe_intermediate_size"),
    renormalize=True,
    shared_intermediate=Key("shared_expert_intermediate_size"),
    shared_gate=True,
)
_NORMS_AROUND = LayerNames(
    "input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"
)
_SHARED_EXPERTS = DenseNames(
    ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"), "mlp.shared_experts.down_proj"
)
_GATE_UP = DenseNames(gate_up=("mlp.gate_up_proj",))
_NORMS_AFTER = LayerNames("post_attention_layernorm", "post_feedforward_layernorm")


def _deepseek_moe(sparse: ByLayer[bool]) -> MoEFamily:
    """The experts of DeepSeek-V3 and of the models after it."""
    return MoEFamily(
        experts=Key("n_routed_experts"),
        intermediate=Key("moe_intermediate_size"),
        renormalize=Key("norm_topk_prob"),
        scoring="sigmoid",
        router_bias=True,
        router_float32=True,
        groups=Key("n_group"),
        top_groups=Key("topk_group"),
        scale=Key("routed_scaling_factor"),
        sparse=sparse,
        shared_experts=Key("n_shared_experts"),
        names=MoENames(shared=_SHARED_EXPERTS),
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
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        qk_norm="head",
        partial_rope=True,
        rope_turns=(11, 11, 10),
        unit_offset=True,
        query_gate=True,
        linear=DeltaNetFamily(),
        moe=moe,
        mtp=_qwen3_mtp(Key("mtp_num_hidden_layers", 1)),
        names=ModelNames(beginnings=_INSIDE),
    )


#: By the name that stands in the `architectures` of a config.json.
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        model_type="llama",
        models="Llama 3 to 3.3",
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        mlp_bias=Key("mlp_bias"),
    ),
    "Qwen2ForCausalLM": Family(
        model_type="qwen2",
        models="Qwen2, Qwen2.5",
        qkv_bias=True,
        windows=windows_by_type,
    ),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        models="Qwen3",
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        qk_norm="head",
        windows=windows_by_type,
    ),
    "Qwen3MoeForCausalLM": Family(
        model_type="qwen3_moe",
        models="Qwen3-MoE",
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        qk_norm="head",
        windows=same_window_if_used,
        moe=MoEFamily(
            experts=Key("num_experts"),
            intermediate=Key("moe_intermediate_size"),
            renormalize=Key("norm_topk_prob"),
            sparse=sparse_by_step,
        ),
    ),
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
    "MiMoForCausalLM": Family(
        model_type="mimo",
        models="MiMo-7B",
        read_as="qwen2",  # transformers has no MiMo
        qkv_bias=True,
        windows=windows_by_type,
        unused=("model.mtp_layers.",),
        mtp=MTPFamily(
            layers=Key("num_nextn_predict_layers", 1),
            prefix="model.mtp_layers.{}.",
            from_zero=True,
            fc="input_proj",
            embed_norm="token_layernorm",
            hidden_norm="hidden_layernorm",
            norm="final_layernorm",
            hidden_first=True,
        ),
    ),
    "GlmForCausalLM": Family(
        model_type="glm",
        models="GLM-4-9B",
        qkv_bias=_ATTENTION_BIAS,
        partial_rope=True,
        interleaved_rope=True,
        dense_names=_GATE_UP,
    ),
    "Glm4ForCausalLM": Family(
        model_type="glm4",
        models="GLM-4-0414",
        qkv_bias=_ATTENTION_BIAS,
        partial_rope=True,
        interleaved_rope=True,
        norms="around",
        layer_names=LayerNames(
            "input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"
        ),
        dense_names=_GATE_UP,
    ),
    "Gemma2ForCausalLM": Family(
        model_type="gemma2",
        models="Gemma 2",
        activation=Key("hidden_activation"),
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        windows=windows_by_type,
        attention_scale=Power("query_pre_attn_scalar", -0.5),
        attention_softcap=Key("attn_logit_softcapping"),
        norms="around",
        unit_offset=True,
        embed_scale=Power("hidden_size", 0.5),
        embed_scale_rounded=True,
        logit_softcap=Key("final_logit_softcapping"),
        bidirectional=Key("use_bidirectional_attention"),
        layer_names=_NORMS_AROUND,
    ),
    "Gemma3ForCausalLM": Family(
        model_type="gemma3_text",
        models="Gemma 3, text",
        activation=Key("hidden_activation"),
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
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
        layer_names=_NORMS_AROUND,
    ),
    "Phi3ForCausalLM": Family(
        model_type="phi3",
        models="Phi-3, Phi-4, Phi-4-mini",
        windows=same_window,
        attention_names=AttentionNames(qkv=("self_attn.qkv_proj",)),
        partial_rope=True,
        dense_names=_GATE_UP,
    ),
    "SmolLM3ForCausalLM": Family(
        model_type="smollm3",
        models="SmolLM3",
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        mlp_bias=Key("mlp_bias"),
        windows=windows_by_type,
        ropes=ropes_where_listed,
    ),
    "SeedOssForCausalLM": Family(
        model_type="seed_oss",
        models="Seed-OSS",
        qkv_bias=_ATTENTION_BIAS,
        o_bias=Key("attention_out_bias"),
        mlp_bias=Key("mlp_bias"),
    ),
    "GraniteForCausalLM": Family(
        model_type="granite",
        models="Granite 3",
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        mlp_bias=Key("mlp_bias"),
        attention_scale=Key("attention_multiplier"),
        residual_scale=Key("residual_multiplier"),
        embed_scale=Key("embedding_multiplier"),
        logit_divisor=Key("logits_scaling"),
    ),
    "Olmo2ForCausalLM": Family(
        model_type="olmo2",
        models="OLMo 2",
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        qk_norm="full",
        norms="after",
        layer_names=_NORMS_AFTER,
    ),
    "Olmo3ForCausalLM": Family(
        model_type="olmo3",
        models="OLMo 3",
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        qk_norm="full",
        windows=windows_by_type,
        ropes=ropes_by_type,
        one_rope_map=True,  # in configs as the first releases of transformers 5 read them
        norms="after",
        layer_names=_NORMS_AFTER,
    ),
    "Qwen3_5ForCausalLM": _qwen3_5("qwen3_5_text", "Qwen3.5, Qwen3.6"),
    "Qwen3_5MoeForCausalLM": _qwen3_5("qwen3_5_moe_text", "Qwen3.5-MoE, Qwen3.6-MoE", _QWEN3_5_MOE),
    "Qwen3NextForCausalLM": Family(
        model_type="qwen3_next",
        models="Qwen3-Next",
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
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
    "OlmoHybridForCausalLM": Family(
        model_type="olmo_hybrid",
        models="OLMo-Hybrid",
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        qk_norm="full",
        optional_rope=True,
        norms="after",
        # transformers saves the first of them under a name of the other layers.
        layer_names=_NORMS_AFTER._replace(also_mixer_norm="feedforward_layer_norm"),
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
    "Glm4MoeForCausalLM": Family(
        model_type="glm4_moe",
        models="GLM-4.5, 4.6, 4.7",
        qkv_bias=_ATTENTION_BIAS,
        qk_norm=If("use_qk_norm", "head", "none"),
        partial_rope=True,
        mtp=MTPFamily(layers=Key("num_nextn_predict_layers", 1)),
        moe=_deepseek_moe(sparse_from("first_k_dense_replace")),
    ),
    "Glm4MoeLiteForCausalLM": Family(
        model_type="glm4_moe_lite",
        models="GLM-4.7-Flash",
        interleaved_rope=Key("rope_interleave"),
        latent=LatentFamily(),
        mtp=MTPFamily(),
        moe=_deepseek_moe(sparse_by_type),
    ),
    "DeepseekV3ForCausalLM": Family(
        model_type="deepseek_v3",
        other_types=("kimi_k2",),
        models="DeepSeek-V3, DeepSeek-R1, Moonlight, Kimi-K2",
        interleaved_rope=Key("rope_interleave"),
        latent=LatentFamily(),
        mtp=MTPFamily(),
        moe=_deepseek_moe(sparse_from("first_k_dense_replace")),
    ),
    "DeepseekV2ForCausalLM": Family(
        model_type="deepseek_v2",
        models="DeepSeek-V2, DeepSeek-V2-Lite",
        interleaved_rope=True,
        latent=LatentFamily(),
        unsupported=("norm_topk_prob", "mlp_bias"),
        moe=MoEFamily(
            experts=Key("n_routed_experts"),
            intermediate=Key("moe_intermediate_size"),
            renormalize=False,
            router_float32=True,
            groups=Key("n_group"),
            top_groups=Key("topk_group"),
            group_best=1,
            grouped=Key("topk_method"),
            scale=Key("routed_scaling_factor"),
            sparse=sparse_from("first_k_dense_replace"),
            shared_experts=Key("n_shared_experts"),
            names=MoENames(shared=_SHARED_EXPERTS),
        ),
    ),
    "MiniMaxM2ForCausalLM": Family(
        model_type="minimax_m2",
        models="MiniMax-M2",
        qk_norm="full",
        partial_rope=True,
        rope_width=Key("rotary_dim"),  # some releases of transformers 5 make a factor of it
        moe=MoEFamily(
            experts=Key("num_local_experts"),
            intermediate=Key("intermediate_size"),
            renormalize=True,
            scoring="sigmoid",
            router_bias=True,
            names=MoENames(
                router=("block_sparse_moe.gate", "mlp.gate"),
                router_bias=("block_sparse_moe.e_score_correction_bias", "mlp.e_score_correction_bias"),
                gate="block_sparse_moe.experts.{}.w1",
                up="block_sparse_moe.experts.{}.w3",
                down="block_sparse_moe.experts.{}.w2",
            ),
        ),
    ),
    "AfmoeForCausalLM": Family(
        model_type="afmoe",
        models="AFMoE (Trinity)",
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        qk_norm="head",
        windows=windows_by_type,
        ropes=ropes_in_windows,
        attention_gate=True,
        norms="around",
        embed_scale=If("mup_enabled", Power("hidden_size", 0.5), 1.0),
        layer_names=LayerNames(
            "input_layernorm", "pre_mlp_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
        ),
        moe=MoEFamily(
            experts=Key("num_experts"),
            intermediate=Key("moe_intermediate_size"),
            renormalize=True,
            scoring="sigmoid",
            router_bias=True,
            scale=Key("route_scale"),
            sparse=sparse_from("num_dense_layers"),
            shared_experts=Key("num_shared_experts"),
            names=MoENames(router=("mlp.router.gate",), router_bias=("mlp.expert_bias",), shared=_SHARED_EXPERTS),
        ),
    ),
    "GptOssForCausalLM": Family(
        model_type="gpt_oss",
        models="gpt-oss",
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        windows=windows_by_type,
        attention_sinks=True,
        mxfp4=True,
        moe=MoEFamily(
            experts=Key("num_local_experts"),
            intermediate=Key("intermediate_size"),
            renormalize=True,
            logit_bias=True,
            clamp_alpha=Key("swiglu_alpha", 1.702),  # transformers 5.17 has both as constants
            clamp_limit=Key("swiglu_limit", 7.0),
            names=MoENames(router=("mlp.router",)),
        ),
    ),
    "OlmoeForCausalLM": Family(
        model_type="olmoe",
        models="OLMoE",
        qkv_bias=_ATTENTION_BIAS,
        o_bias=_ATTENTION_BIAS,
        qk_norm="full",
        clip_qkv=Key("clip_qkv"),
        moe=MoEFamily(
            experts=Key("num_experts"),
            intermediate=Key("intermediate_size"),
            renormalize=Key("norm_topk_prob"),
        ),
    ),
}


#: By the name that stands in the `architectures` of a config.json.
MULTIMODAL: dict[str, Multimodal] = {
    "Gemma3ForConditionalGeneration": Multimodal(
        model_type="gemma3",
        models="Gemma 3 (its language model)",
        language_models=(replace(FAMILIES["Gemma3ForCausalLM"], logit_softcap=None),),
        beginnings=_INSIDE_LLAVA,
    ),
    "Mistral3ForConditionalGeneration": Multimodal(
        model_type="mistral3",
        models="Mistral Small 3, Magistral, Ministral 3 (their language model)",
        language_models=("MistralForCausalLM", "Ministral3ForCausalLM"),
        beginnings=_INSIDE_LLAVA,
    ),
    "Qwen3_5ForConditionalGeneration": Multimodal(
        model_type="qwen3_5",
        models="Qwen3.5, Qwen3.6 with a vision tower",
        language_models=("Qwen3_5ForCausalLM",),
        beginnings=_INSIDE,
        tower=TowerFamily(model_type="qwen3_5_vision", module="Qwen3_5VisionModel", single_frames=True),
    ),
    "Qwen3_5MoeForConditionalGeneration": Multimodal(
        model_type="qwen3_5_moe",
        models="Qwen3.5-MoE, Qwen3.6-MoE with a vision tower",
        language_models=("Qwen3_5MoeForCausalLM",),
        beginnings=_INSIDE,
        tower=TowerFamily(model_type="qwen3_5_moe_vision", module="Qwen3_5MoeVisionModel", single_frames=True),
    ),
    "Qwen3VLForConditionalGeneration": Multimodal(
        model_type="qwen3_vl",
        models="Qwen3-VL",
        language_models=(
            Family(
                model_type="qwen3_vl_text",
                qkv_bias=_ATTENTION_BIAS,
                o_bias=_ATTENTION_BIAS,
                qk_norm="head",
                rope_turns=(24, 20, 20),
            ),
        ),
        beginnings=_INSIDE,
        tower=TowerFamily(model_type="qwen3_vl_vision", module="Qwen3VLVisionModel", single_frames=True),
    ),
    "Qwen3VLMoeForConditionalGeneration": Multimodal(
        model_type="qwen3_vl_moe",
        models="Qwen3-VL-MoE",
        language_models=(
            Family(
                model_type="qwen3_vl_moe_text",
                qkv_bias=_ATTENTION_BIAS,
                o_bias=_ATTENTION_BIAS,
                qk_norm="head",
                rope_turns=(24, 20, 20),
                turned_experts=True,
                moe=MoEFamily(
                    experts=Key("num_experts"),
                    intermediate=Key("moe_intermediate_size"),
                    renormalize=True,
                    sparse=sparse_by_step,
                ),
            ),
        ),
        beginnings=_INSIDE,
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
    """Raise ValueError if the `model_type` of a config.json is not that of its architecture."""
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
    """The `model_type` of a language model whose config may be part of the whole one; None if it may not be."""
    whole = MULTIMODAL[architecture]
    (language_model, *_) = whole.language_models
    return language_model.model_type if whole.flat and isinstance(language_model, Family) else None


def family_of(architecture: str, model_type: Any) -> Family:
    """The declaration of a supported architecture; `model_type` is that of its language model's config.

    Raises ValueError if the architecture has no such language model.
    """
    if architecture in FAMILIES:
        return FAMILIES[architecture]
    whole = MULTIMODAL[architecture]
    declared_families = [FAMILIES[entry] if isinstance(entry, str) else entry for entry in whole.language_models]
    families = {family.model_type: family for family in declared_families}
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
    """The known form of a config: keys that this family reads, and keys of which transformers' forward is independent.

    transformers' name of a key counts, where it knows one by several.
    """
    own = _rules(family).keys()
    common = _COMMON.keys() - {"layer_types", "sliding_window", "use_sliding_window"}
    windows = {"use_sliding_window"} if "sliding_window" in own else set()
    # Families that read another key for their activation do not read this one. Quantization is read for all.
    others = {"hidden_act", "quantization_config"}
    return frozenset(own | common | windows | others | _MADE_INTO_OTHERS | WITHOUT_EFFECT)


def size_rules() -> dict[str, Rule]:
    """Rules for the keys of any config.json that give sizes, where they are not null."""
    return {name: _COMMON[name] for name in _SIZES} | dict.fromkeys(_EXPERT_COUNTS, integer(0, 1 << 14))


def _rules(declaration: Family | MoEFamily | DeltaNetFamily | LatentFamily | MTPFamily) -> dict[str, Rule]:
    rules: dict[str, Rule] = dict.fromkeys(getattr(declaration, "unsupported", ()), FLAG)
    for entry in fields(declaration):
        match getattr(declaration, entry.name):
            case Key(name) | Power(name, _):
                rules[name] = entry.metadata["rule"]
            case If(name, Power(powered, _)):
                rules |= {name: FLAG, powered: entry.metadata["rule"]}
            case If(name):
                rules[name] = FLAG
            case ByLayer() as values:
                rules |= values.rules
            case MoEFamily() | DeltaNetFamily() | LatentFamily() | MTPFamily() as part:
                rules |= _rules(part)
    return rules


# --- from a config to a spec -----------------------------------------------------------------------------------------


def tower_family(architecture: str) -> TowerFamily | None:
    """The declaration of the vision tower of a supported architecture; None if it has none that is served."""
    whole = MULTIMODAL.get(architecture)
    return None if whole is None else whole.tower


def spec_from_config(config: Any, architecture: str, tower: TowerSpec | None = None) -> ModelSpec:
    """The spec of a transformers config; with a `tower` it is served with images.

    Raises:
        ValueError: the architecture is not supported, or the config asks for something that is not; the message says
            for what.
    """
    check_supported(architecture)
    family = family_of(architecture, config.model_type)
    if family.bidirectional is not None and _value(config, family.bidirectional):
        raise ValueError(f"{family.bidirectional.name} is set, and a model that generates must not see later tokens")
    for name in family.unsupported:
        if getattr(config, name, False):
            raise ValueError(f"{name} is not supported for this architecture: it must be false")
    quantized = getattr(config, "quantization_config", None)
    if (
        quantized is not None
        and not is_block_fp8(config)
        and not (family.mxfp4 and _quantization(quantized) == "mxfp4")
    ):
        raise ValueError(
            "this quantization_config is not supported; use a checkpoint with float32, bfloat16 or float16 weights, or "
            "fp8 ones in blocks (quant_method fp8, fmt e4m3, weight_block_size [128, 128])"
        )
    layers = _layers(config, family)
    return ModelSpec(
        architecture=architecture,
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        eps=config.rms_norm_eps,
        max_positions=_max_positions(config),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        layers=layers,
        names=family.names,
        embed_scale=_number(config, family.embed_scale),
        embed_scale_rounded=family.embed_scale_rounded,
        logit_divisor=_number(config, family.logit_divisor),
        logit_softcap=_value(config, family.logit_softcap),
        unit_offset=family.unit_offset,
        unused=_unused(config, family, tower),
        turned_files=_turned_files(family),
        tower=tower,
        mtp=_mtp(config, family, layers),
    )


def is_block_fp8(config: Any) -> bool:
    """Whether a checkpoint says that its weights are e4m3 codes with a scale for each block of 128 x 128."""
    quantized = getattr(config, "quantization_config", None)
    if _quantization(quantized) != "fp8" or not isinstance(quantized, dict):
        return False
    return quantized.get("weight_block_size") == [128, 128] and quantized.get("fmt", "e4m3") == "e4m3"


def _quantization(config: Any) -> Any:
    return config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)


def _turned_files(family: Family) -> tuple[str, ...]:
    if family.moe is None or not family.turned_experts:
        return ()
    return family.moe.names.stacked_gate_up, family.moe.names.stacked_down


def _unused(config: Any, family: Family, tower: TowerSpec | None) -> tuple[str, ...]:
    used = () if tower is None else tower.family.beginnings
    unused = tuple(beginning for beginning in family.unused if beginning not in used)
    return unused + tuple(prefix for prefix in _mtp_prefixes(config, family) if not prefix.startswith(unused))


def _mtp_prefixes(config: Any, family: Family) -> tuple[str, ...]:
    """The prefixes of the layers for multi-token prediction."""
    mtp = family.mtp
    if mtp is None:
        return ()
    first = 0 if mtp.from_zero else config.num_hidden_layers
    return tuple(mtp.prefix.format(first + index) for index in range(_value(config, mtp.layers) or 0))


def _mtp(config: Any, family: Family, layers: tuple[LayerSpec, ...]) -> DraftSpec | None:
    """The first layer for the prediction of further tokens.

    It is like the last layer of the model, with the attention of the last layer that has any.
    """
    mtp, prefixes, last = family.mtp, _mtp_prefixes(config, family), layers[-1]
    mixers = [layer.mixer for layer in layers if isinstance(layer.mixer, KVMixerSpec)]
    if mtp is None or not prefixes or not mixers:
        return None
    assert last.norms == "before", "as all of them"
    return DraftSpec(
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        eps=config.rms_norm_eps,
        taps=(len(layers),),
        mixer=mixers[-1],
        feed_forward=last.feed_forward,
        names=DraftNames(
            prefix=prefixes[0],
            layer=mtp.layer,
            fc=mtp.fc,
            embed_norm=mtp.embed_norm,
            hidden_norm=mtp.hidden_norm,
            feed_forward_norm=mtp.layer + last.names.feed_forward_norm,
            norm=mtp.norm,
            mixer_norm=mtp.layer + last.names.mixer_norm,
            prefix_beginnings=family.names.beginnings,
        ),
        joined=True,
        hidden_first=mtp.hidden_first,
        unit_offset=family.unit_offset,
    )


def _layers(config: Any, family: Family) -> tuple[LayerSpec, ...]:
    count = config.num_hidden_layers
    sparse = (False,) * count if family.moe is None else family.moe.sparse(config)
    mixers = list(zip(family.windows(config), family.ropes(config), strict=True))
    ropes = {kind: _rope(config, kind, family) for _, kind in mixers}
    attention: dict[Any, KVMixerSpec] = {}
    for window, kind in set(mixers):
        if family.latent is None:
            attention[window, kind] = _attention(config, family, ropes[kind], window)
        else:
            attention[window, kind] = _latent(config, family.latent, ropes[kind])
    linear, delta_net = (False,) * count, None
    if family.linear is not None and any(linear := family.linear.linear(config)):
        if _activation(config, family) != "silu":
            raise ValueError(f"{family.activation.name} of a model with linear attention must be silu")
        delta_net = _delta_net(config, family.linear)
    if all(linear):
        raise ValueError("layer_types names no layer with full attention; at least one is needed")
    feed_forward: dict[bool, FeedForwardSpec] = {}
    if not all(sparse):
        feed_forward[False] = _dense(config, family)
    if family.moe is not None and any(sparse):
        if _activation(config, family) != "silu":
            raise ValueError(f"{family.activation.name} of experts must be silu")
        feed_forward[True] = _moe(config, family.moe)
    scale = _number(config, family.residual_scale)
    layers = []
    for mixer, is_linear, is_sparse in zip(mixers, linear, sparse, strict=True):
        block: MixerSpec = attention[mixer]
        names, norms = family.layer_names, family.norms
        if is_linear and family.linear is not None and delta_net is not None:
            block, names, norms = delta_net, family.linear.layer_names, family.linear.norms
        layers.append(LayerSpec(block, feed_forward[is_sparse], names, norms, scale))
    return tuple(layers)


def _delta_net(config: Any, family: DeltaNetFamily) -> DeltaNetSpec:
    spec = DeltaNetSpec(
        hidden=config.hidden_size,
        key_heads=_value(config, family.key_heads),
        value_heads=_value(config, family.value_heads),
        key_dim=_value(config, family.key_dim),
        value_dim=_value(config, family.value_dim),
        conv=_value(config, family.conv),
        eps=_value(config, family.eps),
        interleaved=family.interleaved,
        beta_scale=2.0 if _value(config, family.reflects) else 1.0,
        names=family.names,
    )
    if spec.value_heads % spec.key_heads:
        raise ValueError(
            f"{family.value_heads.name} ({spec.value_heads}) is not a multiple of {family.key_heads.name} "
            f"({spec.key_heads})"
        )
    return spec


def _attention(config: Any, family: Family, rope: RopeSpec, window: int | None) -> AttentionSpec:
    heads = config.num_attention_heads
    spec = AttentionSpec(
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=config.num_key_value_heads or heads,
        head_dim=_head_dim(config),
        rope=rope,
        window=window,
        qkv_bias=_value(config, family.qkv_bias),
        o_bias=_value(config, family.o_bias),
        qk_norm=_value(config, family.qk_norm),
        clip_qkv=_value(config, family.clip_qkv),
        eps=config.rms_norm_eps,
        names=family.attention_names,
        scale=_value(config, family.attention_scale),
        softcap=_value(config, family.attention_softcap),
        unit_offset=family.unit_offset,
        growth=_growth(config) if family.grown_queries else None,
        gate=family.attention_gate,
        query_gate=family.query_gate,
        sinks=family.attention_sinks,
    )
    if spec.heads % spec.kv_heads:
        raise ValueError(f"num_attention_heads ({spec.heads}) is not a multiple of the KV heads ({spec.kv_heads})")
    if spec.head_dim % 2 or not spec.head_dim:
        raise ValueError(f"head_dim ({spec.head_dim}) must be even and at least 2, for rotary embeddings")
    _check_width(rope, spec.head_dim)
    if window is not None and window < 1:
        raise ValueError("sliding_window must be at least 1")
    return spec


def _latent(config: Any, family: LatentFamily, rope: RopeSpec) -> LatentSpec:
    for key in (family.kv_rank, family.nope_dim, family.rope_dim, family.value_dim):
        if _value(config, key) is None:
            raise ValueError(f"config.json gives no {key.name}")
    nope_dim, rope_dim = _value(config, family.nope_dim), _value(config, family.rope_dim)
    spec = LatentSpec(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        q_rank=_value(config, family.q_rank),
        kv_rank=_value(config, family.kv_rank),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=_value(config, family.value_dim),
        rope=rope,
        scale=(nope_dim + rope_dim) ** -0.5 * _yarn_score_factor(config),
        bias=bool(_value(config, family.bias)),
        eps=family.eps,
        names=family.names,
    )
    if rope_dim % 2:
        raise ValueError(f"{family.rope_dim.name} ({rope_dim}) must be even, for rotary embeddings")
    for name, dim in (("head_dim", rope_dim), ("qk_head_dim", spec.head_dim)):
        if getattr(config, name, dim) not in (None, dim):  # transformers' class sets it, unless config.json has it
            raise ValueError(f"{name} ({getattr(config, name)}) must be {dim} in a model with these heads, or absent")
    _check_width(rope, rope_dim)
    if config.num_key_value_heads not in (None, spec.heads):
        raise ValueError(
            f"num_key_value_heads ({config.num_key_value_heads}) must be num_attention_heads ({spec.heads}), or absent"
        )
    if spec.bias and spec.q_rank is None:
        raise ValueError(f"{family.bias.name} needs {family.q_rank.name}: the product of queries alone has no bias")
    return spec


def _dense(config: Any, family: Family) -> DenseSpec:
    bias = _value(config, family.mlp_bias)
    activation = _activation(config, family)
    return DenseSpec(config.hidden_size, config.intermediate_size, bias, family.dense_names, activation)


def _activation(config: Any, family: Family) -> Activation:
    name = getattr(config, family.activation.name, "silu")
    if name not in _ACTIVATIONS:
        supported = ", ".join(_ACTIVATIONS)
        raise ValueError(f"{family.activation.name} {name!r:.80} is not supported; supported: {supported}")
    return _ACTIVATIONS[name]


def _moe(config: Any, family: MoEFamily) -> MoESpec:
    grouped = _is_grouped(config, family)
    spec = MoESpec(
        hidden=config.hidden_size,
        experts=_value(config, family.experts),
        intermediate=_value(config, family.intermediate),
        router=RouterSpec(
            scoring=family.scoring,
            top_k=_value(config, family.top_k) or 0,
            renormalize=_value(config, family.renormalize),
            bias=family.router_bias,
            float32=family.router_float32,
            groups=_value(config, family.groups) if grouped else 1,
            top_groups=_value(config, family.top_groups) if grouped else 1,
            group_best=family.group_best,
            scale=_number(config, family.scale),
            logit_bias=family.logit_bias,
        ),
        names=family.names,
        shared=_shared(config, family),
        shared_gate=family.shared_gate,
        clamped=_clamped(config, family),
    )
    layers = config.num_hidden_layers
    if layers * spec.experts > _MAX_EXPERTS:
        most = _MAX_EXPERTS // layers
        raise ValueError(f"{family.experts.name} is {spec.experts}; with {layers} layers it must be at most {most}")
    if not 1 <= spec.router.top_k <= spec.experts:
        raise ValueError(f"{family.top_k.name} ({spec.router.top_k}) must be between 1 and {spec.experts}")
    _check_groups(spec)
    return spec


def _is_grouped(config: Any, family: MoEFamily) -> bool:
    """Whether a token's experts come from few groups."""
    if family.grouped is not None:
        method = _value(config, family.grouped)
        if method not in ("greedy", "group_limited_greedy"):
            raise ValueError(
                f"{family.grouped.name} {method!r:.80} is not supported; supported: greedy, group_limited_greedy"
            )
        if method == "greedy":
            return False
    for key in (family.groups, family.top_groups):
        if isinstance(key, Key) and _value(config, key) is None:
            raise ValueError(f"config.json gives no {key.name}")
    return True


def _clamped(config: Any, family: MoEFamily) -> ClampedGLUSpec | None:
    if family.clamp_alpha is None:
        return None
    return ClampedGLUSpec(_value(config, family.clamp_alpha), _value(config, family.clamp_limit))


def _check_groups(spec: MoESpec) -> None:
    router = spec.router
    if router.groups == 1:
        return
    size = spec.experts // router.groups
    if size * router.groups != spec.experts or size < 2:
        raise ValueError(f"{spec.experts} experts do not make {router.groups} groups of two or more")
    if not router.top_k / size <= router.top_groups <= router.groups:
        raise ValueError(
            f"topk_group ({router.top_groups}) must be at most {router.groups} and have {router.top_k} experts"
        )


def _shared(config: Any, family: MoEFamily) -> DenseSpec | None:
    width = _value(config, family.shared_intermediate)
    if family.shared_experts is not None:
        width = (_value(config, family.shared_experts) or 0) * _value(config, family.intermediate)
    return DenseSpec(config.hidden_size, width, False, family.names.shared) if width else None


def _value(config: Any, declared: Any) -> Any:
    if isinstance(declared, If):
        return _value(config, declared.value if getattr(config, declared.name) else declared.otherwise)
    if isinstance(declared, Power):
        return getattr(config, declared.name) ** declared.exponent
    if not isinstance(declared, Key):
        return declared
    return getattr(config, declared.name, *([] if declared.default is None else [declared.default]))


def _number(config: Any, declared: Any) -> float:
    """A value that no model of the family lacks. Raises ValueError where the key is null."""
    value = _value(config, declared)
    if value is None:
        raise ValueError(f"config.json gives no {declared.name}")
    return float(value)


# --- rotary embedding ------------------------------------------------------------------------------------------------


def _rope(config: Any, part: str | None, family: Family) -> RopeSpec:
    if part is None or (family.optional_rope and _rope_parameters(config).get("rope_theta") is None):
        return RopeSpec("none", theta=1.0)
    params = _rope_parameters(config, part, family.one_rope_map)
    nested = part if part in (config.rope_parameters or {}) else ""
    share = params.get("partial_rotary_factor", _rope_share(config, family))
    if share != 1.0 and not family.partial_rope:
        raise ValueError("partial_rotary_factor other than 1 is not supported for this architecture")
    if not 0 < share <= 1:
        raise ValueError(f"partial_rotary_factor ({share}) must be above 0 and at most 1")
    interleaved = bool(_value(config, family.interleaved_rope))
    rope = replace(_scaled_rope(config, nested, params), share=share, interleaved=interleaved)
    return replace(rope, axes=_rope_axes(config, family, params, rope))


def _rope_share(config: Any, family: Family) -> float:
    """The share of a head that turns, where `rope_parameters` does not say it."""
    width = None if family.rope_width is None else getattr(config, family.rope_width.name, None)
    return 1.0 if width is None else width / _head_dim(config)


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _check_width(rope: RopeSpec, head_dim: int) -> None:
    """Raise ValueError unless an even number of dimensions turns, with a frequency for each two of them."""
    width = rope.width(head_dim)
    if not width or width % 2:
        raise ValueError(
            f"partial_rotary_factor ({rope.share}) must leave an even number of {head_dim} dimensions, at least 2"
        )
    if rope.frequencies and len(rope.frequencies) != width // 2:
        raise ValueError(
            f"rope scaling {rope.kind!r} has {len(rope.frequencies)} frequencies, and {width // 2} are needed: check "
            "head_dim, partial_rotary_factor, short_factor and long_factor"
        )


def _rope_axes(config: Any, family: Family, params: dict[str, Any], rope: RopeSpec) -> tuple[int, ...]:
    """The axis of each frequency; empty for families whose tokens have one position."""
    default = family.rope_turns or family.rope_blocks
    if default is None:
        return ()
    count, given = rope.width(_head_dim(config)) // 2, params.get("mrope_section") or default
    if len(given) != 3 or any(type(part) is not int or part < 0 for part in given):
        raise ValueError(f"mrope_section ({given!r:.80}) must be three integers")
    if family.rope_blocks is not None:
        if sum(given) != count:
            raise ValueError(f"mrope_section ({given!r:.80}) must have the sum {count}, one for each frequency")
        return tuple(axis for axis, part in enumerate(given) for _ in range(part))
    axes = [0] * count
    for axis in (1, 2):
        for index in range(axis, min(3 * given[axis], count), 3):
            axes[index] = axis
    return tuple(axes)


def _rope_parameters(config: Any, part: str = "", one_map: bool = False) -> dict[str, Any]:
    # transformers folds the older `rope_theta` and `rope_scaling` keys into this one when it reads a config.
    params = dict(config.rope_parameters or {})
    if not part:
        return params
    if one_map and part not in params:
        return params if part == "full_attention" else {"rope_theta": params.get("rope_theta")}
    return dict(params.get(part) or {})


def _growth(config: Any) -> QueryGrowth | None:
    """The factor of queries that `rope_parameters` describes; transformers reads both keys without a default."""
    params = _rope_parameters(config)
    beta, positions = params.get("llama_4_scaling_beta"), params.get("original_max_position_embeddings")
    if beta is None or positions is None:
        raise ValueError("rope_parameters must have llama_4_scaling_beta and original_max_position_embeddings")
    if type(positions) is not int:
        raise ValueError(f"original_max_position_embeddings ({positions}) must be an integer")
    return QueryGrowth(beta, positions)


def _scaled_rope(config: Any, part: str, params: dict[str, Any]) -> RopeSpec:
    """The embedding that one map of `rope_parameters` describes; scaled frequencies are those of transformers."""
    kind, theta = params.get("rope_type", "default"), params.get("rope_theta")
    if theta is None:
        raise ValueError("config.json gives no rope_theta")
    if theta <= 1:
        raise ValueError(f"rope_theta ({theta}) must be more than 1")
    if kind not in ("default", *_SCALED_ROPES):
        supported = ", ".join(("default", *_SCALED_ROPES))
        raise ValueError(f"rope_type {kind!r:.80} is not supported; supported: {supported}")
    if kind == "default":
        return RopeSpec(kind, theta)
    try:
        inv_freq_F, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), layer_type=part or None)
    except KeyError as error:
        raise ValueError(f"config.json: rope scaling {kind!r} needs {error.args[0]!r}") from error
    # The function makes logarithms and tensors of values that may fit no scaling.
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"config.json: rope scaling {kind!r} cannot be computed: {error!s:.200}") from error
    if not bool(torch.isfinite(inv_freq_F).all()):
        raise ValueError(f"config.json: rope scaling {kind!r} gives frequencies that are no numbers: check its factors")
    return RopeSpec(kind, theta, frequencies=tuple(inv_freq_F.tolist()), amplitude=float(factor))


def _yarn_score_factor(config: Any) -> float:
    """The factor of latent attention's scores where a rotary embedding is scaled and has `mscale_all_dim`."""
    params = _rope_parameters(config)
    kind, mscale_all, factor = params.get("rope_type", "default"), params.get("mscale_all_dim"), params.get("factor")
    if kind == "default" or not mscale_all:
        return 1.0
    if factor is None:
        raise ValueError(f"config.json: rope scaling {kind!r} with 'mscale_all_dim' needs 'factor'")
    return (0.1 * mscale_all * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0


def _max_positions(config: Any) -> int:
    """Longest context that the model was made for; checkpoints extended by YaRN may still state the original one."""
    if border := first_border(config):
        return border
    extended = [
        int(params["factor"] * params["original_max_position_embeddings"])
        for params in rope_maps(config, "yarn")
        if params.get("factor") and params.get("original_max_position_embeddings")
    ]
    return max(config.max_position_embeddings, *extended, 0)
