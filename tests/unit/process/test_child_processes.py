"""A worker ends with the process that launched it; checked with real processes."""

import os
import signal
import subprocess
import sys

import pytest

CHILD = """
import signal, sys, threading, time
from types import SimpleNamespace
from rollout.process import child_processes
mode, pidfd, grace_s, heard = sys.argv[1], sys.argv[2] == "pidfd", 600.0, threading.Event()
if mode == "orderly":
    signal.signal(signal.SIGTERM, lambda *_: (print("terminated", flush=True), sys.exit(0)))
elif mode == "stubborn":
    grace_s = 0.2
    signal.signal(signal.SIGTERM, lambda *_: (print("refused", flush=True), heard.set()))
    # On a busy machine a signal may be heard later than the grace is long.
    wait = lambda seconds: (seconds == grace_s and heard.wait(), time.sleep(seconds))
    child_processes.time = SimpleNamespace(sleep=wait)
# With a pidfd nothing is polled: a second look would come after an hour.
child_processes.exit_with_parent(grace_s=grace_s, poll_s=3600.0 if pidfd else 0.02, use_pidfd=pidfd)
print("ready", flush=True)
while True:
    time.sleep(0.05)  # a signal may come just before the call
"""

#: Launches CHILD from a thread that ends at once (which must not end the child), then lives until its stdin closes.
PARENT = """
import subprocess, sys, threading
thread = threading.Thread(target=lambda: subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[2:]]))
thread.start()
thread.join()
sys.stdin.read()
"""


def start(mode: str, how: str) -> subprocess.Popen:
    command = [sys.executable, "-c", PARENT, CHILD, mode, how]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)


def has_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


@pytest.mark.parametrize(
    "how", [pytest.param("pidfd", marks=pytest.mark.skipif(not has_pidfd(), reason="no pidfds here")), "poll"]
)
@pytest.mark.parametrize(("mode", "last_words"), [("orderly", "terminated\n"), ("stubborn", "refused\n")])
def test_child_ends_when_its_parent_is_killed(how, mode, last_words):
    parent = start(mode, how)
    assert parent.stdout is not None and parent.stdin is not None
    assert parent.stdout.readline() == "ready\n"
    parent.send_signal(signal.SIGKILL)
    # stdout reaches its end only when the child, which holds the other end of the pipe, is gone too.
    assert parent.stdout.read() == last_words
    assert parent.wait() == -signal.SIGKILL
    parent.stdin.close()
    parent.stdout.close()
