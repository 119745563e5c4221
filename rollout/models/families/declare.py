"""Declarations of families: what differs from Llama.

A value is a constant, or a `Key`: the value of that key of config.json. Where a value depends on the layer, the
declaration names a function from the config to a tuple of values, one a layer.

A family reads no key without a rule: a `Key` has the rule of its field, a function reads the keys that it lists, and
`registry` has the rules of all families.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from types import SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeVar

from rollout.models.config_rules import BELOW_0, FLAG, LIMITS, MOST_LAYERS, NUMBER, TEXT, Rule, integer, layer_list
from rollout.models.spec import (
    ApartNames,
    AttentionNames,
    DeltaNetNames,
    DenseNames,
    KimiDeltaNames,
    KVSource,
    LayerNames,
    Limits,
    Mamba2Names,
    ModelNames,
    MoENames,
    NormPlace,
    QKNorm,
    QueryGrowth,
    Scoring,
    WindowsSpec,
)
from rollout.models.vision_spec import TowerFamily

WIDTH = integer(1, 1 << 22)
#: "auto" is the width of all heads, divided by their number, as in transformers.
HEAD_DIM = Rule("an integer from 1 to 8192, or 'auto'", lambda value: value == "auto" or integer(1, 8192).allows(value))
STEPS = Rule(
    "two numbers, the first at least 0 and at most the second",
    lambda value: (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(type(step) in (int, float) for step in value)
        and 0 <= value[0] <= value[1]
    ),
)
_ENTRIES = ("compressed_sparse_attention", "heavily_compressed_attention")
RATES = Rule(
    f"a map with an integer above 0 for each of {' and '.join(_ENTRIES)}",
    lambda value: isinstance(value, dict) and {*value} == {*_ENTRIES} and all(map(WIDTH.allows, value.values())),
)
WINDOW = integer(0, 1 << 31)  # transformers writes 0 where windows are not used


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
        given = {name: getattr(config, name, None) for name in self.rules}
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


@by_layer(sliding_window=WINDOW)
def same_window(config: Any) -> tuple[int | None, ...]:
    """One window for all layers, or none."""
    return (config.sliding_window,) * config.num_hidden_layers


@by_layer(sliding_window=WINDOW, use_sliding_window=FLAG)
def same_window_if_used(config: Any) -> tuple[int | None, ...]:
    """One window for all layers, if a flag says so."""
    return (config.sliding_window if config.use_sliding_window else None,) * config.num_hidden_layers


@by_layer(layer_types=layer_list(str), sliding_window=WINDOW)
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


@by_layer(layer_types=layer_list(str), attention_chunk_size=integer(1, 1 << 31))
def chunks_by_type(config: Any) -> tuple[int | None, ...]:
    """The config names the layers in which a token sees only its own chunk of positions."""
    for kind in config.layer_types:
        if kind not in ("full_attention", "chunked_attention"):
            raise ValueError(f"layer type {kind!r:.80} is not supported; supported: full_attention, chunked_attention")
    if "chunked_attention" in config.layer_types and config.attention_chunk_size is None:
        raise ValueError("layer_types names chunked_attention, and there is no attention_chunk_size: add it")
    return tuple(config.attention_chunk_size if kind == "chunked_attention" else None for kind in config.layer_types)


@by_layer()
def own_kv(config: Any) -> tuple[KVSource, ...]:
    """All layers make keys and values of their own."""
    return ("own",) * config.num_hidden_layers


@by_layer()
def same_widths(config: Any) -> tuple[int, ...]:
    """All dense feed-forward blocks have the width that the config says."""
    return (1,) * config.num_hidden_layers


@by_layer()
def no_growths(config: Any) -> tuple[QueryGrowth | None, ...]:
    """No query grows with its position."""
    return (None,) * config.num_hidden_layers


@by_layer()
def no_ropes(config: Any) -> tuple[None, ...]:
    """No layer has a rotary embedding."""
    return (None,) * config.num_hidden_layers


@by_layer()
def same_rope(config: Any) -> tuple[str, ...]:
    """All layers take the whole of `rope_parameters`."""
    return ("",) * config.num_hidden_layers


@by_layer(layer_types=layer_list(str))
def ropes_by_type(config: Any) -> tuple[str, ...]:
    """`rope_parameters` has a map for each kind of attention."""
    return tuple(config.layer_types)


@by_layer(position_embedding_type=TEXT)
def ropes_if_named(config: Any) -> tuple[str | None, ...]:
    """A key names the kind of positions: rotary embeddings in all layers, or none."""
    kind = config.position_embedding_type
    if kind not in (None, "rope", "nope"):
        raise ValueError(f"position_embedding_type {kind!r:.80} is not supported; supported: rope, nope")
    return ("" if kind == "rope" else None,) * config.num_hidden_layers


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
    """Layers with a window have a rotary embedding, other layers none."""
    return tuple("" if kind == "sliding_attention" else None for kind in config.layer_types)


@by_layer(layer_types=layer_list(str), sliding_window=WINDOW)
def ropes_in_windows_if_any(config: Any) -> tuple[str | None, ...]:
    """If the model has windows, see `ropes_in_windows`; otherwise all layers have a rotary embedding."""
    kinds = config.layer_types
    return tuple("" if config.sliding_window is None or kind == "sliding_attention" else None for kind in kinds)


@by_layer()
def no_limits(config: Any) -> tuple[Limits | None, ...]:
    """No layer bounds the activations of its experts."""
    return (None,) * config.num_hidden_layers


@by_layer(expert_swiglu_limit_list=LIMITS, share_expert_swiglu_limit_list=LIMITS)
def limits_by_layer(config: Any) -> tuple[Limits | None, ...]:
    """Lists of limits of experts, and of the shared one; layers beyond a list have none."""
    lists = [given or [] for given in (config.expert_swiglu_limit_list, config.share_expert_swiglu_limit_list)]
    if not any(map(any, lists)):
        return no_limits(config)
    layers = range(config.num_hidden_layers)
    return tuple(
        Limits(*(float(given[layer] or math.inf) if layer < len(given) else math.inf for given in lists))
        for layer in layers
    )


@by_layer(swiglu_alpha=NUMBER, swiglu_limit=NUMBER)
def same_limits(config: Any) -> tuple[Limits | None, ...]:
    """One bound for the clamped activations of all experts."""
    if config.swiglu_alpha != 1.702:
        raise ValueError(f"swiglu_alpha ({config.swiglu_alpha}) other than 1.702 is not supported")
    return (Limits(config.swiglu_limit, config.swiglu_limit),) * config.num_hidden_layers


@by_layer(swiglu_limit=NUMBER)
def one_limit(config: Any) -> tuple[Limits | None, ...]:
    """One bound for the activations of all experts."""
    return (Limits(config.swiglu_limit, config.swiglu_limit),) * config.num_hidden_layers


@by_layer()
def no_tables(config: Any) -> tuple[int | None, ...]:
    """Routers choose all experts."""
    return (None,) * config.num_hidden_layers


@by_layer(mlp_layer_types=layer_list(str), vocab_size=integer(1, 1 << 24), scoring_func=TEXT)
def tables_by_type(config: Any) -> tuple[int | None, ...]:
    """The config names the layers in which a table says the experts of each token."""
    if config.scoring_func != "sqrtsoftplus":
        raise ValueError(f"scoring_func {config.scoring_func!r:.80} is not supported; supported: sqrtsoftplus")
    return tuple(config.vocab_size if kind == "hash_moe" else None for kind in config.mlp_layer_types)


@by_layer()
def all_sparse(config: Any) -> tuple[bool, ...]:
    """Every layer has experts."""
    return (True,) * config.num_hidden_layers


@by_layer(num_local_experts=integer(0, 4096))
def sparse_if_any(config: Any) -> tuple[bool, ...]:
    """Every layer has experts, unless there are none."""
    return (bool(config.num_local_experts),) * config.num_hidden_layers


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


@by_layer(
    moe_layer_interval=integer(1, MOST_LAYERS),
    moe_layer_start_index=integer(0, MOST_LAYERS),
    moe_layer_end_index=integer(-1, MOST_LAYERS),
)
def sparse_by_interval(config: Any) -> tuple[bool, ...]:
    """Every n-th layer between two layers is sparse; a last layer of -1 means the model's last layer."""
    count, last = config.num_hidden_layers, config.moe_layer_end_index
    between = range(config.moe_layer_start_index, (count if last == -1 else last + 1))
    return tuple((layer + 1) % config.moe_layer_interval == 0 and layer in between for layer in range(count))


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
    intermediate: Key = declared(WIDTH)  # width of one expert
    top_k: Key = declared(integer(0, 4096), Key("num_experts_per_tok"))
    renormalize: bool | Key = declared(FLAG)
    scoring: Scoring = "softmax"
    router_bias: bool = False
    weights_inputs: bool = False
    turned: bool = False
    router_float32: bool = False
    groups: int | Key = declared(integer(1, 4096), 1)
    top_groups: int | Key = declared(integer(1, 4096), 1)
    group_best: int = 2
    least_sum: float | Key = declared(NUMBER, 0.0)
    grouped: Key | None = declared(TEXT, None)  # "greedy": there are no groups; "group_limited_greedy": there are
    scale: float | Key = declared(NUMBER, 1.0)
    shared_intermediate: Key | None = declared(integer(0, 1 << 22), None)  # width of what every token takes; 0: none
    shared_experts: Key | None = declared(integer(0, 4096), None)  # its width in experts, where a config says that
    shared_gate: bool = False
    logit_bias: bool = False
    clamp_alpha: Key | None = declared(NUMBER, None)  # given with the limit: experts have biases and a clamped GLU
    clamp_limit: Key | None = declared(NUMBER, None)
    inner: Key | None = declared(WIDTH, None)  # width that experts work on, where it is not the residual stream's
    apart: ApartNames | None = None
    sparse: ByLayer[bool] = all_sparse
    limits: ByLayer[Limits | None] = no_limits
    bounds_gates: bool = False  # limits bound gates before their activation
    tables: ByLayer[int | None] = no_tables
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
class KimiDeltaFamily:
    """The layers of a family that have Kimi delta attention instead of attention."""

    heads: Key = declared(integer(1, 4096), Key("linear_num_heads"))
    dim: Key = declared(integer(1, 8192), Key("linear_head_dim"))
    conv: Key = declared(integer(2, 64), Key("linear_conv_kernel_dim"))
    latents: bool = True  # decays and output gates are made of latents
    bound: If | None = declared(BELOW_0, None)
    linear: ByLayer[bool] = linear_by_type
    names: KimiDeltaNames = KimiDeltaNames()
    norms: NormPlace = "before"
    layer_names: LayerNames = LayerNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Family:
    """The layers of a family that have Mamba-2 instead of attention."""

    heads: Key = declared(integer(1, 4096), Key("mamba_n_heads"))
    head_dim: Key = declared(HEAD_DIM, Key("mamba_d_head"))
    groups: Key = declared(integer(1, 4096), Key("mamba_n_groups"))
    state_dim: Key = declared(integer(1, 8192), Key("mamba_d_state"))
    conv: Key = declared(integer(2, 64), Key("mamba_d_conv"))
    conv_bias: Key = declared(FLAG, Key("mamba_conv_bias"))
    bias: Key = declared(FLAG, Key("mamba_proj_bias"))
    steps: Key | None = declared(STEPS, None)  # the least and the largest one
    least_step: float | Key = declared(NUMBER, 0.0)  # where a config has the least one alone
    linear: ByLayer[bool] = linear_by_type
    names: Mamba2Names = Mamba2Names()
    norms: NormPlace = "before"
    layer_names: LayerNames = LayerNames()


@by_layer(layer_types=layer_list(str))
def all_indexed(config: Any) -> tuple[str, ...]:
    if set(config.layer_types) != {"indexed_attention"}:
        raise ValueError(f"layer_types {config.layer_types!r:.80} is not supported: all must be indexed_attention")
    return ("full",) * config.num_hidden_layers


@by_layer(layer_types=layer_list(str), indexer_types=layer_list(str))
def indexed_by_type(config: Any) -> tuple[str, ...]:
    """The config names the layers with an indexer, and the layers that share the choice of the last one."""
    all_indexed.function(config)
    kinds = tuple(config.indexer_types)
    if not set(kinds) <= {"full", "shared"} or kinds[:1] == ("shared",):
        raise ValueError(f"indexer_types {kinds!r:.80} is not supported; supported: full, shared, the first one full")
    return kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerFamily:
    """The sparse attention of a family."""

    heads: Key = declared(integer(1, 4096), Key("index_n_heads"))
    dim: Key = declared(integer(2, 8192), Key("index_head_dim"))
    top_k: Key = declared(integer(1, 1 << 26), Key("index_topk"))
    interleaved: bool = False
    kinds: ByLayer[str] = all_indexed  # "full": it has an indexer; "shared": it uses the choice of the last indexer


@by_layer(layer_types=layer_list(str))
def blocks_by_type(config: Any) -> tuple[bool, ...]:
    """The config names the layers that attend to chosen blocks."""
    for kind in config.layer_types:
        if kind not in ("full_attention", "minimax_m3_sparse"):
            raise ValueError(f"layer type {kind!r:.80} is not supported; supported: full_attention, minimax_m3_sparse")
    return tuple(kind == "minimax_m3_sparse" for kind in config.layer_types)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksFamily:
    """The choice of blocks in the attention of a family."""

    heads: Key = declared(integer(1, 4096), Key("index_n_heads"))
    dim: Key = declared(integer(2, 8192), Key("index_head_dim"))
    size: Key = declared(integer(1, 1 << 20), Key("index_block_size"))
    top_k: Key = declared(integer(1, 1 << 16), Key("index_topk_blocks"))
    nearest: Key = declared(integer(1, 1 << 16), Key("index_local_blocks"))
    kinds: ByLayer[bool] = blocks_by_type


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentFamily:
    """The latent attention of a family."""

    q_rank: Key = declared(WIDTH, Key("q_lora_rank"))
    kv_rank: Key = declared(WIDTH, Key("kv_lora_rank"))
    nope_dim: Key = declared(integer(1, 8192), Key("qk_nope_head_dim"))
    rope_dim: Key = declared(integer(2, 8192), Key("qk_rope_head_dim"))
    value_dim: Key = declared(integer(1, 8192), Key("v_head_dim"))
    bias: Key = declared(FLAG, Key("attention_bias"))
    eps: float = 1e-6  # epsilon of the norms of latents; transformers' default, whatever `rms_norm_eps` is
    gate: bool = False
    indexer: IndexerFamily | None = None


@by_layer(layer_types=layer_list(str), compress_rates=RATES)
def windows_of_entries(config: Any) -> tuple[WindowsSpec | None, ...]:
    """The config names the kind of each layer's windows, and says how many tokens they have."""
    kinds = {kind: WindowsSpec(rate, kind == _ENTRIES[0]) for kind, rate in config.compress_rates.items()}
    return tuple(kinds.get(kind) for kind in config.layer_types)


@by_layer(layer_types=layer_list(str))
def ropes_of_entries(config: Any) -> tuple[str, ...]:
    """Layers without entries have a rotary embedding of their own."""
    return tuple("main" if kind == "sliding_attention" else "compress" for kind in config.layer_types)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedFamily:
    """Attention to windows and their entries; entries of overlapping windows are chosen by an indexer."""

    q_rank: Key = declared(WIDTH, Key("q_lora_rank"))
    groups: Key = declared(integer(1, 4096), Key("o_groups"))
    o_rank: Key = declared(WIDTH, Key("o_lora_rank"))
    indexer: IndexerFamily = IndexerFamily(interleaved=True)
    kinds: ByLayer[WindowsSpec | None] = windows_of_entries
    streams: Key = declared(integer(1, 64), Key("hc_mult"))  # the model has several residual streams
    stream_rounds: Key = declared(integer(1, 1000), Key("hc_sinkhorn_iters"))
    stream_eps: Key = declared(NUMBER, Key("hc_eps"))


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPFamily:
    """The layers of a family's checkpoints that predict further tokens. The first one may draft; see `DraftSpec`."""

    #: Their number.
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


#: Parts of the declaration of a family.
StateFamily = DeltaNetFamily | KimiDeltaFamily | Mamba2Family
PartFamily = MoEFamily | StateFamily | LatentFamily | IndexerFamily | BlocksFamily | CompressedFamily | MTPFamily


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The differences from Llama without biases. For the fields see the specs that are built from them."""

    model_type: str  # in config.json
    models: str = ""  # names of its models, for the docs
    read_as: str | None = None  # the model type that transformers reads config.json as; None: its own
    #: Other names that `model_type` may have, of models with the same architecture; read as the first one.
    other_types: tuple[str, ...] = ()
    eps: Key = declared(NUMBER, Key("rms_norm_eps"))  # epsilon of norms
    activation: Key = declared(TEXT, Key("hidden_act"))
    limit: Key | None = declared(NUMBER, None)  # all activations are clamped; in dense blocks by this
    layer_configs: ByLayer[Any] | None = None  # configs of layers that have other heads than the model's config says
    kv: ByLayer[KVSource] = own_kv
    value_norm: bool = False
    widths: ByLayer[int] = same_widths  # how many times as wide as `intermediate` a dense feed-forward block is
    #: Width of an input that each layer has of a token, and the number of tokens that have one; a width of 0: none.
    token_inputs: Key | None = declared(integer(0, 1 << 16), None)
    token_input_vocab: Key | None = declared(integer(1, 1 << 24), None)
    layer_factor: str | None = None
    linear_activation: Key | None = declared(
        TEXT, None
    )  # activation of linear attention, where it has a key of its own
    #: Where layers have one block alone: whether it is the mixer.
    mixers: ByLayer[bool] | None = None
    qkv_bias: bool | Key = declared(FLAG, False)
    o_bias: bool | Key = declared(FLAG, False)
    mlp_bias: bool | Key = declared(FLAG, False)
    intermediate: Key = declared(WIDTH, Key("intermediate_size"))  # width of dense feed-forward blocks
    qk_norm: QKNorm | If = declared(FLAG, "none")
    clip_qkv: Key | None = declared(NUMBER, None)
    windows: ByLayer[int | None] = no_windows
    #: The map inside `rope_parameters` that a layer takes; empty: all of it. None: the layer has no rotary embedding.
    ropes: ByLayer[Any] = same_rope
    partial_rope: bool = False  # `partial_rotary_factor` may be less than 1
    #: The number of a head's dimensions that turn; used where `rope_parameters` has no such factor.
    rope_width: Key | None = declared(integer(2, 8192), None)
    #: `rope_parameters` may be one map: layers with full attention take it, other layers only its `rope_theta`.
    one_rope_map: bool = False
    #: `mrope_section` of `rope_parameters` says how many frequencies take each of three positions: in turns, or one
    #: block of frequencies after the other. The value is what transformers takes where the key is absent.
    rope_alternating: tuple[int, int, int] | None = None
    rope_blocks: tuple[int, int, int] | None = None
    interleaved_rope: bool | Key = declared(FLAG, False)
    optional_rope: bool = False  # without a `rope_theta` no layer has a rotary embedding
    attention_gate: bool = False
    query_gate: bool = False
    attention_sinks: bool = False
    value_dim: Key | None = declared(integer(1, 8192), None)
    value_scale: float | Key = declared(NUMBER, 1.0)
    #: Layers with a window have so many times the KV heads, and with `window_sinks` they alone have sinks.
    window_kv_heads: int = 1
    window_sinks: bool = False
    chunks: ByLayer[int | None] = no_windows  # positions of a chunk; a token sees its own chunk
    growths: ByLayer[QueryGrowth | None] = no_growths
    grown_queries: bool = False  # `llama_4_scaling_beta` of `rope_parameters` says by what
    attention_scale: float | Key | Power | None = declared(NUMBER, None)
    attention_softcap: Key | None = declared(NUMBER, None)
    linear: StateFamily | None = None
    latent: LatentFamily | None = None  # all layers have it
    blocks: BlocksFamily | None = None
    compressed: CompressedFamily | None = None  # all layers have it
    norms: NormPlace = "before"
    unit_offset: bool = False
    residual_scale: float | Key = declared(NUMBER, 1.0)
    embed_scale: float | Key | Power | If = declared(NUMBER, 1.0)
    embed_scale_rounded: bool = False
    logit_divisor: float | Key = declared(NUMBER, 1.0)
    logit_softcap: Key | None = declared(NUMBER, None)
    bidirectional: Key | None = declared(FLAG, None)  # true: tokens see later tokens, which is refused
    #: Keys that must be false, 0 in all layers or absent: neither transformers nor this code does what they ask for.
    unsupported: tuple[str, ...] = ()
    without_effect: tuple[str, ...] = ()  # keys of its configs on which no forward depends
    moe: MoEFamily | None = None
    turned_experts: bool = False  # files have tensors of all experts with inputs before outputs; updates have not
    mxfp4: bool = False  # checkpoints may have experts in this format
    #: Beginnings of the names of tensors that text needs none of: prediction of several tokens at once, images. A
    #: tensor of a draft model is used whatever its name begins with.
    unused: tuple[str, ...] = (
        *("mtp.", "visual.", "vision_tower.", "multi_modal_projector."),
        *("model.visual.", "model.vision_tower.", "model.multi_modal_projector."),
        *("mm_projector.", "model.mm_projector.", "patch_merge_mlp."),
        *("model.embed_vision.", "model.embed_audio.", "model.audio_tower."),
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
    #: Possible language models, of `FAMILIES` or of its own; the `model_type` of `text_config` says which.
    language_models: tuple[str | Family, ...]
    #: See `ModelNames`.
    beginnings: tuple[tuple[str, tuple[str, ...]], ...]
    tower: TowerFamily | None = None
    flat: bool = False  # files may have the keys of `text_config` beside `vision_config`


# --- what several families share --------------------------------------------------------------------------------------

ATTENTION_BIAS = Key("attention_bias")
#: Prefixes of a language model's names, in a model of text and images and in the language model alone.
INSIDE = (("model.", ("model.language_model.", "model.")),)
#: The same, with what files on the hub have: transformers' module has the second spelling.
INSIDE_LLAVA = (
    ("model.", ("language_model.model.", "model.language_model.", "model.")),
    ("lm_head", ("language_model.lm_head", "lm_head")),
)
NORMS_AROUND = LayerNames(
    "input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"
)
NORMS_AFTER = LayerNames("post_attention_layernorm", "post_feedforward_layernorm")
SHARED_EXPERTS = DenseNames(
    ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"), "mlp.shared_experts.down_proj"
)
GATE_UP = DenseNames(gate_up=("mlp.gate_up_proj",))
#: Names of experts in files since Mixtral; transformers' modules have another beginning.
BLOCK_SPARSE = MoENames(
    router=("block_sparse_moe.gate",),
    router_bias=("block_sparse_moe.e_score_correction_bias", "block_sparse_moe.gate.e_score_correction_bias"),
    gate="block_sparse_moe.experts.{}.w1",
    up="block_sparse_moe.experts.{}.w3",
    down="block_sparse_moe.experts.{}.w2",
    stacked_gate_up="block_sparse_moe.experts.gate_up_proj",
    stacked_down="block_sparse_moe.experts.down_proj",
    shared=DenseNames(
        ("block_sparse_moe.shared_experts.gate_proj", "block_sparse_moe.shared_experts.up_proj"),
        "block_sparse_moe.shared_experts.down_proj",
        joined="block_sparse_moe.shared_experts.gate_up_proj",
    ),
)
IN_BLOCK_SPARSE = (".block_sparse_moe.", (".block_sparse_moe.", ".mlp."))


def deepseek_moe(sparse: ByLayer[bool]) -> MoEFamily:
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
        names=MoENames(shared=SHARED_EXPERTS),
    )
