"""The engine: one tick of the two-slot pipeline, and what may happen between two steps.

    commands -> plan -> launch -> commit the oldest, draw what was held -> swap weights -> events

Nothing here waits, except `runner.read` for the outputs of the oldest step, while the newest one runs; and, where
nothing runs, for an adapter that is being copied to the device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Literal

from rollout.engine.adapter_table import AdapterError, AdapterUpdate
from rollout.engine.gate import Hold
from rollout.engine.kv.offload import Offload
from rollout.engine.messages import (
    Cancel,
    Command,
    Delta,
    Done,
    DropAdapter,
    EndSession,
    EngineStatus,
    Failed,
    Pause,
    PutAdapter,
    Rejected,
    RequestDone,
    Resume,
    Shutdown,
    StopAt,
    Submit,
)
from rollout.engine.messages import Event as ServiceEvent
from rollout.engine.orders import Sleep, Wake
from rollout.engine.schedule.admission import turned_away
from rollout.engine.schedule.plan import Plan
from rollout.engine.schedule.rescue import rescue
from rollout.engine.schedule.scheduler import Scheduler
from rollout.engine.schedule.sequence import Feature
from rollout.engine.sleep import Sleeper
from rollout.engine.snapshot import set_gauges, snapshot
from rollout.engine.step.masks import MaskBuilder
from rollout.engine.step.pipeline import Pipeline, StepInFlight
from rollout.engine.step.runner import Runner
from rollout.engine.step.slot import Slot
from rollout.metrics.meter import Meter
from rollout.metrics.step_timing import StepTiming
from rollout.weights.updates import Receiver, Swap

log = logging.getLogger(__name__)

#: In the `error` of completions that end as cancelled because the worker does, not because somebody wanted it.
_ENDS = "the worker ended before the completion did; continue_from goes on with it elsewhere"


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What a fault may leave half-way, and what is built anew after one."""

    scheduler: Scheduler
    pipeline: Pipeline
    runner: Runner
    offload: Offload | None = None  # where KV of preempted sequences is kept


class Engine:
    """Scheduler, pipeline and runner, driven by `tick`."""

    def __init__(
        self,
        parts: EngineParts,
        meter: Meter,
        inbox: SimpleQueue[Command],
        emit: Callable[[list[ServiceEvent]], None],
        receiver: Receiver | None = None,
        recompute_on_swap: bool = False,
        drain_s: float = 30.0,
        mask_s: float = 1.0,
        mask_threads: int = 1,
        sleeper: Sleeper | None = None,
    ) -> None:
        self.inbox = inbox
        self.scheduler, self.pipeline, self.runner = parts.scheduler, parts.pipeline, parts.runner
        self.offload = parts.offload
        self.meter = meter
        self.masks = MaskBuilder(mask_s, mask_threads)
        self.sleeper = sleeper or Sleeper()
        self.state: Literal["serving", "paused", "draining"] = "serving"
        self.stopped = False
        self._emit = emit
        self._receiver, self.takes_weights = receiver, receiver is not None
        self.hold = Hold()  # the weight receiver's own takes its place
        self._recompute_on_swap = recompute_on_swap
        self._drain_s = drain_s
        self._drain_until_s = float("inf")
        self._quiet_tokens: list[int] = []  # pauses to confirm once no step is in flight
        self._end_tokens: list[int] = []  # shutdowns to confirm at the end
        self._swap: Swap | None = None
        self._waiting_since_s: float | None = None  # nothing can be launched before KV was moved
        self._command: Command | None = None  # being obeyed
        self.launching: Plan | None = None  # the step that is being launched, for whoever asks what failed
        self.started_s = time.perf_counter()

    @property
    def busy(self) -> bool:
        """True while a tick has something to do without a new command."""
        held = self._paused or self.hold.wanted
        moving = self.offload is not None and self.offload.moving
        return self.pipeline.in_flight > 0 or self._swap is not None or moving or not (self.scheduler.resting or held)

    @property
    def _paused(self) -> bool:
        return self.scheduler.paused or self.sleeper.wanted

    def wait(self, timeout_s: float) -> None:
        """Sleep until a command comes, and obey it; for when there is nothing else to do."""
        try:
            self._obey(self.inbox.get(timeout=timeout_s))
        except Empty:
            return

    def tick(self) -> None:
        """One turn: launch a step if there is one; commit the oldest if the pipeline is full or none was launched."""
        self._take_commands()
        self.scheduler.end_overdue()
        if self.offload is not None:
            self.offload.turn()
        planned_s = time.perf_counter()
        held = self.hold.wanted
        plan = None if held or self.sleeper.wanted else self.scheduler.plan()
        if plan is not None:
            self._launch(plan, self.pipeline.acquire(), planned_s)
        committed = plan is not None and plan.held and self._commit_and_draw(plan)
        committed |= (self.pipeline.full or plan is None) and self._commit_oldest()
        idle = self.pipeline.in_flight == 0 and (self.scheduler.resting or self._paused or self.hold.stale != "")
        if idle:
            self.meter.no_work(time.perf_counter())
        if plan is None and self.pipeline.in_flight == 0 and self.scheduler.memory.adapters is not None:
            self.scheduler.memory.adapters.wait()  # whoever waits for a copy is all there is
        if held and self.pipeline.in_flight == 0 and self._swap is None:
            self.hold.grant()
        self._apply_if_ready()
        self._wait_for_pages(plan is None and not committed, idle)
        if self.sleeper.wanted:
            self.sleeper.turn(self)
        self._report()
        if committed:
            self.meter.finalized(time.perf_counter(), idle)

    def _launch(self, plan: Plan, slot: Slot, planned_s: float) -> None:
        launching_s = time.perf_counter()
        self.launching = plan
        self.runner.launch(plan, slot)
        self.scheduler.launched(plan)
        done_s = time.perf_counter()
        self.pipeline.push(StepInFlight(plan, slot, planned_s, launching_s - planned_s, done_s - launching_s))
        self.launching = None

    def _wait_for_pages(self, nothing_else: bool, idle: bool) -> None:
        """Wait for a copy of KV if there is nothing else to do; unless there is no work either, it holds the device."""
        if not nothing_else or self.offload is None or not self.offload.moving:
            self._waiting_since_s = None
            return
        since_s = self._waiting_since_s or time.perf_counter()
        self.offload.wait(self.sleeper.patience_s)
        self._waiting_since_s = None if idle else since_s
        if not idle:
            self.meter.offload(since_s, time.perf_counter())

    def _commit_and_draw(self, plan: Plan) -> bool:
        """Make the masks of the step that was launched last, once those before it are committed, and draw its rows."""
        committed = self.pipeline.in_flight > 1 and self._commit_oldest()
        step = self.pipeline.oldest()
        assert step is not None and step.plan is plan, "a held step waits for the commits of those before it"
        places = [i for i, seq in enumerate(plan.sampled) if seq.features & Feature.CONSTRAIN and not seq.finalized]
        for seq, reason in self.masks.build([plan.sampled[i] for i in places], step.slot.masks):
            self.scheduler.fail(seq, reason)
        self.runner.draw(plan, step.slot, places)
        return committed

    def _commit_oldest(self) -> bool:
        """Wait for the oldest step and account for it; False if there is none in flight."""
        step = self.pipeline.oldest()
        if step is None:
            return False
        output = self.runner.read(step.plan, step.slot)
        counters, committing_s = self.scheduler.counters, time.perf_counter()
        tokens, zombies = counters.tokens, counters.zombie_rows
        self.scheduler.commit(step.plan, output)
        slot, commit_s = step.slot, time.perf_counter() - committing_s
        self.meter.step(
            StepTiming(
                kind=step.plan.kind,
                rows=len(step.plan.seqs),
                zombie_rows=counters.zombie_rows - zombies,
                tokens=counters.tokens - tokens,
                plan_s=step.plan_s,
                launch_s=step.launch_s,
                commit_s=commit_s,
                start_s=slot.start.time_s,
                end_s=slot.end.time_s,
                version=step.plan.version,
                h2d=(slot.h2d_start.time_s, slot.h2d_done.time_s),
                d2h=(slot.d2h_start.time_s, slot.d2h_done.time_s),
                planned_at_s=step.planned_at_s,
                committed_at_s=committing_s,
                input_tokens=step.plan.tokens,
                max_context=step.plan.max_context,
                mask_wait=(slot.forward_end.time_s, slot.draw_start.time_s) if step.plan.held else None,
            )
        )
        self.pipeline.retire(step)
        return True

    def _apply_if_ready(self) -> None:
        """Weights change here, between two steps, and nowhere else."""
        if self._receiver is None or self.sleeper.asleep:
            return
        swap = self._swap
        if swap is not None and self.pipeline.in_flight == 0:
            swap.end.synchronize()  # there is nothing to do meanwhile
        if swap is not None and swap.end.query():
            self.runner.check()  # first: while there is a swap, nobody may count on the weights
            self._swap = None
            start_s, end_s = swap.held_since_s or swap.start.time_s, swap.end.time_s
            self.meter.swap(start_s, end_s, swap.update.version, swap.update.nbytes)
            self._receiver.applied(swap.update, end_s - start_s)
        if self._swap is None and (update := self._receiver.take_ready()) is not None:
            if isinstance(update, AdapterUpdate):
                self._take_adapter(update, self._receiver)
                return
            held_since_s = (self.hold.granted_s or None) if self.hold.granted else None
            self._swap = Swap(update, self.runner.device.event(), self.runner.device.event(), held_since_s)
            self.runner.enqueue(update.copy_into, self._swap.start, self._swap.end)
            self.scheduler.weights_changed(update.version, self._recompute_on_swap)
            self.hold.clear()

    def _take_adapter(self, update: AdapterUpdate, receiver: Receiver) -> None:
        try:
            self.scheduler.put_adapter(update.name, update.version, update.weights, self._recompute_on_swap)
        except AdapterError as error:
            receiver.refused(update, str(error))
        except Exception as error:  # a fault ends this engine, and the receiver waits for an answer before it goes on
            receiver.failed(update, f"{type(error).__name__}: {error}")
            raise
        else:
            receiver.applied(update, 0.0)

    # --- commands and events -----------------------------------------------------------------------------------------

    def _take_commands(self) -> None:
        while True:
            try:
                command = self.inbox.get_nowait()
            except Empty:
                return
            self._obey(command)

    def _obey(self, command: Command) -> None:
        self._command = command
        self._change(command)
        self._command = None

    def _change(self, command: Command) -> None:
        scheduler = self.scheduler
        match command:
            case Submit(request) if (rejected := turned_away(self, request)) is not None:
                scheduler.events.append(rejected)
            case Submit(request):
                scheduler.submit(request)
            case Cancel(key):
                scheduler.end(key, "cancelled")
            case StopAt(key, index, _, string):
                scheduler.stop_at(key, index, string)
            case Pause(mode, token):
                scheduler.paused = self.state != "draining"  # what is paused could never finish
                self.state = "paused" if self.state == "serving" else self.state
                self._quiet_tokens.append(token)
                if mode == "abort":
                    scheduler.end_all("cancelled")
            case Resume(token):
                scheduler.paused = False
                self.state = "serving" if self.state == "paused" else self.state
                scheduler.events += [Done(paused) for paused in (*self._quiet_tokens, token)]
                self._quiet_tokens = []
            case Shutdown(mode, token):
                self._begin_end(mode, token)
            case PutAdapter(adapter, weights, version, token):
                self._adapt(token, lambda: scheduler.put_adapter(adapter, version, weights, self._recompute_on_swap))
            case DropAdapter(adapter, token):
                self._adapt(token, lambda: scheduler.drop_adapter(adapter))
            case Sleep() | Wake():
                self.sleeper.obey(command, self)
            case EndSession(client, name, token):
                scheduler.memory.sessions.end(client, name)
                scheduler.events += [Done(token)] if token is not None else []

    def _adapt(self, token: int | None, change: Callable[[], None]) -> None:
        answer: list[ServiceEvent] = []
        try:
            change()
            answer = [] if token is None else [Done(token)]
        except AdapterError as error:
            log.warning("an adapter is not changed", extra={"reason": str(error)})
            answer = [] if token is None else [Failed(token, str(error), error.field)]
        self.scheduler.events += answer

    def _begin_end(self, mode: str, token: int | None) -> None:
        self.state = "draining"
        self.scheduler.paused = False  # what is paused could never finish
        if token is not None:
            self._end_tokens.append(token)
        self._drain_until_s = min(self._drain_until_s, time.perf_counter() + self._drain_s)
        self.sleeper.end(self)
        if mode == "now" or self.sleeper.asleep:  # what cannot run could never finish
            self.scheduler.end_all("cancelled", _ENDS)
        self.scheduler.end_early("cancelled", _ENDS)  # no trainer waits with its weights for a worker that ends

    def _report(self) -> None:
        """Confirm what took effect; hand all events to the service at once."""
        if self._quiet_tokens and self.pipeline.in_flight == 0:
            self.scheduler.events += [Done(token) for token in self._quiet_tokens]
            self._quiet_tokens = []
        if self.state == "draining":
            self._end_if_drained()
        events, self.scheduler.events = self.scheduler.events, []
        self._tell(events)

    def _tell(self, events: list[ServiceEvent]) -> None:
        if events:
            for event in events:
                if isinstance(event, Delta) and event.finish is not None:
                    length = event.offset + len(event.token_ids)
                    self.meter.completion(length, event.finish.reason, event.version_span)
                elif isinstance(event, RequestDone):
                    self.meter.observe("queue/seconds", event.queued_s)
                    self.meter.observe("request/seconds", event.total_s)
            self._emit(events)

    def _end_if_drained(self) -> None:
        if time.perf_counter() >= self._drain_until_s:
            self.scheduler.end_all("cancelled", _ENDS)
        if self.scheduler.idle and self.pipeline.in_flight == 0:
            self.stopped = True
            self.scheduler.events += [Done(token) for token in self._end_tokens]

    # --- faults ------------------------------------------------------------------------------------------------------

    def fail(self, message: str) -> None:
        """After a fault: every request ends as `error` with what it has, and whoever waits for it is told.

        The engine is not whole after this: `adopt` new parts or end it.
        """
        command, self._command = self._command, None
        lost = command.request.key if isinstance(command, Submit) else None
        known = lost in self.scheduler.groups
        events = rescue(self.scheduler, message)
        if lost is not None and not known:
            events.append(Rejected(lost, "internal", message))
        if isinstance(command, (PutAdapter, DropAdapter)) and command.token is not None:
            events.append(Failed(command.token, message, code="internal"))
        events += self.sleeper.fail(self, message)
        if self.state == "draining":
            events += [Done(token) for token in self._end_tokens]
        self._tell(events)
        if self._swap is not None and self._receiver is not None:
            self._receiver.failed(self._swap.update, message)

    @property
    def swapping(self) -> bool:
        """True while the weights are between two versions; for ever, if the engine failed meanwhile."""
        return self._swap is not None

    def adopt(self, parts: EngineParts) -> None:
        """Go on with parts that nothing was done with yet, in the state of before."""
        parts.scheduler.counters = self.scheduler.counters
        parts.scheduler.memory.sessions.counts = self.scheduler.memory.sessions.counts
        if parts.offload is not None and self.offload is not None:
            parts.offload.parking.counts = self.offload.parking.counts
        self.scheduler, self.pipeline, self.runner = parts.scheduler, parts.pipeline, parts.runner
        self.offload = parts.offload
        self.launching = None
        self.scheduler.paused = self.state == "paused"

    # --- views -------------------------------------------------------------------------------------------------------

    def status(self) -> EngineStatus:
        """A snapshot of now."""
        return snapshot(self)

    def set_gauges(self) -> None:
        """Give the meter the values of metrics that the engine keeps, before a report."""
        set_gauges(self)

    def check_integrity(self) -> None:
        """Assert that nothing leaked; only when drained."""
        self.pipeline.check_integrity()
        self.scheduler.check_integrity()
