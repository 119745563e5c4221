"""The gate: may a step be launched, an update be applied, a request be admitted? If not: the reason, and the waiters.

The loop, the weight receiver and the service all ask this one object. Its state has seven parts. Each part changes on
its own, and the answers follow from all seven:

    life     serving --drain--> draining --take_answers: no request, no step--> stopped
    pause    open --pause--> paused --resume, drain--> open
    sleep    awake --fall_asleep--> falling --slept--> asleep --wake_up--> awake
                                       '-------- wake_up (refused) --------^
    hold     free --request_hold--> wanted --grant_hold: no step in flight--> granted --clear_hold--> free
                                       '---------- clear_hold (given up) ------------------------------^
    weights  known --fail_hold: an update in place failed half-way--> stale --clear_hold: a whole update--> known
             known --lose_weights: a sleep of level 2 dropped them--> stale
    swap     none --swap_begins--> swapping --swap_ends--> none
    kv       ready --note_recomputing--> recomputing --note_recomputing--> ready

    state       launch a step   apply an update   admit a request   begin an update
    draining    yes             yes               no                yes
    paused      no              yes               yes               yes
    falling     no              yes               as ordered        no
    asleep      no              no                as ordered        no
    wanted      no              yes               yes               yes
    granted     no              yes               yes               yes
    stale       no              yes               yes               yes
    swapping    yes             no                yes               yes
    recomputing yes             no                yes               yes

"As ordered" is `Sleep.requests`: requests wait, or are refused. A step that is launched during a swap runs after the
copy, because both use the compute stream. Recomputing delays an update only where steps may be launched. In all other
states the recomputation stands still, and the trainer may wait for the update before it lets generation go on.

Waiters: a `pause` and a `drain` wait with their tokens, and `take_answers` returns the answers. The receiver waits
for the hold with a callback. A sleep waits for `update_inside` and `swapping` to become false: `sleep.py` looks at them
in every tick.

Threads. Only the loop calls the methods of "the loop's changes". Any thread may ask the questions, and any thread may
call the methods of "the weight receiver". A lock orders the changes of the hold, which both threads make, and the begin
of an update against the order to sleep. Every public attribute is one reference and is replaced as a whole, so any
thread may read it without the lock, perhaps one change late. No method waits, and no callback is called while the lock
is held. A change by the receiver for which the loop has something to do also calls `notify`, since the loop may be
waiting for a command.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from rollout.engine.messages.requests import Request
from rollout.engine.messages.statuses import EngineState, SleepStatus
from rollout.engine.messages.to_service import Done, Rejected

#: Reasons why no step may be launched; "" if one may be.
Blocked = Literal["", "asleep", "paused", "stale", "held"]
#: The cause for which a ready update waits: the end of a sleep, of the previous swap, or of recomputation.
UpdateWait = Literal["wake", "swap", "recompute"]


def _nobody() -> None:
    """No-op: no update waits for the hold, or no loop for a command."""


@dataclass(frozen=True, slots=True)
class SleepState:
    """The state of the sleep: awake, falling (ordered) or asleep (reached)."""

    level: int = 0  # 0: awake; 1: weights are kept in host memory; 2: they are dropped
    requests: Literal["wait", "refuse"] = "wait"  # policy for requests that arrive during the sleep
    reached: bool = False  # asleep
    freed_bytes: int = 0  # device memory given back
    since_s: float = 0.0  # asleep since, by the clock of the gate

    @property
    def ordered(self) -> bool:
        """True unless awake."""
        return self.level > 0


_AWAKE = SleepState()


class Gate:
    """All states that open and close an engine. A gate lives as long as its worker and outlives rebuilt engines.

    Args:
        drain_s: seconds that a drain gives to running requests.
        takes_weights: whether a weight receiver is attached, so that a newer version can arrive at all.
        notify: lets the loop take its next tick at once, from any thread.
        clock: the present, in seconds.
    """

    def __init__(
        self,
        drain_s: float = 30.0,
        takes_weights: bool = False,
        notify: Callable[[], object] = _nobody,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.takes_weights, self.notify, self._clock = takes_weights, notify, clock
        self.draining = False
        self.stopped = False
        self.paused = False
        self.sleep = _AWAKE
        self.hold: Literal["free", "wanted", "granted"] = "free"
        self.stale = ""  # why the weights cannot be used, and what cures that; empty while they can
        self.dropped = False  # a sleep dropped the weights, and no whole update has arrived since
        self.failed = False  # stale because an update failed, not because a sleep was ordered
        self.held_since_s: float | None = None  # held for an update since, by `clock`
        self.swapping = False
        self.recomputing = False  # KV that the last update dropped is computed again, or took too much of the time
        self.update_inside = False  # an update is being received, waits to be applied, or is being applied
        self._drain_s = drain_s
        self._drain_until_s = float("inf")
        self._pause_tokens: list[int] = []
        self._end_tokens: list[int] = []
        self._on_grant: Callable[[], object] = _nobody
        self._lock = threading.Lock()

    # --- the questions; any thread ------------------------------------------------------------------------------------

    @property
    def blocked(self) -> Blocked:
        """The reason why no step may be launched."""
        if self.sleep.ordered:
            return "asleep"
        if self.paused:
            return "paused"
        if self.hold != "free":
            return "stale" if self.stale else "held"
        return ""

    @property
    def at_rest(self) -> bool:
        """True if launches are blocked from outside. A hold is different: it ends by itself and counts as a swap."""
        return self.blocked not in ("", "held")

    @property
    def may_apply(self) -> bool:
        """True if a ready update may be applied now."""
        return self.update_waits_for is None

    @property
    def update_waits_for(self) -> UpdateWait | None:
        """The cause for which a ready update waits; None if it may be applied now."""
        if self.asleep:
            return "wake"
        if self.swapping:
            return "swap"
        return "recompute" if self.recomputing and not self.blocked else None

    def refusal(self, request: Request, version: int) -> Rejected | None:
        """The reason to refuse this request while weights of `version` are served; None if it is admitted."""
        if self.draining:
            return Rejected(request.key, "unavailable", "the worker is draining: send the request to another worker")
        if self.sleep.requests == "refuse":
            message = "this worker is asleep: wake it, or send the request to another worker"
            return Rejected(request.key, "unavailable", message)
        if request.min_version > version and not self.takes_weights:
            message = f"this worker takes no weights: version {request.min_version} can never come"
            return Rejected(request.key, "unavailable", message, "min_version")
        return None

    @property
    def asleep(self) -> bool:
        """True while the device's memory is released."""
        return self.sleep.reached

    @property
    def state(self) -> EngineState:
        """The state that a status shows."""
        blocked = self.blocked
        if self.draining:
            return "draining"
        return "serving" if not blocked or blocked == "held" else blocked

    def sleep_status(self) -> SleepStatus | None:
        """The sleep that a status shows; None while awake."""
        sleep = self.sleep
        if not sleep.ordered:
            return None
        age_s = self._clock() - sleep.since_s if sleep.reached else 0.0
        return SleepStatus(sleep.level, sleep.requests, sleep.freed_bytes, age_s)

    # --- the loop's changes -------------------------------------------------------------------------------------------

    def pause(self, token: int) -> None:
        """Launch nothing until `resume`; `token` is confirmed once no step is in flight. A drain goes on regardless."""
        self.paused = not self.draining  # a paused request could never finish
        self._pause_tokens.append(token)

    def resume(self, token: int) -> list[Done]:
        """Launch again. Returns the answers: pauses that still wait, then this."""
        self.paused = False
        tokens, self._pause_tokens = [*self._pause_tokens, token], []
        return [Done(each) for each in tokens]

    def drain(self, token: int | None) -> None:
        """Admit nothing more; stop when no request is left. `token` is confirmed then."""
        self.draining, self.paused = True, False  # a paused request could never finish
        self._drain_until_s = min(self._drain_until_s, self._clock() + self._drain_s)
        if token is not None:
            self._end_tokens.append(token)

    @property
    def drain_overdue(self) -> bool:
        """True when a drain has taken longer than `drain_s`: end the remaining requests."""
        return self.draining and self._clock() >= self._drain_until_s

    def take_answers(self, in_flight: int, unfinished: int) -> list[Done]:
        """The answers that are now due, given the steps in flight and the unfinished requests; stop if drained."""
        if in_flight:
            return []
        tokens, self._pause_tokens = self._pause_tokens, []
        if self.draining and not unfinished:
            self.stopped = True
            tokens, self._end_tokens = tokens + self._end_tokens, []
        return [Done(token) for token in tokens]

    def fail(self) -> list[Done]:
        """The answers that are due after a fault: a draining worker ends, so its drains are confirmed."""
        return [Done(token) for token in self._end_tokens] if self.draining else []

    def fall_asleep(self, level: int, requests: Literal["wait", "refuse"]) -> None:
        """Order a sleep: launch nothing, begin no update. A deeper sleep may be ordered while asleep."""
        with self._lock:  # an update is admitted before this order, which waits for it, or it is refused
            self.sleep = replace(self.sleep, level=max(self.sleep.level, level), requests=requests)

    def slept(self, freed_bytes: int) -> None:
        """Note that the memory is released."""
        assert self.sleep.ordered and not (self.swapping or self.update_inside)
        self.sleep = replace(self.sleep, reached=True, freed_bytes=freed_bytes, since_s=self._clock())

    def wake_up(self) -> None:
        """Note that the memory is allocated again, or that a sleep was refused."""
        self.sleep = _AWAKE

    def grant_hold(self) -> None:
        """Grant the hold if one is wanted, as no step is in flight. The receiver may write from now on."""
        if self.hold != "wanted" or self.swapping:
            return
        with self._lock:
            if self.hold != "wanted":  # the receiver has given up meanwhile
                return
            self.held_since_s, self.hold = self._clock(), "granted"
            on_grant = self._on_grant
        on_grant()

    def lose_weights(self, why: str) -> None:
        """Hold until a whole update has arrived: no step is in flight, and the parameters have no version."""
        with self._lock:
            self.hold, self.held_since_s, self._on_grant = "granted", None, _nobody
            self.stale, self.dropped, self.failed = why, True, False

    def swap_begins(self) -> None:
        """Note that the copy of an update is on the compute stream."""
        assert not self.swapping
        self.swapping = True

    def swap_ends(self) -> None:
        """Note that the copy is done. Never called after a fault during a swap: the weights are lost."""
        self.swapping = False

    def note_recomputing(self, recomputing: bool) -> None:
        """Set whether the KV that the last update dropped delays the next update."""
        self.recomputing = recomputing

    # --- the weight receiver; any thread ------------------------------------------------------------------------------

    def admit_update(self) -> bool:
        """Begin an update. Returns False if it must not begin, because a sleep has been ordered."""
        with self._lock:
            if self.sleep.ordered:
                return False
            self.update_inside = True
            return True

    def updates_done(self) -> None:
        """Note that no update is being received, is waiting, or is being applied."""
        if self.update_inside:
            self.update_inside = False
            self.notify()

    def request_hold(self, on_grant: Callable[[], object]) -> None:
        """Ask that no step be launched; `on_grant` is called once none is in flight, from any thread."""
        with self._lock:
            at_once = self.hold == "granted"  # stale: no step has run since
            self._on_grant, self.held_since_s = on_grant, self._clock()
            if not at_once:
                self.hold = "wanted"
        if at_once:
            on_grant()
        else:
            self.notify()

    def fail_hold(self, why: str) -> None:
        """The parameters are a mixture of versions: the hold stays until a whole update has arrived."""
        with self._lock:
            self.stale, self.failed, self._on_grant = why, True, _nobody

    def clear_hold(self) -> None:
        """The parameters are whole: generation goes on. The loop calls this when it takes a whole update."""
        with self._lock:
            self.hold, self.stale, self.dropped, self.failed = "free", "", False, False
            self.held_since_s, self._on_grant = None, _nobody  # the callback refers to the update and its memory
        self.notify()
