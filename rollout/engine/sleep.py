"""Sleep and wake: the device's memory given back to whoever shares it, and had again.

    awake --Sleep--> falling --no step in flight, no update inside--> asleep --Wake--> awake; after level 2 stale
                     nothing is launched, no update begins               `- too little memory: asleep as before

Commands are obeyed one after the other, in the order in which they came; each gets one answer, when it has taken
effect. Asleep, a sleep of a higher level drops what was kept; any other changes nothing. Awake, so does a wake.

Invariants:

- While memory is given back nothing is launched, no update is received and nothing is copied to a slot of an adapter.
- No KV outlives a sleep: cache, sessions and shares are empty, and rows start again from their tokens.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Literal

from rollout.engine.orders import Sleep, SleepStatus, Wake
from rollout.engine.releasable import MemoryShortError, ReleasableMemory
from rollout.engine.types import Done, Event, Failed

if TYPE_CHECKING:
    from rollout.engine.engine import Engine
    from rollout.engine.scheduler import Scheduler

log = logging.getLogger(__name__)

_DROPPED = "the weights were dropped in a sleep of level 2: publish a whole update"
_ENDING = "the worker is draining: it ends soon"


class Sleeper:
    """The sleeps of one engine, whose loop calls everything here. Without `memory` it cannot sleep.

    `mode` and `requests` hold for sleeps that do not say it.
    """

    def __init__(
        self,
        memory: ReleasableMemory | None = None,
        mode: Literal["keep", "abort"] = "keep",
        requests: Literal["wait", "refuse"] = "wait",
    ) -> None:
        self.memory = memory
        self.wanted = False  # nothing may be launched: asleep, or falling
        self.asleep = False  # the memory is given back
        self._mode, self._requests = mode, requests
        self._level = 0  # of the sleep that there is, or that is wanted
        self._takes: Literal["wait", "refuse"] = requests
        self._orders: deque[Sleep | Wake] = deque()
        self._begun = False  # the first of them is under way
        self._freed_bytes = 0
        self._since_s = 0.0

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
        if isinstance(order, Wake):
            answer: Done | Failed = self._wake(order, engine) if self.asleep else self._told(order, 0, began_s)
        elif self.asleep:
            assert self.memory is not None
            if self._level == 2:
                self.memory.forget()
            answer = self._told(order, self._freed_bytes, began_s)
        elif _quiet(engine):
            answer = self._fall_asleep(order, engine)
        else:
            return False
        engine.scheduler.events.append(answer)
        return True

    def _fall_asleep(self, order: Sleep, engine: Engine) -> Done | Failed:
        assert self.memory is not None
        began_s = time.perf_counter()
        engine.runner.finish()
        try:
            if self._level == 1:
                self.memory.save()  # before anything is dropped: where it fails, all goes on as it was
        except MemoryShortError as error:
            log.warning("this worker cannot sleep", extra={"reason": str(error)})
            self._awake(engine)
            return Failed(order.token, str(error), code="unavailable")
        _drop_kv(engine.scheduler)
        self._freed_bytes = self.memory.release()
        self.asleep, self._since_s = True, time.perf_counter()
        engine.meter.offload(began_s, self._since_s)
        answer = self._told(order, self._freed_bytes, began_s)
        log.info("asleep", extra=dict(answer.facts))
        return answer

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
        answer = self._told(order, self.memory.nbytes, began_s)
        log.info("awake again", extra=dict(answer.facts))
        self._awake(engine)
        return answer

    def _awake(self, engine: Engine) -> None:
        self.wanted = self.asleep = False
        self._level = self._freed_bytes = 0
        engine.hold.door.open()

    def _told(self, order: Sleep | Wake, nbytes: int, began_s: float) -> Done:
        return Done(order.token, {"level": self._level, "bytes": nbytes, "seconds": time.perf_counter() - began_s})


def _quiet(engine: Engine) -> bool:
    """True while no step is in flight, no KV is moved, and no update is received or applied."""
    moving = engine.offload is not None and engine.offload.moving
    return engine.pipeline.in_flight == 0 and not engine.swapping and not moving and engine.hold.door.empty


def _drop_kv(scheduler: Scheduler) -> None:
    """All KV is lost, the weights stay what they are: rows and parked sequences start again from their tokens."""
    scheduler.weights_changed(scheduler.version, recompute=True)
    assert not (scheduler.prefilling or scheduler.decoding or scheduler.leaving), "a step was in flight"
    if scheduler.memory.adapters is not None:
        scheduler.memory.adapters.unload_all()
