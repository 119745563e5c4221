"""Start a worker from a training job, and end it with the job.

    with start_worker("/models/qwen3-8b", max_rows=64, env={"CUDA_VISIBLE_DEVICES": "7"}) as worker:
        client = RolloutClient(worker.endpoint)

    with start_worker("/models/qwen3-8b", workers=8) as worker:      a worker a device, and their supervisor
        client = RolloutClient(worker.endpoints)

The worker is a process in its own process group; its output goes to a log file. It does not inherit the variables that
torchrun and other launchers set for a rank. Imports no torch.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.process_bound import ProcessBound
from trainer_bridge.scratch import ScratchFolder
from trainer_bridge.wire.errors import RolloutError
from trainer_bridge.wire.keys import ClientCurve

_LAUNCHER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "WANDB_RUN_ID", "WANDB_SERVICE"),
)
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "PET_", "ACCELERATE_")
_SERVE = (sys.executable, "-P", "-m", "rollout.cli.main", "serve")
#: The folder of the packages: a checkout that is not installed may have been found in the current folder.
_PACKAGES = str(Path(__file__).resolve().parents[2])
_POLL_S = 0.05
_TERMINATE_S = 5.0
_TAIL_LINES = 30


class WorkerFailed(RolloutError, code="worker_failed"):  # noqa: N818
    """The worker ended, or was not ready in time; the message has the end of its log."""


def start_worker(
    model: str | os.PathLike[str],
    *,
    args: Sequence[str] = (),
    env: Mapping[str, str | None] | None = None,
    log_file: str | os.PathLike[str] | None = None,
    ready_timeout_s: float = 900.0,
    wait: bool = True,
    progress: bool = True,
    command: Sequence[str] = _SERVE,
    curve: ClientCurve | None = None,
    **flags: Any,
) -> WorkerProcess:
    """Start `rollout serve MODEL` and return once it can serve.

    `flags` are command line flags: `max_rows=8` is `--max-rows 8`, False is `--no-flag`, None is left out; `args` are
    appended. `env` adds to the environment (None removes). Without `log_file` the log is temporary. With `wait=False`,
    call `wait_ready` later. `progress` shows the start on stderr. `stop` needs `curve` for a worker with CURVE.
    """
    scratch = ScratchFolder("worker")
    ready_file = scratch.path / "ready.json"
    log_path = scratch.path / "worker.log" if log_file is None else Path(log_file)
    flags = {"bind": "tcp://127.0.0.1:0", **flags, "ready_file": ready_file, "exit_with_parent": True}
    environ = worker_environment(os.environ, env or {})
    # An installed worker finds the packages by itself; at the front of the path they could hide standard modules.
    installed = Path(_PACKAGES).name in ("site-packages", "dist-packages")
    if command == _SERVE and not installed and "PYTHONPATH" not in (env or {}):
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [environ.get("PYTHONPATH"), _PACKAGES]))
    try:
        with open(log_path, "ab") as log:
            stages = StageLines(log_path) if progress else None
            process = subprocess.Popen(
                [*command, os.fspath(model), *flag_list(flags), *args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,
            )
    except OSError:
        scratch.close()
        raise
    worker = WorkerProcess(process, scratch, ready_file, log_path, curve, stages)
    if wait:
        try:
            worker.wait_ready(ready_timeout_s)
        except BaseException:
            worker.kill()
            raise
    return worker


def flag_list(flags: Mapping[str, Any]) -> list[str]:
    """Keyword arguments as command line flags."""
    words: list[str] = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if value is True:
            words.append(f"--{flag}")
        elif value is False:
            words.append(f"--no-{flag}")
        elif value is not None:
            words += [f"--{flag}", str(value)]
    return words


def worker_environment(base: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """The environment of a worker: without the variables of a launcher of ranks, then with `changes`.

    torchrun sets OMP_NUM_THREADS to 1 where it is absent. A user's own 1 looks the same, so a 1 is always removed.
    """
    kept = {
        name: value
        for name, value in base.items()
        if name not in _LAUNCHER_VARIABLES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    if "TORCHELASTIC_RUN_ID" in base and base.get("OMP_NUM_THREADS") == "1":
        del kept["OMP_NUM_THREADS"]
    for name, changed in changes.items():
        if changed is None:
            kept.pop(name, None)
        else:
            kept[name] = changed
    return kept


class WorkerProcess(ProcessBound):
    """A worker of `start_worker`; with `workers=N` a supervisor and N workers, and `endpoint` is the first one's.

    It ends at once with its `with` block, this object or the job; `stop` lets requests finish.
    """

    _instead = "end the worker in its process, and pass its endpoints"
    _readable_after_fork = frozenset(
        {"log_path", "log_tail", "pid", "pids", "endpoint", "endpoints", "weights_endpoint", "weights_endpoints"}
        | {"model", "_pid", "_ready", "_ready_file", "_read_ready", "_told", "_workers"}
    )

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        scratch: ScratchFolder,
        ready_file: Path,
        log_path: Path,
        curve: ClientCurve | None = None,
        stages: StageLines | None = None,
    ) -> None:
        self.log_path = log_path
        self._curve = curve
        self._stages = stages
        self._process, self._pid = process, process.pid
        self._ready_file = ready_file
        self._ready: dict[str, Any] | None = None
        self._end = weakref.finalize(self, _end, process, scratch, os.getpid())

    @property
    def pid(self) -> int:
        """The process id."""
        return self._pid

    @property
    def returncode(self) -> int | None:
        """The exit status, or None while the worker lives."""
        return self._process.poll()

    @property
    def endpoint(self) -> str:
        """The endpoint for clients."""
        return self._told("endpoint")

    @property
    def weights_endpoint(self) -> str:
        """The endpoint for weights."""
        return self._told("weights_endpoint")

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The request endpoint of every worker. A worker keeps its endpoint when it restarts."""
        return tuple(worker["endpoint"] for worker in self._workers())

    @property
    def weights_endpoints(self) -> tuple[str, ...]:
        """The weights endpoint of every worker."""
        return tuple(worker["weights_endpoint"] for worker in self._workers())

    @property
    def pids(self) -> tuple[int | None, ...]:
        """The present process ids of the workers; None for a worker that is not restarted any more."""
        self._told("pid")
        self._ready = self._read_ready() or self._ready
        return tuple(worker["pid"] for worker in self._workers())

    @property
    def model(self) -> str:
        """The served model."""
        return self._told("model")

    def _workers(self) -> list[dict[str, Any]]:
        self._told("endpoint")
        assert self._ready is not None
        return self._ready.get("workers", [self._ready])

    def _told(self, name: str) -> Any:
        if self._ready is None:
            raise RuntimeError("the worker is still starting; call wait_ready() first")
        return self._ready[name]

    def wait_ready(self, timeout_s: float = 900.0) -> None:
        """Return once the worker can serve. Raises `WorkerFailed`."""
        deadline = time.monotonic() + timeout_s
        while self._ready is None:
            self._ready = self._read_ready()
            if self._stages is not None:
                self._stages.log_new_lines()
            if self._ready is not None:
                return
            if self._process.poll() is not None:
                raise WorkerFailed(f"the worker ended with status {self._process.returncode}\n{self.log_tail()}")
            if time.monotonic() >= deadline:
                raise WorkerFailed(f"the worker was not ready after {timeout_s} s\n{self.log_tail()}")
            self._wait(_POLL_S)

    def _read_ready(self) -> dict[str, Any] | None:
        try:
            ready = json.loads(self._ready_file.read_text())
        except (FileNotFoundError, json.JSONDecodeError):  # missing or incomplete file
            return None
        missing = [name for name in ("endpoint", "weights_endpoint", "model", "pid") if name not in ready]
        if missing:
            raise WorkerFailed(
                f"the worker's ready file lacks {missing[0]!r}; do worker and client have the same version?"
            )
        return ready

    def log_tail(self, lines: int = _TAIL_LINES) -> str:
        """The end of the log."""
        try:
            text = self.log_path.read_text(errors="replace")
        except FileNotFoundError:
            return "(the log is gone)"
        return "\n".join(text.splitlines()[-lines:]) or "(the log is empty)"

    def stop(self, mode: Literal["drain", "now"] = "drain", timeout_s: float = 60.0) -> int:
        """End the worker as `RolloutClient.shutdown` does, after `timeout_s` by signals; returns its exit status."""
        deadline = time.monotonic() + timeout_s
        if self.returncode is None and self._ready is not None:
            if "workers" in self._ready:
                self._signal(mode)
            else:
                self._ask(mode, timeout_s)
            self._wait(max(0.0, deadline - time.monotonic()))
        if self.returncode is None:
            self._process.terminate()
            self._wait(_TERMINATE_S)
        return self.kill()

    def _signal(self, mode: Literal["drain", "now"]) -> None:
        """Ask a supervisor, because a restarting worker cannot answer."""
        self._process.terminate()
        if mode == "now":
            self._process.send_signal(signal.SIGINT)  # another signal: two of one kind may arrive as one

    def _ask(self, mode: Literal["drain", "now"], timeout_s: float) -> None:
        client = RolloutClient(self.endpoint, timeout_s=timeout_s, connect_timeout_s=timeout_s, curve=self._curve)
        with client, suppress(RolloutError):  # one that does not answer is terminated
            client.shutdown(mode)

    def _wait(self, timeout_s: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def kill(self) -> int:
        """Kill the worker and remove its temporary folder; returns the exit status."""
        self._end()
        return self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._owned:
            self.stop("now", timeout_s=10.0)


def _end(process: subprocess.Popen[bytes], scratch: ScratchFolder, owner: int) -> None:
    if os.getpid() != owner:  # a fork of the job has a copy of the object, but not the worker
        return
    if process.poll() is None:  # otherwise the process id may have been reused
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    scratch.close()


class StageLines:
    """Copies a worker's log lines about long stages, such as loading weights, to this process's stderr.

    Args:
        log: the worker's log, in text or JSON lines; its present content belongs to an earlier worker.
    """

    _TEXT = re.compile(r"\S+ INFO (\S+) rollout\.progress: (.*?)(?: \[stage=.*\])?")

    def __init__(self, log: Path) -> None:
        self._log = log
        self._at = log.stat().st_size

    def log_new_lines(self) -> None:
        """Print new lines. Never raises for a broken or missing log."""
        try:
            with self._log.open("rb") as file:
                file.seek(self._at)
                lines = file.read().rpartition(b"\n")[:2]
        except OSError:
            return
        text = b"".join(lines)
        self._at += len(text)
        for line in text.decode("utf-8", "replace").splitlines():
            if (found := self._stage(line)) is not None:
                print(f"worker {found[0]}: {found[1]}", file=sys.stderr, flush=True)

    def _stage(self, line: str) -> tuple[str, str] | None:
        """The worker and its message, if the line is about a stage."""
        if not line.startswith("{"):
            match = self._TEXT.fullmatch(line)
            return None if match is None else (match[1], match[2])
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if fields.get("logger") != "rollout.progress":
            return None
        return str(fields.get("worker")), str(fields.get("message"))
