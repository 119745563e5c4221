"""Which experts each token took: recorded by the step, kept by the host with the KV (`sequence/experts`).

    routers of a step --> StepExperts [tokens, 1 + words] int32 --D2H, with the step's outputs--> commit --> ExpertPages
                          KV slot | experts, packed                                                        [KV slot]

Packed: the numbers of a token's experts in all sparse layers, layer by layer, likeliest first, in 8 or 16 bits, padded
to a whole word.

Legend: N tokens, T those of a step, L sparse layers, K experts a token, W words of an entry.
"""

from __future__ import annotations

import torch

from rollout.engine.messages import RoutingShape
from rollout.engine.sequence.experts import entry_words
from rollout.models.batch import AttentionBatch, ExpertRecord
from rollout.models.spec import ModelSpec


def routing_shape(spec: ModelSpec) -> RoutingShape | None:
    """The shape of an entry; None for a model without experts."""
    moe = spec.moe
    return None if moe is None else RoutingShape(len(spec.sparse_layers), moe.router.top_k, moe.experts)


def record_words(shape: RoutingShape | None, tokens: int) -> int:
    """int32 words of the record of a step of `tokens` tokens."""
    return 0 if shape is None else tokens * (1 + entry_words(shape))


class StepExperts:
    """The record of one step on the device: a view of int32 `words` that the slot, or a graph, owns."""

    def __init__(self, shape: RoutingShape, words: torch.Tensor) -> None:
        width = 1 + entry_words(shape)
        self._shape = shape
        self._rows_NW = words.view(-1, width)
        packed = self._rows_NW[:, 1:].view(torch.uint8 if shape.dtype.itemsize == 1 else torch.uint16)
        experts_NLK = packed[:, : shape.layers * shape.top_k].unflatten(1, (shape.layers, shape.top_k))
        rows_N = torch.arange(len(experts_NLK), dtype=torch.int64, device=words.device)
        self.experts = ExpertRecord(experts_NLK, rows_N)

    def end(self, batch: AttentionBatch) -> None:
        """Write where the KV of each token is, after the forward of `batch`; on the compute stream."""
        slots_T = batch.kv_slots_T
        self._rows_NW[: len(slots_T), 0].copy_(slots_T)

    def another(self, tokens: int) -> StepExperts:
        """A record with memory of its own, for a step of `tokens` tokens."""
        words = torch.zeros(record_words(self._shape, tokens), dtype=torch.int32, device=self._rows_NW.device)
        return StepExperts(self._shape, words)

    def copy_from(self, other: StepExperts, tokens: int) -> None:
        """Take the first `tokens` entries of another record. On the compute stream."""
        self._rows_NW[:tokens].copy_(other._rows_NW[:tokens])
