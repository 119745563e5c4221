"""Makes a `ModelSpec` from a transformers config, by the declaration of its family."""

import math
from dataclasses import replace
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rollout.checkpoint_folder import CheckpointError
from rollout.models.families.declare import (
    BlocksFamily,
    CompressedFamily,
    DeltaNetFamily,
    Family,
    If,
    IndexerFamily,
    Key,
    KimiDeltaFamily,
    LatentFamily,
    Mamba2Family,
    MoEFamily,
    Power,
)
from rollout.models.longrope import first_border, rope_maps
from rollout.models.registry import check_supported, family_of
from rollout.models.spec import (
    ENTRY_TOKENS,
    IN_COMPRESSOR,
    Activation,
    AttentionSpec,
    BlocksSpec,
    ClampedGLUSpec,
    CompressedSpec,
    DeltaNetSpec,
    DenseSpec,
    DraftNames,
    DraftSpec,
    IndexerSpec,
    KimiDeltaSpec,
    KVMixerSpec,
    LatentSpec,
    LayerSpec,
    Mamba2Spec,
    MixerSpec,
    ModelSpec,
    MoESpec,
    QueryGrowth,
    RopeKind,
    RopeSpec,
    RouterSpec,
    StateMixerSpec,
    StreamsSpec,
    TokenInputSpec,
    WindowsSpec,
)
from rollout.models.vision_spec import TowerSpec

#: Experts of all layers together; each has its own tensors.
_MAX_EXPERTS = 1 << 16
#: Kinds of scaled rotary embeddings. Their frequencies do not depend on the length of a sequence.
_SCALED_ROPES: tuple[RopeKind, ...] = ("linear", "llama3", "yarn", "longrope", "proportional")
#: Activations by their names in config.json.
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}


def spec_from_config(config: Any, architecture: str, tower: TowerSpec | None = None) -> ModelSpec:
    """The spec of a transformers config; with a `tower` it is served with images.

    Raises:
        ValueError: the architecture is not supported, or the config asks for something that is not; the message says
            for what.
    """
    check_supported(architecture)
    family = family_of(architecture, config.model_type)
    if family.bidirectional is not None and _value(config, family.bidirectional):
        raise ValueError(
            f"{family.bidirectional.name} is set, but a model that generates must not attend to later tokens"
        )
    for name in family.unsupported:
        if getattr(config, name, False):
            raise ValueError(f"{name} is not supported for this architecture: it must be false")
    quantized = getattr(config, "quantization_config", None)
    if quantized is not None and not is_block_fp8(config) and not (family.mxfp4 and is_mxfp4(config)):
        raise ValueError(
            "this quantization_config is not supported; use a checkpoint with float32, bfloat16 or float16 weights, or "
            "fp8 ones in blocks (quant_method fp8, fmt e4m3, weight_block_size [128, 128])"
        )
    layers = _layers(config, family)
    return ModelSpec(
        architecture=architecture,
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        eps=_value(config, family.eps),
        max_positions=_max_positions(config),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        layers=layers,
        names=family.names,
        embed_scale=_number(config, family.embed_scale),
        embed_scale_rounded=family.embed_scale_rounded,
        token_inputs=_token_inputs(config, family),
        streams=_streams(config, family.compressed),
        logit_divisor=_number(config, family.logit_divisor),
        logit_softcap=_value(config, family.logit_softcap),
        unit_offset=family.unit_offset,
        unused=_unused(config, family, tower) + _shared_names(family, layers),
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


def is_mxfp4(config: Any) -> bool:
    """Whether a checkpoint says that its experts are in MXFP4."""
    return _quantization(getattr(config, "quantization_config", None)) == "mxfp4"


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


def _shared_names(family: Family, layers: tuple[LayerSpec, ...]) -> tuple[str, ...]:
    """Prefixes of tensors that checkpoints may have for keys and values of layers that share another layer's."""
    modules = (*family.attention_names.qkv[1:], family.attention_names.qk_norm[1])
    shared = [
        i for i, layer in enumerate(layers) if isinstance(layer.mixer, AttentionSpec) and layer.mixer.kv == "shared"
    ]
    names = (family.names.layer.format(layer) + module + "." for layer in shared for module in modules)
    return tuple(spelled for name in names for spelled in family.names.spellings(name))


def _token_inputs(config: Any, family: Family) -> TokenInputSpec | None:
    dim, vocab = _value(config, family.token_inputs), _value(config, family.token_input_vocab)
    if not dim:
        return None
    if vocab is None or vocab < config.vocab_size:
        raise CheckpointError(f"{vocab} tokens have inputs of layers, and the vocabulary has {config.vocab_size}")
    return TokenInputSpec(dim, vocab, _activation(config, family.activation))


def _streams(config: Any, family: CompressedFamily | None) -> StreamsSpec | None:
    if family is None:
        return None
    return StreamsSpec(*(_value(config, key) for key in (family.streams, family.stream_rounds, family.stream_eps)))


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
    mixers = [layer.mixer for layer in layers if isinstance(layer.mixer, AttentionSpec | LatentSpec)]
    if mtp is None or not prefixes or not mixers:
        return None
    if isinstance(mixers[-1], LatentSpec) and (mixers[-1].indexer or mixers[-1].shares_choice):
        return None  # such a layer would need an indexer of its own
    feed_forward = last.feed_forward
    assert last.norms == "before" and feed_forward is not None, "as all of them"
    if isinstance(feed_forward, MoESpec):
        feed_forward = replace(feed_forward, limits=None)  # limits belong to the model's layers
    return DraftSpec(
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        eps=_value(config, family.eps),
        taps=(len(layers),),
        mixer=mixers[-1],
        feed_forward=feed_forward,
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
    sparse, limits, tables = (False,) * count, (None,) * count, (None,) * count
    if family.moe is not None:
        sparse, limits, tables = family.moe.sparse(config), family.moe.limits(config), family.moe.tables(config)
    indexer = None if family.latent is None else family.latent.indexer
    indexed: tuple[Any, ...] = (None,) * count
    if chooser := indexer or family.blocks or family.compressed:
        indexed = chooser.kinds(config)
    each = (family.windows, family.ropes, family.chunks, family.growths)
    sources, widths = family.kv(config), family.widths(config)
    configs = (config,) * count if family.layer_configs is None else family.layer_configs(config)
    heads = tuple((_head_dim(own), own.num_key_value_heads) for own in configs)
    mixers = list(zip(*(values(config) for values in each), indexed, sources, heads, strict=True))
    first = {key: own for key, own in reversed(list(zip(mixers, configs, strict=True)))}
    ropes = {(kind, of): _rope(first[mixer], kind, family) for mixer in mixers for _, kind, *_, of in (mixer,)}
    attention: dict[Any, KVMixerSpec] = {}
    for mixer in set(mixers):
        window, kind, chunk, growth, index, source, of = mixer
        rope = ropes[kind, of]
        if family.compressed is not None:
            attention[mixer] = _compressed(config, family.compressed, rope, window, index)
        elif family.latent is None:
            spec = _attention(first[mixer], family, rope, window)
            blocks = _blocks(config, family.blocks, spec) if index and family.blocks else None
            attention[mixer] = replace(spec, chunk=chunk, growth=growth or spec.growth, kv=source, blocks=blocks)
        else:
            growth = _growth(config) if family.grown_queries else None
            latent = _latent(config, family.latent, rope, growth)
            if index == "full" and indexer is not None:
                latent = replace(latent, indexer=_indexer(config, indexer, latent))
            attention[mixer] = replace(latent, shares_choice=index == "shared")
    linear: tuple[bool, ...] = (False,) * count
    states: StateMixerSpec | None = None
    if family.linear is not None and any(linear := family.linear.linear(config)):
        key = family.linear_activation or family.activation
        if _activation(config, key) != "silu":
            raise ValueError(f"{key.name} of a model with linear attention must be silu")
        match family.linear:
            case KimiDeltaFamily() as declared:
                states = _kimi_delta(config, declared)
            case Mamba2Family() as declared:
                states = _mamba2(config, declared, _value(config, family.eps))
            case DeltaNetFamily() as declared:
                states = _delta_net(config, declared)
    if all(linear):
        raise ValueError("layer_types names no layer with full attention; at least one is needed")
    dense = {width: _dense(config, family, width) for width in set(widths)} if not all(sparse) else {}
    experts: MoESpec | None = None
    if family.moe is not None and any(sparse):
        activation = _activation(config, family.activation) if family.limit is None else "clamped"
        if activation == "gelu":
            raise ValueError(f"{family.activation.name} of experts must be silu, gelu_pytorch_tanh or relu2")
        experts = replace(
            _moe(config, family.moe, activation), eps=_value(config, family.eps) if family.moe.apart else 0.0
        )
        if experts.shared is not None and _value(config, family.mlp_bias):
            raise ValueError("biases of feed-forward blocks are not supported in a model with a shared expert")
    scale = _number(config, family.residual_scale)
    layers = []
    each_layer = zip(mixers, linear, sparse, widths, limits, tables, strict=True)
    for mixer, is_linear, is_sparse, width, limit, table in each_layer:
        block: MixerSpec = attention[mixer]
        names, norms = family.layer_names, family.norms
        if is_linear and family.linear is not None and states is not None:
            block, names, norms = states, family.linear.layer_names, family.linear.norms
        feed_forward = replace(experts, limits=limit, table=table) if is_sparse and experts else dense[width]
        layers.append(LayerSpec(block, feed_forward, names, norms, scale, family.layer_factor))
    if family.mixers is None:
        return tuple(layers)
    has_mixer = family.mixers(config)
    return tuple(
        replace(layer, feed_forward=None) if mixes else replace(layer, mixer=None)
        for layer, mixes in zip(layers, has_mixer, strict=True)
    )


def _kimi_delta(config: Any, family: KimiDeltaFamily) -> KimiDeltaSpec:
    _check_given(config, family.heads, family.dim, family.conv)
    dim = _value(config, family.dim)
    heads, conv = _value(config, family.heads), _value(config, family.conv)
    rank, bound = dim if family.latents else None, _value(config, family.bound)
    eps = config.rms_norm_eps
    return KimiDeltaSpec(config.hidden_size, heads, dim, dim, rank, conv, eps, bound, family.names)


def _mamba2(config: Any, family: Mamba2Family, eps: float) -> Mamba2Spec:
    steps = (_value(config, family.least_step), math.inf) if family.steps is None else _value(config, family.steps)
    spec = Mamba2Spec(
        hidden=config.hidden_size,
        heads=_value(config, family.heads),
        head_dim=_value(config, family.head_dim),
        groups=_value(config, family.groups),
        state_dim=_value(config, family.state_dim),
        conv=_value(config, family.conv),
        conv_bias=_value(config, family.conv_bias),
        bias=_value(config, family.bias),
        steps=(0.0, math.inf) if steps is None else (float(steps[0]), float(steps[1])),
        eps=eps,
        names=family.names,
    )
    if spec.heads % spec.groups:
        raise CheckpointError(
            f"{family.heads.name} ({spec.heads}) is not a multiple of {family.groups.name} ({spec.groups})"
        )
    return spec


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
        raise CheckpointError(
            f"{family.value_heads.name} ({spec.value_heads}) is not a multiple of {family.key_heads.name} "
            f"({spec.key_heads})"
        )
    return spec


def _attention(config: Any, family: Family, rope: RopeSpec, window: int | None) -> AttentionSpec:
    heads, qk_norm = config.num_attention_heads, _value(config, family.qk_norm)
    if qk_norm == "unit" and rope.amplitude != 1.0:
        raise ValueError("scaled rotary embeddings with an amplitude are not supported for this architecture")
    spec = AttentionSpec(
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=(config.num_key_value_heads or heads) * (1 if window is None else family.window_kv_heads),
        head_dim=_head_dim(config),
        rope=rope,
        window=window,
        qkv_bias=_value(config, family.qkv_bias),
        o_bias=_value(config, family.o_bias),
        # Such a norm is the same before and after a rotation. Layers without one have no norm.
        qk_norm="none" if qk_norm == "unit" and rope.kind == "none" else qk_norm,
        clip_qkv=_value(config, family.clip_qkv),
        eps=_value(config, family.eps),
        names=family.attention_names,
        scale=_value(config, family.attention_scale),
        softcap=_value(config, family.attention_softcap),
        unit_offset=family.unit_offset,
        growth=_growth(config) if family.grown_queries else None,
        gate=family.attention_gate,
        query_gate=family.query_gate,
        sinks=family.attention_sinks or (family.window_sinks and window is not None),
        value_dim=_value(config, family.value_dim),
        value_scale=_value(config, family.value_scale) or 1.0,
        value_norm=family.value_norm,
    )
    if spec.heads % spec.kv_heads:
        raise CheckpointError(f"num_attention_heads ({spec.heads}) is not a multiple of the KV heads ({spec.kv_heads})")
    if spec.v_dim > spec.head_dim:
        raise ValueError(f"values of {spec.v_dim} dimensions are not supported: keys have {spec.head_dim}")
    if spec.head_dim % 2 or not spec.head_dim:
        raise CheckpointError(f"head_dim ({spec.head_dim}) must be even and at least 2, for rotary embeddings")
    _check_width(rope, spec.head_dim)
    if window is not None and window < 1:
        raise CheckpointError("sliding_window must be at least 1")
    return spec


def _latent(config: Any, family: LatentFamily, rope: RopeSpec, growth: QueryGrowth | None) -> LatentSpec:
    _check_given(config, family.kv_rank, family.nope_dim, family.rope_dim, family.value_dim)
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
        growth=growth,
        gate=family.gate,
    )
    if rope_dim % 2:
        raise CheckpointError(f"{family.rope_dim.name} ({rope_dim}) must be even, for rotary embeddings")
    for name, dims in (("head_dim", (rope_dim, spec.head_dim)), ("qk_head_dim", (spec.head_dim,))):
        given = getattr(config, name, None)  # transformers' class sets it, unless config.json has it
        if given not in (None, *dims):
            allowed = " or ".join(map(str, dims))
            raise CheckpointError(f"{name} ({given}) must be {allowed} in a model with these heads, or absent")
    _check_width(rope, rope_dim)
    if config.num_key_value_heads not in (None, spec.heads):
        raise CheckpointError(
            f"num_key_value_heads ({config.num_key_value_heads}) must be num_attention_heads ({spec.heads}), or absent"
        )
    if spec.bias and spec.q_rank is None:
        raise ValueError(f"{family.bias.name} needs {family.q_rank.name}: the product of queries alone has no bias")
    return spec


def _indexer(config: Any, family: IndexerFamily, latent: LatentSpec) -> IndexerSpec:
    if latent.q_rank is None:
        raise CheckpointError("an indexer needs q_lora_rank: its queries are made of the latents of queries")
    heads, dim, top_k = (_value(config, key) for key in (family.heads, family.dim, family.top_k))
    if dim < latent.rope_dim:
        raise CheckpointError(f"{family.dim.name} ({dim}) must be at least the {latent.rope_dim} dimensions that turn")
    return IndexerSpec(latent.hidden, latent.q_rank, heads, dim, top_k, family.interleaved)


def _blocks(config: Any, family: BlocksFamily, attention: AttentionSpec) -> BlocksSpec:
    heads, turned = _value(config, family.heads), attention.rope.width(attention.head_dim)
    spec = BlocksSpec(*(_value(config, key) for key in (family.dim, family.size, family.top_k, family.nearest)))
    if heads != attention.kv_heads:
        raise ValueError(f"{family.heads.name} ({heads}) must be the number of KV heads ({attention.kv_heads})")
    if spec.dim < turned:
        raise CheckpointError(f"{family.dim.name} ({spec.dim}) must be at least the {turned} dimensions that turn")
    if spec.nearest > spec.top_k:
        raise CheckpointError(f"{family.nearest.name} ({spec.nearest}) must be at most {family.top_k.name}")
    return spec


def _compressed(
    config: Any, family: CompressedFamily, rope: RopeSpec, window: int | None, windows: WindowsSpec | None
) -> CompressedSpec:
    q_rank, top, indexer = _value(config, family.q_rank), family.indexer, None
    if windows is not None and windows.overlap:
        heads, dim, top_k = (_value(config, key) for key in (top.heads, top.dim, top.top_k))
        indexer = IndexerSpec(config.hidden_size, q_rank, heads, dim, top_k, top.interleaved, names=IN_COMPRESSOR)
    if not window:
        raise CheckpointError("sliding_window must be at least 1")
    spec = CompressedSpec(
        config.hidden_size,
        config.num_attention_heads,
        config.head_dim,
        q_rank,
        _value(config, family.groups),
        _value(config, family.o_rank),
        rope,
        window,
        config.rms_norm_eps,
        windows,
        indexer,
    )
    if spec.heads % spec.groups:
        raise CheckpointError(f"num_attention_heads ({spec.heads}) is not a multiple of o_groups ({spec.groups})")
    least = spec.head_dim if indexer is None else min(spec.head_dim, indexer.dim)
    if spec.head_dim % ENTRY_TOKENS or least % ENTRY_TOKENS or least < rope.width(spec.head_dim):
        wanted = f"multiples of {ENTRY_TOKENS}, and at least the dimensions that turn"
        raise ValueError(f"head_dim ({spec.head_dim}) and index_head_dim ({least}) must be {wanted}")
    if windows is not None and (windows.tokens % ENTRY_TOKENS or (indexer and windows.tokens > ENTRY_TOKENS)):
        raise ValueError(f"compress_rates must be multiples of {ENTRY_TOKENS}, and {ENTRY_TOKENS} with an indexer")
    _check_width(rope, spec.head_dim)
    return spec


def _dense(config: Any, family: Family, times: int = 1) -> DenseSpec:
    bias = _value(config, family.mlp_bias)
    activation = _activation(config, family.activation) if family.limit is None else "clamped"
    width = times * _value(config, family.intermediate)
    limit = _value(config, family.limit)
    return DenseSpec(config.hidden_size, width, bias, family.dense_names, activation, limit)


def _activation(config: Any, key: Key) -> Activation:
    name = getattr(config, key.name, "silu")
    if name not in _ACTIVATIONS:
        supported = ", ".join(_ACTIVATIONS)
        raise ValueError(f"{key.name} {name!r:.80} is not supported; supported: {supported}")
    return _ACTIVATIONS[name]


def _moe(config: Any, family: MoEFamily, activation: Activation) -> MoESpec:
    grouped = _is_grouped(config, family)
    if family.bounds_gates:
        if activation != "silu":
            raise ValueError("hidden_act must be silu where gates are bounded")
        activation = "bounded_silu"
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
            least_sum=_number(config, family.least_sum),
            weights_inputs=family.weights_inputs,
        ),
        names=family.names,
        shared=_shared(config, family, activation),
        shared_gate=family.shared_gate,
        clamped=_clamped(config, family),
        activation=activation,
        turned=family.turned,
        inner=_value(config, family.inner),
        apart=family.apart,
    )
    layers = config.num_hidden_layers
    if layers * spec.experts > _MAX_EXPERTS:
        most = _MAX_EXPERTS // layers
        raise CheckpointError(
            f"{family.experts.name} is {spec.experts}; with {layers} layers it must be at most {most}"
        )
    if not 1 <= spec.router.top_k <= spec.experts:
        raise CheckpointError(f"{family.top_k.name} ({spec.router.top_k}) must be between 1 and {spec.experts}")
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
    _check_given(config, family.groups, family.top_groups)
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
        raise CheckpointError(f"{spec.experts} experts do not make {router.groups} groups of two or more")
    if not router.top_k / size <= router.top_groups <= router.groups:
        raise CheckpointError(
            f"topk_group ({router.top_groups}) must be at most {router.groups} and have {router.top_k} experts"
        )


def _shared(config: Any, family: MoEFamily, activation: Activation) -> DenseSpec | None:
    width = _value(config, family.shared_intermediate)
    if family.shared_experts is not None:
        width = (_value(config, family.shared_experts) or 0) * _value(config, family.intermediate)
    return DenseSpec(config.hidden_size, width, False, family.names.shared, activation) if width else None


def _check_given(config: Any, *declared: Any) -> None:
    for key in declared:
        if isinstance(key, Key) and _value(config, key) is None:
            raise CheckpointError(f"config.json gives no {key.name}")


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
        raise CheckpointError(f"config.json gives no {declared.name}")
    return float(value)


# --- rotary embedding ------------------------------------------------------------------------------------------------


def _rope(config: Any, part: str | None, family: Family) -> RopeSpec:
    if part is None or (family.optional_rope and _rope_parameters(config).get("rope_theta") is None):
        return RopeSpec("none", theta=1.0)
    params = _rope_parameters(config, part, family.one_rope_map)
    nested = part if part in (config.rope_parameters or {}) else ""
    share = params.get("partial_rotary_factor", _rope_share(config, family))
    if family.latent is not None:
        heads = [_head_dim(config)]
        if isinstance(family.linear, KimiDeltaFamily):
            heads.append(_value(config, family.linear.dim))
        if share in [_value(config, family.latent.rope_dim) / dim for dim in heads]:
            share = 1.0  # The factor was for a whole head.
    if params.get("rope_type") == "proportional":
        share = 1.0  # The function of transformers gives frequencies of 0 to the dimensions that do not turn.
    if share != 1.0 and not family.partial_rope:
        raise ValueError("partial_rotary_factor other than 1 is not supported for this architecture")
    if not 0 < share <= 1:
        raise CheckpointError(f"partial_rotary_factor ({share}) must be above 0 and at most 1")
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
        raise CheckpointError(
            f"partial_rotary_factor ({rope.share}) must leave an even number of {head_dim} dimensions, at least 2"
        )
    if rope.frequencies and len(rope.frequencies) != width // 2:
        raise ValueError(
            f"rope scaling {rope.kind!r} has {len(rope.frequencies)} frequencies, and {width // 2} are needed: check "
            "head_dim, partial_rotary_factor, short_factor and long_factor"
        )


def _rope_axes(config: Any, family: Family, params: dict[str, Any], rope: RopeSpec) -> tuple[int, ...]:
    """The axis of each frequency; empty for families whose tokens have one position."""
    default = family.rope_alternating or family.rope_blocks
    if default is None:
        return ()
    count, given = rope.width(_head_dim(config)) // 2, params.get("mrope_section") or default
    if len(given) != 3 or any(type(part) is not int or part < 0 for part in given):
        raise CheckpointError(f"mrope_section ({given!r:.80}) must be three integers")
    if family.rope_blocks is not None:
        if sum(given) != count:
            raise CheckpointError(f"mrope_section ({given!r:.80}) must have the sum {count}, one for each frequency")
        return tuple(axis for axis, part in enumerate(given) for _ in range(part))
    axes = [0] * count
    for axis in (1, 2):
        for index in range(axis, min(3 * given[axis], count), 3):
            axes[index] = axis
    return tuple(axes)


def _rope_parameters(config: Any, part: str = "", one_map: bool = False) -> dict[str, Any]:
    # transformers folds the older `rope_theta` and `rope_scaling` keys into this one when it reads a config.
    params = dict(getattr(config, "rope_parameters", None) or {})
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
        raise CheckpointError("rope_parameters must have llama_4_scaling_beta and original_max_position_embeddings")
    if type(positions) is not int:
        raise CheckpointError(f"original_max_position_embeddings ({positions}) must be an integer")
    return QueryGrowth(beta, positions)


def _scaled_rope(config: Any, part: str, params: dict[str, Any]) -> RopeSpec:
    """The embedding that one map of `rope_parameters` describes; transformers computes scaled frequencies."""
    kind, theta = params.get("rope_type", "default"), params.get("rope_theta")
    if theta is None:
        raise CheckpointError("config.json gives no rope_theta")
    if theta <= 1:
        raise CheckpointError(f"rope_theta ({theta}) must be more than 1")
    if kind not in ("default", *_SCALED_ROPES):
        supported = ", ".join(("default", *_SCALED_ROPES))
        raise ValueError(f"rope_type {kind!r:.80} is not supported; supported: {supported}")
    if kind == "default":
        return RopeSpec(kind, theta)
    try:
        inv_freq_F, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), layer_type=part or None)
    except KeyError as error:
        raise CheckpointError(f"config.json: rope scaling {kind!r} needs {error.args[0]!r}") from error
    # The function makes logarithms and tensors of values that may fit no scaling.
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"config.json: rope scaling {kind!r} cannot be computed: {error!s:.200}") from error
    if not bool(torch.isfinite(inv_freq_F).all()):
        raise CheckpointError(
            f"config.json: rope scaling {kind!r} gives frequencies that are no numbers: check its factors"
        )
    return RopeSpec(kind, theta, frequencies=tuple(inv_freq_F.tolist()), amplitude=float(factor))


def _yarn_score_factor(config: Any) -> float:
    """The factor of latent attention's scores where a rotary embedding is scaled and has `mscale_all_dim`."""
    params = _rope_parameters(config)
    kind, mscale_all, factor = params.get("rope_type", "default"), params.get("mscale_all_dim"), params.get("factor")
    if kind == "default" or not mscale_all:
        return 1.0
    if factor is None:
        raise CheckpointError(f"config.json: rope scaling {kind!r} with 'mscale_all_dim' needs 'factor'")
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
