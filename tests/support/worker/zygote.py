"""Starts workers by a fork of a process that has imported everything: a start then takes a fifth of the CPU time.

    tests ----- command line, folder, log ----> zygote: has imported the libraries, and runs one thread
                                                  |  fork
                                                starter  --- process id ---> tests
                                                  |  fork, and ends
                                                worker: becomes a child of the tests' process, and runs `rollout serve`

The worker runs the module that `python -m` would run, from the command line to its end. It is a child of the tests'
process, as after `start_worker`: it can be waited for, and ends with that process. Its children (followers, the process
of texts) are new processes of Python.

A worker that needs another environment than the tests have cannot be forked: libraries read it when they are imported.
Tests of the start itself use `start_worker`.
"""

import ctypes
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_MESSAGE_BYTES = 1 << 16
_SETS_FOR_TESTS = "PYTEST_CURRENT_TEST"


class ForkedProcess:
    """A child of this process, with the methods of `subprocess.Popen` that a `WorkerProcess` calls."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while the process runs."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
                    os.close(self._pidfd)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises `subprocess.TimeoutExpired` after `timeout` seconds."""
        end_s = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            left_s = None if end_s is None else end_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise subprocess.TimeoutExpired("rollout serve", timeout or 0.0)
            select.select([self._pidfd], [], [], left_s)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Zygote:
    """The tests' side. The constructor starts the process, which imports; the first fork waits for it."""

    def __init__(self, environ: dict[str, str]) -> None:
        self.environ = environ
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environ, stdin=subprocess.DEVNULL)
        self._lock = threading.Lock()

    def fork(self, module: str, words: list[str], log: int) -> ForkedProcess:
        """A process that runs a module with these arguments; its output goes to the descriptor `log`."""
        request = json.dumps({"module": module, "words": words, "folder": os.getcwd()}).encode()
        with self._lock, _reaper_of_orphans():
            socket.send_fds(self._socket, [request], [log])
            answer = self._socket.recv(_MESSAGE_BYTES)
            assert answer, "the process that forks workers has ended"
            pid = json.loads(answer)["pid"]
            process = ForkedProcess(pid)
            while _parent_of(pid) != os.getpid():  # its starter is about to end
                time.sleep(0.001)
        return process


@functools.cache
def zygote(environ: tuple[tuple[str, str], ...]) -> Zygote:
    """The zygote of this process for workers with this environment."""
    return Zygote(dict(environ))


def forked(module: str, words: list[str], environ: dict[str, str], log: Path) -> ForkedProcess:
    """Run a module, such as `rollout.cli.main`, with these arguments and variables."""
    kept = {name: value for name, value in environ.items() if name != _SETS_FOR_TESTS}
    with open(log, "ab") as file:
        return zygote(tuple(sorted(kept.items()))).fork(module, words, file.fileno())


class _reaper_of_orphans:  # noqa: N801 -- a context
    """Meanwhile orphans below this process become its children."""

    def __enter__(self) -> None:
        _set_reaper(True)

    def __exit__(self, *exc: object) -> None:
        _set_reaper(False)


def _set_reaper(on: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this process cannot take orphans over")


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# --- the zygote ------------------------------------------------------------------------------------------------------


def _import_everything() -> None:
    gc.disable()
    import rollout.cli.serve
    import rollout.worker  # noqa: F401

    gc.freeze()
    gc.enable()
    assert len(os.listdir("/proc/self/task")) == 1, "a process with several threads cannot be forked"


def _requests(connection: socket.socket) -> dict[str, Any]:
    """Answers requests; returns in each new worker, with its request."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 1)
        if not message:
            os._exit(0)  # the tests have ended
        starter = os.fork()
        if starter == 0:
            starter = os.getpid()
            worker = os.fork()
            if worker == 0:
                return {**json.loads(message), "log": descriptors[0], "starter": starter}
            connection.send(json.dumps({"pid": worker}).encode())
            os._exit(0)
        os.close(descriptors[0])
        os.waitpid(starter, 0)


def _become(request: dict[str, Any], connection: socket.socket) -> None:
    """Have what a new process of `start_worker` has."""
    os.setsid()
    os.dup2(request["log"], 1)
    os.dup2(request["log"], 2)
    os.close(request["log"])
    connection.close()
    os.chdir(request["folder"])
    sys.argv[1:] = request["words"]
    while os.getppid() == request["starter"]:
        time.sleep(0.001)


def _main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    _import_everything()
    request = _requests(connection)
    _become(request, connection)
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
