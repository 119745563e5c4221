"""The group of one update, kept for the next: to connect GPUs takes longer than to send the weights.

    update i     joins  --> broadcasts --> keep(place, group)
    update i+1   take(place) --> broadcasts --> keep(place, group)     if all members still have it, in the same places
                 else it is let go of, and they meet in a new one

A group that broke is never kept. Both ends of a group that is let go of end by themselves: nobody waits for the others.
"""

from __future__ import annotations

import threading
import time

from trainer_bridge.transports.nccl.group import END_S, BroadcastGroup, GroupSeat, begin_ending


class KeptGroup:
    """A member's; any thread, one update at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: tuple[GroupSeat, BroadcastGroup] | None = None
        self._ending: list[threading.Thread] = []

    @property
    def name(self) -> str:
        """The group's name; empty if no group is kept."""
        kept = self._kept
        return "" if kept is None else kept[0].name

    def keep(self, place: GroupSeat, group: BroadcastGroup) -> None:
        """Until it is taken. Nothing is on its way in it."""
        with self._lock:
            self._let_go()
            self._kept = place, group

    def take(self, place: GroupSeat) -> BroadcastGroup | None:
        """The group, which is the caller's now, if this is the place in it; else None, and it is let go of."""
        with self._lock:
            kept = self._kept
            if kept is not None and (kept[0].name, kept[0].rank, kept[0].size) == (place.name, place.rank, place.size):
                self._kept = None
                return kept[1]
            self._let_go()
        return None

    def let_go(self) -> None:
        """Leave the group, without a wait: to leave may take NCCL half a second."""
        with self._lock:
            self._let_go()

    def leave_broken(self, group: BroadcastGroup) -> None:
        """Leave one that was taken or made anew, and broke."""
        thread = group.close(broken=True)
        if thread is not None:
            with self._lock:
                self._note(thread)

    def close(self) -> None:
        """Leave it, and wait a moment: a thread that is inside of torch while Python ends may abort the process."""
        self.let_go()
        until_s = time.monotonic() + END_S
        with self._lock:
            ending, self._ending = self._ending, []
        for thread in ending:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _let_go(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            thread = begin_ending(lambda: _leave(kept[1]))
            if thread is not None:
                self._note(thread)

    def _note(self, thread: threading.Thread) -> None:
        self._ending = [*(other for other in self._ending if other.is_alive()), thread]


def _leave(group: BroadcastGroup) -> None:
    """Return when nothing of it is left."""
    thread = group.close(broken=True)
    if thread is not None:
        thread.join()
