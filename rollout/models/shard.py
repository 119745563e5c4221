"""The spec of one rank's shard of a model.

    attention        query heads by rank with their KV heads; a KV head is kept by several ranks if there are fewer
    latent attention heads by rank; the products that make latents, and the latents in the cache, on every rank
    linear attention key heads by rank with their value heads, convolutions and states; heads of Mamba-2 with groups
    dense blocks     intermediate width by rank
    experts          intermediate width by rank where each part is whole blocks of 128; else whole experts by rank
    embedding,       vocabulary by rank
      output layer
    norms, routers,  whole on every rank
      vision tower

With rows dealt to ranks (`rollout.models.dealt_rows`) attention is whole on every rank, too. With contexts split over
ranks (`rollout.models.split_context`) KV heads are.

Each block reads the whole hidden state, which is the same on all ranks, and makes a part of a sum over the ranks.
"""

from dataclasses import replace

from rollout.config import AttentionSplit
from rollout.models.spec import (
    AttentionSpec,
    CompressedSpec,
    DeltaNetSpec,
    DenseSpec,
    FeedForwardSpec,
    KimiDeltaSpec,
    LatentSpec,
    LayerSpec,
    Mamba2Spec,
    MixerSpec,
    ModelSpec,
    MoESpec,
    Shard,
)

#: A part of an expert's width is a multiple of this: the kernels' tiles, and blocks of codes that share a scale.
EXPERT_BLOCK = 128


def shard_spec(spec: ModelSpec, rank: int, size: int, split: AttentionSplit = "heads") -> ModelSpec:
    """The spec of what rank `rank` of `size` ranks keeps of a model; `spec` itself for one rank.

    `split` says how ranks divide attention.

    Raises:
        ValueError: the model cannot be cut into `size` shards, with the reason.
    """
    if size == 1:
        return spec
    shard = Shard(rank, size)
    try:
        if split == "rows" and spec.moe is None:
            raise _CannotCutError("attention_split = rows is for models with experts: use heads")
        layers = {layer: _layer(layer, shard, split) for layer in dict.fromkeys(spec.layers)}
        if not replace(spec, shard=Shard(size - 1, size)).kept_vocab:
            raise _CannotCutError(f"its vocabulary has {spec.vocab} tokens")
    except _CannotCutError as error:
        raise ValueError(f"this {spec.architecture} cannot be cut into {size} shards: {error}") from error
    return replace(spec, layers=tuple(layers[layer] for layer in spec.layers), shard=shard)


def spec_of_rank(spec: ModelSpec, rank: int) -> ModelSpec:
    """The spec of another rank of the same group; `spec` describes a shard."""
    shard = Shard(rank, spec.shard.size)
    layers = {layer: _layer_of_rank(layer, shard) for layer in dict.fromkeys(spec.layers)}
    return replace(spec, layers=tuple(layers[layer] for layer in spec.layers), shard=shard)


def _layer_of_rank(layer: LayerSpec, shard: Shard) -> LayerSpec:
    mixer, block = layer.mixer, layer.feed_forward
    if mixer is not None and mixer.shard.size > 1:
        mixer = replace(mixer, shard=shard)
    if isinstance(block, DenseSpec):
        block = replace(block, shard=shard)
    elif block is not None:
        shared = None if block.shared is None else replace(block.shared, shard=shard)
        block = replace(block, shared=shared, shard=shard)
    return replace(layer, mixer=mixer, feed_forward=block)


class _CannotCutError(Exception):
    """Why a model cannot be cut."""


def _layer(layer: LayerSpec, shard: Shard, split: AttentionSplit) -> LayerSpec:
    mixer = layer.mixer
    if mixer is not None:
        mixer = _dealt(mixer) if split == "rows" else _mixer(mixer, shard)
        if split == "context" and isinstance(mixer, CompressedSpec):
            raise _CannotCutError("attention_split = context is not for attention to entries of windows: use heads")
        if split == "context" and isinstance(mixer, AttentionSpec | LatentSpec):
            mixer = _split_context(mixer)
    block = None if layer.feed_forward is None else _feed_forward(layer.feed_forward, shard)
    return replace(layer, mixer=mixer, feed_forward=block)


def _dealt(mixer: MixerSpec) -> MixerSpec:
    if not isinstance(mixer, AttentionSpec | LatentSpec):
        raise _CannotCutError("attention_split = rows is not for layers with states or entries of windows: use heads")
    return replace(mixer, split="rows")


def _split_context(mixer: AttentionSpec | LatentSpec) -> MixerSpec:
    """A mixer that is cut by heads, with the KV of all KV heads."""
    if isinstance(mixer, LatentSpec):
        if mixer.indexer is not None or mixer.shares_choice:
            raise _CannotCutError("attention_split = context is not for attention with an indexer: use heads or rows")
        return replace(mixer, split="context")
    if mixer.window is not None or mixer.chunk is not None or mixer.sinks or mixer.blocks:
        problem = "attention with windows, chunks, chosen blocks or sinks"
        raise _CannotCutError(f"attention_split = context is not for {problem}: use heads")
    return replace(mixer, kv_heads=mixer.all_kv_heads, split="context")


def _mixer(mixer: MixerSpec, shard: Shard) -> MixerSpec:
    if isinstance(mixer, AttentionSpec):
        return _attention(mixer, shard)
    if isinstance(mixer, LatentSpec):
        return _latent(mixer, shard)
    if isinstance(mixer, CompressedSpec):
        if mixer.groups % shard.size:
            raise _CannotCutError(f"{mixer.groups} groups of heads (o_groups) are not a multiple of {shard.size}")
        return replace(mixer, heads=mixer.heads // shard.size, groups=mixer.groups // shard.size, shard=shard)
    if isinstance(mixer, Mamba2Spec):
        return _mamba2(mixer, shard)
    return _linear(mixer, shard) if isinstance(mixer, DeltaNetSpec) else _kimi_delta(mixer, shard)


def _attention(mixer: AttentionSpec, shard: Shard) -> AttentionSpec:
    heads, kv_heads, size = mixer.heads, mixer.kv_heads, shard.size
    if heads % size:
        raise _CannotCutError(f"{heads} attention heads are not a multiple of {size}")
    if kv_heads % size and size % kv_heads:
        raise _CannotCutError(f"{kv_heads} KV heads are neither a multiple of {size} nor a divisor of it")
    kept = max(1, kv_heads // size)
    return replace(mixer, heads=heads // size, kv_heads=kept, shard=shard, all_kv_heads=kv_heads)


def _latent(mixer: LatentSpec, shard: Shard) -> LatentSpec:
    if mixer.heads % shard.size:
        raise _CannotCutError(f"{mixer.heads} heads of latent attention are not a multiple of {shard.size}")
    return replace(mixer, heads=mixer.heads // shard.size, shard=shard)


def _linear(mixer: DeltaNetSpec, shard: Shard) -> DeltaNetSpec:
    keys, values, size = mixer.key_heads, mixer.value_heads, shard.size
    if keys % size:
        raise _CannotCutError(f"{keys} key heads of linear attention are not a multiple of {size}")
    return replace(mixer, key_heads=keys // size, value_heads=values // size, shard=shard)


def _kimi_delta(mixer: KimiDeltaSpec, shard: Shard) -> KimiDeltaSpec:
    if mixer.value_heads % shard.size:
        raise _CannotCutError(f"{mixer.value_heads} heads of linear attention are no multiple of {shard.size}")
    return replace(mixer, value_heads=mixer.value_heads // shard.size, shard=shard)


def _mamba2(mixer: Mamba2Spec, shard: Shard) -> Mamba2Spec:
    heads, groups, size = mixer.heads, mixer.groups, shard.size
    if heads % size or (groups > 1 and groups % size):
        raise _CannotCutError(f"{heads} heads of Mamba-2 in {groups} groups are not a multiple of {size}")
    return replace(mixer, heads=heads // size, groups=max(1, groups // size), shard=shard, all_groups=groups)


def _dense(block: DenseSpec, shard: Shard) -> DenseSpec:
    if block.intermediate % shard.size:
        raise _CannotCutError(
            f"the width {block.intermediate} of its feed-forward blocks is not a multiple of {shard.size}"
        )
    return replace(block, intermediate=block.intermediate // shard.size, shard=shard)


def _feed_forward(block: FeedForwardSpec, shard: Shard) -> FeedForwardSpec:
    return _dense(block, shard) if isinstance(block, DenseSpec) else _experts(block, shard)


def _experts(block: MoESpec, shard: Shard) -> MoESpec:
    shared = None if block.shared is None else _dense(block.shared, shard)
    size = shard.size
    if block.intermediate % (EXPERT_BLOCK * size) == 0:
        width = block.intermediate // size
        return replace(block, intermediate=width, shared=shared, shard=shard)
    if block.experts % size:
        raise _CannotCutError(
            f"{block.experts} experts are not a multiple of {size}, nor is their width {block.intermediate} a "
            f"multiple of {EXPERT_BLOCK} times {size}"
        )
    return replace(block, shared=shared, shard=shard, whole_experts=True)
