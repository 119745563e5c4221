"""The worker: a model, an engine, a service and a weight receiver, and the loop that drives them.

    serve(settings)        load, bind, announce, loop, drain, report
      Worker.loop          tick while there is work; sleep on the inbox while there is none

What a launcher sees: one JSON line on stdout and the ready file once the worker can serve, one JSON line on stdout at
the end. SIGTERM and SIGINT drain; a second one ends at once.

After a fault every request ends as `error` with the tokens that it has. Then the engine is built anew around the
weights; where that can't be, the worker ends with status FAULT. A loop that hangs has its requests handed back by the
watchdog's thread, and ends with status HUNG.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import logging
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import torch

from rollout.adapter_sources import adapter_folders, adapter_target, read_adapters
from rollout.announce import say, write_whole
from rollout.config import Settings
from rollout.engine.adapter_table import AdapterTable
from rollout.engine.build import build_engine, kept_routing, longest_sequence, rebuild_engine, sleeping_memory
from rollout.engine.device.streams import Device, make_device
from rollout.engine.last_steps import last_steps, running_requests
from rollout.engine.loop import Engine
from rollout.engine.messages import Command, EngineStatus, PutAdapter, Shutdown
from rollout.engine.snapshot import state_of
from rollout.engine.views import EngineViews
from rollout.libraries import freeze_heap
from rollout.logs import set_up, worker_name
from rollout.metrics.definitions import TOP_METRICS
from rollout.metrics.health import Health
from rollout.metrics.prometheus import PrometheusSink
from rollout.metrics.sinks import JsonlSink, MetricsThread, Sink
from rollout.metrics.timeline import write_timeline
from rollout.metrics.wandb_mode import wandb_mode
from rollout.metrics.wandb_sink import WandbSink
from rollout.models import LoadedModel, load_model
from rollout.models.loader import fetch
from rollout.ports import check_free
from rollout.progress import stage
from rollout.service.access import Access
from rollout.service.requests.constraint import constraints_for
from rollout.service.served_model import ServedModel
from rollout.service.server import Server
from rollout.service.text.codec import load_text_codec
from rollout.service.text.process import TextProcess
from rollout.settings_sources import SettingsError
from rollout.watchdog import Watchdog
from rollout.weights.receiver import WeightReceiver

log = logging.getLogger(__name__)

#: How long the loop waits for Python's lock at the most, about, while another thread has it for long: a chat template
#: takes it for tens of milliseconds, and Python's own 5 ms are longer than many a step.
SWITCH_INTERVAL_S = 0.2e-3

_STATUS_EVERY_S = 0.1
_IDLE_WAIT_S = 0.01  # how long a staged update waits at the most when nothing runs
_SINK_DEADLINE_S = 20.0
_STOP_S = 10.0  # for the loop to end at once
_CLOSE_S = 60.0  # for threads and sinks to end once the loop has
_FAULTS_WITHIN_S = 3600.0
_MESSAGE_CHARS = 500

#: Exit statuses, beside 0 (orderly end) and 2 (wrong usage).
FAILED, FAULT, HUNG = 1, 3, 4


class Worker:
    """Everything that one process serves with. Construction binds the sockets; nothing runs before `loop`."""

    def __init__(
        self, settings: Settings, loaded: LoadedModel, sinks: list[Sink], health: Health, restarts: int = 0
    ) -> None:
        self.settings = settings
        self.sinks = sinks
        self.health = health
        self.restarts = restarts
        self.faults: list[float] = []  # when, `time.perf_counter()`
        self.status = EngineStatus(state="serving", rows_max=settings.engine.max_rows)
        self.name = worker_name()
        inbox: SimpleQueue[Command] = SimpleQueue()
        text = load_text_codec(loaded.folder)
        self.prompts = None if text is None else TextProcess(loaded.folder, settings.service, settings.log_format)
        if self.prompts is not None:
            self.prompts.start()  # loads while the engine is built; the first prompt waits for it, the worker does not
        model, version = loaded.model, settings.weights.initial_version
        target = adapter_target(settings.engine, model, self._adapters)
        device = make_device(settings.model.device)
        memory = sleeping_memory(settings, device, model)  # before anybody has views of the weights
        views, room = loaded.trainer_views(), None if memory is None else memory.room
        self.receiver = WeightReceiver(views, version, settings.weights, settings.security, target, room)
        first_adapters = read_adapters(settings.engine, model)
        with stage("preparing decode steps") as advance:
            self.engine = build_engine(
                settings,
                device,
                model,
                inbox,
                lambda events: self.server.outbox.put(events),
                self.receiver,
                advance,
                memory,
            )
        self.engine.hold = self.receiver.hold
        self.server = Server(
            settings.service,
            ServedModel(
                settings.model.path,
                loaded.spec.vocab,
                longest_sequence(settings, model, self.engine),
                loaded.generation_config.eos_token_ids,
                sparse=loaded.spec.moe is not None,
                routing=kept_routing(settings.engine, model),
                adapters=settings.engine.adapter_slots > 0,
                sleep=settings.engine.sleep,
                min_version=settings.weights.min_version,
            ),
            inbox=inbox,
            status=self.latest_status,
            text=text,
            prompts=self.prompts,
            constraints=constraints_for(text, loaded.spec.vocab, settings.service.max_constraint_s),
            receiver=self.receiver,
            views=EngineViews(self.engine),
            adapters=adapter_folders(settings.engine, model),
            worker_name=self.name,
            stop_check_every=settings.engine.stop_check_every,
            security=settings.security,
        )
        for name, weights in first_adapters.items():
            inbox.put(PutAdapter(name, weights))
        self.metrics = MetricsThread(self.sinks)
        self.last_tick_s = time.perf_counter()
        self._next_status_s = 0.0
        self._known_problems: tuple[str, ...] = ()
        self._next_report_s = self.last_tick_s + settings.metrics.interval_s
        self.watchdog = Watchdog(
            last_tick_s=lambda: self.last_tick_s,
            stall_s=settings.engine.stall_exit_s,
            on_signal=self._on_signal,
            on_stall=self._on_stall,
        )

    def start(self) -> None:
        """Take requests."""
        self.metrics.start()
        self.server.start()
        self.last_tick_s = time.perf_counter()
        self.watchdog.start()
        self.status = self.engine.status()
        versions = {"version": self.receiver.version, "min_version": self.settings.weights.min_version}
        if versions["version"] < versions["min_version"]:
            log.info("requests wait for newer weights", extra=versions)
        self.health.watch(self._not_serving)
        self._announce()

    def latest_status(self) -> EngineStatus:
        """The last snapshot, with the state, version and adapters of now: whoever was told `ok` sees what it did.

        It is called on the service thread, which answers while the loop hangs.
        """
        silent_s, adapters = time.perf_counter() - self.last_tick_s, self._adapters()
        reported = self.metrics.latest
        return replace(
            self.status,
            state="stalled" if silent_s > self.settings.engine.stall_s else state_of(self.engine),
            sleep=self.engine.sleeper.status(),
            stale=self.receiver.hold.stale,
            weights_version=self.engine.scheduler.version,
            adapters=None if adapters is None else tuple(adapters.status()),
            last_tick_s=silent_s,
            faults=len(self.faults),
            restarts=self.restarts,
            prompt_faults=0 if self.prompts is None else self.prompts.deaths,
            problems=self.problems(),
            metrics={} if reported is None else {m.name: reported.metrics[m.name] for m in TOP_METRICS},
        )

    def _not_serving(self) -> str:
        """Why the worker does not serve, for `/health`; empty if it does. Called on the metrics port's threads."""
        status = self.latest_status()
        return {
            "serving": "",
            "paused": "generation is paused until `resume`",
            "draining": "the worker is shutting down and takes no new requests",
            "asleep": "the worker sleeps until `wake`",
            "stale": status.stale,
            "stalled": f"the loop has hung for {status.last_tick_s:.0f} s",
        }[status.state]

    def _adapters(self) -> AdapterTable | None:
        """Those that are known, if any are served; the receiver's thread may ask before there is an engine."""
        engine: Engine | None = getattr(self, "engine", None)
        return None if engine is None else engine.scheduler.memory.adapters

    def problems(self) -> tuple[str, ...]:
        """What has ended that generation can do without, a sentence each."""
        threads = {"the weight receiver": self.receiver.alive, "the metrics thread": self.metrics.alive}
        ended = tuple(f"{name} has ended" for name, alive in threads.items() if not alive)
        stale = (hold.stale,) if (hold := self.receiver.hold).failed else ()
        text = () if self.prompts is None or self.prompts.problem is None else (self.prompts.problem,)
        hung = self.engine.masks.left_behind
        masks = (f"{hung} constraints have hung a thread each",) if hung else ()
        offload = self.engine.offload
        moved = (offload.failure,) if offload is not None and offload.failure else ()
        return (*ended, *stale, *text, *masks, *moved)

    def loop(self) -> int:
        """Serve until shut down; returns the exit status."""
        while not self.engine.stopped:
            if not self.server.alive:
                log.critical("the service thread has ended; nobody can be answered")
                return FAILED
            try:
                self._turn()
                continue
            # Whatever it was (the device, memory, our own books), nobody may be left without an answer.
            except Exception as error:
                log.critical("the engine failed", exc_info=True, extra=self._circumstances())
                message = f"the engine failed: {type(error).__name__}: {error}"[:_MESSAGE_CHARS]
            if not self._recover(message):
                return FAULT
        return 0

    def _turn(self) -> None:
        engine = self.engine
        self.last_tick_s = time.perf_counter()
        if not engine.busy:
            engine.wait(_IDLE_WAIT_S)
        engine.tick()
        now = time.perf_counter()
        if now >= self._next_status_s or not engine.busy:  # what has just ended shows at once
            self.status, self._next_status_s = engine.status(), now + _STATUS_EVERY_S
            if (problems := self.problems()) != self._known_problems:
                for problem in problems:
                    if problem not in self._known_problems:
                        log.error("%s", problem)
                self._known_problems = problems
        if now >= self._next_report_s:
            self._next_report_s = now + self.settings.metrics.interval_s
            self._report(now)

    def _recover(self, message: str) -> bool:
        """Hand every request back, then make the engine whole; False if it can't be, or has failed too often."""
        now = time.perf_counter()
        try:
            self.engine.fail(message)
            self.faults.append(now)
            if self.engine.state == "draining":
                return False  # nothing is left to do
            if sum(when > now - _FAULTS_WITHIN_S for when in self.faults) > self.settings.engine.max_faults:
                facts = {"faults": len(self.faults), "max_faults": self.settings.engine.max_faults}
                log.critical("that was one fault too many", extra=facts)
                return False
            rebuild_engine(self.engine, self.settings)
        # What is not answered by now gets `unavailable` when the service ends.
        except Exception:
            log.critical("the engine cannot be made whole", exc_info=True)
            return False
        self.status = self.engine.status()
        facts = {"version": self.engine.scheduler.version, "faults": len(self.faults)}
        log.warning("the engine is whole again", extra=facts)
        return True

    def close(self, status: int) -> None:
        """Answer what is left, end the threads, write the last report and the timeline."""
        self.watchdog.stop_watching()
        self.watchdog.end_within(_CLOSE_S, status)
        self.status = self.engine.status()
        self.receiver.close()  # first: it answers a publisher that waits, through the service
        self.server.stop()
        if self.prompts is not None:
            self.prompts.close()
        self._set_gauges()
        totals = self.engine.meter.totals()
        histograms = {name: read.whole_run() for name, read in self.engine.meter.histograms().items()}
        versions = self.engine.meter.ended_versions(and_this=True)
        self.metrics.put(self.engine.meter.steps, totals, final=True, histograms=histograms, versions=versions)
        self.metrics.close(_SINK_DEADLINE_S)
        try:
            self.engine.runner.close()
        except RuntimeError:  # of a device that has failed
            log.debug("the streams did not end in order", exc_info=True)
        metrics = self.settings.metrics
        steps = self.engine.meter.recent_steps()[-metrics.timeline_steps :]
        if metrics.timeline is not None and steps:
            name = Path(self.settings.model.path).name
            write_timeline(steps, metrics.timeline, f"{name}: the last {len(steps)} steps")
        runs = [sink.run_path for sink in self.sinks if isinstance(sink, WandbSink)]
        say({"event": "ended", "wandb_run": runs[0] if runs else None, "totals": totals})

    def _report(self, now: float) -> None:
        self._set_gauges()
        meter = self.engine.meter
        reported, histograms, versions = meter.report(now), meter.histograms(), meter.ended_versions()
        self.metrics.put(meter.steps, reported, histograms=histograms, versions=versions)

    def _set_gauges(self) -> None:
        self.engine.set_gauges()
        self.engine.meter.set({"rollout/reclaimed_rows": self.server.reclaimed})
        self.engine.meter.mismatch(self.server.mismatch.take())

    def _on_signal(self, count: int) -> None:
        if count == 1 and self.engine.state != "draining":
            facts = {"running": self.status.rows_running, "drain_s": self.settings.service.drain_s}
            log.info("draining: nothing new is taken, what runs goes on; a second signal ends it", extra=facts)
            self.server.drain()
        else:
            self.engine.inbox.put(Shutdown("now"))
            self.watchdog.expect_end(_STOP_S)

    def _on_stall(self, seconds: float) -> None:
        """The loop hangs: do what it can't, from the watchdog's thread, and end the process."""
        facts = {"silent_s": round(seconds, 1), **self._circumstances()}
        log.critical("the loop hangs; the worker ends", extra=facts)
        try:
            self.engine.fail(f"the worker hung for {seconds:.0f} s")
        # The loop may wake up and change what is read here; who got no tokens is told so when the service ends.
        except Exception:
            log.critical("what was generated cannot be handed back", exc_info=True)
        try:
            self.server.stop()
        finally:
            os._exit(HUNG)

    def _circumstances(self) -> dict[str, object]:
        """What was going on, for the log line that says what failed: whose requests ran, and the last steps."""
        requests = running_requests(self.engine)
        return {"running": len(requests), "requests": requests, "steps": last_steps(self.engine)}

    def _announce(self) -> None:
        ready = {
            "event": "ready",
            "endpoint": self.server.endpoint,
            "weights_endpoint": self.receiver.endpoint,
            "pid": os.getpid(),
            "model": self.settings.model.path,
            "weights_version": self.engine.scheduler.version,
        }
        pages = [sink.url for sink in self.sinks if isinstance(sink, PrometheusSink)]
        if pages:
            ready["metrics_url"] = pages[0]
        if self.settings.ready_file is not None:
            write_whole(Path(self.settings.ready_file), json.dumps(ready))
        say(ready)


def serve(settings: Settings, restarts: int = 0) -> int:
    """Run a worker until it is shut down; returns the exit status. `restarts` is how often a supervisor began again.

    Raises `SettingsError` for settings that are wrong whatever the model, ValueError or OSError when the model, the
    machine or the settings together don't allow serving; all of them say what to change.
    """
    set_up(settings.log_level, settings.log_format, worker_name())  # now that the libraries with loggers are there
    device = check_settings(settings)
    torch.set_num_threads(settings.model.cpu_threads)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    check_free(settings)  # before the model, which may take minutes
    health = Health()
    sinks = make_sinks(settings, health)
    with stage(f"fetching {settings.model.path}") as advance:
        folder = fetch(settings.model, advance)
    with stage("loading weights") as advance:
        loaded = load_model(settings.model, device.torch_device, advance, folder, settings.engine.expert_format)
    worker = Worker(settings, loaded, sinks, health, restarts)
    settle_heap()
    worker.start()
    status = FAILED
    try:
        status = worker.loop()
        return status
    finally:
        worker.close(status)


def settle_heap() -> None:
    """Keep what start-up made out of later garbage collections.

    Half a million objects of libraries never go away, and each full collection would look at all of them while the loop
    waits.
    """
    gc.collect()
    freeze_heap()


def check_settings(settings: Settings) -> Device:
    """What can be said before a model is loaded, which may take minutes: the device, or raises `SettingsError`."""
    if settings.metrics.timeline is not None and importlib.util.find_spec("matplotlib") is None:
        raise SettingsError("timeline needs matplotlib: pip install 'rollout-engine[plot]', or leave the setting out")
    try:
        if settings.metrics.wandb:
            wandb_mode(os.environ)
        Access.from_settings(settings.security).check_binds(settings)
        return make_device(settings.model.device)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def make_sinks(settings: Settings, health: Health) -> list[Sink]:
    """The sinks that the settings ask for. Raises ValueError when the port for Prometheus is taken."""
    sinks: list[Sink] = []
    if settings.metrics.jsonl is not None:
        sinks.append(JsonlSink(settings.metrics.jsonl))
    if settings.metrics.wandb:
        sinks.append(WandbSink(settings.metrics, settings.model_dump()))
    if (port := settings.metrics.metrics_port) is not None:
        sinks.append(PrometheusSink(settings.metrics.metrics_host, port, settings.model.path, health))
    return sinks
