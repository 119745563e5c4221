"""A cache of transformers for one piece of a step: its layers keep nothing themselves.

Keys and values go to the pages of the pool and come from there; states come from the state pool, and go back to it when
the piece has run. What each layer keeps was noted by one forward (`probe_cache`) under caches of the same classes.

Legend: B rows, N tokens of each row in the piece, L tokens of a row's context, G KV heads, D dimension, P pages,
S page size, R places of the state pool.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from rollout.models.batch import AttentionBatch, KVCache, zeroed
from rollout.models.spec import KVShape
from rollout.models.state_pool import States

#: Names of the argument that modules take a cache by, the newest first.
_ARGUMENTS = ("cache", "past_key_values", "cache_params")


class StateShape(NamedTuple):
    """A state tensor of a row in one layer."""

    recurrent: bool  # False: the last inputs of a convolution
    number: int  # its place among the layer's states
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one row's state."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class LayerCache(NamedTuple):
    """One layer's data."""

    kv: int | None  # its place among the KV of the pool
    indexed: int | None  # the same of the keys that choose positions
    states: tuple[StateShape, ...]
    state_count: int  # states that transformers' class of this layer has; 0 for other classes


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """The data of all layers."""

    layers: tuple[LayerCache, ...]
    kv_shapes: tuple[KVShape, ...]


@dataclass(frozen=True, slots=True)
class ModuleStates(States):
    """The states of all layers with states, [R, ...] each."""

    layers: list[tuple[torch.Tensor, ...]]
    drafts: None = None

    @classmethod
    def allocate(
        cls,
        layers: Sequence[LayerCache],
        places: int,
        device: torch.device | str,
        zeros: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None,
    ) -> ModuleStates:
        """Memory for `places` states; `zeros` makes the tensors, by default torch makes them on `device`."""

        def make(state: StateShape) -> torch.Tensor:
            shape = places, *state.shape
            return zeroed(device, shape, state.dtype) if zeros is None else zeros(shape, state.dtype)

        return cls([tuple(map(make, layer.states)) for layer in layers if layer.states])


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that go through the module together, [B, N], and their places."""

    batch: AttentionBatch
    kv: KVCache
    before: int  # tokens that the module takes for earlier ones
    slots_T: torch.Tensor  # int64, [B * N]
    fresh: bool  # no row has earlier tokens
    context_BL: torch.Tensor | None = None  # slots of each row's whole context; None: our attention reads the pages
    visible_BL: torch.Tensor | None = None  # false where a row's context has not begun


def base_of(module: Any) -> Any:
    """The part of a causal LM before its output layer."""
    return getattr(module, "model", module) if module.base_model is module else module.base_model


def cache_argument(module: Any) -> str:
    """The name of the argument of a base model that takes a cache. Raises ValueError if it takes none."""
    known = inspect.signature(base_of(module).forward).parameters
    found = next((name for name in _ARGUMENTS if name in known), None)
    if found is None:
        raise ValueError("its code does not use a cache of transformers")
    return found


class _KV(DynamicLayer):
    """The keys and values of a layer, in the pages."""

    def __init__(self, piece: Piece, layer: LayerCache) -> None:
        super().__init__()
        self._piece, self._layer = piece, layer

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the piece's keys and values; the keys and values that the layer attends to, [B, G, L, D]."""
        piece = self._piece
        if piece.context_BL is None:
            return key_states, value_states
        assert self._layer.kv is not None, "the layer kept keys when it was tried"
        cache = piece.kv.layer(self._layer.kv)
        return _kept(cache.k_PSGD, key_states, piece), _kept(cache.v_PSGD, value_states, piece)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """The same for keys that choose positions, [B, N, D] to [B, L, D]."""
        return self.update_index(indexer_key_states[:, None])[:, 0]

    def update_index(self, idx_k: torch.Tensor) -> torch.Tensor:
        """The same for keys that choose positions, [B, G, N, D] to [B, G, L, D]."""
        piece = self._piece
        if piece.context_BL is None:
            return idx_k
        assert self._layer.indexed is not None, "the layer kept keys when it was tried"
        return _kept(piece.kv.layer(self._layer.indexed).k_PSGD, idx_k, piece)

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """The positions of the tokens before the piece, [3, B, tokens]: the code that asks adds its own positions."""
        piece = self._piece
        if not piece.before:
            return None
        first_B1 = piece.batch.positions_T.view(len(piece.batch.page_table_BP), -1)[:, :1]
        earlier_BL = first_B1 - piece.before + torch.arange(piece.before, device=first_B1.device)
        return earlier_BL.clamp(min=0).expand(3, -1, -1)  # below 0 a row's context has not begun

    @indexer_position_ids.setter
    def indexer_position_ids(self, _: torch.Tensor | None) -> None:
        """Nothing is kept: they follow from the piece."""

    def get_seq_length(self) -> int:
        """Tokens before the piece."""
        return self._piece.before

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Tokens that a mask covers, and the first one."""
        return self._piece.before + query_length, 0


class _State(LinearAttentionLayer):
    """The states of a layer: transformers' own class, with states from the pool."""

    device: Any
    dtype: Any

    def __init__(self, piece: Piece, layer: LayerCache) -> None:
        LinearAttentionLayer.__init__(self, layer.state_count)

    def load(
        self, layer: LayerCache, tensors: Sequence[torch.Tensor], places_B: torch.Tensor, begun_B: torch.Tensor
    ) -> None:
        """Take the rows' states out of the pool; of a row that has not begun they are zeros."""
        for state, pool in zip(layer.states, tensors, strict=True):
            kept, number = pool.index_select(0, places_B), state.number
            value = kept.where(begun_B.view(-1, *[1] * len(state.shape)), 0)
            if state.recurrent:
                self.recurrent_states[number] = value
                self.is_recurrent_states_initialized[number] = True
            else:
                self.conv_states[number] = value
                self.is_conv_states_initialized[number] = True
                self.conv_kernel_size[number] = state.shape[-1]
                self.dtype = value.dtype
            self.device = value.device
            self.has_previous_state[number] = True

    def save(self, layer: LayerCache, tensors: Sequence[torch.Tensor], places_B: torch.Tensor) -> None:
        """Put the rows' states into the pool."""
        for state, pool in zip(layer.states, tensors, strict=True):
            value = (self.recurrent_states if state.recurrent else self.conv_states)[state.number]
            assert value is not None, "the layer kept a state when it was tried"
            if not state.recurrent and value.shape[-1] < state.shape[-1]:  # a short prompt
                value = F.pad(value, (state.shape[-1] - value.shape[-1], 0))
            pool.index_copy_(0, places_B, value.to(pool.dtype))


class _KVAndState(_State, _KV):  # type: ignore[misc, override]  # as transformers' own class of both
    """KV and a state in one layer."""

    def __init__(self, piece: Piece, layer: LayerCache) -> None:
        _KV.__init__(self, piece, layer)
        _State.__init__(self, piece, layer)


class PieceCache(DynamicCache):
    """The cache of one piece."""

    def __init__(self, facts: CacheFacts, piece: Piece) -> None:
        self._facts, self._piece = facts, piece
        Cache.__init__(self, layers=[_class_of(layer)(piece, layer) for layer in facts.layers])
        if not piece.fresh:
            begun_B = piece.batch.positions_T.view(len(piece.batch.page_table_BP), -1)[:, 0] > 0
            for layer, facts_of, tensors in self._states():
                layer.load(facts_of, tensors, self._places, begun_B)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the piece, for layers without KV as well."""
        return self._piece.before

    def save_states(self) -> None:
        """Put the states after the piece into the pool."""
        for layer, facts_of, tensors in self._states():
            layer.save(facts_of, tensors, self._places)

    @property
    def _places(self) -> torch.Tensor:
        places_B = self._piece.batch.rows_B
        assert places_B is not None, "a step of a model with states names the places of its rows"
        return places_B

    def _states(self) -> Iterator[tuple[_State, LayerCache, tuple[torch.Tensor, ...]]]:
        pairs = [(layer, facts) for layer, facts in zip(self.layers, self._facts.layers, strict=True) if facts.states]
        for (layer, facts), tensors in zip(pairs, self._piece.kv.states.layers, strict=True):
            assert isinstance(layer, _State)
            yield layer, facts, tensors


def _class_of(layer: LayerCache) -> Any:
    if layer.state_count == 0:
        return _KV
    return _State if layer.kv is None else _KVAndState


def _kept(pages_PSGD: torch.Tensor, new_BGND: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Store new rows in the pages; returns the rows of the whole context, [B, G, L, D]."""
    if not pages_PSGD.shape[-1]:
        return new_BGND
    flat, context_BL = pages_PSGD.flatten(0, 1), piece.context_BL
    assert context_BL is not None
    flat.index_copy_(0, piece.slots_T, new_BGND.transpose(1, 2).flatten(0, 1).to(flat.dtype))
    return flat[context_BL].transpose(1, 2).to(new_BGND.dtype)


# --- what the layers keep ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Notes:
    kv_shapes: list[KVShape] = field(default_factory=list)

    def add(self, shape: KVShape) -> int:
        self.kv_shapes.append(shape)
        return len(self.kv_shapes) - 1


class _NotedKV(DynamicLayer):
    def __init__(self, notes: _Notes) -> None:
        super().__init__()
        self._notes, self.kv, self.indexed = notes, None, None

    kv: int | None
    indexed: int | None
    indexer_position_ids: torch.Tensor | None = None

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if self.kv is not None:
            raise ValueError("a layer of its code keeps two sets of keys and values")
        heads = key_states.shape[1]
        if value_states.shape[1] != heads:
            raise ValueError(f"a layer of its code has {heads} heads of keys and {value_states.shape[1]} of values")
        self.kv = self._notes.add(KVShape(heads, key_states.shape[3], value_states.shape[3]))
        return key_states, value_states

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        return self.update_index(indexer_key_states[:, None])[:, 0]

    def update_index(self, idx_k: torch.Tensor) -> torch.Tensor:
        self.indexed = self._notes.add(KVShape(idx_k.shape[1], idx_k.shape[3], 0))
        return idx_k

    def get_seq_length(self) -> int:
        """No tokens are before the probe's."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The probe's tokens."""
        return query_length, 0


class _NotedState(LinearAttentionLayer):
    device: Any

    def __init__(self, notes: _Notes, count: int) -> None:
        LinearAttentionLayer.__init__(self, count)


class _NotedBoth(_NotedState, _NotedKV):  # type: ignore[misc, override]  # as above
    def __init__(self, notes: _Notes, count: int) -> None:
        _NotedKV.__init__(self, notes)
        _NotedState.__init__(self, notes, count)


class NotingCache(DynamicCache):
    """The cache of a first forward: notes what each layer keeps."""

    def __init__(self, module: Any) -> None:
        self._notes = _Notes()
        Cache.__init__(self, layers=[self._noting(layer) for layer in DynamicCache(config=module.config).layers])

    def _noting(self, layer: Any) -> Any:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            both = isinstance(layer, CacheLayerMixin)
            return (_NotedBoth if both else _NotedState)(self._notes, layer.number_of_states)
        if isinstance(layer, CacheLayerMixin):
            if type(layer).__module__ != Cache.__module__ and not hasattr(layer, "update_index"):
                raise ValueError(f"its layers keep more than keys, values and states ({type(layer).__name__})")
            return _NotedKV(self._notes)
        return layer

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """No tokens are before the probe's."""
        return 0

    def facts(self) -> CacheFacts:
        """Each layer's data, after the forward."""
        return CacheFacts(tuple(map(_facts_of, self.layers)), tuple(self._notes.kv_shapes))


def _facts_of(layer: Any) -> LayerCache:
    kv, indexed = getattr(layer, "kv", None), getattr(layer, "indexed", None)
    if not isinstance(layer, LinearAttentionLayer):
        return LayerCache(kv, indexed, (), 0)
    states = [
        StateShape(recurrent, number, tuple(value.shape[1:]), value.dtype)
        for recurrent, values in ((False, layer.conv_states), (True, layer.recurrent_states))
        for number, value in values.items()
        if value is not None
    ]
    return LayerCache(kv, indexed, tuple(states), layer.number_of_states)
