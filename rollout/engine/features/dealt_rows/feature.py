"""Rows that are dealt to ranks: each rank learns which chunks of a prefill are its own.

The forward of a decode finds its own rows by their pages (`rollout.models.dealt_rows`). Each rank's prefill takes its
own chunks out of the step, so the host of the rank must know the chunks.
"""

from __future__ import annotations

from rollout.engine.schedule.plan import Plan
from rollout.engine.schedule.step_feature import StepFeature
from rollout.engine.step.device_feature import DeviceFeature, HostParts, Site
from rollout.engine.step.row_state import RowState
from rollout.engine.upload import StepInput, UploadStaging
from rollout.models.batch import BatchFields
from rollout.models.decoder import Decoder

_NAME = "dealt_rows"


class DealtRowsFeature(StepFeature):
    """Sends the rank of each span of a prefill."""

    name = _NAME

    def pack(self, plan: Plan, staging: UploadStaging) -> None:
        if plan.kind == "prefill":
            staging.facts[_NAME] = [span.seq.kv.rank for span in plan.spans]


class DealtRows(DeviceFeature[None]):
    """Tells the forwards of rank `rank` which chunks are its own."""

    name = _NAME
    batch_fields = frozenset({"own_chunks"})

    def __init__(self, rank: int) -> None:
        self._rank = rank

    @classmethod
    def make(cls, site: Site) -> DealtRows | None:
        model = site.model
        return cls(model.group.rank) if isinstance(model, Decoder) and model.spec.split == "rows" else None

    def host_part(self, engine: HostParts, before: StepFeature | None) -> DealtRowsFeature:
        return DealtRowsFeature()

    def prefill_fields(self, rows: RowState, step: StepInput, output: None) -> BatchFields:
        """The chunks of this rank; a rehearsal does not name ranks, and runs all chunks on each."""
        facts = step.header.facts
        if _NAME not in facts:
            return {}
        return {"own_chunks": tuple(at for at, rank in enumerate(facts[_NAME]) if rank == self._rank)}
