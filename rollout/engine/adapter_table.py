"""Adapters that are known, and which of them lie in slots on the device.

    put          an adapter, or a newer version of one; rows that run with it go on with the new one
    ready        before admission: the adapter is in a slot, or its copy there begins
    take, give   a sequence is admitted; no step in flight names it any more

Invariants:
- A slot that a sequence has taken belongs to that adapter until it is given back, which happens where row and pages are
  (`SequenceMemory.release`), with no step in flight that names the row. So the copies of the load stream, which run
  beside steps, write to slots that no step reads.
- A newer version of an adapter in use is written by the compute stream, between two steps.
- Every content that an adapter has ever had is another generation. KV is of a weights version and a generation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

from rollout.engine.device.streams import Device, Event, Stream
from rollout.engine.messages import VERSION_END, AdapterStatus
from rollout.models.adapters import AdapterSlots, AdapterWeights


class AdapterError(ValueError):
    """An adapter cannot be taken or given up; the message says why, `field` which part of a request is at fault."""

    def __init__(self, message: str, field: str = "name") -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class AdapterUpdate:
    """An adapter that came over the weight bridge, whole and checked."""

    name: str
    version: int
    nbytes: int
    weights: AdapterWeights
    released: bool = True  # nothing of the bridge's memory is in it

    def close(self, applied: bool) -> None:
        """The engine is done with it."""


@dataclass(eq=False, slots=True)
class Adapter:
    """One adapter, by name; newer versions take the place of its weights."""

    name: str
    version: int
    generation: int  # of its weights, from 1
    weights: AdapterWeights
    slot: Slot | None = None  # where it lies


@dataclass(eq=False, slots=True)
class Slot:
    """Room for one adapter on the device."""

    number: int  # from 1
    written: Event  # by a stream; steps that read it are launched later
    adapter: Adapter | None = None
    refs: int = 0  # sequences that have taken it
    used: int = 0  # grows with every use


@dataclass(eq=False, slots=True)
class AdapterTable:
    """All adapters of an engine. `memory` is theirs on the device; `loads` and `compute` are streams."""

    memory: AdapterSlots
    device: Device
    loads: Stream
    compute: Stream
    most: int  # adapters that may be known
    known: dict[str, Adapter] = field(default_factory=dict)
    evicted: int = 0  # adapters that lost their slot to others
    _slots: list[Slot] = field(default_factory=list)
    _loading: Slot | None = None
    _generations: int = 0
    _uses: int = 0

    def __post_init__(self) -> None:
        self._slots = [Slot(number, self.device.event()) for number in range(1, self.memory.slots + 1)]

    # --- what is known -----------------------------------------------------------------------------------------------

    def check(self, name: str, version: int | None) -> int:
        """The version that new weights of an adapter will be. Raises AdapterError where they cannot be taken.

        Any thread may ask; only on the loop's does the answer stay true.
        """
        old = self.known.get(name)
        if old is None and len(self.known) >= self.most:
            raise AdapterError(
                f"{len(self.known)} adapters are loaded, as many as engine.max_adapters allows: unload one first, "
                "or raise it"
            )
        if old is not None and version is not None and version <= old.version:
            raise AdapterError(f"adapter {name!r} is at version {old.version}; send a later one than that", "version")
        if old is not None and old.version == VERSION_END - 1:
            raise AdapterError(f"adapter {name!r} is at the last version that there is; unload it first", "version")
        return version if version is not None else 0 if old is None else old.version + 1

    def put(self, name: str, version: int | None, weights: AdapterWeights) -> Adapter:
        """Have an adapter, or a newer version of it. Raises AdapterError, and then nothing has changed."""
        assert weights.rank <= self.memory.rank
        version = self.check(name, version)
        self._generations += 1
        adapter = self.known.get(name)
        if adapter is None:
            adapter = self.known[name] = Adapter(name, version, self._generations, weights)
            return adapter
        slot = adapter.slot
        if slot is not None and slot.refs:
            self.compute.wait(slot.written)
            self.compute.run(functools.partial(self.memory.write, slot.number, weights))
            self.compute.record(slot.written)
        elif slot is not None:
            slot.adapter, adapter.slot = None, None  # it is written anew before it is used
        # Last: where the device fails, the engine is built anew with the adapter of before.
        adapter.version, adapter.generation, adapter.weights = version, self._generations, weights
        return adapter

    def inherit(self, other: AdapterTable) -> None:
        """Know what a table knew whose engine has failed; nothing lies in a slot yet."""
        self._generations, self.evicted = other._generations, other.evicted
        for old in other.known.values():
            self.known[old.name] = Adapter(old.name, old.version, old.generation, old.weights)

    def drop(self, name: str) -> None:
        """Forget an adapter that no request names; a slot in which it lies is free once no row has it."""
        adapter = self.known.pop(name)
        if adapter.slot is not None:
            adapter.slot.adapter, adapter.slot = None, None

    # --- slots -------------------------------------------------------------------------------------------------------

    def ready(self, adapter: Adapter) -> bool:
        """True if the adapter is in a slot; else its copy is under way, or all slots are in use."""
        slot = adapter.slot or self._begin_load(adapter)
        return slot is not None and slot.written.query()

    def wait(self) -> None:
        """Return when the copy that began last is done; for when nothing else can be done, and it may be waited for."""
        if self._loading is not None:
            self._loading.written.synchronize()
            self._loading = None

    def take(self, adapter: Adapter) -> Slot:
        """The slot of an adapter that is ready, for one sequence."""
        slot = adapter.slot
        assert slot is not None and slot.adapter is adapter
        slot.refs += 1
        self._use(slot)
        return slot

    def give(self, slot: Slot) -> None:
        """A sequence needs its slot no more: no step in flight names it."""
        assert slot.refs > 0, f"adapter slot {slot.number} is given back more often than it was taken"
        slot.refs -= 1

    def unload_all(self) -> None:
        """What lies in slots is lost; no sequence has one."""
        self.wait()
        for slot in self._slots:
            assert slot.refs == 0, "an adapter slot is in use"
            if slot.adapter is not None:
                slot.adapter.slot, slot.adapter = None, None

    def status(self) -> Iterator[AdapterStatus]:
        """Every adapter. Any thread may ask."""
        for adapter in tuple(self.known.values()):
            slot = adapter.slot
            yield AdapterStatus(adapter.name, adapter.version, slot is not None, 0 if slot is None else slot.refs)

    def check_unused(self) -> None:
        """Assert that no slot is in use and that slots and adapters agree."""
        assert not any(slot.refs for slot in self._slots), "an adapter slot is in use"
        for slot in self._slots:
            assert slot.adapter is None or slot.adapter.slot is slot, "a slot and its adapter disagree"
        for adapter in self.known.values():
            assert adapter.slot is None or adapter.slot.adapter is adapter, "an adapter and its slot disagree"

    def _begin_load(self, adapter: Adapter) -> Slot | None:
        free = [slot for slot in self._slots if slot.refs == 0]
        if not free:
            return None
        slot = min(free, key=lambda slot: (slot.adapter is not None, slot.used))
        if slot.adapter is not None:
            self.evicted += 1
            slot.adapter.slot = None
        slot.adapter, adapter.slot = adapter, slot
        self._use(slot)
        self.loads.wait(slot.written)
        self.loads.run(functools.partial(self.memory.write, slot.number, adapter.weights))
        self.loads.record(slot.written)
        self._loading = slot
        return slot

    def _use(self, slot: Slot) -> None:
        self._uses += 1
        slot.used = self._uses
