"""The inputs of a step besides its tokens: their places in the paged KV cache, and the cache itself.

An `AttentionBatch` describes one step and is made anew for each. Tensors that layers share (pages to gather, masks) are
computed by the first layer that needs them, and kept.

Legend: T tokens of the step, B rows, P pages (of the cache, or of a row), S page size, G KV heads, D head dimension.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypedDict

import numpy as np
import torch
from rollout_kernels import DecodePlan, plan_paged_decode

from rollout.models.lora_slots import StepAdapters
from rollout.models.spec import CODED_KV, WHOLE, KVShape, Shard
from rollout.models.state_pool import NO_STATES, States

if TYPE_CHECKING:
    from rollout_kernels.attention.triton_decode_plan import DecodeWork

_ALIGNED = 64  # bytes, as torch aligns tensors


class PromptChunk(NamedTuple):
    """A piece of one row's prompt, in host integers."""

    query_start: int  # its first token in the step
    query_len: int  # number of its tokens
    context_len: int  # tokens of the row in the cache, these included


@dataclass(frozen=True, slots=True)
class ExpertRecord:
    """Memory for the experts of a step's tokens: token t's in row t."""

    experts_TLK: torch.Tensor  # uint8 or uint16; L sparse layers, K experts; strided, may have more rows than tokens
    rows_T: torch.Tensor  # int64: 0, 1, 2, ...; the row numbers as a tensor, for kernels

    def layer(self, index: int, tokens: int) -> torch.Tensor:
        """The part of a step of `tokens` tokens that the sparse layer `index` (counted among those) writes, [T, K]."""
        return self.experts_TLK[:tokens, index]


@dataclass(frozen=True, slots=True)
class HiddenTaps:
    """Memory for the residual stream before some layers, which a draft model reads."""

    layers: tuple[int, ...]
    hidden_TF: torch.Tensor  # a part as wide as the stream for each of the layers; may have more rows than tokens

    def take(self, layer: int, x_TH: torch.Tensor) -> None:
        """Keep the stream before `layer`, if it is wanted."""
        if layer in self.layers:
            tokens, width = x_TH.shape
            begin = self.layers.index(layer) * width
            self.hidden_TF[:tokens, begin : begin + width].copy_(x_TH)


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Positions and cache places of one step's tokens.

    Decode: `chunks` is None and T == B, one token a row, at position `context_lens_B - 1`. Prefill: `chunks[i]` belongs
    to row i of the page table. A padding row has only page 0 and may have a context length of 0.
    """

    positions_T: torch.Tensor  # int32 or int64
    kv_slots_T: torch.Tensor  # page * page_size + offset, int32 or int64
    page_table_BP: torch.Tensor  # int32; entries past a row's context may be any page that exists
    context_lens_B: torch.Tensor  # int32, this step's tokens included
    max_context: int  # host-side bound on context_lens_B
    chunks: tuple[PromptChunk, ...] | None = None
    query_starts_C1: torch.Tensor | None = None  # int32: first token of each chunk, and their total; for GPUs
    experts: ExpertRecord | None = None  # written by sparse layers
    adapters: StepAdapters | None = None  # None if no row of the step has one
    rows_B: torch.Tensor | None = None  # int64: place of each row's state; for models that have states
    #: int32: drafts after each row, -1 for a draft row; of steps with drafts, for models that have states.
    behind_B: torch.Tensor | None = None
    segments_SW: torch.Tensor | None = None  # int32: what decode rows share, as `plan_paged_decode` takes it
    wanted: WantedTokens | None = None  # the forward returns the hidden states of these alone; None: of all
    #: Positions of the rotary embedding where they are not `positions_T`: [T], or [3, T] by axis in steps with images.
    rope_positions: torch.Tensor | None = None
    images: StepImages | None = None  # tokens of the step that are images
    taps: HiddenTaps | None = None  # hidden states that are kept for a draft model
    own_chunks: tuple[int, ...] | None = None  # chunks of this rank, if rows are dealt; None: all
    _shared: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def rotary_positions(self) -> torch.Tensor:
        return self.positions_T if self.rope_positions is None else self.rope_positions

    def wanted_at(self, at_S: torch.Tensor, chunk_S: torch.Tensor, ends: Iterable[int]) -> WantedTokens:
        """The tokens at these places of a prefill, each the last of its chunk, whose context is in `ends`."""
        chunks = tuple(PromptChunk(i, 1, end) for i, end in enumerate(ends))
        batch = AttentionBatch(
            positions_T=self.positions_T[at_S],
            kv_slots_T=self.kv_slots_T[at_S],
            page_table_BP=self.page_table_BP[chunk_S],
            context_lens_B=self.context_lens_B[chunk_S],
            max_context=self.max_context,
            chunks=chunks,
            query_starts_C1=torch.arange(len(chunks) + 1, dtype=torch.int32, device=at_S.device),
            adapters=None if self.adapters is None else self.adapters.at(at_S),
        )
        return WantedTokens(at_S, batch)

    def shared(self, key: Any, make: Callable[[], Any]) -> Any:
        """A value that the layers of the step have in common; the first layer that asks for `key` makes it."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def in_chunks(self, size: int, page_size: int) -> AttentionBatch:
        """The step for layers in which a token sees only its own chunk of `size` positions, which are whole pages."""
        return self.shared(("chunks of positions", size), lambda: self._in_chunks(size, page_size))

    def _in_chunks(self, size: int, page_size: int) -> AttentionBatch:
        check_chunk(size, page_size)
        device, most = self.page_table_BP.device, min(self.max_context, size)
        if self.chunks is None:
            number_B = (self.context_lens_B - 1).clamp_min(0) // size
            table_BP = self._pages_from(None, number_B * (size // page_size), size // page_size)
            lens_B = self.context_lens_B - number_B * size
            return replace(self, page_table_BP=table_BP, context_lens_B=lens_B, max_context=most, segments_SW=None)
        rows, pages, spans = list[int](), list[int](), list[PromptChunk]()
        for row, (start, length, context) in enumerate(self.chunks):
            at = context - length
            while at < context:
                begin = at // size * size
                end = min(begin + size, context)
                rows.append(row)
                pages.append(begin // page_size)
                spans.append(PromptChunk(start, end - at, end - begin))
                start, at = start + end - at, end
        starts = [*(span.query_start for span in spans), sum(span.query_len for span in spans)]
        return replace(
            self,
            page_table_BP=self._pages_from(
                torch.tensor(rows, device=device), torch.tensor(pages, device=device), size // page_size
            ),
            context_lens_B=torch.tensor([span.context_len for span in spans], dtype=torch.int32, device=device),
            max_context=most,
            chunks=tuple(spans),
            query_starts_C1=torch.tensor(starts, dtype=torch.int32, device=device),
            segments_SW=None,
        )

    def _pages_from(self, rows_S: torch.Tensor | None, first_S: torch.Tensor, count: int) -> torch.Tensor:
        """Up to `count` pages of these rows (None: of all), from a page on."""
        table_SP = self.page_table_BP if rows_S is None else self.page_table_BP.index_select(0, rows_S)
        columns = torch.arange(min(count, table_SP.shape[1]), device=table_SP.device)
        at_SP = (first_S[:, None] + columns).clamp_max(table_SP.shape[1] - 1)
        return table_SP.gather(1, at_SP.long())

    def keep(self, key: Any, value: Any) -> None:
        """Give the layers after this one a value, in the place of an earlier one of this key."""
        self._shared[key] = value

    def kept(self, key: Any) -> Any:
        """The last value that a layer before this one kept under `key`."""
        return self._shared[key]

    def decode_plan(
        self, window: int | None, k_cache_PSGD: torch.Tensor, q_TQD: torch.Tensor
    ) -> DecodePlan | DecodeWork:
        """The plan of decode attention, shared by layers with the same window and the same shapes of heads."""
        return self.shared(
            (window, k_cache_PSGD.shape[2:], q_TQD.shape[1]),
            lambda: plan_paged_decode(
                self.page_table_BP,
                self.context_lens_B,
                k_cache_PSGD,
                heads=q_TQD.shape[1],
                window=window,
                max_context=self.max_context,
                dtype=q_TQD.dtype,
                segments_SW=self.segments_SW,
            ),
        )


@dataclass(frozen=True, slots=True)
class StepImages:
    """Tokens of a prefill whose embeddings a vision tower made."""

    at_N: torch.Tensor  # int64: where they are in the step; each once
    embeddings_NW: torch.Tensor  # their embedding, then the embeddings added after the first layers, in one row

    def replace_in(self, x_TH: torch.Tensor) -> torch.Tensor:
        """The embeddings of the step, changed in place."""
        return x_TH.index_copy_(0, self.at_N, self.embeddings_NW[:, : x_TH.shape[1]])

    def add_after(self, layer: int, x_TH: torch.Tensor) -> torch.Tensor:
        """The residual stream after this layer, changed in place."""
        hidden = x_TH.shape[1]
        begin = (1 + layer) * hidden
        if begin < self.embeddings_NW.shape[1]:
            x_TH.index_add_(0, self.at_N, self.embeddings_NW[:, begin : begin + hidden])
        return x_TH


class BatchFields(TypedDict, total=False):
    """The fields of an `AttentionBatch` that features give."""

    adapters: StepAdapters
    experts: ExpertRecord
    images: StepImages
    own_chunks: tuple[int, ...]
    rope_positions: torch.Tensor
    taps: HiddenTaps | None


@dataclass(frozen=True, slots=True)
class WantedTokens:
    """Tokens of a prefill whose hidden states are wanted: after the last layer's KV, only they are computed."""

    at_S: torch.Tensor  # int64: where they are in the step
    batch: AttentionBatch  # a chunk for each of them


def check_chunk(size: int, page_size: int) -> None:
    """Raise ValueError unless a chunk of this many positions is whole pages."""
    if size % page_size:
        raise ValueError(f"page_size ({page_size}) must be a divisor of attention_chunk_size ({size})")


class KeepsKV(Protocol):
    """A model as the pool sees it."""

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """The KV of a token, for each layer that has KV."""


class LayerKV(NamedTuple):
    """One layer's part of the pool."""

    k_PSGD: torch.Tensor
    v_PSGD: torch.Tensor
    scales_P2GS: torch.Tensor | None  # scales of keys and values that are e4m3 codes


@dataclass(frozen=True, slots=True)
class KVCache:
    """The pool of KV pages: for each layer that has KV, keys and values [P, S, G, D] with the heads of that layer.

    Keys and values of a layer may have different dimensions. Where values are in the keys, `v` has no dimension, or the
    keys of an indexer.

    Either in the model's dtype, or as e4m3 codes (uint8), and then with float32 scales [P, 2, G, S], keys' first.
    With `tokens`, a page also holds the ids of its tokens; drafts by n-grams are found there.
    """

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    page_size: int
    scales: list[torch.Tensor] = field(default_factory=list)  # empty where there are no codes
    states: States = NO_STATES  # states of the layers without KV
    tokens: torch.Tensor | None = None  # int32 [P, S]; None where nothing reads them
    #: Rows are dealt to ranks: page p of this rank of them is rank * pages + p in a step.
    dealt: Shard = WHOLE
    #: Contexts are split over ranks: k, v and scales have this rank's part of the positions of a page.
    split: Shard = WHOLE

    @property
    def whole(self) -> bool:
        """True if this rank has all positions of all rows."""
        return self.dealt.size == self.split.size == 1

    def layer(self, index: int) -> LayerKV:
        """The part that a layer reads and writes; `index` counts the layers that have KV."""
        return LayerKV(self.k[index], self.v[index], self.scales[index] if self.scales else None)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the pool of pages; the first dimension of each is the page."""
        return [
            *self.k,
            *(v for v in self.v if v.shape[-1]),
            *self.scales,
            *([] if self.tokens is None else [self.tokens]),
        ]

    def note_tokens(self, kv_slots_T: torch.Tensor, tokens_T: torch.Tensor) -> None:
        """Store the ids of a step's tokens in the pages, if pages hold ids."""
        if self.tokens is not None:
            self.tokens.view(-1).index_copy_(0, kv_slots_T.long(), tokens_T.int())

    @property
    def pages(self) -> int:
        """Pages of this rank's pool, the dump page included."""
        return len(self.k[0])

    @property
    def pages_of_all(self) -> int:
        """Pages that steps can name: pages of all ranks if rows are dealt."""
        return self.pages * self.dealt.size

    def has_page(self, pages: torch.Tensor) -> torch.Tensor:
        """Which of these pages of a step this rank has, bool."""
        local = pages - self._first
        return (local >= 0) & (local < self.pages)

    def local_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """Pages of a step in this rank's own numbers; the dump page for pages of other ranks."""
        return pages if self.dealt.size == 1 else (pages - self._first).masked_fill(~self.has_page(pages), 0)

    def local_slots(self, slots_T: torch.Tensor) -> torch.Tensor:
        """Like `local_pages`, for slots: page * page_size + offset."""
        foreign_T = ~self.has_page(slots_T // self.page_size)
        return (slots_T - self._first * self.page_size).masked_fill(foreign_T, 0)

    @property
    def _first(self) -> int:
        return self.dealt.rank * self.pages

    @classmethod
    def allocate(
        cls,
        spec: KeepsKV,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        zeros: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None,
        states: States = NO_STATES,
        tokens: bool = False,
        split: Shard = WHOLE,
    ) -> KVCache:
        """Allocate `pages` pages of `page_size` tokens, zeroed: attention masks hide values, but not NaN.

        `spec` says what each layer that has KV keeps of a token.
        `dtype` is the model's, or of `CODED_KV` for codes and scales. `zeros` makes the tensors; by default
        torch makes them on `device`. `states` is needed by a model that has states. `tokens`: pages have token ids.
        With a `split` contexts are split over ranks.
        """
        coded = dtype in CODED_KV
        make = zeros or functools.partial(zeroed, device)
        k_dtype = torch.uint8 if coded else dtype
        v_dtype = torch.int8 if dtype == torch.int8 else k_dtype
        part = page_size // split.size
        k = [make((pages, part, shape.heads, shape.k_dim), k_dtype) for shape in spec.kv_shapes]
        v = [
            make((pages, part, shape.heads, shape.v_dim), v_dtype) if shape.v_dim else keys[..., :0]
            for shape, keys in zip(spec.kv_shapes, k, strict=True)
        ]
        scale_shapes = [(pages, 2, shape.heads, part) for shape in spec.kv_shapes] if coded else []
        scales = [make(shape, torch.float32) for shape in scale_shapes]
        ids = make((pages, page_size), torch.int32) if tokens else None
        return cls(k=k, v=v, page_size=page_size, scales=scales, states=states, tokens=ids, split=split)


def zeroed(device: torch.device | str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeroed memory; on a CPU the system gives a page of it when it is first written."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    nbytes = math.prod(shape) * dtype.itemsize
    memory = torch.from_numpy(np.zeros(nbytes + _ALIGNED, np.uint8))  # torch would write the zeros
    return memory[-memory.data_ptr() % _ALIGNED :][:nbytes].view(dtype).view(shape)
