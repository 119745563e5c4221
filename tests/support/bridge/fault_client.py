"""The tests' end of `fault_server`: children that come to grief, forks of a process that has imported everything."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.weights import update_intake
from tests.support.bridge.harness import Worker, wait_for


class FaultServer:
    """The process, and its children."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.bridge.fault_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )

    @contextlib.contextmanager
    def child(self, **order: Any) -> Iterator[int]:
        """A child that does as `order` says; its pid. Killed at the end if it lives."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        pid = int(self.process.stdout.readline())
        try:
            yield pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End it; what it forked ends by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(20)


def idle_s(transport: str) -> float:
    """For a group it is waited for; it also bounds how long its members may take to meet, on a machine that is busy."""
    return 6.0 if transport == "nccl" else 60.0


@contextlib.contextmanager
def time_passes(seconds: float) -> Iterator[None]:
    """Workers of this process find that so long nothing has come, once they are asked for their status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update_intake, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + seconds))
        yield


def run_fault(
    faults: FaultServer,
    worker: Worker,
    transport: str,
    folder: Path,
    phase: str,
    fault: str,
    device: str = "cpu",
    **more: Any,
) -> None:
    """A publisher that comes to grief; return when the worker has nothing more to do with it."""
    order = {"endpoint": worker.endpoint, "transport": transport, "folder": str(folder), "version": 2, "seed": 2}
    order |= {"device": device, **more}
    with faults.child(role="publisher", phase=phase, fault=fault, **order) as pid:
        wait_for(lambda: ended_or_stopped(pid), "the fault, or the refusal of what is corrupt")
        with time_passes(0.0 if transport == "nccl" else idle_s(transport)):
            wait_for(lambda: worker.status()["state"] in ("idle", "stale"), "the end of the update")


def ended_or_stopped(pid: int) -> bool:
    """Whether every thread of the process is: a signal reaches them one after the other."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return all(_thread_state(stat) in "TtZX" for stat in Path(f"/proc/{pid}/task").glob("*/stat"))
    return True


def _thread_state(stat: Path) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return stat.read_text().rpartition(")")[2].split()[0]
    return "X"
