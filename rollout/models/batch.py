"""What a step tells the model beside its tokens: where they sit in the paged KV cache.

An `AttentionBatch` describes one step and is made anew for each: what its layers share (pages to gather, masks) is
computed by the first layer that asks and kept.

Legend: T tokens of the step, B rows, P pages (of the cache, or of a row), S page size, G KV heads, D head dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rollout_kernels import DecodePlan, plan_paged_decode

from rollout.models.adapters import StepAdapters
from rollout.models.spec import ModelSpec

if TYPE_CHECKING:
    from rollout_kernels.attention.triton_decode_plan import DecodeWork


class Chunk(NamedTuple):
    """A piece of one row's prompt, in host integers."""

    query_start: int  # where its tokens begin in the step
    query_len: int  # how many they are
    context_len: int  # tokens of the row in the cache, these included


@dataclass(frozen=True, slots=True)
class ExpertRecord:
    """Where a step keeps which experts its tokens take: token t's in row t."""

    experts_TLK: torch.Tensor  # uint8 or uint16; L sparse layers, K experts; rows may be apart, and more than tokens
    rows_T: torch.Tensor  # int64: 0, 1, 2, ...; the same as a tensor, which kernels take

    def layer(self, index: int, tokens: int) -> torch.Tensor:
        """What the sparse layer `index` (counted among those) writes for a step of so many tokens, [T, K]."""
        return self.experts_TLK[:tokens, index]


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
    chunks: tuple[Chunk, ...] | None = None
    query_starts_C1: torch.Tensor | None = None  # int32: where each chunk's tokens begin, and their total; for GPUs
    experts: ExpertRecord | None = None  # written by sparse layers
    adapters: StepAdapters | None = None  # where a row of the step has one
    _shared: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def shared(self, key: Any, make: Callable[[], Any]) -> Any:
        """What the layers of the step have in common: the first that asks for `key` has it made."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def decode_plan(
        self, window: int | None, k_cache_PSGD: torch.Tensor, q_TQD: torch.Tensor
    ) -> DecodePlan | DecodeWork:
        """What the decode layers of this window share; their caches, and their queries, are alike."""
        return self.shared(
            window,
            lambda: plan_paged_decode(
                self.page_table_BP,
                self.context_lens_B,
                k_cache_PSGD,
                heads=q_TQD.shape[1],
                window=window,
                max_context=self.max_context,
                dtype=q_TQD.dtype,
            ),
        )


class LayerKV(NamedTuple):
    """One layer's part of the pool."""

    k_PSGD: torch.Tensor
    v_PSGD: torch.Tensor
    scales_P2GS: torch.Tensor | None  # of keys and values that are e4m3 codes


@dataclass(frozen=True, slots=True)
class KVCache:
    """The pool of KV pages: for each layer, keys and values of shape [P, S, G, D].

    Either in the model's dtype, or as e4m3 codes (uint8), and then with float32 scales [P, 2, G, S], keys' first.
    """

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    page_size: int
    scales: list[torch.Tensor] = field(default_factory=list)  # none where there are no codes

    def layer(self, index: int) -> LayerKV:
        """What a layer reads and writes."""
        return LayerKV(self.k[index], self.v[index], self.scales[index] if self.scales else None)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Everything that a page consists of; the first dimension of each are pages."""
        return [*self.k, *self.v, *self.scales]

    @classmethod
    def allocate(
        cls,
        spec: ModelSpec,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        zeros: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None,
    ) -> KVCache:
        """Allocate `pages` pages of `page_size` tokens, zeroed: what is masked still has to be finite.

        `dtype` is the model's, or `torch.float8_e4m3fn` for codes and scales. `zeros` makes the tensors, by default
        torch does, on `device`.
        """
        coded = dtype == torch.float8_e4m3fn
        shape = (pages, page_size, spec.kv_heads, spec.head_dim)

        def pool(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
            make = zeros or functools.partial(_zeros, device)
            return [make(shape, dtype) for _ in range(spec.layers)]

        k, v = (pool(shape, torch.uint8 if coded else dtype) for _ in range(2))
        scales = pool((pages, 2, spec.kv_heads, page_size), torch.float32) if coded else []
        return cls(k=k, v=v, page_size=page_size, scales=scales)


def _zeros(device: torch.device | str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)
