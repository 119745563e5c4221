"""The experts of each token: recorded by the step, kept by the host with the KV (`entries`).

    routers of a step --> StepExperts [tokens, 1 + words] int32 --D2H, with the step's outputs--> commit --> ExpertPages
                          KV slot | experts, packed                                                        [KV slot]

Packed: the numbers of a token's experts in all sparse layers, layer by layer, likeliest first, in 8 or 16 bits, padded
to a whole word.

Legend: N tokens, T tokens of a step, L sparse layers, K experts a token, W words of an entry.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from rollout.config import EngineSettings
from rollout.engine.features.routing.entries import ExpertPages, entry_words
from rollout.engine.features.routing.feature import RoutingFeature
from rollout.engine.messages.requests import RoutingShape
from rollout.engine.schedule.step_feature import StepFeature
from rollout.engine.step.device_feature import HostParts, OutputFeature, Site
from rollout.engine.step.row_state import RowState
from rollout.engine.upload import Header, StepInput
from rollout.models.batch import AttentionBatch, BatchFields, ExpertRecord
from rollout.models.language_model import LanguageModel, native
from rollout.models.spec import ModelSpec

log = logging.getLogger(__name__)


class StepExperts:
    """The record of one step on the device: a view of int32 `words` that the slot, or a graph, owns."""

    def __init__(self, shape: RoutingShape, words: torch.Tensor) -> None:
        width = 1 + entry_words(shape)
        self._rows_NW = words.view(-1, width)
        packed = self._rows_NW[:, 1:].view(torch.uint8 if shape.dtype.itemsize == 1 else torch.uint16)
        experts_NLK = packed[:, : shape.layers * shape.top_k].unflatten(1, (shape.layers, shape.top_k))
        rows_N = torch.arange(len(experts_NLK), dtype=torch.int64, device=words.device)
        self.experts = ExpertRecord(experts_NLK, rows_N)

    def end(self, batch: AttentionBatch) -> None:
        """Write where the KV of each token is, after the forward of `batch`; on the compute stream."""
        slots_T = batch.kv_slots_T
        self._rows_NW[: len(slots_T), 0].copy_(slots_T)

    def copy_from(self, other: StepExperts, tokens: int) -> None:
        """Take the first `tokens` entries of another record. On the compute stream."""
        self._rows_NW[:tokens].copy_(other._rows_NW[:tokens])


class RoutingRecord(OutputFeature[StepExperts]):
    """Has the routers of every step write down their choice, in the form of `shape`."""

    name = "routing"
    batch_fields = frozenset({"experts"})

    def __init__(self, shape: RoutingShape) -> None:
        self.shape = shape

    @classmethod
    def make(cls, site: Site) -> RoutingRecord | None:
        """See `kept_routing`."""
        shape = kept_routing(site.settings.engine, site.model)
        return None if shape is None else cls(shape)

    def host_part(self, engine: HostParts, before: StepFeature | None) -> RoutingFeature:
        entries = ExpertPages(self.shape, engine.kv.pages_of_all, engine.kv.page_size, engine.host_pages)
        log.info("experts of tokens are kept", extra={"host_bytes": entries.nbytes})
        return RoutingFeature(entries)

    def output_words(self, tokens: int) -> int:
        return record_words(self.shape, tokens)

    def output(self, words: torch.Tensor, rows: int, tokens: int) -> StepExperts:
        return StepExperts(self.shape, words)

    def copy_output(self, target: StepExperts, source: StepExperts, tokens: int) -> None:
        target.copy_from(source, tokens)

    def decode_fields(
        self, rows: RowState, rows_B: torch.Tensor, positions_B: torch.Tensor, needs: int, output: StepExperts
    ) -> BatchFields:
        return {"experts": output.experts}

    def prefill_fields(self, rows: RowState, step: StepInput, output: StepExperts) -> BatchFields:
        return {"experts": output.experts}

    def reads_hidden(self, header: Header) -> bool:
        """All tokens go through all layers."""
        return True

    def forward_ends(self, batch: AttentionBatch, output: StepExperts) -> None:
        """Write where the KV of each token is."""
        output.end(batch)

    def read(self, words: np.ndarray, header: Header, output: StepExperts) -> np.ndarray:
        """The record: int32 [tokens, words]."""
        return words.reshape(header.tokens, -1)


def kept_routing(engine: EngineSettings, model: LanguageModel) -> RoutingShape | None:
    """The shape of the routing that is recorded; None if none is. Raises ValueError for a model without experts."""
    if not engine.routing:
        return None
    shape = routing_shape(native(model).spec)
    if shape is None:
        raise ValueError(
            f"engine.routing is set, but {model.spec.architecture} of this checkpoint has no experts: leave it out"
        )
    return shape


def routing_shape(spec: ModelSpec) -> RoutingShape | None:
    """The shape of an entry; None for a model without experts."""
    moe = spec.moe
    return None if moe is None else RoutingShape(len(spec.sparse_layers), moe.router.top_k, moe.experts)


def record_words(shape: RoutingShape, tokens: int) -> int:
    """int32 words of the record of a step of `tokens` tokens."""
    return tokens * (1 + entry_words(shape))
