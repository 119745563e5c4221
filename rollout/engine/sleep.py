"""Sleep and wake: the device's memory is given to other processes, and taken back later.

    awake --Sleep--> falling --> emptying --> asleep --WakeUp--> awake; after level 2 stale
                               `-- refused: awake again

    falling    no step is launched, no update begins; until no step is in flight and no update is inside
    emptying   rows are preempted. At level 1 their KV is offloaded (`tier`) while the host has room, and comes back at
               their next admission; other KV is computed again. Until no page is in use
    asleep     the memory is given back; a wake that finds too little memory changes nothing

The gate knows falling (emptying included) and asleep; this module does the work. Orders are carried out in the order of
arrival. Each order gets one answer, when it has taken effect. While asleep, a sleep of a higher level drops the kept
data, and any other sleep changes nothing. While awake, a wake changes nothing.

Invariants:

- While memory is given back, no step is launched, no update is received and nothing is copied to an adapter slot.
- The only KV that outlives a sleep is on the host and belongs to weights that return unchanged: of rows, and known
  pages. The cache in the pool, sessions and shared prompts are empty.
- A sleep that is refused loses no offloaded KV: rows get it back from the host or from the pool.
"""

import logging
import math
from collections import deque

from rollout.config import EngineSettings
from rollout.engine.device.releasable import MemoryShortError, SleepMemory
from rollout.engine.messages.to_engine import Sleep, WakeUp
from rollout.engine.messages.to_service import Done, Event, Failed
from rollout.engine.parts import EngineLinks, EngineParts
from rollout.engine.schedule.preemption import release_pool
from rollout.engine.schedule.roster import Roster
from rollout.metrics.meter import Meter

log = logging.getLogger(__name__)

_DROPPED = "the weights were dropped in a sleep of level 2: publish a whole update"
_ENDING = "the worker is draining: it ends soon"
#: The longest wait for a copy of KV in one tick while the engine falls asleep: copies may hang.
_COPY_WAIT_S = 0.05


class Sleeper:
    """The sleeps of one engine; only the loop calls it. `memory` says whether it can sleep at all.

    `settings` give the time limit for moving KV (`constants.sleep_kv_s`).
    """

    def __init__(self, links: EngineLinks, meter: Meter, memory: SleepMemory, settings: EngineSettings) -> None:
        self.memory = memory
        self._gate, self._receiver, self._meter = links.gate, links.receiver, meter
        self._kv_s = settings.constants.sleep_kv_s
        self._orders: deque[Sleep | WakeUp] = deque()
        self._begun = False  # the first order is under way
        self._emptying_s = math.inf  # emptying the pool since, by the roster's clock

    def take(self, order: Sleep | WakeUp, parts: EngineParts) -> None:
        """Take an order; `advance` carries it out."""
        refused: Failed | None = None
        if not self.memory.sleeps:
            refused = Failed(order.token, "this worker cannot sleep: start it with --sleep (engine.sleep)", "op")
        elif self._gate.draining:
            refused = Failed(order.token, _ENDING, code="unavailable")
        elif isinstance(order, Sleep) and order.level == 2 and not self._gate.takes_weights:
            message = "this worker takes no weights, so it could not wake from a sleep of level 2: use level 1"
            refused = Failed(order.token, message, "level")
        if refused is not None:
            parts.roster.events.append(refused)
            return
        self._orders.append(order)
        self._begin(parts)
        if not self._gate.sleep.ordered:  # a wake of an engine that is awake; all others wait for the end of the tick
            self.advance(parts)

    @property
    def copy_wait_s(self) -> float:
        """The longest time that the loop may wait for a copy of KV."""
        return _COPY_WAIT_S if self._gate.sleep.ordered else math.inf

    def advance(self, parts: EngineParts) -> None:
        """Carry out the orders that can be carried out now. Called at the end of a tick while a sleep is ordered."""
        while self._orders and (answer := self._carry_out(self._orders[0], parts)) is not None:
            parts.roster.events.append(answer)
            self._orders.popleft()
            self._begun = False
            self._begin(parts)

    def end(self, parts: EngineParts) -> None:
        """The worker drains: refuse the orders that wait; wake up unless asleep."""
        parts.roster.events += [Failed(order.token, _ENDING, code="unavailable") for order in self._orders]
        self._drop_orders()

    def fail(self, message: str) -> list[Event]:
        """After a fault: the answers to the waiting orders. The engine is awake then, unless it was asleep."""
        answers: list[Event] = [Failed(order.token, message, code="internal") for order in self._orders]
        self._drop_orders()
        return answers

    def _drop_orders(self) -> None:
        self._orders.clear()
        self._begun = False
        if not self._gate.asleep:
            self._stay_awake()

    def _begin(self, parts: EngineParts) -> None:
        """Start the first order; the part that needs no quiet device is done at once."""
        if self._begun or not self._orders:
            return
        self._begun, order = True, self._orders[0]
        if isinstance(order, Sleep):
            self._gate.fall_asleep(order.level, order.requests or "wait")
            self._receiver.rest()
            if order.mode == "abort":
                parts.roster.end_all("cancelled")

    def _carry_out(self, order: Sleep | WakeUp, parts: EngineParts) -> Done | Failed | None:
        """Try to carry out an order; the answer, or None while it waits."""
        now_s, gate = parts.roster.clock(), self._gate
        if isinstance(order, WakeUp):
            return self._wake(order, parts) if gate.asleep else self._done(order, 0, now_s, parts)
        if gate.asleep:
            if gate.sleep.level == 2:
                self.memory.forget()
                parts.roster.forget_offloaded()
                parts.roster.allocator.forget_all()
            return self._done(order, gate.sleep.freed_bytes, now_s, parts)
        if parts.pipeline.in_flight == 0 and not gate.swapping and not gate.update_inside:
            return self._fall_asleep(order, parts)
        return None

    def _fall_asleep(self, order: Sleep, parts: EngineParts) -> Done | Failed | None:
        """The device is quiet. Returns the answer, or None while KV is on its way to the host."""
        keep = self._gate.sleep.level == 1
        if self._emptying_s == math.inf:
            self._emptying_s = parts.roster.clock()
            parts.executor.finish()
            try:
                if keep:
                    self.memory.save()  # first: if this fails, nothing has been dropped
            except MemoryShortError as error:
                return self._refuse(order, str(error), parts)
            release_pool(parts.roster, keep)
        began_s = self._emptying_s
        if not _emptied(parts.roster):
            late = parts.roster.clock() - began_s >= self._kv_s
            return self._refuse(order, self._too_late(), parts) if late else None
        _forget_device_state(parts.roster, keep)
        parts.executor.finish()  # a feature may have copied to the device meanwhile
        freed_bytes, self._emptying_s = self.memory.release(), math.inf
        self._gate.slept(freed_bytes)
        self._meter.offload(began_s, parts.roster.clock())
        answer = self._done(order, freed_bytes, began_s, parts)
        log.info("asleep", extra=dict(answer.facts))
        return answer

    def _refuse(self, order: Sleep, why: str, parts: EngineParts) -> Failed:
        """Resume generation; preempted rows get their KV back from the host or the pool."""
        log.warning("this worker cannot sleep", extra={"reason": why})
        self._meter.offload(self._emptying_s, parts.roster.clock())
        self._stay_awake()
        return Failed(order.token, why, code="unavailable")

    def _too_late(self) -> str:
        return (
            f"the KV of completions did not reach the host within {self._kv_s:g} s, so generation "
            "goes on: lower engine.host_kv_gib, or sleep with mode 'abort'"
        )

    def _wake(self, order: WakeUp, parts: EngineParts) -> Done | Failed:
        began_s = parts.roster.clock()
        try:
            self.memory.restore()
        except MemoryShortError as error:
            log.warning("this worker stays asleep", extra={"reason": str(error)})
            return Failed(order.token, str(error), code="unavailable")
        if self._gate.sleep.level == 2:
            self._gate.lose_weights(_DROPPED)
        self._meter.offload(began_s, parts.roster.clock())
        answer = self._done(order, self.memory.nbytes, began_s, parts)
        log.info("awake again", extra=dict(answer.facts))
        self._stay_awake()
        return answer

    def _stay_awake(self) -> None:
        self._emptying_s = math.inf
        self.memory.forget()  # saved for a sleep that was refused
        self._gate.wake_up()

    def _done(self, order: Sleep | WakeUp, nbytes: int, began_s: float, parts: EngineParts) -> Done:
        facts = {
            "level": self._gate.sleep.level,
            "bytes": nbytes,
            "seconds": parts.roster.clock() - began_s,
            "parked": parts.roster.allocator.tier.status()[0].sequences,
        }
        return Done(order.token, facts)


def _emptied(roster: Roster) -> bool:
    """True once no page is in use or copied. Until then, pages of offloaded sequences alone are sent to the host."""
    allocator = roster.allocator
    allocator.end_sharing()  # a turn or a fetch may have ended meanwhile, and left its KV to a session or a snapshot
    allocator.tier.send_unshared()
    return allocator.pool.used == 0 and not allocator.tier.copies_out


def _forget_device_state(roster: Roster, keep: bool) -> None:
    """Empty the prefix cache and the features' device memory; `keep` the cached KV on the host."""
    assert not (roster.prefilling or roster.decoding or roster.ending), "a row has no pages"
    if keep:
        roster.allocator.empty_pool()
    else:
        roster.allocator.forget_all()
    for feature in roster.features:
        feature.memory_leaves()
