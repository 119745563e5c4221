"""A process whose main thread is stuck still hears signals and still ends; checked with real processes."""

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

#: Its main thread is stuck in a call that lets other threads run but comes back to no bytecode, like a driver's.
STUCK = """
import hashlib, os, sys, time
from rollout.process.watchdog import Watchdog
mode = sys.argv[1]

def heard(count):
    print("signal", count, flush=True)
    if count == 2:
        watchdog.expect_end(0.1)

def stalled(seconds):
    print("stalled", flush=True)
    os._exit(4)

started_s, ticks = time.perf_counter(), True
watchdog = Watchdog(
    last_tick_s=lambda: time.perf_counter() if ticks else started_s,
    stall_s=0.6 if mode != "signals" else None,
    on_signal=heard,
    on_stall=stalled,
)
watchdog.start()
if mode == "closing":
    watchdog.stop_watching()
print("ready", flush=True)
ticks = mode == "alive"
if mode == "closing":
    watchdog.end_within(1.0, 3)
    watchdog.end_within(60.0, 5)
if mode == "alive":
    watchdog.end_within(2.0, 0)
hashlib.pbkdf2_hmac("sha256", b"x", b"y", (1 << 31) - 1)
"""


def start(mode: str, **options: Any) -> subprocess.Popen:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, mode], stdout=subprocess.PIPE, text=True, env=environ, **options
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_a_second_signal_ends_a_process_that_is_stuck() -> None:
    process = start("signals")
    assert process.stdout is not None
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "signal 1\n"
    process.send_signal(signal.SIGTERM)  # a test run in the background inherits an ignored SIGINT
    assert process.stdout.read() == "signal 2\nstalled\n"
    assert process.wait(30) == 4


@pytest.mark.parametrize(("mode", "said", "status"), [("hung", "stalled\n", 4), ("closing", "", 3), ("alive", "", 0)])
def test_a_stall_is_seen_and_a_deadline_kept(mode: str, said: str, status: int) -> None:
    """`closing` expects no ticks any more, and `alive` ticks: neither stalls."""
    process = start(mode)
    assert process.stdout is not None and process.stdout.read() == said
    assert process.wait(30) == status


def test_a_signal_that_the_process_ignores_stays_ignored() -> None:
    process = start("signals", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert process.stdout is not None
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "signal 1\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.read() == "signal 2\nstalled\n"
    assert process.wait(30) == 4
