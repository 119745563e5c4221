"""The threads of a follower that carry out orders."""

from __future__ import annotations

import subprocess
import sys

import torch

from rollout.ranks.ordered_work import OrderedWork
from rollout.ranks.reports import Reports
from rollout.ranks.ring import SharedMemory

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
    work = OrderedWork("work", torch.device("cpu"), reports, 0)
    for i in range(100):
        work.put(lambda i=i: done.append(i))  # type: ignore[misc]
    work.finish()
    assert done == list(range(100)) and reports.text(0, "end") == ""


def test_a_rank_ends_with_the_reason_when_one_of_its_threads_fails() -> None:
    memory = SharedMemory.create("reports", 2 * Reports.line_bytes())
    command = [sys.executable, "-c", FAILS, str(memory.descriptor)]
    ended = subprocess.run(command, pass_fds=(memory.descriptor,), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1 and "no such piece" in ended.stderr
    assert Reports(memory, 2).text(1, "end") == "thread updates: KeyError: 'no such piece'"
