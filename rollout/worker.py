"""The worker: a model, an engine, a service and a weight receiver, and the loop that drives them.

    serve(settings)    check, load --> Worker --> loop --> close
      build            receiver and other links between threads first, then engine, service      `Worker.__init__`
      serve            tick while there is work; wait on the inbox while there is none  `loop`, `_tick`
      recover          after a fault: hand requests back, build the engine anew         `_recover`
      close            answer the clients that wait, end the threads, write the last report   `close`

Its threads, by name, and what each may change. They hand work to each other in queues:

    (main)                the engine: gate, roster, sequences, pages, steps     reads commands from the inbox
    service               sockets of clients, requests in flight, results       reads events from the outbox
    service-prompts       nothing: it returns a prompt to the service thread, as `service-constraints` does a constraint
    masks-N               masks, and matchers of constraints; the loop takes them until a deadline
    weight-receiver       staging memory; the loop copies from there between two steps
    kv-disk-write, -read  files of KV and host memory; the loop reads which jobs have ended
    metrics               sinks
    watchdog, rank-watch  nothing: they ask for a drain, or end the process

A launcher sees one JSON line on stdout and the ready file once the worker can serve, and one JSON line on stdout at the
end. SIGTERM and SIGINT drain the worker; a second signal ends it at once.

After a fault every request ends as `error` with the tokens that it has. Then the engine is built anew around the same
weights. Whatever ends a worker otherwise takes `Worker.end` first, which says why and with which status:

    FAILED   the service thread has ended                                         by the loop
    FAULT    the engine cannot be made whole; a rank is lost or has failed        by the loop; of a rank, if the loop
                                                                                  waits for it: by the watching thread
    HUNG     the loop hangs                                                       by the watchdog's thread
"""

import json
import logging
import os
import time
from pathlib import Path
from queue import SimpleQueue

from rollout.config import Settings
from rollout.engine.build import build_engine, check_model, longest_sequence, rebuild_engine, sleeping_memory
from rollout.engine.device.streams import make_device
from rollout.engine.features.adapters.known_adapters import AdapterRegistry
from rollout.engine.gate import Gate
from rollout.engine.inspect import Inspector
from rollout.engine.messages.statuses import RankStatus
from rollout.engine.messages.to_engine import Command, NextTick, PutAdapter, Shutdown
from rollout.engine.parts import EngineLinks
from rollout.engine.step.device_feature import OrderSizes, alone
from rollout.engine.step.execute import Orders
from rollout.metrics.prometheus import Health
from rollout.metrics.sinks import MetricsThread, Sink
from rollout.metrics.wandb_sink import ContinuedRun, WandbSink
from rollout.models import LoadedModel, load_model
from rollout.models.loader import check_cut, fetch, fetch_draft
from rollout.network.ports import check_free
from rollout.process.announce import announce, write_atomically
from rollout.process.interpreter import collect_and_freeze, hand_over_soon, set_cpu_threads
from rollout.process.logs import set_up, worker_name
from rollout.process.progress import advance_both, stage
from rollout.process.watchdog import End, Watchdog
from rollout.ranks.follower_processes import FollowerProcesses
from rollout.ranks.orders import ring_bytes
from rollout.ranks.processes import ConnectError, OwnProgress, Ranks
from rollout.ranks.rank_watch import LaneName, LaneProgress
from rollout.ranks.start_watch import PREPARING
from rollout.service.capabilities import Outbox, ServedEngine, WorkerAddress
from rollout.service.requests.constraint import constraints_for
from rollout.service.server import ServedText, Server
from rollout.service.text.process import TextProcess
from rollout.service.vitals import Vitals
from rollout.text.codec import load_text_codec
from rollout.weights.parameter_map import ParameterMap, update_names
from rollout.weights.receiver import WeightReceiver
from rollout.weights.staging import make_staging
from rollout.weights.update_intake import UpdateTargets
from rollout.worker_parts import (
    adapter_folders,
    adapter_target,
    check_settings,
    eos_ids,
    make_sinks,
    metrics_url,
    read_adapters,
    served_model,
)

log = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.05  # between two looks at deadlines, leases, threads and ranks while nothing runs
_SINK_DEADLINE_S = 20.0
_STOP_S = 10.0  # time for the loop to end at once
_CLOSE_S = 60.0  # most seconds for threads and sinks to end after the loop
_NOTICE_S = 1.0  # time for the loop to notice by itself that a rank is lost
_CAUSE_S = 1.0  # time to learn which rank is lost, once an operation with it has failed
_RANKS_CLOSE_S = 15.0  # in place of `_CLOSE_S`, once a rank is lost
_FAULTS_WITHIN_S = 3600.0
_MESSAGE_CHARS = 500

#: Exit statuses, besides 0 (orderly end) and 2 (wrong usage).
FAILED, FAULT, HUNG = 1, 3, 4


class Worker:
    """Everything that one process serves with. The constructor binds the sockets; no request is read before `start`."""

    def __init__(
        self,
        settings: Settings,
        loaded: LoadedModel,
        sinks: list[Sink],
        health: Health,
        restarts: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        model, version = loaded.model, settings.weights.initial_version
        check_model(settings.engine, model)
        text = load_text_codec(loaded.folder)
        self.settings, self.sinks, self.health = settings, sinks, health
        self._supervised = restarts is not None
        self.ranks = Ranks(settings) if ranks is None else ranks
        self.ranks.start.enter(PREPARING)
        self.prompts = None if text is None else TextProcess(loaded.folder, settings.service, settings.log_format)
        if self.prompts is not None:
            self.prompts.start()  # the tokenizer loads while the engine is built; only the first prompt waits for it
        self.metrics = MetricsThread(sinks)

        inbox: SimpleQueue[Command] = SimpleQueue()
        gate = Gate(settings.service.drain_s, takes_weights=True, notify=lambda: inbox.put(NextTick()))
        outbox, registry = Outbox(), AdapterRegistry(settings.engine.max_adapters)
        device = make_device(str(model.embed.device))
        memory = sleeping_memory(settings, device, model)  # moves the weights, so before anything takes views of them
        self._memory = memory
        packer = self.ranks.adapter_packer(model)
        parameters = ParameterMap(loaded.trainer_views(), update_names(settings.model, loaded))
        allocate = memory.buffer if memory.sleeps else None
        staging = make_staging(parameters.views, settings.weights, self.ranks.size > 1, allocate)
        self._swap_copies = staging.swap_copies
        self.receiver = WeightReceiver(
            UpdateTargets(
                parameters,
                self.ranks.update_memories(staging),
                adapter_target(settings.engine, model, registry, packer),
            ),
            version,
            settings.weights,
            gate,
            settings.security,
        )
        links = EngineLinks(inbox, outbox.put, gate, self.receiver)
        with stage("preparing decode steps") as shown:
            advance = advance_both(shown, self.ranks.start.advance)
            lead = self._lead if self.ranks.size > 1 else alone
            self.engine = build_engine(
                settings,
                device,
                model,
                links,
                memory=memory,
                progress=advance,
                lead=lead,
                shared=[registry],
            )
        staging.memory.arrival.end_pinning()
        for name, weights in read_adapters(settings.engine, model, packer).items():
            links.inbox.put(PutAdapter(name, weights))
        self.inspector = Inspector(self.engine)
        parts = self.engine, links, self.metrics, self.prompts
        self.vitals = Vitals(settings, *parts, restarts or 0, self._rank_status)
        eos = eos_ids(loaded.generation_config.eos_token_ids, text, loaded.spec.vocab)
        self.server = Server(
            settings.service,
            served_model(settings, loaded, longest_sequence(settings, model, self.engine), eos),
            ServedEngine(
                links.inbox,
                self.vitals.latest,
                outbox,
                views=self.inspector,
                receiver=self.receiver,
                adapters=adapter_folders(settings.engine, model, packer),
            ),
            ServedText(
                text,
                self.prompts,
                constraints_for(text, loaded.spec.vocab, settings.service.constants.max_constraint_s, eos),
            ),
            worker=WorkerAddress(worker_name(), metrics_url(sinks)),
            security=settings.security,
        )
        self._next_report_s = time.perf_counter() + settings.metrics.interval_s
        self.watchdog = Watchdog(
            last_tick_s=lambda: self.vitals.last_tick_s,
            stall_s=settings.engine.stall_exit_s,
            on_signal=self._on_signal,
            on_stall=self._on_stall,
        )
        self.end = End(self.watchdog.end_within)

    def start(self) -> None:
        self.ranks.watch(self._on_rank_lost, self._progress)
        self.metrics.start()
        self.server.start()
        self.vitals.tick()
        self.watchdog.start()
        self.vitals.refresh(at_once=True)
        versions = {"version": self.receiver.version, "min_version": self.settings.weights.min_version}
        if versions["version"] < versions["min_version"]:
            log.info("requests wait for newer weights", extra=versions)
        self.health.watch(self.vitals.not_serving)
        self._announce()

    # --- serve --------------------------------------------------------------------------------------------------------

    def _lead(self, sizes: OrderSizes) -> Orders:
        return self.ranks.lead(ring_bytes(sizes), self.settings.weights.initial_version)

    def loop(self) -> int:
        """Serve until shut down; returns the exit status."""
        while not self.engine.gate.stopped:
            if not self.server.alive:
                return self._end_loop("the service thread has ended; no client can be answered", FAILED)
            try:
                self._tick()
                continue
            # Whatever failed (the device, memory, our own books), every client must get an answer.
            except Exception as error:
                log.critical("the engine failed", exc_info=True, extra=self._circumstances())
                message = f"the engine failed: {type(error).__name__}: {error}"[:_MESSAGE_CHARS]
            if self.ranks.size > 1:  # ranks cannot go on together after a fault
                status = self._end_loop(message, FAULT)
                cause = self.ranks.wait_for_cause(_CAUSE_S)  # a rank that ended is known as the cause a little later
                self._hand_back(f"the tensor group is lost: {cause}" if cause else message)
                return status
            if not self._recover(message):
                return self._end_loop(message, FAULT)
        return 0

    def _end_loop(self, reason: str, status: int) -> int:
        """Begin the end on the loop's thread; returns the status."""
        if not self.end.begin(reason, status, _RANKS_CLOSE_S if self.ranks.size > 1 else _CLOSE_S):
            self.end.wait()
        return status

    def _tick(self) -> None:
        engine = self.engine
        if self.ranks.size > 1:
            self.ranks.check()
        self.vitals.tick()
        worked = engine.busy or engine.wait(_IDLE_WAIT_S)
        worked |= engine.tick()
        self.vitals.refresh(at_once=worked and not engine.busy)  # a request that has just ended shows at once
        if (now := time.perf_counter()) >= self._next_report_s:
            self._next_report_s = now + self.settings.metrics.interval_s
            self._report(now)

    def _report(self, now: float) -> None:
        self._set_gauges()
        meter = self.engine.meter
        reported, histograms, versions = meter.report(now), meter.histograms(), meter.ended_versions()
        totals = meter.totals(now)  # now and not at the end alone: a process that is killed has no end
        self.metrics.put(meter.steps, reported, histograms=histograms, versions=versions, totals=totals)

    def _set_gauges(self) -> None:
        self.inspector.set_gauges()
        self.engine.meter.set({"rollout/reclaimed_rows": self.server.reclaimed})
        self.engine.meter.mismatch(self.server.mismatch.take())
        if ranks := self._rank_status():
            behind = ranks[0].launched - min(rank.done for rank in ranks)
            beat_age_s = max(rank.beat_age_s for rank in ranks)
            self.engine.meter.set({"ranks/beat_age_s": beat_age_s, "ranks/steps_behind": max(0, behind)})

    # --- recover ------------------------------------------------------------------------------------------------------

    def _recover(self, message: str) -> bool:
        """Hand every request back, then make the engine whole; False if that fails or it has failed too often."""
        now, faults, most = time.perf_counter(), self.vitals.faults, self.settings.engine.constants.max_faults
        try:
            self.engine.fail(message)
            faults.append(now)
            if self.engine.gate.draining:
                return False  # nothing is left to do
            if sum(when > now - _FAULTS_WITHIN_S for when in faults) > most:
                log.critical("the engine failed too often", extra={"faults": len(faults), "max_faults": most})
                return False
            rebuild_engine(self.engine, self.settings)
        # Requests without an answer get `unavailable` when the service ends.
        except Exception:
            log.critical("the engine cannot be made whole", exc_info=True)
            return False
        self.vitals.refresh(at_once=True)
        log.warning("the engine is whole again", extra={"version": self.engine.roster.version, "faults": len(faults)})
        return True

    def _progress(self) -> OwnProgress:
        """On the watching thread: how far this rank is."""
        steps = self.engine.pipeline.steps()
        busy = any(not step.slot.end.query() for step in steps)
        lanes: dict[LaneName, LaneProgress] = {
            "swap": LaneProgress(self.engine.swapper.copying, self._swap_copies.parts_done())
        }
        lanes["sleep"] = LaneProgress(self._memory.working, self._memory.parts)
        for queue in self.engine.executor.copy_queues:
            lanes[queue.name] = LaneProgress(queue.copying, queue.ended)  # type: ignore[index]
        return OwnProgress(self.engine.meter.steps, busy, lanes, self.engine.executor.compute.thread_id)

    def _rank_status(self) -> list[RankStatus]:
        committed = self.engine.meter.steps
        return self.ranks.status(committed + self.engine.pipeline.in_flight, committed)

    def _on_rank_lost(self, failure: str) -> None:
        """On the watching thread: the loop takes note of it, unless it waits for the rank that is lost."""
        time.sleep(_NOTICE_S)
        self._end_process(f"the tensor group is lost: {failure}", FAULT)

    def _on_stall(self, seconds: float) -> None:
        """On the watchdog's thread: the loop hangs."""
        log.critical("the loop hangs", extra={"silent_s": round(seconds, 1), **self._circumstances()})
        self._end_process(f"the worker hung for {seconds:.0f} s", HUNG)

    def _end_process(self, reason: str, status: int) -> None:
        """Hand the requests back and exit, unless another thread does."""
        if not self.end.begin(reason, status, _CLOSE_S):
            return
        self._hand_back(reason)
        try:
            self.server.stop()
        finally:
            self.ranks.close()
            os._exit(status)

    def _hand_back(self, message: str) -> None:
        try:
            self.engine.fail(message)
        # The loop may wake up and change the books while they are read. Requests without an answer get `unavailable`
        # when the service ends.
        except Exception:
            log.critical("generated tokens cannot be handed back", exc_info=True)

    def _circumstances(self) -> dict[str, object]:
        """The requests that ran, and the last steps, for the log line of a fault."""
        try:
            requests = self.inspector.running_requests()
            return {"running": len(requests), "requests": requests, "steps": self.inspector.last_steps()}
        # The books may be broken, or change while another thread reads them. What matters is the answers that follow.
        except Exception as error:
            return {"circumstances": f"cannot be read: {type(error).__name__}: {error}"}

    # --- close --------------------------------------------------------------------------------------------------------

    def _on_signal(self, count: int) -> None:
        if count == 1 and not self.engine.gate.draining:
            facts = {"running": self.vitals.status.rows_running, "drain_s": self.settings.service.drain_s}
            log.info("draining: new requests are refused, running ones go on; a second signal ends them", extra=facts)
            self.server.drain()
        else:
            self.engine.inbox.put(Shutdown("now"))
            self.watchdog.expect_end(_STOP_S)

    def close(self, status: int) -> None:
        """Answer the clients that wait, end the threads, write the last report."""
        self.watchdog.stop_watching()
        self.watchdog.end_within(_CLOSE_S, status)
        self.vitals.refresh(at_once=True)
        self.receiver.close()  # first: it answers a publisher that waits, through the service
        self.server.stop()
        if self.prompts is not None:
            self.prompts.close()
        self._set_gauges()
        meter = self.engine.meter
        totals, versions = meter.totals(), meter.ended_versions(and_this=True)
        histograms = {name: read.whole_run() for name, read in meter.histograms().items()}
        self.metrics.put(meter.steps, totals, final=True, histograms=histograms, versions=versions, totals=totals)
        self.metrics.close(_SINK_DEADLINE_S)
        try:
            if not self.ranks.failure:  # then the streams wait for the lost rank
                self.engine.executor.close()
        except RuntimeError:  # an error of a device that has failed
            log.debug("the streams did not end in order", exc_info=True)
        runs = [sink.run_path for sink in self.sinks if isinstance(sink, WandbSink)]
        announce({"event": "ended", "wandb_run": runs[0] if runs else None, "totals": totals}, self._supervised)

    def _announce(self) -> None:
        ready = {
            "event": "ready",
            "endpoint": self.server.endpoint,
            "weights_endpoint": self.receiver.endpoint,
            "pid": os.getpid(),
            "model": self.settings.model.path,
            "weights_version": self.engine.roster.version,
        }
        if (page := metrics_url(self.sinks)) is not None:
            ready["metrics_url"] = page
        if self.settings.ready_file is not None:
            write_atomically(Path(self.settings.ready_file), json.dumps(ready))
        announce(ready, self._supervised)


def serve(
    settings: Settings,
    restarts: int | None = None,
    followers: FollowerProcesses | None = None,
    run: ContinuedRun | None = None,
) -> int:
    """Run a worker until it is shut down; returns the exit status.

    `restarts` counts the restarts by a supervisor; None: there is no supervisor. `followers` are the processes of the
    other ranks, if they run already. `run` is the W&B run of all processes that a supervisor starts for this worker.

    Raises `SettingsError` for settings that are wrong for any model, and ValueError or OSError if model, machine and
    settings do not fit together. Every message says what to change.
    """
    set_up(settings.log_level, settings.log_format, worker_name())  # after the imports of libraries with loggers
    device = check_settings(settings)
    set_cpu_threads()
    hand_over_soon()
    check_free(settings)  # before the model, which may take minutes
    health = Health()
    sinks = make_sinks(settings, health, run)
    with stage(f"fetching {settings.model.path}") as advance:
        folder = fetch(settings.model, advance)
    draft = None
    if settings.engine.speculation_model is not None:
        with stage(f"fetching {settings.engine.speculation_model}") as advance:
            draft = fetch_draft(settings, advance)
    engine = settings.engine
    check_cut(settings.model, folder, engine.tensor_parallel, engine.weight_format, engine.attention_split)
    ranks = Ranks(settings, folder, draft, followers)
    try:
        try:
            group = ranks.connect(device.torch_device)
            with stage("loading weights") as shown:
                advance = advance_both(shown, ranks.start.advance)
                how = (engine.weight_format, group, draft, engine.mtp, engine.attention_split)
                loaded = load_model(settings.model, device.torch_device, advance, folder, *how)
            worker = Worker(settings, loaded, sinks, health, restarts, ranks)
        except (RuntimeError, ConnectError) as error:  # perhaps a rank was lost, which the watching thread finds
            if cause := ranks.wait_for_cause(_CAUSE_S):
                raise ChildProcessError(f"the tensor group is lost: {cause}") from error
            raise
        collect_and_freeze()
        worker.start()
        status = FAILED
        try:
            status = worker.loop()
            return status
        finally:
            worker.close(status)
    finally:
        ranks.close()
