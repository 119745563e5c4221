"""A thread of a follower for work that takes longer than a step may wait. It does its work in order.

It reports how many pieces of work it got, and how many have ended, so rank 0 finds it if it hangs.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Literal

import torch

from rollout.ranks.reports import Number, Reports

log = logging.getLogger(__name__)

_FAILED = 1
Name = Literal["updates", "adapters"]
#: What it was given, what has ended, and parts of the work under way.
WORK_NUMBERS: dict[Name, tuple[Number, Number, Number]] = {
    "updates": ("updates_given", "updates_ended", "updates_parts"),
    "adapters": ("adapters_given", "adapters_ended", "adapters_parts"),
}


class OrderedWork:
    """Runs functions in a thread, one after the other.

    The functions report refusals themselves. If one raises, the rank ends: rank 0 waits for its answer.
    """

    def __init__(self, name: Name, device: torch.device, reports: Reports, number: int) -> None:
        self._name, self._device, self._reports, self._number = name, device, reports, number
        self._given, self._ended, self._parts = WORK_NUMBERS[name]
        self._work: SimpleQueue[Callable[[], object]] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, work: Callable[[], object]) -> None:
        """Run this after all that was put before. One thread puts."""
        self._reports.add(self._number, self._given)
        self._work.put(work)

    def advance(self) -> None:
        """Called by work that takes long, at each part that it has done: it does not hang."""
        self._reports.add(self._number, self._parts)

    def finish(self) -> None:
        """Return when all that was put is done."""
        done = threading.Event()
        self.put(done.set)
        done.wait()

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # of this thread
            while True:
                self._work.get()()
                self._reports.add(self._number, self._ended)
        except BaseException as error:
            self._reports.say(self._number, "end", f"thread {self._name}: {type(error).__name__}: {error}")
            log.critical("this rank ends: its thread %s failed", self._name, exc_info=True)
            os._exit(_FAILED)
