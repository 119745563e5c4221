"""Published weights come into use here, between two steps.

    take_ready --> copy on the compute stream, between two events --> end event reached --> applied
                   later steps run after the copy, in stream order

A ready update waits while the gate says so: for the swap before it, or for recomputation (`Recomputation`). An update
for a feature needs no copy here: the feature takes the update like a command. Weights that an update writes in place,
while generation is held, change elsewhere.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rollout.engine.device.streams import Event
from rollout.engine.gate import Gate
from rollout.engine.messages.to_engine import FeatureUpdate
from rollout.engine.parts import EngineParts, Receiver, StagedUpdate
from rollout.engine.schedule.command_feature import carry_out
from rollout.engine.schedule.plan import Plan
from rollout.engine.schedule.preemption import change_weights
from rollout.engine.schedule.roster import Roster
from rollout.engine.schedule.step_feature import RefusalError
from rollout.engine.sequence.sequence import Sequence, SequenceState
from rollout.metrics.meter import Meter


class Recomputation:
    """Counts the time of prefills that an update caused; says whether the next update waits for them.

        update applied                                  the next update may be applied
           |-- rows that lost their KV are prefilled --|-- rows decode --|
           |          `_pending` is not empty                            |
           |<----------- time since: `spent_s` is at most `most` of it ->|

    An update drops the KV of all rows, and their prefills begin again. If the next update came before the last prefill
    was complete, the rows at the end of the queue would never decode. So the next update waits until no prefill is
    pending, and until the prefills took at most the part `most` of the time since the last update.

    The wait is bounded. A pending sequence holds a row, or waits for the prefill of a sequence with a row: it needs
    nothing but steps. A sequence that gets no row at once, because pages are short or requests of a higher priority
    came first, is no longer pending. When no sequence is pending, `spent_s` is fixed, and the wait ends `spent_s /
    most` after the last update.

    Args:
        most: largest share of the time since the last update that recomputation may take before the next update.
        clock: monotonic seconds.
    """

    def __init__(self, most: float, clock: Callable[[], float]) -> None:
        self.most = most
        self.clock = clock
        self.spent_s = 0.0  # time spent on prefills of lost KV since the last update
        self._since_s = clock()
        self._pending: set[Sequence] = set()

    def begin(self, seqs: Iterable[Sequence]) -> None:
        """Note that an update was applied, and that these sequences lost their KV."""
        self._pending = set(seqs)
        self.spent_s, self._since_s = 0.0, self.clock()

    def admitted(self, roster: Roster) -> None:
        """Every waiting sequence that can get a row now has got one: sequences without a row are no longer pending."""
        if not self._pending:
            return
        joined = roster.feed.joined_sequences()
        self._pending = {
            seq
            for seq in self._pending
            if not seq.finalized and (seq.state is not SequenceState.WAITING or seq in joined)
        }

    def committed(self, plan: Plan, ran_s: float) -> float:
        """A step was committed that ran for `ran_s` seconds; returns how many of them computed KV again."""
        if not self._pending or plan.kind == "decode":
            return 0.0
        tokens = 0
        for span in plan.spans:
            # The sequence was taken off since: the step is older than the update.
            if span.seq in self._pending and span.seq.state in (SequenceState.PREFILL, SequenceState.DECODE):
                tokens += span.tokens_in
                if span.draws:
                    self._pending.remove(span.seq)
        spent_s = ran_s * tokens / plan.tokens
        self.spent_s += spent_s
        return spent_s

    def delays(self, roster: Roster) -> bool:
        """True if the next update has to wait. Without rows it costs nothing, so it may be applied."""
        if self.most == 1.0:
            return False
        if any(not seq.finalized for seq in self._pending):
            return True
        return roster.running > 0 and self.spent_s > self.most * (self.clock() - self._since_s)


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
        self._under_way: tuple[_Swap, ...] = ()  # at most one

    @property
    def copying(self) -> bool:
        """Whether the device copies an update. Any thread may ask."""
        return any(swap.start.query() and not swap.end.query() for swap in self._under_way)

    def advance(self, parts: EngineParts) -> None:
        """Finish the swap under way if its copy is done; apply an update if one is ready."""
        if self._gate.asleep:
            return
        for swap in self._under_way:
            self._finish(swap, parts)
        self._gate.note_recomputing(self._recomputation.delays(parts.roster))
        if self._gate.may_apply and (update := self._receiver.take_ready()) is not None:
            if isinstance(update, FeatureUpdate):
                self._give_to_feature(update, parts)
            else:
                self._begin(update, parts)

    def fail(self, message: str) -> None:
        """After a fault: the weights are lost if a swap was under way. The gate stays in `swapping`."""
        for swap in self._under_way:
            self._receiver.failed(swap.update, message)

    def _begin(self, update: StagedUpdate, parts: EngineParts) -> None:
        held_since_s = self._gate.held_since_s if self._gate.hold == "granted" else None
        device = parts.executor.device
        swap = _Swap(update, device.event(), device.event(), held_since_s)
        self._under_way = (swap,)
        self._gate.swap_begins()
        parts.executor.swap(update.version, update.copy_into, swap.start, swap.end)
        self._recomputation.begin(change_weights(parts.roster, update.version, self._recompute, update.names))
        self._gate.clear_hold()

    def _finish(self, swap: _Swap, parts: EngineParts) -> None:
        if parts.pipeline.in_flight == 0:
            swap.end.synchronize()  # the loop has nothing else to do
        if not swap.end.query():
            return
        parts.executor.check()  # called first: if this raises, the weights are lost and the gate stays in `swapping`
        self._under_way = ()
        self._gate.swap_ends()
        start_s, end_s = swap.held_since_s or swap.start.time_s, swap.end.time_s
        self._meter.swap(start_s, end_s, swap.update.version, swap.update.nbytes)
        self._receiver.applied(swap.update, end_s - start_s)

    def _give_to_feature(self, update: FeatureUpdate, parts: EngineParts) -> None:
        try:
            lost = carry_out(update.command, parts.roster, self._recompute)
        except RefusalError as error:
            self._receiver.refused(update, str(error))
        except Exception as error:  # a fault ends these parts, and the receiver waits for an answer
            self._receiver.failed(update, f"{type(error).__name__}: {error}")
            raise
        else:
            self._recomputation.begin(lost)
            self._receiver.applied(update, 0.0)
