"""KV of preempted sequences goes to the host and comes back, beside the steps: one turn of it a tick of the loop.

    turn:  copies that are over --> pages given back, rows that can be planned again;  then copies that can begin

`parking` decides which pages, `page_mover` copies them. Nothing here waits but `wait`, for when no step can be launched
before a copy is over. A copy that fails ends offloading: what is parked is computed again, and so is what is preempted
from then on.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Literal

from rollout.engine.kv.page_mover import PageMover, Piece
from rollout.engine.kv.parking import Arrival, Parking, Place
from rollout.engine.schedule.scheduler import Scheduler

log = logging.getLogger(__name__)

_KEEP = 4096


@dataclass(frozen=True, slots=True)
class MoveRecord:
    """A piece that was copied; times as those of steps."""

    direction: Literal["out", "in"]
    pages: int
    start_s: float
    end_s: float


class Offload:
    """What is done about preempted sequences between two steps."""

    def __init__(self, scheduler: Scheduler, parking: Parking, mover: PageMover) -> None:
        self.parking = parking
        self.mover = mover
        self.failure = ""  # why there is none any more
        self.recent: deque[MoveRecord] = deque(maxlen=_KEEP)
        self._scheduler = scheduler

    @property
    def moving(self) -> bool:
        """True while there are copies to begin or under way."""
        return self.parking.waiting or self.mover.moving

    def turn(self) -> bool:
        """Account for the copies that are over, begin others; True while there are any."""
        if not self.moving:
            return False
        self._take_landed()
        if not self.failure:
            self._begin()
        return self.moving

    def wait(self, most_s: float) -> None:
        """Block until a copy is over, for so long at most: there is nothing to launch before."""
        self.mover.wait(most_s)

    def _take_landed(self) -> None:
        for piece in self.mover.out.landed():
            self._note("out", piece)
            places: list[Place] = piece.cargo
            self._scheduler.memory.pages_left_pool(places, bool(piece.failure))
        for piece in self.mover.back.landed():
            self._note("in", piece)
            arrivals: list[Arrival] = piece.cargo
            self._scheduler.came_back(self.parking.arrived(arrivals, bool(piece.failure)))

    def _note(self, direction: Literal["out", "in"], piece: Piece) -> None:
        if not piece.failure:
            self.recent.append(MoveRecord(direction, piece.pages, piece.start.time_s, piece.end.time_s))
        elif not self.failure:
            self.failure = f"KV is offloaded no more, what is preempted is computed again: {piece.failure}"
            log.error("%s", self.failure)
            self.parking.closed = True
            self._scheduler.forget_parked()

    def _begin(self) -> None:
        out, back = self.mover.out, self.mover.back
        while out.most and (places := self.parking.next_out(out.most)):
            pages = [place.page for place in places if place.page is not None]
            out.start(pages, [place.host for place in places], places)
        while back.most and (arrivals := self.parking.next_in(back.most)):
            # A page may be given back while a step in flight still copies from it.
            pages = [arrival.page for arrival in arrivals]
            back.start(pages, [arrival.place.host for arrival in arrivals], arrivals, self.mover.compute)
