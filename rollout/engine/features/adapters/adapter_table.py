"""The adapters in slots on the device.

    put          an adapter, or a newer version of one; rows that run with it go on with the new version
    ready        before admission: which adapters of the queue are in a slot; copies of others begin
    take, give   a sequence is admitted; no step in flight names it any more

Adapters get slots in the order of the queue. The least recently used adapter without rows loses its slot first;
adapters that no sequence waits for go before all others. While an adapter waits for a slot, sequences of adapters in
slots pass it, so that all rows are in use. The wait ends: a slot that has taken its share of all rows may be *closed*
for sequences after the waiting one, and is free when its rows have ended. At most a quarter of the slots is closed at a
time; slots with the fewest rows come first. Sequences before the waiting one, for example of a higher priority, still
take a closed slot. The slot is then open again, and the slot that such sequences took least is closed next. So no
adapter starves: it gets a closed slot after the adapters before it in the queue.

Invariants:
- A slot that a sequence has taken belongs to that adapter until it is given back, together with row and pages
  (`Roster.settle`), when no step in flight names the row. So the copies of the load stream, which run during steps,
  write only to slots that no step reads.
- A newer version of an adapter in use is written by the compute stream, between two steps.
"""

import functools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rollout.engine.device.rank_orders import NO_RANK_ORDERS, RankOrders
from rollout.engine.device.streams import Device, DeviceStream
from rollout.engine.features.adapters.known_adapters import NO_SLOT, Adapter, AdapterRegistry, AdapterSlot
from rollout.models.lora_slots import NO_WEIGHTS, AdapterSlots, AdapterWeights

#: The time between two looks at the copies of other ranks.
_LOOK_S = 0.0005


@dataclass(slots=True)
class AdapterCounts:
    """Totals of a worker."""

    loaded: int = 0  # copies to slots for sequences that wait
    evicted: int = 0  # adapters that lost their slot to another adapter


class AdapterTable:
    """The slots of an engine, and the adapters of `registry` in them: none at first.

    `memory` is the slots' device memory, for batches of `rows`; `loads` and `compute` are streams. In a tensor group a
    slot is written when all ranks have written it; `orders` tell them to.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        memory: AdapterSlots,
        device: Device,
        streams: tuple[DeviceStream, DeviceStream],
        orders: RankOrders = NO_RANK_ORDERS,
        rows: int = 1,
        counts: AdapterCounts | None = None,
    ) -> None:
        self.registry = registry
        self.memory = memory
        self.counts = counts or AdapterCounts()
        self.loads, self.compute = streams
        self._slots = [AdapterSlot(number, device.event()) for number in range(1, memory.slots + 1)]
        self._share = -(-rows // memory.slots)  # rows that a slot may take before it is closed
        self._most_closed = max(1, memory.slots // 4)
        self._closed: list[AdapterSlot] = []  # the first for the first adapter that waits for a slot, and so on
        self._loading: deque[AdapterSlot] = deque()
        self._uses = 0
        self._orders = orders
        self._read: deque[tuple[AdapterSlot, AdapterWeights]] = deque()  # copies that may still read the weights
        for adapter in registry.known.values():
            adapter.slot = NO_SLOT  # a slot of the previous table, which a fault ended

    # --- adapters -----------------------------------------------------------------------------------------------------

    @property
    def known(self) -> dict[str, Adapter]:
        """The registry's adapters by name."""
        return self.registry.known

    def put(self, name: str, version: int | None, weights: AdapterWeights) -> Adapter:
        """Add an adapter, or a newer version of one. Raises RefusalError, and then nothing has changed."""
        assert weights.rank <= self.memory.rank
        version, edition = self.registry.check(name, version), self.registry.next_edition()
        adapter = self.known.get(name)
        if adapter is None:
            adapter = self.known[name] = Adapter(edition, name, version, weights)
            return adapter
        slot = adapter.slot
        if slot.refs:
            self.compute.wait(slot.written)
            self._write(slot, weights, self.compute)
        else:
            adapter.leave_slot()  # it is written again before it is used
        # Last: if the device fails before this, the engine is rebuilt with the previous version.
        adapter.version, adapter.edition, adapter.weights = version, edition, weights
        return adapter

    def drop(self, name: str) -> None:
        """Forget an adapter that no request names; its slot is free once no row has it."""
        adapter = self.known.pop(name)
        adapter.weights = NO_WEIGHTS
        adapter.leave_slot()

    # --- slots --------------------------------------------------------------------------------------------------------

    def ready(self, waiting: Sequence[Adapter]) -> set[Adapter]:
        """The adapters whose slot takes a sequence. `waiting`: adapters of sequences without a row, in their order.

        Copies of others begin while slots are free.
        """
        wanted, earlier, ready = set(waiting), set[AdapterSlot](), set[Adapter]()
        free = [slot for slot in self._slots if slot.refs == 0]
        free.sort(key=lambda slot: (slot.adapter is not None, slot.adapter in wanted, slot.used), reverse=True)
        self._closed = [slot for slot in self._closed if slot.refs]
        without = 0  # adapters that have no slot
        for adapter in waiting:
            while not adapter.in_slot and free:
                if (slot := free.pop()) not in earlier:
                    self._load(adapter, slot)
            if not adapter.in_slot:
                without += 1
                if len(self._closed) < without <= self._most_closed:
                    self._close_one()
                continue
            earlier.add(adapter.slot)
            if adapter.slot not in self._closed[:without] and self._is_written(adapter.slot):
                ready.add(adapter)
        del self._closed[without:]
        return ready

    def wait(self) -> None:
        """Wait for the oldest copy that has begun. Call it when the loop has nothing else to do."""
        while self._loading:
            slot = self._loading.popleft()
            if not self._is_written(slot):
                slot.written.synchronize()
                while not self._is_written(slot):
                    time.sleep(_LOOK_S)
                return
        while self.let_go():
            time.sleep(_LOOK_S)

    def let_go(self) -> bool:
        """Drop references to weights that all ranks have read. True while some are still read. Called at every tick."""
        while self._read and self._is_written(self._read[0][0]):
            self._read.popleft()
        return bool(self._read)

    def take(self, adapter: Adapter) -> AdapterSlot:
        """The slot of an adapter that is ready, for one sequence."""
        slot = adapter.slot
        assert slot.adapter is adapter, "the adapter is in a slot"
        slot.refs += 1
        slot.taken += 1
        if slot in self._closed:
            self._closed.remove(slot)
            slot.passed += 1
        self._use(slot)
        return slot

    def give(self, slot: AdapterSlot) -> None:
        """A sequence gives its slot back: no step in flight names it."""
        assert slot.refs > 0, f"adapter slot {slot.number} is given back more often than it was taken"
        slot.refs -= 1

    def unload_all(self) -> None:
        """Forget what lies in the slots; no sequence has taken one."""
        while self._loading or self._read:
            self.wait()
        assert not any(slot.refs for slot in self._slots), "an adapter slot is in use"
        for adapter in self.known.values():
            adapter.leave_slot()

    def check_unused(self) -> None:
        """Assert that no slot is in use and that slots and adapters agree."""
        assert not any(slot.refs for slot in self._slots), "an adapter slot is in use"
        for slot in self._slots:
            assert slot.adapter is None or slot.adapter.slot is slot, "a slot and its adapter disagree"
        for adapter in self.known.values():
            assert not adapter.in_slot or adapter.slot.adapter is adapter, "an adapter and its slot disagree"

    def _load(self, adapter: Adapter, slot: AdapterSlot) -> None:
        """Begin to copy an adapter to a slot that no row uses."""
        if slot.adapter is not None:
            self.counts.evicted += 1
            slot.adapter.slot = NO_SLOT
        slot.adapter, adapter.slot, slot.taken, slot.passed = adapter, slot, 0, 0
        self._use(slot)
        assert adapter.weights is not NO_WEIGHTS, "no request names a dropped adapter"
        self.loads.wait(slot.written)
        self._write(slot, adapter.weights, self.loads)
        self._loading.append(slot)
        self.counts.loaded += 1

    def _close_one(self) -> None:
        """Close a slot that has taken its share: by fewest passing sequences, then by fewest rows."""
        had = [slot for slot in self._slots if slot.refs and slot.taken >= self._share and slot not in self._closed]
        if had:
            self._closed.append(min(had, key=lambda slot: (slot.passed, slot.refs, slot.used)))

    def _write(self, slot: AdapterSlot, weights: AdapterWeights, stream: DeviceStream) -> None:
        slot.order = self._orders.give("adapter_copies", slot.number, weights.shared.number, stream is self.loads)
        stream.run(functools.partial(self.memory.write, slot.number, weights))
        stream.record(slot.written)
        self._read.append((slot, weights))

    def _is_written(self, slot: AdapterSlot) -> bool:
        return slot.written.query() and self._orders.done("adapter_copies", slot.order)

    def _use(self, slot: AdapterSlot) -> None:
        self._uses += 1
        slot.used = self._uses
