"""The record of one step: which experts each of its tokens took, written by the routers into the slot.

    [tokens, 1 + words] int32     where the token's KV is (page * page_size + place) | its experts, packed

Packed: their numbers in all sparse layers, layer by layer, likeliest first, in 8 or 16 bits, and up to a whole word of
padding. `routing` says what the host makes of it.

Legend: N tokens, T those of a step, L sparse layers, K experts a token, W words.
"""

from __future__ import annotations

import torch

from rollout.engine.messages import RoutingShape
from rollout.engine.step.expert_trace import entry_words, record_words
from rollout.models.batch import AttentionBatch, ExpertRecord
from rollout.models.spec import ModelSpec


def routing_shape(spec: ModelSpec) -> RoutingShape | None:
    """The shape of an entry; None for a model without experts."""
    moe = spec.moe
    return None if moe is None else RoutingShape(sum(moe.layers), moe.top_k, moe.experts)


class StepRecord:
    """The record of one step on the device, over int32 words that somebody else owns."""

    def __init__(self, shape: RoutingShape, words: torch.Tensor) -> None:
        width = 1 + entry_words(shape)
        self._shape = shape
        self._rows_NW = words.view(-1, width)
        packed = self._rows_NW[:, 1:].view(torch.uint8 if shape.dtype.itemsize == 1 else torch.uint16)
        experts_NLK = packed[:, : shape.layers * shape.top_k].unflatten(1, (shape.layers, shape.top_k))
        rows_N = torch.arange(len(experts_NLK), dtype=torch.int64, device=words.device)
        self.experts = ExpertRecord(experts_NLK, rows_N)

    def end(self, batch: AttentionBatch) -> None:
        """The forward of `batch` has written its experts: write where its tokens' KV is. On the compute stream."""
        slots_T = batch.kv_slots_T
        self._rows_NW[: len(slots_T), 0].copy_(slots_T)

    def another(self, tokens: int) -> StepRecord:
        """A record of its own for a step of so many tokens."""
        words = torch.zeros(record_words(self._shape, tokens), dtype=torch.int32, device=self._rows_NW.device)
        return StepRecord(self._shape, words)

    def copy_from(self, other: StepRecord, tokens: int) -> None:
        """Take the first `tokens` entries of another record. On the compute stream."""
        self._rows_NW[:tokens].copy_(other._rows_NW[:tokens])
