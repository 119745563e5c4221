"""Adapters in admission and uploads, and their changes between two steps.

Section of rows that a step sets up: init_adapters, int32 [rows]: the slot of each row's adapter, 0 for none.
"""

from collections.abc import Mapping

import numpy as np

from rollout.engine.features.adapters.adapter_table import AdapterTable
from rollout.engine.features.adapters.known_adapters import NO_SLOT, Adapter, AdapterUse
from rollout.engine.messages.statuses import StatusFields
from rollout.engine.messages.to_engine import AdapterCommand, DropAdapter, FeatureCommand, Prefetch, PutAdapter
from rollout.engine.messages.to_service import DeltaFields, Rejected
from rollout.engine.schedule.command_feature import CommandFeature
from rollout.engine.schedule.plan import Plan
from rollout.engine.schedule.preemption import restart_prompts
from rollout.engine.schedule.roster import Roster
from rollout.engine.schedule.step_feature import RefusalError, VariantFeature
from rollout.engine.sequence.sequence import PLAIN_WEIGHTS, Group, Sequence
from rollout.engine.upload import RowNeeds, UploadStaging


class AdaptersFeature(CommandFeature, VariantFeature):
    """The adapters of one engine; `table` has their slots."""

    name = AdapterCommand.feature

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
        group.variant, group.needs = self.table.known[name], group.needs | RowNeeds.VARIANT
        return None

    def edition(self, prefetch: Prefetch) -> int:
        """The edition of a loaded adapter."""
        return 0 if prefetch.adapter is None else self._loaded(prefetch.adapter, "adapter").edition

    def ready(self, heads: list[Sequence]) -> list[Sequence]:
        """The sequences without an adapter, or whose adapter's slot takes them. Other adapters are loaded, or wait."""
        waiting = [variant for seq in heads if isinstance(variant := seq.group.variant, Adapter)]
        if not waiting:
            return heads
        ready = {PLAIN_WEIGHTS, *self.table.ready(waiting)}
        return [seq for seq in heads if seq.group.variant in ready]

    def admitted(self, seq: Sequence) -> None:
        """The sequence takes its slot."""
        if isinstance(use := seq.variant_use, AdapterUse):
            use.slot = self.table.take(use.adapter)
            use.note_version(seq.launched)

    def delta_fields(self, seq: Sequence) -> DeltaFields:
        """The versions that the adapter had so far."""
        if not isinstance(use := seq.variant_use, AdapterUse):
            return {}
        # A change after tokens in flight may come earlier than noted: some may be refused.
        end = len(seq.drawn.tokens)
        return {"adapter_versions": tuple(change for change in use.version_changes if change[0] <= end)}

    def left(self, seq: Sequence) -> None:
        """The sequence gives its slot back."""
        if isinstance(use := seq.variant_use, AdapterUse) and use.slot is not NO_SLOT:
            self.table.give(use.slot)
            use.slot = NO_SLOT

    def tick(self, wait: bool) -> None:
        """Let go of weights that all ranks have read, or wait for copies to slots."""
        if wait:
            self.table.wait()
        else:
            self.table.let_go()

    def pack(self, plan: Plan, staging: UploadStaging) -> None:
        """Put the slots of the rows that the step sets up."""
        if plan.kind == "prefill" and (new := [span.seq for span in plan.spans if not span.seq.row_ready]):
            staging.put("init_adapters", np.array([_slot_number(seq) for seq in new], dtype=np.int32))

    def memory_leaves(self) -> None:
        """The slots lose their content."""
        self.table.unload_all()

    def gauges(self) -> Mapping[str, float]:
        return {"adapters/loads": self.table.counts.loaded, "adapters/evictions": self.table.counts.evicted}

    def status(self) -> StatusFields:
        return {"adapters": tuple(self.table.registry.status())}

    def check(self) -> None:
        self.table.check_unused()

    # --- commands -----------------------------------------------------------------------------------------------------

    def carry_out(self, command: FeatureCommand, roster: Roster, recompute: bool) -> list[Sequence]:
        """Load or unload an adapter; steps planned from now on run with its new weights."""
        if isinstance(command, PutAdapter):
            return self._put(command, roster, recompute)
        assert isinstance(command, DropAdapter)
        adapter = self._loaded(command.name)
        if users := sum(group.variant is adapter for group in roster.groups.values()):
            raise RefusalError(f"{users} unfinished requests name adapter {command.name!r:.200}: cancel them, or wait")
        self.table.drop(command.name)
        return []

    def _put(self, command: PutAdapter, roster: Roster, recompute: bool) -> list[Sequence]:
        old = self.table.known.get(command.name)
        adapter = self.table.put(command.name, command.version, command.weights)
        if old is None:
            return []
        roster.feed.close_shared_prompts(lambda group: group.variant is adapter)
        users = [seq for seq in roster.unfinished() if seq.group.variant is adapter]
        kept, taken_off = restart_prompts(roster, users, recompute)
        for seq in kept:
            roster.feed.prefill_stopped(seq)
            assert isinstance(seq.variant_use, AdapterUse)
            seq.variant_use.note_version(seq.launched)
        return taken_off

    def _loaded(self, name: str, field: str = "name") -> Adapter:
        if name not in self.table.known:
            raise RefusalError(f"adapter {name!r:.200} is not loaded", field)
        return self.table.known[name]


def _slot_number(seq: Sequence) -> int:
    return seq.variant_use.slot.number if isinstance(seq.variant_use, AdapterUse) else 0
