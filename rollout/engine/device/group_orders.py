"""Orders of rank 0 to the other ranks of a tensor group, which these acknowledge."""

from __future__ import annotations

from typing import Any, Protocol

from rollout.engine.device.releasable import ReleasableMemory, SleepMemory


class GroupOrders(Protocol):
    """Has the other ranks do the work of this rank. The orders of one lane are carried out in sequence."""

    def give(self, lane: Any, *fields: Any) -> int:
        """Give an order; returns its number in its lane."""

    def done(self, lane: Any, number: int) -> bool:
        """Whether all other ranks have carried out this order and those before it, or failed to."""

    def failures(self, lane: Any, number: int) -> list[str]:
        """The failures of ranks at this order of a lane, or a later one."""

    def memory_of_all(self, own: ReleasableMemory) -> SleepMemory:
        """The memory that a sleep of all ranks gives back; `own` is the memory of this rank."""


class NoGroupOrders:
    """The orders of a worker of one rank: there is no other rank, so each is done at once."""

    def give(self, lane: Any, *fields: Any) -> int:
        """No-op."""
        return 0

    def done(self, lane: Any, number: int) -> bool:
        """True."""
        return True

    def failures(self, lane: Any, number: int) -> list[str]:
        """None."""
        return []

    def memory_of_all(self, own: ReleasableMemory) -> SleepMemory:
        """The memory of this rank."""
        return own


NO_GROUP_ORDERS = NoGroupOrders()
