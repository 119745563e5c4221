"""The threads of a follower that carry out orders."""

from __future__ import annotations

import subprocess
import sys
import threading

import torch

from rollout.ranks.ordered_work import OrderedWork
from rollout.ranks.reports import Reports
from rollout.ranks.ring import SharedMemory
from tests.support.worker.harness import until

FAILS = """
import sys, time
import torch
from rollout.ranks.ordered_work import OrderedWork
from rollout.ranks.reports import Reports
from rollout.ranks.ring import SharedMemory

reports = Reports(SharedMemory(int(sys.argv[1])), 2)
work = OrderedWork("updates", torch.device("cpu"), reports, 1)
work.put(lambda: {}["no such piece"])
work.finish()
"""


def test_work_is_done_in_order() -> None:
    reports, done = Reports(SharedMemory.create("reports", Reports.line_bytes()), 1), list[int]()
    work = OrderedWork("updates", torch.device("cpu"), reports, 0)
    for i in range(100):
        work.put(lambda i=i: done.append(i))  # type: ignore[misc]
    work.finish()
    assert done == list(range(100)) and reports.text(0, "end") == ""


def test_work_that_hangs_and_work_that_goes_on_are_reported() -> None:
    reports, goes_on = Reports(SharedMemory.create("reports", Reports.line_bytes()), 1), threading.Event()
    work = OrderedWork("adapters", torch.device("cpu"), reports, 0)
    for wait in (goes_on.wait, work.advance):
        work.put(wait)
    until(lambda: reports.get("adapters_given") == [2], "two pieces of work")
    assert reports.get("adapters_ended") == [0] and reports.get("adapters_parts") == [0]
    goes_on.set()
    work.finish()
    until(lambda: reports.get("adapters_ended") == reports.get("adapters_given") == [3], "the end of all work")
    assert reports.get("adapters_parts") == [1] and reports.get("updates_given") == [0]


def test_a_rank_ends_with_the_reason_when_one_of_its_threads_fails() -> None:
    memory = SharedMemory.create("reports", 2 * Reports.line_bytes())
    command = [sys.executable, "-c", FAILS, str(memory.descriptor)]
    ended = subprocess.run(command, pass_fds=(memory.descriptor,), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1 and "no such piece" in ended.stderr
    assert Reports(memory, 2).text(1, "end") == "thread updates: KeyError: 'no such piece'"
