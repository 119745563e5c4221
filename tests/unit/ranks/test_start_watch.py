"""The rules by which rank 0 finds a rank that hangs at the start, and by which a slow one stays."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout.ranks.processes import look_at_start
from rollout.ranks.start_watch import (
    CONNECTING,
    IMPORTING,
    LOADING,
    PREPARING,
    READY,
    StartPosition,
    StartProgress,
    StartState,
    StartWatch,
)
from rollout.ranks.thread_stat import thread_stat
from tests.support.worker.harness import until

LIMIT_S, LOOK_S = 32.0, 0.25


class Start:
    """Three ranks that start, and are looked at every quarter of a second."""

    def __init__(self, *stages: int, limit_s: float | None = LIMIT_S) -> None:
        self.ranks = [StartState(StartPosition(stage)) for stage in stages]
        self.watch = StartWatch(limit_s)
        self.now_s, self.compiles = 0.0, False

    def at(self, rank: int, stage: int, done: int = 0, total: int = 0) -> None:
        self.change(rank, position=StartPosition(stage, total > 0, done), total=total)

    def change(self, rank: int, **fields: Any) -> None:
        self.ranks[rank] = self.ranks[rank]._replace(**fields)

    def go(self, seconds: float, cpu: dict[int, float] | None = None) -> str:
        """Look for so long, or until a rank hangs. `cpu` is how many cores ranks use."""
        for _ in range(round(seconds / LOOK_S)):
            self.now_s += LOOK_S
            for rank, cores in (cpu or {}).items():
                self.change(rank, cpu_s=self.ranks[rank].cpu_s + cores * LOOK_S)
            if failure := self.watch.find_stall(self.ranks, self.compiles, LOOK_S):
                return failure
        return ""


def test_the_rank_that_is_the_least_far_has_hung_and_not_those_that_wait_for_it() -> None:
    start = Start(CONNECTING, CONNECTING, IMPORTING)
    assert "rank 2 has hung at the start: nothing is done in the stage 'importing' for" in start.go(100)
    assert LIMIT_S < start.now_s <= LIMIT_S + 2 * LOOK_S


def test_ranks_that_are_equally_far_are_named_together() -> None:
    assert "ranks 1, 2 have hung" in Start(READY, PREPARING, PREPARING).go(100)
    assert "ranks 0, 1, 2 have hung" in Start(CONNECTING, CONNECTING, CONNECTING).go(100)


def test_one_that_does_something_saves_all_that_are_equally_far() -> None:
    start = Start(PREPARING, PREPARING, PREPARING)
    assert start.go(600, cpu={2: 0.1}) == ""
    assert "hung" in start.go(60, cpu={2: 0.01})


def test_a_rank_that_waited_for_another_one_has_its_whole_time_when_that_one_goes_on() -> None:
    start = Start(PREPARING, PREPARING, PREPARING)
    assert start.go(600, cpu={2: 1.0}) == ""
    start.at(2, READY)
    assert start.go(LIMIT_S - 1) == ""
    assert "ranks 0, 1" in start.go(2)


def test_while_weights_are_loaded_each_rank_is_judged_by_itself() -> None:
    start = Start(LOADING, LOADING, LOADING)
    start.at(2, LOADING, 50, 200)
    for done in range(1, 60):
        start.at(0, LOADING, done, 200)
        start.at(1, LOADING, done // 2, 200)
        if failure := start.go(1.0):
            break
    assert "rank 2 has hung at the start: nothing is done in the stage 'loading weights' at 25 % (50 of 200)" in failure
    assert start.now_s <= LIMIT_S + 1


def test_one_that_has_all_its_weights_waits_for_the_others() -> None:
    start = Start(LOADING, PREPARING, LOADING)
    start.at(0, LOADING, 200, 200)
    for done in range(1, 200):
        start.at(2, LOADING, done, 200)
        assert start.go(LIMIT_S - 1) == ""


@pytest.mark.parametrize("sign", ["read_bytes", "waits_for_disk"])
def test_a_slow_disk_is_no_hang(sign: str) -> None:
    start = Start(PREPARING, LOADING, PREPARING)
    start.at(1, LOADING, 50, 200)
    for count in range(1, 200):
        start.change(1, **{sign: count if sign == "read_bytes" else True})
        assert start.go(10) == ""
    start.change(1, waits_for_disk=False)
    assert "rank 1 has hung" in start.go(LIMIT_S + 1)


def test_a_rank_that_waits_for_its_disk_saves_no_other_one_that_loads() -> None:
    start = Start(LOADING, LOADING, LOADING)
    for rank in range(3):
        start.at(rank, LOADING, 10 + rank, 200)
    start.change(0, waits_for_disk=True)
    assert "rank 1 has hung" in start.go(100)


def test_no_time_counts_while_a_rank_compiles_and_none_without_a_limit() -> None:
    start = Start(PREPARING, PREPARING, PREPARING)
    start.compiles = True
    assert start.go(300) == ""
    start.compiles = False
    assert "hung" in start.go(LIMIT_S + 1)
    assert Start(IMPORTING, CONNECTING, CONNECTING, limit_s=None).go(4000) == ""


def test_each_part_and_each_stage_is_progress() -> None:
    reports: list[tuple[int, int, int]] = []
    progress, start = StartProgress(lambda *report: reports.append(report)), Start(READY, READY, IMPORTING)

    def moves() -> None:
        assert start.go(LIMIT_S - 1) == ""
        start.at(2, *reports[-1])

    for stage in (CONNECTING, LOADING, PREPARING):
        progress.enter(stage)
        moves()
        for done in range(3):
            progress.advance(done, 3)
            moves()
    assert "at 66 % (2 of 3)" in start.go(LIMIT_S + 1)


# --- signs of a process -----------------------------------------------------------------------------------------------

_SLEEPS = "import time; print(flush=True); time.sleep(600)"
_READS = "import sys; print(flush=True); [open(sys.argv[1], 'rb').read() for _ in iter(int, 1)]"
_WAITS = """
import ctypes, time
print(flush=True)
libc = ctypes.CDLL(None)
pid = libc.vfork()
if pid == 0:
    libc.sleep(600)
"""


def looks_of(
    code: str, path: Path, enough: Callable[[list[StartState]], bool], state: str = "", on_cpu: bool = True
) -> list[StartState]:
    """Looks at a process that runs this code, until they are enough; from when it is in a state, if one is given."""
    command, looks = [sys.executable, "-c", code, str(path)], []
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"\n"
            until(lambda: state in ("", thread_stat(process.pid, process.pid).state), f"state {state}")

            def looked() -> bool:
                time.sleep(0.05)
                looks.append(look_at_start(process.pid, LOADING, 1, 2, on_cpu))
                return enough(looks)

            until(looked, "what shows")
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    return looks


def test_a_process_that_sleeps_shows_no_sign(tmp_path: Path) -> None:
    looks = looks_of(_SLEEPS, tmp_path, lambda looks: len(looks) == 20, state="S")
    assert looks[-1].read_bytes == looks[0].read_bytes > 0  # of its imports
    assert looks[-1].cpu_s - looks[0].cpu_s < 0.05 and not any(look.waits_for_disk for look in looks)
    assert looks[0].position == StartPosition(LOADING, True, 1) and looks[0].total == 2


def test_a_process_that_reads_shows_bytes_and_time_of_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * (8 << 20))

    def both(looks: list[StartState]) -> bool:
        return looks[-1].read_bytes > looks[0].read_bytes and looks[-1].cpu_s > looks[0].cpu_s

    assert both(looks_of(_READS, tmp_path / "file", both, on_cpu=False))


def test_a_process_in_the_kernel_that_cannot_be_interrupted_waits_for_a_disk(tmp_path: Path) -> None:
    looks = looks_of(_WAITS, tmp_path, lambda looks: len(looks) == 20, state="D")
    assert all(look.waits_for_disk for look in looks)  # the state of a page fault, here of a parent in vfork


def test_a_process_that_has_ended_shows_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    assert look_at_start(process.pid, IMPORTING, 0, 0, on_cpu=True) == StartState()
