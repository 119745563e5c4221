"""Children that run a module of this package, and their end: a child ends with its launcher.

A watcher thread waits for the parent. On Linux it sleeps on a pidfd, which the kernel makes readable the moment the
parent exits; elsewhere, or where pidfds are not allowed, it compares the parent's id every `poll_s` seconds. Linux'
`PR_SET_PDEATHSIG` is not used: it fires at the end of the forking *thread*, so a trainer would lose a worker launched
from a thread of a pool.

On the parent's end the process sends itself SIGTERM, for an orderly end, and `grace_s` seconds later SIGKILL, which
takes effect even if the main thread hangs.
"""

import os
import select
import signal
import sys
import threading
import time

#: Seconds between two checks of the parent's id, if there are no pidfds.
POLL_S = 0.5


def module_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module. Without -P every import would be looked for in the current folder first."""
    return [sys.executable, "-P", "-m", module, *arguments]


def import_path() -> dict[str, str]:
    """The variable by which a child looks for imports where this process does, and nowhere else."""
    return {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}


def exit_with_parent(grace_s: float, poll_s: float = POLL_S, use_pidfd: bool = True) -> threading.Thread:
    """Start the watcher; returns its thread, a daemon.

    Args:
        grace_s: seconds between SIGTERM and SIGKILL.
        poll_s: seconds between two checks of the parent's id, if it is polled.
        use_pidfd: False polls even if pidfds are available.
    """
    parent = os.getppid()
    pidfd = _open_pidfd(parent) if use_pidfd else None
    thread = threading.Thread(target=_watch, args=(parent, pidfd, grace_s, poll_s), name="parent-watch", daemon=True)
    thread.start()
    return thread


def _open_pidfd(pid: int) -> int | None:
    opener = getattr(os, "pidfd_open", None)
    if opener is None:
        return None
    try:
        fd: int = opener(pid)
    except OSError:  # an old kernel, or a sandbox that refuses the call: poll instead
        return None
    return fd


def _watch(parent: int, pidfd: int | None, grace_s: float, poll_s: float) -> None:
    if pidfd is not None:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        # The parent may have ended before the pidfd was opened, and another process may have its id.
        while os.getppid() == parent and not poller.poll():
            pass
        os.close(pidfd)
    else:
        while os.getppid() == parent:
            time.sleep(poll_s)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os.kill(os.getpid(), signal.SIGKILL)
