"""Orders of rank 0 that the other ranks of a tensor group acknowledge, such as orders to release memory."""

import time
from typing import Any, Protocol

from rollout.engine.device.releasable import MemoryShortError, ReleasableMemory, SleepMemory


class RankOrders(Protocol):
    """Has the other ranks do the work of this rank. The orders of one lane are carried out in sequence."""

    def give(self, lane: Any, *fields: Any) -> int:
        """Give an order; returns its number in its lane."""

    def done(self, lane: Any, number: int) -> bool:
        """Whether all other ranks have carried out this order and all earlier orders, or failed to."""

    def failures(self, lane: Any, number: int) -> list[str]:
        """The failures of ranks at this order of a lane, or a later one."""

    def memory_of_all(self, own: ReleasableMemory) -> SleepMemory:
        """The memory that a sleep of all ranks gives back; `own` is the memory of this rank."""


class NoRankOrders:
    """The orders of a worker of one rank: there is no other rank, so each is done at once."""

    def give(self, lane: Any, *fields: Any) -> int:
        return 0

    def done(self, lane: Any, number: int) -> bool:
        return True

    def failures(self, lane: Any, number: int) -> list[str]:
        """None."""
        return []

    def memory_of_all(self, own: ReleasableMemory) -> SleepMemory:
        """The memory of this rank."""
        return own


NO_RANK_ORDERS = NoRankOrders()


_LOOK_S = 0.002


class SleepOrders(RankOrders, Protocol):
    """Orders to the other ranks, including the orders that only a sleep needs."""

    def unmap_relay(self) -> None:
        """Have the other ranks unmap this device's relay memory, before a sleep releases it."""

    def free_relay(self) -> int:
        """Release the relay memory after the other ranks have unmapped it; returns its bytes."""

    @property
    def freed_bytes(self) -> int:
        """Bytes that all other ranks have given back."""


class MemoryOfRanks:
    """The memory of all ranks of a tensor group: all have theirs, or none has. `own` is the part of rank 0.

        rank 0   order --> own part --> wait for the others --> a failure of any rank undoes the order on all

    A sleep is rare and the device is quiet, so the loop waits here for the other ranks, as it does for its own copies.
    """

    def __init__(self, own: ReleasableMemory, orders: SleepOrders) -> None:
        self._own, self._orders = own, orders

    @property
    def sleeps(self) -> bool:
        """Whether the memory can be given back; all ranks have the same settings."""
        return self._own.sleeps

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of rank 0; other ranks have about as many."""
        return self._own.nbytes

    @property
    def released(self) -> bool:
        """Whether the memory is given back."""
        return self._own.released

    def save(self) -> None:
        number, failures = self._orders.give("sleep", "save"), []
        try:
            self._own.save()
        except MemoryShortError as error:
            failures.append(str(error))
        failures += self._wait(number)
        if failures:
            self.forget()
            raise MemoryShortError("; ".join(failures))

    def release(self) -> int:
        """See `SleepMemory.release`; returns the bytes of all ranks."""
        before = self._orders.freed_bytes
        self._orders.unmap_relay()
        number = self._orders.give("sleep", "release")
        freed_bytes = self._own.release()
        self._wait(number)
        freed_bytes += self._orders.free_relay()
        return freed_bytes + self._orders.freed_bytes - before

    def forget(self) -> None:
        self._orders.give("sleep", "forget")
        self._own.forget()

    def restore(self) -> None:
        number, failures = self._orders.give("sleep", "restore"), []
        try:
            self._own.restore()
        except MemoryShortError as error:
            failures.append(str(error))
        failures += self._wait(number)
        if failures:
            number = self._orders.give("sleep", "fall_back")
            self._own.fall_back()
            self._wait(number)
            raise MemoryShortError("; ".join(failures))

    def _wait(self, number: int) -> list[str]:
        """Wait for the other ranks; returns the failures."""
        while not self._orders.done("sleep", number):
            time.sleep(_LOOK_S)
        return self._orders.failures("sleep", number)
