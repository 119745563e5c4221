"""Orders of rank 0 to the other ranks of a tensor group, which these acknowledge."""

from __future__ import annotations

from typing import Any, Protocol


class GroupOrders(Protocol):
    """Has the other ranks do what this rank does. The orders of a lane are carried out one after the other."""

    def give(self, lane: Any, *fields: Any) -> int:
        """Give an order; returns its number in its lane."""

    def done(self, lane: Any, number: int) -> bool:
        """Whether all other ranks have carried out this order and those before it, or failed to."""

    def failures(self, lane: Any, number: int) -> list[str]:
        """Why ranks could not carry out this order of a lane, or a later one."""

    def unmap_relay(self) -> None:
        """Have the other ranks unmap memory of this device, which they read; before a sleep gives memory back."""

    def free_relay(self) -> int:
        """Give that memory back, once they have; returns its bytes."""

    @property
    def freed_bytes(self) -> int:
        """Bytes that all other ranks have given back."""
