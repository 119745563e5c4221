"""Adapters that requests can name, as plain data: the registry, and the adapter use of one sequence.

Each set of weights that an adapter ever had is an edition of its own, also under a known name or version. KV belongs to
a weights version and an adapter edition. The slots on the device are in `features/adapters`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rollout.engine.device.streams import CpuEvent, Event
from rollout.engine.messages.requests import VERSION_END
from rollout.engine.messages.statuses import AdapterStatus
from rollout.models.lora_slots import NO_WEIGHTS, AdapterWeights


class AdapterError(ValueError):
    """An adapter cannot be loaded or unloaded; the message says why, `field` names the wrong part of the request."""

    def __init__(self, message: str, field: str = "name") -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class AdapterUpdate:
    """An adapter that arrived over the weight bridge, complete and checked."""

    name: str
    version: int
    nbytes: int
    weights: AdapterWeights
    released: bool = True  # it refers to no memory of the bridge

    def close(self, applied: bool) -> None:
        """The engine is done with this update."""


@dataclass(eq=False, slots=True)
class AdapterSlot:
    """Device memory for one adapter."""

    number: int  # slot number, from 1; 0 is no slot
    written: Event  # the write has ended; steps that read the slot are launched later
    adapter: Adapter | None = None
    order: int = 0  # number of the copy on the other ranks
    refs: int = 0  # sequences that have taken it
    taken: int = 0  # sequences that ever took it with this adapter
    passed: int = 0  # sequences that took it while it was closed: they are ahead of the waiting adapter
    used: int = 0  # grows with every use


NO_SLOT = AdapterSlot(0, CpuEvent())


@dataclass(eq=False, slots=True)
class Adapter:
    """One adapter, by name; a newer version replaces its weights."""

    name: str
    version: int
    edition: int  # edition of its weights, from 1; 0 is no adapter
    weights: AdapterWeights  # empty once it is dropped: ended requests may still refer to it
    slot: AdapterSlot = NO_SLOT  # device slot

    @property
    def in_slot(self) -> bool:
        """True while the adapter is on the device, or being copied there."""
        return self.slot is not NO_SLOT

    def leave_slot(self) -> None:
        """Note that the adapter is no longer on the device."""
        self.slot.adapter, self.slot = None, NO_SLOT


NO_ADAPTER = Adapter("", -1, 0, NO_WEIGHTS)


@dataclass(eq=False, slots=True)
class AdapterUse:
    """The adapter use of one sequence; empty without an adapter."""

    adapter: Adapter
    slot: AdapterSlot = NO_SLOT  # set while the sequence has a row
    #: (token, version): the first token drawn with that version. Tokens ahead in flight count as accepted.
    version_changes: list[tuple[int, int]] = field(default_factory=list)

    @property
    def edition(self) -> int:
        """Edition of the adapter's weights, 0 without an adapter; KV depends on it."""
        return self.adapter.edition

    def note_version(self, token: int) -> None:
        """From `token` on, tokens are drawn with the adapter's present version."""
        if self.adapter is NO_ADAPTER:
            return
        changes, version = self.version_changes, self.adapter.version
        if changes and changes[-1][0] == token:
            changes.pop()
        if not changes or changes[-1][1] != version:
            changes.append((token, version))

    def refused(self, count: int, after: int) -> None:
        """A step whose tokens begin at `after` refused this many tokens ahead: changes noted since come earlier."""
        changes = self.version_changes
        for i in range(len(changes) - 1, -1, -1):
            token, version = changes[i]
            if token <= after:
                return
            changes[i] = token - count, version

    def dropped(self, token: int) -> None:
        """Discard the tokens from this one on: they are drawn again with the present version."""
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
        """The version that new weights of an adapter will have. Raises AdapterError if they cannot be taken.

        Any thread may ask, but only on the loop's thread does the answer stay true.
        """
        known = self.known.get(name, NO_ADAPTER)
        if known is NO_ADAPTER and len(self.known) >= self._most:
            raise AdapterError(
                f"{len(self.known)} adapters are loaded, as many as engine.max_adapters allows: unload one first, "
                "or raise it"
            )
        if known.version == VERSION_END - 1:
            raise AdapterError(f"adapter {name!r} is at the last version that is possible; unload it first", "version")
        new = known.version + 1 if version is None else version
        if new <= known.version:
            raise AdapterError(f"adapter {name!r} is at version {known.version}; send a later version", "version")
        return new

    def next_edition(self) -> int:
        """The number of new weights."""
        self._editions += 1
        return self._editions

    def status(self) -> Iterator[AdapterStatus]:
        """Every adapter. Any thread may ask."""
        for adapter in tuple(self.known.values()):
            yield AdapterStatus(adapter.name, adapter.version, adapter.in_slot, adapter.slot.refs)
