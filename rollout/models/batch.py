"""What a step tells the model beside its tokens: where they sit in the paged KV cache.

An `AttentionBatch` describes one step and is made anew for each: what its layers share (pages to gather, masks) is
computed by the first layer that asks and kept.

Legend: T tokens of the step, B rows, P pages (of the cache, or of a row), S page size, G KV heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from rollout_kernels import DecodePlan, plan_paged_decode

from rollout.models.spec import ModelSpec

if TYPE_CHECKING:
    from rollout_kernels.triton_decode_plan import DecodeWork


class Chunk(NamedTuple):
    """A piece of one row's prompt, in host integers."""

    query_start: int  # where its tokens begin in the step
    query_len: int  # how many they are
    context_len: int  # tokens of the row in the cache, these included


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
    _plans: dict[int | None, DecodePlan | DecodeWork] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def decode_plan(self, window: int | None, k_cache_PSGD: torch.Tensor) -> DecodePlan | DecodeWork:
        """What the decode layers of this window share; their caches have one shape and dtype."""
        plan = self._plans.get(window)
        if plan is None:
            plan = plan_paged_decode(
                self.page_table_BP, self.context_lens_B, k_cache_PSGD, window=window, max_context=self.max_context
            )
            self._plans[window] = plan
        return plan


@dataclass(frozen=True, slots=True)
class KVCache:
    """The pool of KV pages: for each layer, keys and values of shape [P, S, G, D]."""

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    page_size: int

    @classmethod
    def allocate(
        cls, spec: ModelSpec, pages: int, page_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> KVCache:
        """Allocate `pages` pages of `page_size` tokens, zeroed: what is masked still has to be finite."""
        shape = (pages, page_size, spec.kv_heads, spec.head_dim)

        def pool() -> list[torch.Tensor]:
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.layers)]

        return cls(k=pool(), v=pool(), page_size=page_size)
