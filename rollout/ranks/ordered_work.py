"""A thread of a follower that does what it is given, in order: what takes longer than a step may wait."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch

from rollout.ranks.reports import Reports

log = logging.getLogger(__name__)

_FAILED = 1


class OrderedWork:
    """Runs functions in a thread, one after the other.

    The functions report refusals themselves. If one raises, the rank ends: rank 0 waits for its answer.
    """

    def __init__(self, name: str, device: torch.device, reports: Reports, number: int) -> None:
        self._name, self._device, self._reports, self._number = name, device, reports, number
        self._work: SimpleQueue[Callable[[], object]] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, work: Callable[[], object]) -> None:
        """Run this after all that was put before."""
        self._work.put(work)

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
        except BaseException as error:
            self._reports.say(self._number, "end", f"thread {self._name}: {type(error).__name__}: {error}")
            log.critical("this rank ends: its thread %s failed", self._name, exc_info=True)
            os._exit(_FAILED)
