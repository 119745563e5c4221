"""Published weights come into use here, between two steps.

    take_ready --> copy on the compute stream, between two events --> end event reached --> applied
                   later steps run after the copy, in stream order

A ready update waits while the gate says so: for the swap before it, or for recomputation (`recomputation`). An adapter
needs no copy here: its copy is part of the adapter table. Two things change elsewhere: adapters that a client loads, by
its command, and weights that an update writes in place while generation is held.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollout.engine.adapters import AdapterError, AdapterUpdate
from rollout.engine.device.streams import Event
from rollout.engine.features.adapters.changes import put_adapter
from rollout.engine.gate import Gate
from rollout.engine.parts import EngineParts, Receiver, StagedUpdate
from rollout.engine.recomputation import Recomputation
from rollout.engine.schedule.preemption import change_weights
from rollout.metrics.meter import Meter


@dataclass(frozen=True, slots=True)
class _Swap:
    """An update of the weights that is enqueued on the compute stream."""

    update: StagedUpdate
    start: Event
    end: Event
    held_since_s: float | None  # update in place: start of the hold, `time.perf_counter()`


class Swapper:
    """Applies the receiver's updates."""

    def __init__(
        self, receiver: Receiver, gate: Gate, meter: Meter, recompute: bool, recomputation: Recomputation
    ) -> None:
        self._receiver = receiver
        self._gate = gate
        self._meter = meter
        self._recompute = recompute
        self._recomputation = recomputation
        self._swap: _Swap | None = None

    @property
    def copying(self) -> bool:
        """Whether the device copies an update. Any thread may ask."""
        swap = self._swap
        return swap is not None and swap.start.query() and not swap.end.query()

    def advance(self, parts: EngineParts) -> None:
        """Finish the swap under way if its copy is done; apply an update if one is ready."""
        if self._gate.asleep:
            return
        if self._swap is not None:
            self._finish(self._swap, parts)
        self._gate.note_recomputing(self._recomputation.delays(parts.roster))
        if self._gate.may_apply and (update := self._receiver.take_ready()) is not None:
            if isinstance(update, AdapterUpdate):
                self._put_adapter(update, parts)
            else:
                self._begin(update, parts)

    def fail(self, message: str) -> None:
        """After a fault: the weights are lost if a swap was under way. The gate stays in `swapping`."""
        if self._swap is not None:
            self._receiver.failed(self._swap.update, message)

    def _begin(self, update: StagedUpdate, parts: EngineParts) -> None:
        held_since_s = self._gate.held_since_s if self._gate.hold == "granted" else None
        device = parts.executor.device
        self._swap = _Swap(update, device.event(), device.event(), held_since_s)
        self._gate.swap_begins()
        parts.executor.swap(update.version, update.copy_into, self._swap.start, self._swap.end)
        self._recomputation.begin(change_weights(parts.roster, update.version, self._recompute, update.names))
        self._gate.clear_hold()

    def _finish(self, swap: _Swap, parts: EngineParts) -> None:
        if parts.pipeline.in_flight == 0:
            swap.end.synchronize()  # the loop has nothing else to do
        if not swap.end.query():
            return
        parts.executor.check()  # called first: if this raises, the weights are lost and the gate stays in `swapping`
        self._swap = None
        self._gate.swap_ends()
        start_s, end_s = swap.held_since_s or swap.start.time_s, swap.end.time_s
        self._meter.swap(start_s, end_s, swap.update.version, swap.update.nbytes)
        self._receiver.applied(swap.update, end_s - start_s)

    def _put_adapter(self, update: AdapterUpdate, parts: EngineParts) -> None:
        try:
            lost = put_adapter(parts.roster, update.name, update.version, update.weights, self._recompute)
        except AdapterError as error:
            self._receiver.refused(update, str(error))
        except Exception as error:  # a fault ends these parts, and the receiver waits for an answer
            self._receiver.failed(update, f"{type(error).__name__}: {error}")
            raise
        else:
            self._recomputation.begin(lost)
            self._receiver.applied(update, 0.0)
