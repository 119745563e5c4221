"""The engine's loop: one tick of the two-slot pipeline.

    commands   submit, cancel, pause, ...                      never waits
    plan       scheduler: who runs next; none while the gate blocks launches
    launch     H2D -> forward [-> draw] -> D2H, enqueued       waits only for room in the ring of a tensor group
    commit     the oldest step, if the pipeline is full or nothing was launched: waits for its D2H event
    draw       the step just launched, if its draw needs masks: waits for them, beside its forward
    swap       a published update is copied into the parameters, between two steps
    sleep      orders to sleep and wake, while there are any: waits for copies of memory and for the other ranks
    events     everything that the service must know, in one call

At depth 2 the step just launched runs while the step before it is committed. A tick waits elsewhere only while no step
is in flight: for a copy of a feature, the end of a swap, or a copy of KV.
"""

import time

from rollout.config import EngineSettings
from rollout.engine.commands import WORKER_ENDS, Commands
from rollout.engine.device.releasable import SleepMemory
from rollout.engine.messages.to_service import Delta, Event, RequestDone
from rollout.engine.parts import EngineLinks, EngineParts
from rollout.engine.schedule.plan import Plan
from rollout.engine.schedule.roster import Roster
from rollout.engine.schedule.scheduler import Scheduler
from rollout.engine.sleep import Sleeper
from rollout.engine.step.execute import Executor
from rollout.engine.step.masks import MaskBuilder, usual_threads
from rollout.engine.step.pipeline import Pipeline, StepInFlight
from rollout.engine.swap import Recomputation, Swapper
from rollout.metrics.meter import Meter
from rollout.metrics.step_timing import StepTiming


class Engine:
    """Runs the parts, one `tick` at a time. It asks the gate before it admits, launches or swaps.

    An engine lives as long as its worker: other threads hold it. A fault replaces `parts` as a whole, in one
    assignment (`restart`); everything else here outlives faults.
    """

    def __init__(
        self, parts: EngineParts, links: EngineLinks, meter: Meter, memory: SleepMemory, settings: EngineSettings
    ) -> None:
        recompute = settings.kv_on_swap == "recompute"
        self.recomputation = Recomputation(settings.recompute_fraction if recompute else 1.0, parts.roster.clock)
        self.parts = parts
        self.gate, self.inbox, self.meter = links.gate, links.inbox, meter
        self.masks = MaskBuilder(settings.mask_s, settings.constants.mask_threads or usual_threads())
        self.swapper = Swapper(links.receiver, links.gate, meter, recompute, self.recomputation)
        self.sleeper = Sleeper(links, meter, memory, settings)
        self.commands = Commands(links, self.sleeper, recompute)
        self.launching: Plan | None = None  # the step that is being launched, for a report of a fault
        self.started_s = time.perf_counter()
        self._emit = links.emit
        self._waiting_since_s: float | None = None  # nothing can be launched until a copy of KV is done

    def tick(self) -> bool:
        """One tick: launch a step, if any; commit the oldest step if the pipeline is full or no step was launched.

        Returns whether the service got any event.
        """
        parts, gate = self.parts, self.gate
        roster, scheduler, pipeline = parts.roster, parts.scheduler, parts.pipeline
        self.commands.take(parts)
        scheduler.end_overdue()
        parts.tier.advance(roster)
        for feature in roster.variants:
            feature.tick(wait=False)
        launched = not gate.blocked and self._launch_next()
        committed = launched and pipeline.newest().plan.draws_later and self._commit_and_draw()
        committed |= (pipeline.full or not launched) and self.commit_oldest()
        idle = pipeline.in_flight == 0 and (roster.resting or gate.at_rest)
        if pipeline.in_flight == 0:
            self._nothing_runs(idle, not launched)
        self.swapper.advance(parts)
        self._wait_for_copies(not launched and not committed, idle)
        if gate.sleep.ordered:
            self.sleeper.advance(parts)
        reported = self._report()
        if committed:
            self.meter.finalized(time.perf_counter(), idle)
        return reported

    @property
    def busy(self) -> bool:
        """True while a tick has something to do without a new command."""
        parts, gate = self.parts, self.gate
        waits = parts.roster.resting or gate.blocked != ""
        return parts.pipeline.in_flight > 0 or gate.swapping or parts.tier.moving or not waits

    def wait(self, timeout_s: float) -> bool:
        """Wait for a command and carry it out while the engine is not busy; False if none came."""
        return self.commands.wait(self.parts, timeout_s)

    # --- the phases of a tick -----------------------------------------------------------------------------------------

    def _launch_next(self) -> bool:
        """Plan a step and launch it; False if there is nothing to do."""
        scheduler, planned_s = self.parts.scheduler, time.perf_counter()
        plan = scheduler.plan()
        if scheduler.admission_over:
            self.recomputation.admitted(self.parts.roster)
        if plan is None:
            return False
        self.launch(plan, planned_s)
        return True

    def launch(self, plan: Plan, planned_s: float) -> None:
        """Pack a plan into the next slot and enqueue its step; planning began at `planned_s`, `time.perf_counter()`."""
        parts, slot = self.parts, self.parts.pipeline.acquire()
        launching_s = time.perf_counter()
        self.launching = plan
        upload = parts.packer.pack(plan, slot.staging)
        parts.executor.execute(upload, slot)
        parts.scheduler.launched(plan)
        done_s = time.perf_counter()
        plan_s, launch_s = launching_s - planned_s, done_s - launching_s
        parts.pipeline.push(StepInFlight(plan, upload.header, slot, planned_s, plan_s, launch_s))
        self.launching = None

    def _commit_and_draw(self) -> bool:
        """Commit the step before the one just launched, make the masks that depend on it, draw with them."""
        parts, step = self.parts, self.parts.pipeline.newest()
        committed = parts.pipeline.in_flight > 1 and self.commit_oldest()
        assert step is parts.pipeline.oldest(), "masks are made after all earlier commits"
        made = self.masks.of_step(step.plan, step.slot.masks)
        for seq, finish in made.ended:
            parts.roster.finish(seq, finish)
        parts.executor.draw(step.header, step.slot, made.at, made.refused)
        return committed

    def commit_oldest(self) -> bool:
        """Wait for the oldest step and account for it; False if no step is in flight."""
        parts = self.parts
        if not parts.pipeline.in_flight:
            return False
        step = parts.pipeline.oldest()
        output = parts.executor.read(step.header, step.slot)
        counters, committing_s = parts.roster.counters, time.perf_counter()
        tokens, zombies = counters.tokens, counters.zombie_rows
        parts.scheduler.commit(step.plan, output)
        commit_s = time.perf_counter() - committing_s
        record = _record(step, counters.tokens - tokens, counters.zombie_rows - zombies, committing_s, commit_s)
        self.meter.step(record)
        parts.scheduler.committed(step.plan, output, record.tokens, record.end_s - record.start_s)
        if spent_s := self.recomputation.committed(step.plan, record.ran_s):
            self.meter.add("weights/recompute_s", spent_s)
        parts.pipeline.retire(step)
        return True

    def _nothing_runs(self, idle: bool, nothing_planned: bool) -> None:
        """Handle an empty pipeline: update the meter, wait for copies that delay admission, grant a hold."""
        if idle:
            self.meter.no_work(time.perf_counter())
        if nothing_planned:
            for feature in self.parts.roster.variants:
                feature.tick(wait=True)
        self.gate.grant_hold()

    def _wait_for_copies(self, nothing_else: bool, idle: bool) -> None:
        """Wait for a copy of KV if there is nothing else to do. If requests wait meanwhile, it is a bubble."""
        tier = self.parts.tier
        if not nothing_else or not tier.moving:
            self._waiting_since_s = None
            return
        since_s = self._waiting_since_s or time.perf_counter()
        tier.wait(self.sleeper.copy_wait_s)
        self._waiting_since_s = None if idle else since_s
        if not idle:
            self.meter.offload(since_s, time.perf_counter())

    def _report(self) -> bool:
        """Hand the events of this tick and the due answers to the service; returns whether there were any."""
        roster = self.parts.roster
        if self.gate.drain_overdue:
            roster.end_all("cancelled", WORKER_ENDS)
        roster.events += self.gate.take_answers(self.parts.pipeline.in_flight, len(roster.groups))
        events, roster.events = roster.events, []
        self._send(events)
        return bool(events)

    def _send(self, events: list[Event]) -> None:
        if not events:
            return
        for event in events:
            if isinstance(event, Delta) and event.finish is not None:
                length = event.offset + len(event.token_ids)
                self.meter.completion(length, event.finish.reason, event.version_span)
            elif isinstance(event, RequestDone):
                self.meter.observe("queue/seconds", event.queued_s)
                self.meter.observe("request/seconds", event.total_s)
        self._emit(events)

    # --- faults -------------------------------------------------------------------------------------------------------

    def fail(self, message: str) -> None:
        """After a fault: end every request as `error` with its tokens, and answer every order that waits.

        The parts are not whole after this: `restart` with new ones, or end the worker. If the loop hangs, the
        watchdog's thread calls this.
        """
        answer = self.commands.fail(self.parts, message)
        events = self.parts.roster.rescue(message)
        self._send([*events, *answer, *self.sleeper.fail(message), *self.gate.fail()])
        self.swapper.fail(message)

    def restart(self, parts: EngineParts) -> None:
        """Go on with new parts, in the same state of the gate."""
        self.launching, self._waiting_since_s = None, None
        self.parts = parts

    def check_integrity(self) -> None:
        """Assert that nothing leaked; only when drained."""
        self.parts.pipeline.check_integrity()
        self.parts.roster.check_integrity()

    # --- the parts, by name -------------------------------------------------------------------------------------------

    @property
    def roster(self) -> Roster:
        return self.parts.roster

    @property
    def scheduler(self) -> Scheduler:
        return self.parts.scheduler

    @property
    def pipeline(self) -> Pipeline:
        """The slots and the steps in flight."""
        return self.parts.pipeline

    @property
    def executor(self) -> Executor:
        """The device's side of a step."""
        return self.parts.executor


def _record(step: StepInFlight, tokens: int, zombie_rows: int, committing_s: float, commit_s: float) -> StepTiming:
    plan, slot = step.plan, step.slot
    return StepTiming(
        kind=plan.kind,
        rows=plan.rows,
        zombie_rows=zombie_rows,
        tokens=tokens,
        plan_s=step.plan_s,
        launch_s=step.launch_s,
        commit_s=commit_s,
        start_s=slot.start.time_s,
        end_s=slot.end.time_s,
        version=plan.version,
        h2d=(slot.h2d_start.time_s, slot.h2d_done.time_s),
        d2h=(slot.d2h_start.time_s, slot.d2h_done.time_s),
        planned_at_s=step.planned_at_s,
        committed_at_s=committing_s,
        input_tokens=plan.tokens,
        max_context=plan.max_context,
        mask_wait=(slot.forward_end.time_s, slot.draw_start.time_s) if plan.draws_later else None,
    )
