"""Adapters that arrive, change or are dropped, between two steps."""

from __future__ import annotations

from rollout.engine.adapters import Adapter, AdapterError
from rollout.engine.features.adapters.feature import AdaptersFeature
from rollout.engine.schedule.preemption import restart_prompts
from rollout.engine.schedule.roster import Roster
from rollout.engine.schedule.step_feature import find_feature
from rollout.engine.sequence.sequence import Sequence
from rollout.models.lora_slots import AdapterWeights


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
    roster.feed.close_shares(lambda group: group.adapter is adapter)
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
