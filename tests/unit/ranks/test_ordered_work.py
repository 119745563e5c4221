"""The threads of a follower that carry out orders."""

import subprocess
import sys
import threading

import pytest
import torch

from rollout.ranks.ordered_work import OrderedWork
from rollout.ranks.rank_watch import LaneProgress
from rollout.ranks.reports import RankReports
from rollout.ranks.ring import SharedMemory
from trainer_bridge.wire.errors import WeightsRejected

FAILS = """
import sys, time
import torch
from rollout.ranks.ordered_work import OrderedWork
from rollout.ranks.reports import RankReports
from rollout.ranks.ring import SharedMemory

reports = RankReports(SharedMemory(int(sys.argv[1])), 2)
work = OrderedWork("updates", torch.device("cpu"), reports, 1)
work.put(1, lambda: {}["no such piece"])
work.finish()
"""


def test_work_is_done_in_order() -> None:
    reports, done = RankReports(SharedMemory.create("reports", RankReports.line_bytes()), 1), list[int]()
    work = OrderedWork("updates", torch.device("cpu"), reports, 0)
    for i in range(100):
        work.put(1 + i, lambda i=i: done.append(i))  # type: ignore[misc]
    work.finish()
    assert done == list(range(100)) and reports.text(0, "end") == ""


def test_work_that_hangs_and_work_that_goes_on_are_reported() -> None:
    reports, goes_on = RankReports(SharedMemory.create("reports", RankReports.line_bytes()), 1), threading.Event()
    work = OrderedWork("adapters", torch.device("cpu"), reports, 0)
    for number, wait in enumerate((goes_on.wait, work.advance), 1):
        work.put(number, wait)
    assert reports.lanes(0)["adapters"] == LaneProgress(True, 0)
    goes_on.set()
    work.finish()
    assert reports.lanes(0)["adapters"] == LaneProgress(False, 3), "two orders and a part"
    assert reports.lanes(0)["updates"] == LaneProgress(False, 0)


@pytest.mark.parametrize(
    ("error", "why"), [(WeightsRejected("too large"), "too large"), (OSError("no"), "OSError: no")]
)
def test_work_that_may_fail_is_acknowledged_with_the_reason(error: Exception, why: str) -> None:
    def fails() -> None:
        raise error

    reports = RankReports(SharedMemory.create("reports", RankReports.line_bytes()), 1)
    work = OrderedWork("updates", torch.device("cpu"), reports, 0)
    work.put(1, fails, "a piece cannot be kept")
    work.put(2, lambda: None)
    work.finish()
    assert reports.ended("updates") == [2] and reports.failures("updates", 1) == [f"rank 1: {why}"]


def test_a_rank_ends_with_the_reason_when_one_of_its_threads_fails() -> None:
    memory = SharedMemory.create("reports", 2 * RankReports.line_bytes())
    command = [sys.executable, "-c", FAILS, str(memory.descriptor)]
    ended = subprocess.run(command, pass_fds=(memory.descriptor,), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1 and "no such piece" in ended.stderr
    assert RankReports(memory, 2).text(1, "end") == "thread updates: KeyError: 'no such piece'"
