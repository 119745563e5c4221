"""Orders to end the worker: at once, or by a drain that has a limit.

    now     Shutdown("now") ==> engine, and all drains end with it
    drain   after the prompts in preparation: Shutdown("drain") ==> engine;  after `drain_s`: Shutdown("now")

Prompts in preparation and rows have `drain_s` together, since a supervisor kills the worker later.
"""

from __future__ import annotations

import math
import time
from itertools import count
from queue import SimpleQueue
from typing import Literal

from rollout.engine.messages.to_engine import Command, Shutdown
from rollout.service.requests.background_work import BackgroundWork
from rollout.service.requests.intake import PreparedPrompt


class Shutdowns:
    """Has the engine end. Everything here runs on the service thread."""

    def __init__(
        self, drain_s: float, inbox: SimpleQueue[Command], background: BackgroundWork[PreparedPrompt | None]
    ) -> None:
        self._drain_s = drain_s
        self._inbox = inbox
        self._background = background
        self._places = count()
        self._drains: dict[int, tuple[float, int | None]] = {}  # (time limit, token not yet sent to the loop)

    def begin(self, mode: Literal["drain", "now"], token: int | None) -> None:
        """Have the engine end. A drain begins after the requests in tokenization, since these were accepted."""
        if mode == "drain":
            place = next(self._places)
            self._drains[place] = (time.monotonic() + self._drain_s, token)
            self._background.after_all(lambda: self._begin_drain(place))
        else:
            self._inbox.put(Shutdown("now", token))
            self._end_drains(by_s=math.inf)

    def tick(self) -> None:
        """End the drains that have lasted too long."""
        self._end_drains(by_s=time.monotonic())

    def wait_s(self) -> float | None:
        """Seconds until `tick` has something to do, None if nothing is due by time."""
        limits_s = [limit_s for limit_s, _ in self._drains.values()]
        return max(0.0, min(limits_s) - time.monotonic()) if limits_s else None

    def _begin_drain(self, place: int) -> None:
        if place in self._drains:
            limit_s, token = self._drains[place]
            self._inbox.put(Shutdown("drain", token))
            self._drains[place] = (limit_s, None)

    def _end_drains(self, by_s: float) -> None:
        for place, (limit_s, token) in list(self._drains.items()):
            if by_s >= limit_s:
                del self._drains[place]
                self._inbox.put(Shutdown("now", token))
