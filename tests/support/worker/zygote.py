"""Starts workers by a fork of a process that has imported everything: a start then takes a fifth of the CPU time.

    tests ----- command line, folder, log ----> zygote: has imported the libraries, and runs one thread
                                                  |  fork
                                                starter  --- process id ---> tests
                                                  |  fork, and ends
                                                worker: becomes a child of the tests' process, and runs `rollout serve`

The worker runs the module that `python -m` would run, from the command line to its end. It is a child of the tests'
process, as after `start_worker`: it can be waited for, and ends with that process. It forks its followers. Its first
process of texts is forked before the worker begins, and has torch; a later one is a new process of Python.

A worker whose environment libraries read when they are imported cannot be forked: `forked` takes changes of variables
that are read later. A `sitecustomize` in the first folder of PYTHONPATH is run after the fork. Tests of the start
itself use `start_worker`.
"""

import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36
_NAME_BYTES = 15
_MESSAGE_BYTES = 1 << 17
_SETS_FOR_TESTS = "PYTEST_CURRENT_TEST"


class ForkedProcess:
    """A child of this process, with the methods of `subprocess.Popen` that are called."""

    def __init__(self, pid: int, stdin: BinaryIO | None = None) -> None:
        self.pid = pid
        self.stdin = stdin
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
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
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

    def fork(self, module: str, words: list[str], late: Mapping[str, str], log: int) -> ForkedProcess:
        """A process that runs a module with these arguments; its output goes to the descriptor `log`."""
        told = {"module": module, "words": words, "late": dict(late), "folder": os.getcwd()}
        request = json.dumps(told).encode()
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


def forked(module: str, words: list[str], environ: dict[str, str], late: Mapping[str, str], log: Path) -> ForkedProcess:
    """Run a module, such as `rollout.cli.main`, with these arguments and variables.

    `late` are changes of variables that nothing reads when it is imported.
    """
    kept = {name: value for name, value in environ.items() if name != _SETS_FOR_TESTS}
    with open(log, "ab") as file:
        return zygote(tuple(sorted(kept.items()))).fork(module, words, late, file.fileno())


def children_running(pid: int, module: str) -> list[int]:
    """The children of a process that run this module, forked ones and others, in the order of their ids."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_bytes().split(b"\0")
                name = (folder / "comm").read_text().rstrip("\n")
                if _parent_of(int(folder.name)) == pid and (module.encode() in command or name == _named(module)):
                    found.append(int(folder.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return sorted(found)


class _reaper_of_orphans:  # noqa: N801 -- a context
    """Meanwhile orphans below this process become its children."""

    def __enter__(self) -> None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def __exit__(self, *exc: object) -> None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _prctl(what: int, value: int | bytes) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(what, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {what} is refused")


def _named(module: str) -> str:
    return module[-_NAME_BYTES:]


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# --- the zygote ------------------------------------------------------------------------------------------------------


def _import_everything() -> None:
    gc.disable()
    import rollout.cli.serve
    import rollout.ranks.follower
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
    os.environ.update(request["late"])
    tempfile.tempdir = None  # it may be another one here
    while os.getppid() == request["starter"]:
        time.sleep(0.001)


def _run(module: str, words: Sequence[str]) -> None:
    """What Python does when it starts with these words."""
    _begin(module, words)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _begin(module: str, words: Sequence[str]) -> None:
    _prctl(_PR_SET_NAME, _named(module).encode())
    sys.argv[1:] = words
    sys.orig_argv[:] = [sys.executable, "-P", "-m", module, *words]
    first = Path(os.environ["PYTHONPATH"].partition(os.pathsep)[0])
    spec = importlib.util.spec_from_file_location("sitecustomize", first / "sitecustomize.py")
    if (first / "sitecustomize.py").exists() and spec is not None and spec.loader is not None:
        if str(first) not in sys.path:  # where its own children look, too
            sys.path.insert(0, str(first))
        sys.modules["sitecustomize"] = hook = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(hook)


class _ForksText:
    """The module `subprocess` for what starts the process of texts: its first `Popen` gives a process that waits."""

    def __init__(self) -> None:
        """Fork it, while no other thread runs."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()
            _become_text(theirs)
        theirs.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(  # noqa: N802 -- a name of Python's
        self, command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], **streams: int
    ) -> Any:
        """A child of this process that runs `python -P -m MODULE ARGUMENTS`."""
        pid, self._pid = self._pid, 0
        if pid:
            request = {"words": command[4:], "environ": dict(env), "descriptors": list(pass_fds)}
            with self._socket, contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it was killed
                socket.send_fds(self._socket, [json.dumps(request).encode()], pass_fds)
                return ForkedProcess(pid)
        return subprocess.Popen(command, pass_fds=pass_fds, env=env, **streams)


def _become_text(connection: socket.socket) -> None:
    """Wait for the request of `_ForksText`, and be the process of texts; never returns."""
    message, received, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 8)
    if not message:
        os._exit(0)  # the worker has ended, or serves no texts
    status = 1
    try:
        request = json.loads(message)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        above = max([*request["descriptors"], *received]) + 1
        moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in received]
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2 and descriptor not in moved:
                with contextlib.suppress(OSError):  # the one that listed the folder
                    os.close(descriptor)
        for descriptor, number in zip(moved, request["descriptors"], strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(request["environ"])
        from rollout.service.text import process

        _begin(process.__name__, request["words"])
        process.sys = _OwnModules()  # type: ignore[assignment]  # transformers has torch: it cannot do without it now
        status = process.main(request["words"])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


class _OwnModules:
    """The module `sys` for code that hides a module from the libraries that it loads: nothing is hidden."""

    def __init__(self) -> None:
        self.modules = dict(sys.modules)

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)


class _Forks:
    """The module `subprocess` for what starts followers: its `Popen` forks, while hardly a thread runs."""

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(  # noqa: N802 -- a name of Python's
        self, command: Sequence[str], *, stdin: int, stdout: int, pass_fds: Sequence[int], env: Mapping[str, str]
    ) -> Any:
        """A child of this thread that runs `python -P -m MODULE ARGUMENTS`."""
        if len(os.listdir("/proc/self/task")) > 2:  # more than the one that watches the parent
            return subprocess.Popen(command, stdin=stdin, stdout=stdout, pass_fds=pass_fds, env=env)
        assert stdin == subprocess.PIPE
        reads, writes = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that two threads run
            pid = os.fork()
        if pid:
            os.close(reads)
            return ForkedProcess(pid, os.fdopen(writes, "wb"))
        status = 1
        try:
            os.dup2(reads, 0)
            os.dup2(stdout, 1)
            for descriptor in map(int, os.listdir("/proc/self/fd")):
                if descriptor > 2 and descriptor not in pass_fds:
                    with contextlib.suppress(OSError):  # the one that listed the folder
                        os.close(descriptor)
            os.environ.clear()
            os.environ.update(env)
            _, _, _, module, *words = command
            _run(module, words)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:  # what is up the stack is the worker's
            os._exit(status)


def _main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    _import_everything()
    request = _requests(connection)
    _become(request, connection)
    from rollout.ranks import follower_processes
    from rollout.service.text import process

    process.subprocess = _ForksText()  # type: ignore[assignment]
    follower_processes.subprocess = _Forks()  # type: ignore[assignment]
    _run(request["module"], request["words"])


if __name__ == "__main__":
    _main()
