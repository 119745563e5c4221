"""Several workers on one machine: a device or several each, started again on the same endpoints when they die.

    rollout serve MODEL --workers 2
      supervisor              no model, no socket; prints one JSON line for each event of a worker
        worker 0, device 0    bind + 0       a worker like any other, with --exit-with-parent
        worker 1, device 1    bind + 1

A worker that dies is started again after a pause, which doubles with every restart of the last hour. After too many
restarts it is given up, and the others serve on. A worker that ends with status 0 was told to end and is not started
again. If a worker ends before it was ready, a restart would not help: all workers are ended. Once all were ready, a
worker whose process is stopped (SIGSTOP) is killed after `SILENT_S`: its clients would wait, and it cannot tell them.
SIGTERM drains all workers, a second SIGTERM ends them at once. The workers belong to the supervisor's process group,
and end with it.
"""

import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout.config import Settings
from rollout.model_name import readable_name
from rollout.process.announce import announce, write_atomically
from rollout.process.child_processes import import_path
from rollout.process.watchdog import ObservedTime
from rollout.ranks.rank_watch import SILENT_S
from rollout.ranks.thread_stat import is_stopped
from trainer_bridge.client.launch import worker_environment
from trainer_bridge.scratch import ScratchFolder

log = logging.getLogger(__name__)

_POLL_S = 0.05
_RECENT_S = 3600.0
_MOST_BACKOFF_S = 60.0
_AGAIN_S = 1.0  # between two signals to a worker that must end at once
#: Seconds that a worker may take to end after its drain.
KILL_GRACE_S = 30.0


@dataclass(slots=True)
class WorkerPlace:
    """One place for a worker: a device, two endpoints, and the present process."""

    index: int
    bind: str
    weights_bind: str
    device: str | None
    process: subprocess.Popen[bytes] | None = None
    announced: dict[str, Any] | None = None  # content of the last ready file, perhaps of an earlier process
    ready: bool = False  # the present process is ready
    status: int | None = None  # exit status of the last process, if it is not started again
    due_s: float | None = None  # time of the next start
    stopped_s: float = 0.0  # how long the present process has been stopped
    restarts: int = 0
    recent: list[float] = field(default_factory=list)  # times of the restarts in the last hour


class Supervisor:
    """Starts, watches and ends the workers.

    Args:
        settings: the settings of the command line.
        command: the command line of a worker; the flags of its place are appended.
        devices: for each worker its CUDA_VISIBLE_DEVICES; None leaves the variable unchanged.
    """

    def __init__(self, settings: Settings, command: Sequence[str], devices: Sequence[str | None]) -> None:
        self._settings = settings
        self._command = list(command)
        self.workers = [
            WorkerPlace(i, nth_endpoint(settings.service.bind, i), nth_endpoint(settings.weights.bind, i), device)
            for i, device in enumerate(devices)
        ]
        self.folder = ScratchFolder("supervisor")
        self._job = secrets.token_hex(4)  # the first part of the ids of the workers' runs in W&B
        self._announced = False
        self._signals = 0
        self._signals_sent = 0  # signals sent to each worker
        self._sent_s = self._kill_s = float("inf")
        self._status = 0

    def run(self) -> int:
        """Supervise until no worker is left; returns the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.on_signal)
        log.info("starting %d workers", len(self.workers))
        with self.folder:
            for worker in self.workers:
                self.start(worker)
            observed = ObservedTime(_POLL_S)
            while any(worker.status is None for worker in self.workers):
                passed_s = observed.passed_s()
                for worker in self.workers:
                    self.check(worker, passed_s)
                self._pass_signals_on()
                time.sleep(_POLL_S)
        facts = [{"worker": w.index, "status": w.status, "restarts": w.restarts} for w in self.workers]
        announce({"event": "ended", "workers": facts})
        return self._status

    def on_signal(self, number: int, frame: object) -> None:
        """Note a signal, which `run` passes on."""
        self._signals += 1

    # --- one worker --------------------------------------------------------------------------------------------------

    def start(self, worker: WorkerPlace) -> None:
        """Start a process at this place."""
        worker.due_s, worker.ready = None, False
        self.ready_file_of(worker).unlink(missing_ok=True)
        changes = import_path()
        changes["TERM"] = "dumb"  # lines instead of bars: bars of several workers would overwrite each other
        if worker.device is not None:
            changes["CUDA_VISIBLE_DEVICES"] = worker.device
        name = os.environ.get("WANDB_NAME") or readable_name(self._settings.model.path)
        changes["WANDB_NAME"] = f"{name}-{worker.index}"
        group = os.environ.get("WANDB_RUN_GROUP")
        changes["WANDB_RUN_GROUP"] = group or f"rollout-{socket.gethostname()}-{os.getpid()}"
        worker.process = subprocess.Popen(
            [*self._command, *self._own_flags(worker)],
            stdin=subprocess.DEVNULL,
            stdout=2,  # the supervisor's stdout is for its own lines
            env=worker_environment(os.environ, changes),
        )

    def _own_flags(self, worker: WorkerPlace) -> list[str]:
        flags: dict[str, object] = {
            "workers": 1,
            "bind": worker.bind,
            "weights-bind": worker.weights_bind,
            "ready-file": self.ready_file_of(worker),
            "restarts": worker.restarts,
        }
        metrics = self._settings.metrics
        if metrics.jsonl is not None:
            path = Path(metrics.jsonl)
            flags["jsonl"] = path.with_stem(f"{path.stem}-{worker.index}")
        if metrics.metrics_port:  # 0: each worker picks a free port
            flags["metrics-port"] = metrics.metrics_port + worker.index
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        totals = self.folder.path / f"totals-{worker.index}.json"
        return [*words, "--continued-run", f"{self._job}-{worker.index}", str(totals), "--exit-with-parent"]

    def ready_file_of(self, worker: WorkerPlace) -> Path:
        """The file that the worker writes when it can serve."""
        return self.folder.path / f"ready-{worker.index}.json"

    def check(self, worker: WorkerPlace, passed_s: float) -> None:
        """Act if a worker became ready, ended, was stopped for long, or is due for its restart."""
        if worker.process is None:
            if worker.due_s is not None and self._signals:
                worker.due_s, worker.status = None, 0  # the worker waited for its restart
            elif worker.due_s is not None and time.monotonic() >= worker.due_s:
                self.start(worker)
            return
        status = worker.process.poll()
        if not worker.ready and (status is None or status == 0):
            self.read_ready_file(worker)
        if status is not None:
            worker.process = None
            self._ended(worker, status)
        elif (worker.ready or self._announced) and self._settings.engine.rank_stall_s is not None:
            self._end_if_stopped(worker, passed_s)

    def _end_if_stopped(self, worker: WorkerPlace, passed_s: float) -> None:
        assert worker.process is not None
        pid = worker.process.pid
        worker.stopped_s = worker.stopped_s + passed_s if is_stopped(pid) else 0.0
        if worker.stopped_s > SILENT_S:
            worker.stopped_s = 0.0
            facts = {"index": worker.index, "pid": pid}
            log.critical("a worker has been stopped for %g s: it is killed", SILENT_S, extra=facts)
            worker.process.kill()

    def read_ready_file(self, worker: WorkerPlace) -> None:
        """Announce the worker, and with the last one all of them, once its ready file is there."""
        try:
            worker.announced = json.loads(self.ready_file_of(worker).read_text())
        except FileNotFoundError:
            return
        assert worker.announced is not None
        worker.ready = True
        worker.bind, worker.weights_bind = worker.announced["endpoint"], worker.announced["weights_endpoint"]
        if self._announced:
            self._write_ready()
            announce({"event": "worker_ready", **self._facts(worker)})
        elif all(other.ready for other in self.workers):
            self._announced = True
            announce(self._write_ready())

    def _ended(self, worker: WorkerPlace, status: int) -> None:
        if self._signals or status == 0:
            worker.status = status
            if self._announced:
                self._write_ready()
        elif not self._announced:
            log.critical("a worker ended before it could serve", extra={"index": worker.index, "status": status})
            worker.status = status
            self._status = status if status > 0 else 1
            self._signals = 2
        else:
            self._restart_later(worker, status)

    def _restart_later(self, worker: WorkerPlace, status: int) -> None:
        now_s, limits = time.monotonic(), self._settings.supervisor
        worker.recent = [when for when in worker.recent if when > now_s - _RECENT_S]
        fact = {"event": "worker_ended", "worker": worker.index, "status": status}
        if len(worker.recent) >= limits.max_restarts:
            facts = {"index": worker.index, "status": status, "restarts": worker.restarts}
            log.critical("a worker ended too often: it is given up", extra=facts)
            worker.status, self._status = status, 1
            self._write_ready()
            announce(fact | {"restart_in_s": None})
            return
        pause_s = min(limits.restart_backoff_s * 2 ** len(worker.recent), _MOST_BACKOFF_S)
        facts = {"index": worker.index, "status": status, "restart_in_s": pause_s}
        log.error("a worker ended; it is started again", extra=facts)
        worker.recent.append(now_s)
        worker.restarts += 1
        worker.due_s = now_s + pause_s
        announce(fact | {"restart_in_s": pause_s})

    # --- all workers -------------------------------------------------------------------------------------------------

    def _pass_signals_on(self) -> None:
        now_s = time.monotonic()
        again = self._signals > 1 and now_s >= self._sent_s + _AGAIN_S  # two signals may arrive as one
        if min(self._signals, 2) > self._signals_sent or again:
            if not self._signals_sent:
                self._kill_s = now_s + self._settings.service.drain_s + KILL_GRACE_S
            self._signals_sent, self._sent_s = min(self._signals_sent + 1, 2), now_s
            self._signal_all(signal.SIGTERM)
        if now_s >= self._kill_s:
            self._kill_s = float("inf")
            self._signal_all(signal.SIGKILL)

    def _signal_all(self, number: signal.Signals) -> None:
        for worker in self.workers:
            if worker.process is not None:
                worker.process.send_signal(number)

    def _facts(self, worker: WorkerPlace) -> dict[str, Any]:
        ready = worker.announced or {}
        facts = {name: ready.get(name) for name in ("endpoint", "weights_endpoint", "pid", "weights_version")}
        if "metrics_url" in ready:
            facts["metrics_url"] = ready["metrics_url"]
        if worker.status is not None:  # this worker is not started again
            facts |= {"pid": None, "status": worker.status}
        return {"worker": worker.index, **facts, "restarts": worker.restarts}

    def _write_ready(self) -> dict[str, Any]:
        """Write the common ready file: the first worker's fields, the supervisor's pid, and `workers`."""
        first = self.workers[0].announced
        assert first is not None
        ready = {**first, "pid": os.getpid(), "workers": [self._facts(worker) for worker in self.workers]}
        if self._settings.ready_file is not None:
            write_atomically(Path(self._settings.ready_file), json.dumps(ready))
        return ready


def nth_endpoint(bind: str, index: int) -> str:
    """The endpoint of worker `index`: a port `index` higher, any port for port 0, or a path with the index appended."""
    head, colon, port = bind.rpartition(":")
    if bind.startswith("tcp://") and colon and port.isdigit():
        return bind if int(port) == 0 else f"{head}:{int(port) + index}"
    return f"{bind}-{index}" if bind.startswith("ipc://") else bind


def assign_devices(settings: Settings, environ: Mapping[str, str]) -> list[str | None]:
    """The entries of CUDA_VISIBLE_DEVICES for each worker, one a rank, or None on a CPU.

    Raises ValueError if there are fewer devices than workers.
    """
    workers, device = settings.supervisor.workers, settings.model.device
    ranks = settings.engine.tensor_parallel
    if device == "cpu" or (workers == 1 and device not in ("auto", "cuda")):
        return [None] * workers
    if device not in ("auto", "cuda"):
        raise ValueError(f"device {device!r} is a single device for {workers} workers: write auto, cuda or cpu")
    devices = _visible_devices(environ)
    if not devices and device == "auto":
        return [None] * workers
    if len(devices) < workers * ranks:
        each = f" of {ranks} devices each" if ranks > 1 else ""
        raise ValueError(f"workers is {workers}{each}, but {len(devices)} CUDA devices are visible: lower it")
    return [",".join(devices[index * ranks : (index + 1) * ranks]) for index in range(workers)]


def _visible_devices(environ: Mapping[str, str]) -> list[str]:
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip()]
    import torch  # counts without starting CUDA in this process

    return [str(index) for index in range(torch.cuda.device_count())]
