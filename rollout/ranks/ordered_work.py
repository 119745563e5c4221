"""A thread of a follower for a lane whose orders take longer than a step may wait. It carries them out in order."""

import logging
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch

from rollout.ranks.reports import LaneName, LaneReport, RankReports
from trainer_bridge.wire.errors import WeightsRejected

log = logging.getLogger(__name__)

_FAILED = 1


class OrderedWork:
    """Runs the functions of orders in a thread, in turn, and acknowledges the orders.

    An order fails if its function raises an exception, and rank 0 gets the text. Without a
    `failure` text, an exception ends the rank.
    """

    def __init__(
        self,
        lane: LaneName,
        device: torch.device,
        reports: RankReports,
        follower: int,
    ) -> None:
        self._device, self._reports, self._follower = device, reports, follower
        self._report = LaneReport(reports, follower, lane)
        self._work: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._given = self._done = 0  # orders
        threading.Thread(target=self._run, name=lane, daemon=True).start()

    def put(self, number: int, work: Callable[[], object], failure: str = "", may_hang: bool = False) -> None:
        """Carry out this order after all that were put before. One thread puts.

        `failure` is logged if it fails; an order without it must not fail. One that may hang, with a disk, does not
        count as begun.
        """
        self._given += 1
        if not may_hang:
            self._report.begin(number)
        self._work.put(lambda: self._carry_out(number, work, failure))

    @property
    def idle(self) -> bool:
        """Whether all orders are carried out."""
        return self._given == self._done

    def advance(self) -> None:
        """Called by work that takes long, at each part that it has done: it does not hang."""
        self._report.advance()

    def finish(self) -> None:
        """Return when all that was put is done."""
        done = threading.Event()
        self._work.put(done.set)
        done.wait()

    def _carry_out(self, number: int, work: Callable[[], object], failure: str) -> None:
        why = ""
        try:
            work()
        except WeightsRejected as error:
            why = str(error)
        # Whatever it is, rank 0 waits for an answer.
        except Exception as error:
            if not failure:
                raise
            log.exception(failure)
            why = f"{type(error).__name__}: {error}"
        self._done += 1
        self._report.end(number, why)

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # the device of this thread
            while True:
                self._work.get()()
        except BaseException as error:
            self._reports.set_text(
                self._follower, "end", f"thread {self._report.lane}: {type(error).__name__}: {error}"
            )
            log.critical("this rank ends: its thread %s failed", self._report.lane, exc_info=True)
            os._exit(_FAILED)
