"""One forward of a few tokens that shows what each layer of a module keeps and sees.

Under the name `PROBE` a mask function and an attention function are registered. The mask function makes a mask as
transformers does and remembers what it means. The attention function notes the shapes of keys and values, and which of
these masks it got. A layer with another mask made its own, and the paged cache cannot serve it. Nor can a layer be
served that passes more tensors to the function: choices of positions, or biases.
"""

import inspect
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from rollout.models.fallback.cache import CacheFacts, NotingCache, base_of, cache_argument
from rollout.models.fallback.layer_windows import MaskFunction, Visible, read_mask
from rollout.models.spec import KVShape

PROBE = "rollout_probe"
_TOKENS = 8
#: Tensors in the call of an attention function that say nothing of scores.
_KNOWN = {"position_ids", "cache_position"}


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """The KV of a layer, and the tokens that its tokens see."""

    index: int  # among the KV of the pool
    kv: KVShape
    window: int | None
    softcap: bool  # its scores are bounded
    sinks: bool  # its softmax has a score without a value
    shared: bool = False  # an earlier layer keeps its keys and values


@dataclass(slots=True)
class _Notes:
    """The calls that a probe has seen."""

    #: Each mask with its meaning, or the reason why it cannot be served.
    masks: list[tuple[torch.Tensor, Visible | ValueError]] = field(default_factory=list)
    layers: dict[nn.Module, LayerFacts] = field(default_factory=dict)
    #: The keys of each layer that keeps its own.
    keys: list[torch.Tensor] = field(default_factory=list)


_NOTES: ContextVar[_Notes] = ContextVar("rollout_probe_notes")


def probe_layers(module: Any, vocab: int) -> dict[nn.Module, LayerFacts]:
    """The facts about the attention layers of a causal LM, by the module that calls the attention function.

    Raises ValueError that says which layer cannot be served, and why.
    """
    before, notes = module.config._attn_implementation, _Notes()
    token = _NOTES.set(notes)
    module.set_attn_implementation(PROBE)
    try:
        _forward(module, vocab, use_cache=False)
    finally:
        module.set_attn_implementation(before)
        _NOTES.reset(token)
    return notes.layers


def probe_cache(module: Any, vocab: int) -> CacheFacts:
    """Find the data that each layer keeps in a cache of transformers. Raises ValueError if pools cannot keep it."""
    cache = NotingCache(module)
    _forward(module, vocab, use_cache=True, **{cache_argument(module): cache})
    return cache.facts()


def _forward(module: Any, vocab: int, **arguments: Any) -> None:
    device = module.get_input_embeddings().weight.device
    positions = torch.arange(_TOKENS, device=device)[None]
    if "position_ids" in inspect.signature(base_of(module).forward).parameters:
        arguments["position_ids"] = positions
    base_of(module)(input_ids=positions % vocab, **arguments)


def _probe_mask(*, q_length: int, kv_length: int, mask_function: MaskFunction, **rest: Any) -> torch.Tensor:
    """A mask of 0 and 1 that layers may hand on; what it means is noted."""
    visible: Visible | ValueError
    try:
        visible = read_mask(mask_function)
    except ValueError as error:  # no layer may use it
        visible = error
    mask = torch.ones(1, 1, q_length, kv_length, device=rest.get("device"))
    _NOTES.get().masks.append((mask, visible))
    return mask


def _is_whole(given: torch.Tensor | None, mask: torch.Tensor) -> bool:
    """Whether a layer got this mask, or a slice of the whole mask."""
    return given is not None and given.shape == mask.shape and given.data_ptr() == mask.data_ptr()


def _probe_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Note the layer; its output is zeros."""
    notes = _NOTES.get()
    index = len(notes.layers)
    if module in notes.layers:
        number = list(notes.layers).index(module)
        raise ValueError(f"its layer {number} computes attention twice for a token")
    visible = next((visible for mask, visible in notes.masks if _is_whole(attention_mask, mask)), None)
    if visible is None:
        what = "is called without a mask" if attention_mask is None else "makes its mask itself"
        raise ValueError(f"its layer {index} {what}, so its attention pattern is unknown")
    if isinstance(visible, ValueError):
        raise ValueError(f"in its layer {index} {visible}")
    unknown = sorted(name for name, value in rest.items() if name not in _KNOWN and isinstance(value, torch.Tensor))
    if unknown or rest.get("is_causal") is False:
        what = " and ".join(unknown) or "is_causal = False"
        raise ValueError(f"its layer {index} passes {what} to its attention, which the paged cache cannot apply")
    if key.shape[2] != query.shape[2]:
        raise ValueError(f"its layer {index} attends to tokens outside of the sequence")
    kv = KVShape(key.shape[1], key.shape[3], value.shape[3])
    if value.shape[1] != kv.heads or query.shape[1] % kv.heads or query.shape[3] != kv.k_dim:
        raise ValueError(
            f"its layer {index} has {query.shape[1]} query heads, {kv.heads} of keys, {value.shape[1]} of values"
        )
    place = next((place for place, known in enumerate(notes.keys) if known is key), None)
    if place is None:
        notes.keys.append(key)
    facts = len(notes.keys) - 1 if place is None else place, kv, visible.window
    notes.layers[module] = LayerFacts(*facts, softcap is not None, s_aux is not None, place is not None)
    return value.new_zeros(1, query.shape[2], query.shape[1], kv.v_dim), None


AttentionInterface.register(PROBE, _probe_attention)
AttentionMaskInterface.register(PROBE, _probe_mask)
