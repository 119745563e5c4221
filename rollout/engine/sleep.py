"""Sleep and wake: the device's memory given back to whoever shares it, and had again.

    awake --Sleep--> falling --> emptying --> asleep --Wake--> awake; after level 2 stale
                               `-- refused: awake again

    falling    nothing is launched, no update begins; until no step is in flight and no update inside
    emptying   rows are preempted: at level 1 their KV is parked (`parking`), as far as the host has room for it, and
               they take it back when they are admitted again; the rest is computed again. Until no page is in use
    asleep     the memory is given back; a wake that finds too little changes nothing

Commands are obeyed one after the other, in the order in which they came; each gets one answer, when it has taken
effect. Asleep, a sleep of a higher level drops what was kept; any other changes nothing. Awake, so does a wake.

Invariants:

- While memory is given back nothing is launched, no update is received and nothing is copied to a slot of an adapter.
- No KV outlives a sleep but what is parked on the host, of weights that come back as they were: cache, sessions and
  shares are empty.
- What was parked for a sleep that is refused is taken back from wherever it is by then.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from typing import TYPE_CHECKING, Literal

from rollout.engine.device.releasable import MemoryShortError, ReleasableMemory
from rollout.engine.messages import Done, Event, Failed
from rollout.engine.orders import Sleep, SleepStatus, Wake

if TYPE_CHECKING:
    from rollout.engine.loop import Engine
    from rollout.engine.schedule.scheduler import Scheduler

log = logging.getLogger(__name__)

_DROPPED = "the weights were dropped in a sleep of level 2: publish a whole update"
_ENDING = "the worker is draining: it ends soon"
#: While it falls asleep, the longest wait for a copy before the loop turns: copies may hang.
_TURN_S = 0.05


class Sleeper:
    """The sleeps of one engine, whose loop calls everything here. Without `memory` it cannot sleep.

    `mode` and `requests` hold for sleeps that do not say it; KV has to be on the host within `kv_s`.
    """

    def __init__(
        self,
        memory: ReleasableMemory | None = None,
        mode: Literal["keep", "abort"] = "keep",
        requests: Literal["wait", "refuse"] = "wait",
        kv_s: float = 60.0,
    ) -> None:
        self.memory = memory
        self.wanted = False  # nothing may be launched: asleep, or falling
        self.asleep = False  # the memory is given back
        self._mode, self._requests, self._kv_s = mode, requests, kv_s
        self._level = 0  # of the sleep that there is, or that is wanted
        self._takes: Literal["wait", "refuse"] = requests
        self._orders: deque[Sleep | Wake] = deque()
        self._begun = False  # the first of them is under way
        self._freed_bytes = 0
        self._since_s = 0.0
        self._emptying_s: float | None = None  # since when KV leaves the pool, while it does

    def obey(self, order: Sleep | Wake, engine: Engine) -> None:
        """Take an order; `turn` carries it out."""
        if self.memory is None:
            message = "this worker cannot sleep: start it with 'engine.sleep'"
            engine.scheduler.events.append(Failed(order.token, message, "op"))
        elif engine.state == "draining":
            engine.scheduler.events.append(Failed(order.token, _ENDING, code="unavailable"))
        elif isinstance(order, Sleep) and order.level == 2 and not engine.takes_weights:
            message = "this worker takes no weights, so none could come after a sleep of level 2: use level 1"
            engine.scheduler.events.append(Failed(order.token, message, "level"))
        else:
            self._orders.append(order)
            self._begin(engine)
            if not self.wanted:
                self.turn(engine)

    @property
    def refuses(self) -> bool:
        """True if requests that come now are not taken."""
        return self.wanted and self._takes == "refuse"

    @property
    def patience_s(self) -> float:
        """How long the loop may wait for a copy of KV."""
        return _TURN_S if self.wanted else math.inf

    def turn(self, engine: Engine) -> None:
        """Carry out what can be. Called at the end of a tick, while something is wanted."""
        while self._orders and self._carry_out(self._orders[0], engine):
            self._orders.popleft()
            self._begun = False
            self._begin(engine)

    def end(self, engine: Engine) -> None:
        """The worker ends: orders that wait are not carried out."""
        for order in self._orders:
            engine.scheduler.events.append(Failed(order.token, _ENDING, code="unavailable"))
        self._orders.clear()
        self._begun = False
        if not self.asleep:
            self._awake(engine)

    def fail(self, engine: Engine, message: str) -> list[Event]:
        """After a fault: the answers to orders that wait."""
        answers: list[Event] = [Failed(order.token, message, code="internal") for order in self._orders]
        self._orders.clear()
        self._begun = False
        if not self.asleep:
            self._awake(engine)
        return answers

    def status(self) -> SleepStatus | None:
        """What a status says of it."""
        if not self.wanted:
            return None
        age_s = time.perf_counter() - self._since_s if self.asleep else 0.0
        return SleepStatus(self._level, self._takes, self._freed_bytes, age_s)

    def _begin(self, engine: Engine) -> None:
        """Do at once what the first order needs no quiet for."""
        if self._begun or not self._orders:
            return
        self._begun, order = True, self._orders[0]
        if isinstance(order, Sleep):
            self.wanted = True
            self._level = max(self._level, order.level)
            self._takes = order.requests or self._requests
            engine.hold.door.shut()
            if (order.mode or self._mode) == "abort":
                engine.scheduler.end_all("cancelled")

    def _carry_out(self, order: Sleep | Wake, engine: Engine) -> bool:
        """Try to; True if the order is answered."""
        began_s = time.perf_counter()
        answer: Done | Failed | None
        if isinstance(order, Wake):
            answer = self._wake(order, engine) if self.asleep else self._told(order, 0, began_s, engine)
        elif self.asleep:
            assert self.memory is not None
            if self._level == 2:
                self.memory.forget()
                engine.scheduler.forget_parked()
            answer = self._told(order, self._freed_bytes, began_s, engine)
        elif _quiet(engine):
            answer = self._fall_asleep(order, engine)
        else:
            return False
        if answer is not None:
            engine.scheduler.events.append(answer)
        return answer is not None

    def _fall_asleep(self, order: Sleep, engine: Engine) -> Done | Failed | None:
        """The answer, or None while KV is on its way to the host."""
        assert self.memory is not None
        if self._emptying_s is None:
            self._emptying_s = time.perf_counter()
            engine.runner.finish()
            try:
                if self._level == 1:
                    self.memory.save()  # before anything is dropped: where it fails, all goes on as it was
            except MemoryShortError as error:
                return self._refuse(order, engine, str(error))
            engine.scheduler.leave_pool(keep=self._level == 1)
        began_s = self._emptying_s
        if not _emptied(engine):
            late = time.perf_counter() - began_s >= self._kv_s
            return self._refuse(order, engine, self._too_late()) if late else None
        _forget_device(engine.scheduler)
        engine.runner.finish()  # an adapter may have been written meanwhile
        self._freed_bytes = self.memory.release()
        self.asleep, self._since_s, self._emptying_s = True, time.perf_counter(), None
        engine.meter.offload(began_s, self._since_s)
        answer = self._told(order, self._freed_bytes, began_s, engine)
        log.info("asleep", extra=dict(answer.facts))
        return answer

    def _refuse(self, order: Sleep, engine: Engine, why: str) -> Failed:
        """All goes on; rows that were preempted for it have their KV where it is by now."""
        assert self._emptying_s is not None
        log.warning("this worker cannot sleep", extra={"reason": why})
        engine.meter.offload(self._emptying_s, time.perf_counter())
        self._awake(engine)
        return Failed(order.token, why, code="unavailable")

    def _too_late(self) -> str:
        return (
            f"the KV of completions was not on the host within engine.sleep_kv_s = {self._kv_s:g} s, and generation "
            "goes on: raise it, lower engine.host_kv_gib, or sleep with mode 'abort'"
        )

    def _wake(self, order: Wake, engine: Engine) -> Done | Failed:
        assert self.memory is not None
        began_s = time.perf_counter()
        try:
            self.memory.restore()
        except MemoryShortError as error:
            log.warning("this worker stays asleep", extra={"reason": str(error)})
            return Failed(order.token, str(error), code="unavailable")
        if self._level == 2:
            engine.hold.lost(_DROPPED)
        engine.meter.offload(began_s, time.perf_counter())
        answer = self._told(order, self.memory.nbytes, began_s, engine)
        log.info("awake again", extra=dict(answer.facts))
        self._awake(engine)
        return answer

    def _awake(self, engine: Engine) -> None:
        self.wanted = self.asleep = False
        self._level = self._freed_bytes = 0
        self._emptying_s = None
        if self.memory is not None:
            self.memory.forget()  # what a sleep saved that was not to be
        engine.hold.door.open()

    def _told(self, order: Sleep | Wake, nbytes: int, began_s: float, engine: Engine) -> Done:
        parked = 0 if engine.offload is None else engine.offload.parking.status().sequences
        seconds = time.perf_counter() - began_s
        return Done(order.token, {"level": self._level, "bytes": nbytes, "seconds": seconds, "parked": parked})


def _quiet(engine: Engine) -> bool:
    """True while no step is in flight and no update is received or applied."""
    return engine.pipeline.in_flight == 0 and not engine.swapping and engine.hold.door.empty


def _emptied(engine: Engine) -> bool:
    """True once no page is in use; until then have those sent that only parked sequences use by now."""
    scheduler = engine.scheduler
    if scheduler.memory.parking is not None:
        scheduler.memory.parking.sweep()
    return scheduler.memory.pool.used == 0


def _forget_device(scheduler: Scheduler) -> None:
    """What the cache and the slots of adapters hold is lost."""
    assert not (scheduler.prefilling or scheduler.decoding or scheduler.leaving), "a row has no pages"
    scheduler.memory.weights_changed()
    if scheduler.memory.adapters is not None:
        scheduler.memory.adapters.unload_all()
