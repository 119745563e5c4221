"""The group of one update, kept for the next: connecting GPUs takes longer than sending the weights.

    update i     joins  --> broadcasts --> keep(seat, group)
    update i+1   take(seat) --> broadcasts --> keep(seat, group)     if all members still have it, in the same seats
                 otherwise each member leaves it and joins a new one

A broken group is never kept. A member leaves a group without waiting for the others.
"""

import threading
import time

import torch
import torch.distributed as dist

from trainer_bridge.transports.nccl.nccl_group import END_S, BroadcastGroup, GroupSeat, begin_ending


class KeptGroup:
    """The group that a member keeps. Any thread, one update at a time. `group_type` are the groups that it joins."""

    def __init__(self, group_type: type[BroadcastGroup] = BroadcastGroup) -> None:
        self._group_type = group_type
        self._lock = threading.Lock()
        self._kept: tuple[GroupSeat, BroadcastGroup] | None = None
        self._ending: list[threading.Thread] = []

    @property
    def name(self) -> str:
        """The group's name; empty if no group is kept."""
        kept = self._kept
        return "" if kept is None else kept[0].name

    def join(
        self, store: dist.Store, seat: GroupSeat, address: str, device: torch.device, timeout_s: float
    ) -> BroadcastGroup:
        """Meet the other members of a group. Raises `GroupError` if not all of them join within `timeout_s`."""
        return self._group_type(store, seat.name, seat.rank, seat.size, address, device, timeout_s)

    def keep(self, seat: GroupSeat, group: BroadcastGroup) -> None:
        """Keep a group with nothing in flight until the next `take`; leave the one kept before."""
        with self._lock:
            self._leave()
            self._kept = seat, group

    def take(self, seat: GroupSeat) -> BroadcastGroup | None:
        """Hand over the kept group if `seat` is this member's seat in it; otherwise leave it and return None."""
        with self._lock:
            kept = self._kept
            if kept is not None and (kept[0].name, kept[0].rank, kept[0].size) == (seat.name, seat.rank, seat.size):
                self._kept = None
                return kept[1]
            self._leave()
        return None

    def leave(self) -> None:
        """Leave the kept group in a thread: NCCL may take half a second."""
        with self._lock:
            self._leave()

    def leave_broken(self, group: BroadcastGroup) -> None:
        """Leave a broken group that was taken or newly made."""
        thread = group.close(broken=True)
        if thread is not None:
            with self._lock:
                self._note(thread)

    def close(self) -> None:
        """Leave the kept group and wait at most 2 s: a thread inside torch may abort the process when Python ends."""
        self.leave()
        until_s = time.monotonic() + END_S
        with self._lock:
            ending, self._ending = self._ending, []
        for thread in ending:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _leave(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            thread = begin_ending(lambda: _close(kept[1]))
            if thread is not None:
                self._note(thread)

    def _note(self, thread: threading.Thread) -> None:
        self._ending = [*(other for other in self._ending if other.is_alive()), thread]


def _close(group: BroadcastGroup) -> None:
    """Close a group; return when all of it is freed."""
    thread = group.close(broken=True)
    if thread is not None:
        thread.join()
