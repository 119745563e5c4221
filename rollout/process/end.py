"""The end of a process that several threads may end: the first one says why, and with which status.

    the loop               an error that it cannot mend      `begin`, then it cleans up and returns the status
    a watching thread      a peer is lost                    `begin`, then it exits
    the watchdog's thread  the loop hangs                    `begin`, then it exits

A thread whose `begin` is False does nothing more: the process ends with the reason and status of the first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class End:
    """The end of this process.

    Args:
        end_within: ends the process with a status after some seconds, if it still runs (`Watchdog.end_within`).
    """

    def __init__(self, end_within: Callable[[float, int], None]) -> None:
        self._end_within = end_within
        self._lock = threading.Lock()
        self.reason, self.status = "", 0  # set once it has begun

    def begin(self, reason: str, status: int, within_s: float) -> bool:
        """Begin the end, which must not take longer than `within_s`; False if another thread has begun it."""
        if not self._lock.acquire(blocking=False):
            return False
        self._end_within(within_s, status)
        self.reason, self.status = reason, status
        log.critical("the process ends", extra={"reason": reason, "status": status})
        return True

    def wait(self) -> None:
        """Wait for the exit that another thread has begun; does not return."""
        threading.Event().wait()
