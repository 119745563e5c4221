"""Adapters in admission and uploads.

Section of rows that a step sets up: init_adapters, int32 [rows]: the slot of each row's adapter, 0 for none.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rollout.engine.features.adapters.adapter_table import AdapterTable
from rollout.engine.messages.to_service import Rejected
from rollout.engine.schedule.plan import Plan
from rollout.engine.schedule.step_feature import StepFeature
from rollout.engine.sequence.row_needs import RowNeeds
from rollout.engine.sequence.sequence import Group, Sequence
from rollout.engine.upload import UploadStaging


class AdaptersFeature(StepFeature):
    """The adapters of one engine; `table` has their slots."""

    name = "adapters"
    serves = RowNeeds.ADAPTER

    def __init__(self, table: AdapterTable) -> None:
        self.table = table

    def enter(self, group: Group) -> Rejected | None:
        """Find the adapter; refuse one that is not loaded."""
        name = group.request.adapter
        if name is None:
            return None
        if name not in self.table.known:
            message = f"adapter {name!r:.200} is not loaded; load it with 'load_adapter', or publish it"
            return Rejected(group.key, "bad_request", message, "adapter")
        group.adapter = self.table.known[name]
        return None

    def ready(self, heads: list[Sequence]) -> list[Sequence]:
        """The sequences without an adapter, or with one whose slot takes them. Other adapters are loaded, or wait."""
        waiting = [seq.group.adapter for seq in heads if seq.group.adapter is not None]
        if not waiting:
            return heads
        ready = self.table.ready(waiting)
        return [seq for seq in heads if seq.group.adapter is None or seq.group.adapter in ready]

    def admitted(self, seq: Sequence) -> None:
        """The sequence takes its slot."""
        if seq.group.adapter is not None:
            seq.adapter_use.slot = self.table.take(seq.group.adapter)

    def left(self, seq: Sequence) -> None:
        """The sequence gives its slot back."""
        if seq.adapter_use.slot is not None:
            self.table.give(seq.adapter_use.slot)
            seq.adapter_use.slot = None

    def tick(self, wait: bool) -> None:
        """Let go of weights that all ranks have read, or wait for copies to slots."""
        if wait:
            self.table.wait()
        else:
            self.table.let_go()

    def pack(self, plan: Plan, staging: UploadStaging) -> None:
        """Put the slots of the rows that the step sets up."""
        if plan.kind == "prefill" and (new := [span.seq.adapter_use for span in plan.spans if not span.seq.row_ready]):
            slots = [0 if use.slot is None else use.slot.number for use in new]
            staging.put("init_adapters", np.array(slots, dtype=np.int32))

    def memory_leaves(self) -> None:
        """The slots lose their content."""
        self.table.unload_all()

    def gauges(self) -> Mapping[str, float]:
        """See `StepFeature`."""
        return {"adapters/loads": self.table.counts.loaded, "adapters/evictions": self.table.counts.evicted}

    def check(self) -> None:
        """See `StepFeature`."""
        self.table.check_unused()
