"""The worker: a model, an engine, a service and a weight receiver, and the loop that drives them.

    serve(settings)        load, bind, announce, loop, drain, report
      Worker.loop          tick while there is work; sleep on the inbox while there is none

What a launcher sees: one JSON line on stdout and the ready file once the worker can serve, one JSON line on stdout at
the end. SIGTERM and SIGINT drain; a second one ends at once. Exit status 0 after an orderly end, 1 after a fault.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from rich.progress import Progress

from rollout.config import Settings
from rollout.engine.build import build_engine, context_limit
from rollout.engine.device import DeviceError, make_device
from rollout.engine.types import Command, EngineStatus, Shutdown
from rollout.metrics import JsonlSink, MetricsThread, Sink, WandbSink, write_timeline
from rollout.models import LoadedModel, load_model
from rollout.service.intake import ServedModel
from rollout.service.server import Server
from rollout.service.text import load_text_codec
from trainer_bridge.receiver import WeightReceiver

log = logging.getLogger(__name__)

_STATUS_EVERY_S = 0.1
_IDLE_WAIT_S = 0.01  # how long a staged update waits at the most when nothing runs
_SINK_DEADLINE_S = 20.0


class Worker:
    """Everything that one process serves with. Construction binds the sockets; nothing runs before `loop`."""

    def __init__(self, settings: Settings, loaded: LoadedModel) -> None:
        self.settings = settings
        self.status = EngineStatus(state="serving", rows_max=settings.engine.max_rows)
        self.name = f"{socket.gethostname()}:{os.getpid()}"
        inbox: SimpleQueue[Command] = SimpleQueue()
        model, version = loaded.model, settings.weights.initial_version
        self.receiver = WeightReceiver(trainer_views(loaded), version, settings.weights)
        self.server = Server(
            settings.service,
            ServedModel(
                settings.model.path,
                loaded.spec.vocab,
                context_limit(settings, model),
                loaded.generation_config.eos_token_ids,
            ),
            inbox=inbox,
            status=self.latest_status,
            text=load_text_codec(loaded.folder),
            receiver=self.receiver,
            worker_name=self.name,
            stop_check_every=settings.engine.stop_check_every,
        )
        self.engine = build_engine(
            settings, make_device(settings.model.device), model, inbox, self.server.outbox.put, self.receiver
        )
        self.sinks = make_sinks(settings)
        self.metrics = MetricsThread(self.sinks)

    def start(self) -> None:
        """Take requests."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self.metrics.start()
        self.server.start()
        self.status = self.engine.status()
        self._announce()

    def latest_status(self) -> EngineStatus:
        """The last snapshot, with the state and the version of now: whoever was told `ok` sees what it did."""
        return replace(self.status, state=self.engine.state, weights_version=self.engine.scheduler.version)

    def loop(self) -> int:
        """Serve until shut down; returns the exit status."""
        engine, next_status_s = self.engine, 0.0
        next_report_s = time.perf_counter() + self.settings.metrics.interval_s
        try:
            while not engine.stopped:
                if not engine.busy:
                    engine.wait(_IDLE_WAIT_S)
                engine.tick()
                now = time.perf_counter()
                if now >= next_status_s:
                    self.status, next_status_s = engine.status(), now + _STATUS_EVERY_S
                    if not self.server.alive:
                        raise RuntimeError("the service thread has ended; nobody can be answered")
                if now >= next_report_s:
                    next_report_s = now + self.settings.metrics.interval_s
                    self._report(now)
        except DeviceError as error:
            log.critical("the device failed", exc_info=True)
            engine.fail(str(error))
            return 1
        return 0

    def close(self) -> None:
        """Answer what is left, end the threads, write the last report and the timeline."""
        self.status = self.engine.status()
        self.receiver.close()  # first: it answers a publisher that waits, through the service
        self.server.stop()
        self.engine.set_gauges()
        totals = self.engine.meter.totals()
        self.metrics.put(self.engine.meter.steps, totals, final=True)
        self.metrics.close(_SINK_DEADLINE_S)
        self.engine.runner.close()
        metrics = self.settings.metrics
        steps = self.engine.meter.recent_steps()[-metrics.timeline_steps :]
        if metrics.timeline is not None and steps:
            write_timeline(steps, metrics.timeline, f"{self.settings.model.path}: the last {len(steps)} steps")
        runs = [sink.run_path for sink in self.sinks if isinstance(sink, WandbSink)]
        _say({"event": "ended", "wandb_run": runs[0] if runs else None, "totals": totals})

    def _report(self, now: float) -> None:
        self.engine.set_gauges()
        self.metrics.put(self.engine.meter.steps, self.engine.meter.report(now))

    def _on_signal(self, number: int, frame: object) -> None:
        again = self.engine.state == "draining"
        self.engine.inbox.put(Shutdown("now" if again else "drain"))

    def _announce(self) -> None:
        ready = {
            "event": "ready",
            "endpoint": self.server.endpoint,
            "weights_endpoint": self.receiver.endpoint,
            "pid": os.getpid(),
            "model": self.settings.model.path,
            "weights_version": self.engine.scheduler.version,
        }
        if self.settings.ready_file is not None:
            write_whole(Path(self.settings.ready_file), json.dumps(ready))
        _say(ready)


def serve(settings: Settings) -> int:
    """Run a worker until it is shut down; returns the exit status.

    Raises ValueError or OSError, with what to change, when the model or the settings don't allow serving.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")  # libraries: warnings only
    for package in ("rollout", "trainer_bridge"):
        logging.getLogger(package).setLevel(settings.log_level.upper())
    if settings.metrics.timeline is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("timeline needs matplotlib: pip install 'rollout-engine[plot]', or leave the setting out")
    torch.set_num_threads(settings.model.cpu_threads)
    device = make_device(settings.model.device)
    with Progress(disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task("loading weights", total=None)
        loaded = load_model(
            settings.model, device.torch_device, lambda done, total: bar.update(task, completed=done, total=total)
        )
    worker = Worker(settings, loaded)
    worker.start()
    try:
        return worker.loop()
    finally:
        worker.close()


def trainer_views(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    """The names that a trainer may send: the checkpoint's, and a tied output layer, which its state_dict lists too."""
    views = loaded.model.hf_views()
    if loaded.spec.tied:
        views["lm_head.weight"] = views["model.embed_tokens.weight"]
    return views


def make_sinks(settings: Settings) -> list[Sink]:
    """The sinks that the settings ask for."""
    sinks: list[Sink] = []
    if settings.metrics.jsonl is not None:
        sinks.append(JsonlSink(settings.metrics.jsonl))
    if settings.metrics.wandb:
        sinks.append(WandbSink(settings.metrics, settings.model_dump()))
    return sinks


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or none."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(text)
    partial.replace(path)


def _say(fact: dict[str, Any]) -> None:
    print(json.dumps(fact), flush=True)
