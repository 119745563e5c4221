"""Adapters in admission and uploads, and their changes between two steps.

Section of rows that a step sets up: init_adapters, int32 [rows]: the slot of each row's adapter, 0 for none.
"""

from collections.abc import Mapping

import numpy as np

from rollout.engine.adapters import NO_ADAPTER, NO_SLOT, Adapter, AdapterError
from rollout.engine.features.adapters.adapter_table import AdapterTable
from rollout.engine.messages.to_service import DeltaFields, Rejected
from rollout.engine.schedule.plan import Plan
from rollout.engine.schedule.preemption import restart_prompts
from rollout.engine.schedule.roster import Roster
from rollout.engine.schedule.step_feature import StepFeature, find_feature
from rollout.engine.sequence.sequence import Group, Sequence
from rollout.engine.upload import UploadStaging
from rollout.models.lora_slots import AdapterWeights


class AdaptersFeature(StepFeature):
    """The adapters of one engine; `table` has their slots."""

    name = "adapters"

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
        waiting = [adapter for seq in heads if (adapter := seq.group.adapter) is not NO_ADAPTER]
        if not waiting:
            return heads
        ready = {NO_ADAPTER, *self.table.ready(waiting)}
        return [seq for seq in heads if seq.group.adapter in ready]

    def admitted(self, seq: Sequence) -> None:
        """The sequence takes its slot."""
        if seq.group.adapter is not NO_ADAPTER:
            seq.adapter_use.slot = self.table.take(seq.group.adapter)
        seq.adapter_use.note_version(seq.launched)

    def delta_fields(self, seq: Sequence) -> DeltaFields:
        """The versions that the adapter had so far."""
        # A change after tokens in flight may come earlier than noted: some may be refused.
        changes, end = seq.adapter_use.version_changes, len(seq.drawn.tokens)
        return {"adapter_versions": tuple(change for change in changes if change[0] <= end)}

    def left(self, seq: Sequence) -> None:
        """The sequence gives its slot back."""
        if seq.adapter_use.slot is not NO_SLOT:
            self.table.give(seq.adapter_use.slot)
            seq.adapter_use.slot = NO_SLOT

    def tick(self, wait: bool) -> None:
        """Let go of weights that all ranks have read, or wait for copies to slots."""
        if wait:
            self.table.wait()
        else:
            self.table.let_go()

    def pack(self, plan: Plan, staging: UploadStaging) -> None:
        """Put the slots of the rows that the step sets up."""
        if plan.kind == "prefill" and (new := [span.seq.adapter_use for span in plan.spans if not span.seq.row_ready]):
            slots = [use.slot.number for use in new]
            staging.put("init_adapters", np.array(slots, dtype=np.int32))

    def memory_leaves(self) -> None:
        """The slots lose their content."""
        self.table.unload_all()

    def gauges(self) -> Mapping[str, float]:
        return {"adapters/loads": self.table.counts.loaded, "adapters/evictions": self.table.counts.evicted}

    def check(self) -> None:
        self.table.check_unused()


def put_adapter(
    roster: Roster, name: str, version: int | None, weights: AdapterWeights, recompute: bool
) -> list[Sequence]:
    """Take an adapter; steps planned from now on run with it. Returns the sequences whose KV has to be computed again.

    Raises AdapterError where it cannot be taken.
    """
    adapters = find_feature(roster.features, AdaptersFeature)
    assert adapters is not None
    old = adapters.table.known.get(name)
    adapter = adapters.table.put(name, version, weights)
    if old is None:
        return []
    roster.feed.close_shared_prompts(lambda group: group.adapter is adapter)
    users = [seq for seq in roster.unfinished() if seq.group.adapter is adapter]
    kept, taken_off = restart_prompts(roster, users, recompute)
    for seq in kept:
        roster.feed.prefill_stopped(seq)
        seq.adapter_use.note_version(seq.launched)
    return taken_off


def edition_of(roster: Roster, name: str | None) -> int:
    """The edition of an adapter that is loaded; 0 without a name. Raises AdapterError."""
    return 0 if name is None else _loaded(roster, name, "adapter")[1].edition


def drop_adapter(roster: Roster, name: str) -> None:
    """Forget an adapter. Raises AdapterError if it is not loaded, or if a request names it."""
    adapters, adapter = _loaded(roster, name)
    users = sum(group.adapter is adapter for group in roster.groups.values())
    if users:
        raise AdapterError(f"{users} unfinished requests name adapter {name!r:.200}: cancel them, or wait")
    adapters.table.drop(name)


def _loaded(roster: Roster, name: str, field: str = "name") -> tuple[AdaptersFeature, Adapter]:
    adapters = find_feature(roster.features, AdaptersFeature)
    if adapters is None or name not in adapters.table.known:
        raise AdapterError(f"adapter {name!r:.200} is not loaded", field)
    return adapters, adapters.table.known[name]
