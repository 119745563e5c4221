"""Adapters that requests can name, as plain data: the registry, and the adapter use of one sequence.

Each set of weights that an adapter ever had is an edition of its own, also under a known name or version.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rollout.engine.device.streams import CpuEvent, Event
from rollout.engine.messages.requests import VERSION_END
from rollout.engine.messages.statuses import AdapterStatus
from rollout.engine.schedule.step_feature import RefusalError
from rollout.engine.sequence.sequence import Variant, VariantUse
from rollout.models.lora_slots import AdapterWeights


@dataclass(eq=False, slots=True)
class AdapterSlot:
    """Device memory for one adapter."""

    number: int  # slot number, from 1; 0 is no slot
    written: Event  # the write has ended; steps that read the slot are launched later
    adapter: Adapter | None = None
    order: int = 0  # number of the copy on the other ranks
    refs: int = 0  # sequences that have taken it
    taken: int = 0  # sequences that ever took it with this adapter
    passed: int = 0  # sequences before the waiting adapter that took the slot while it was closed
    used: int = 0  # grows with every use


NO_SLOT = AdapterSlot(0, CpuEvent())


@dataclass(eq=False, slots=True)
class Adapter(Variant):
    """One adapter, by name; a newer version replaces its weights and its edition, which is 1 or more."""

    name: str
    version: int
    weights: AdapterWeights  # empty once it is dropped: ended requests may still refer to it
    slot: AdapterSlot = NO_SLOT  # device slot

    def use(self) -> AdapterUse:
        """See `Variant`."""
        return AdapterUse(self)

    @property
    def in_slot(self) -> bool:
        """True while the adapter is on the device, or being copied there."""
        return self.slot is not NO_SLOT

    def leave_slot(self) -> None:
        """Note that the adapter is no longer on the device."""
        self.slot.adapter, self.slot = None, NO_SLOT


@dataclass(eq=False, slots=True)
class AdapterUse(VariantUse):
    """The adapter use of one sequence."""

    adapter: Adapter
    slot: AdapterSlot = NO_SLOT  # set while the sequence has a row
    #: (token, version): the first token drawn with that version. Tokens ahead in flight count as accepted.
    version_changes: list[tuple[int, int]] = field(default_factory=list)

    def note_version(self, token: int) -> None:
        """From `token` on, tokens are drawn with the adapter's present version."""
        changes, version = self.version_changes, self.adapter.version
        if changes and changes[-1][0] == token:
            changes.pop()
        if not changes or changes[-1][1] != version:
            changes.append((token, version))

    def refused(self, count: int, after: int) -> None:
        """See `VariantUse`: changes noted since come earlier."""
        changes = self.version_changes
        for i in range(len(changes) - 1, -1, -1):
            token, version = changes[i]
            if token <= after:
                return
            changes[i] = token - count, version

    def dropped(self, token: int) -> None:
        """See `VariantUse`: they are drawn again with the present version."""
        while self.version_changes and self.version_changes[-1][0] > token:
            self.version_changes.pop()
        self.note_version(token)


class AdapterRegistry:
    """Adapters by name, `most` at the most. Only the loop changes it; any thread may read it."""

    def __init__(self, most: int) -> None:
        self.known: dict[str, Adapter] = {}
        self._most = most
        self._editions = 0

    def check(self, name: str, version: int | None) -> int:
        """The version that new weights of an adapter will have. Raises RefusalError if they cannot be taken.

        Any thread may ask, but only on the loop's thread does the answer stay true.
        """
        known = self.known.get(name)
        if known is None and len(self.known) >= self._most:
            raise RefusalError(
                f"{len(self.known)} adapters are loaded, as many as engine.max_adapters allows: unload one first, "
                "or raise it"
            )
        last = -1 if known is None else known.version
        if last == VERSION_END - 1:
            raise RefusalError(f"adapter {name!r} is at the last version that is possible; unload it first", "version")
        new = last + 1 if version is None else version
        if new <= last:
            raise RefusalError(f"adapter {name!r} is at version {last}; send a later version", "version")
        return new

    def next_edition(self) -> int:
        """The number of new weights."""
        self._editions += 1
        return self._editions

    def status(self) -> Iterator[AdapterStatus]:
        """Every adapter. Any thread may ask."""
        for adapter in tuple(self.known.values()):
            yield AdapterStatus(adapter.name, adapter.version, adapter.in_slot, adapter.slot.refs)
