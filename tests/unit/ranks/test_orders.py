"""Orders: a follower takes none of another version, and what one follower has done is not done by all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.config import Settings
from rollout.ranks.follower import Follower
from rollout.ranks.orders import ANY_VERSION, END, FORGET, Orders
from rollout.ranks.reports import Number, Reports
from rollout.ranks.ring import RingReader, RingWriter, SharedMemory


class Ring:
    """Rank 0's end of a ring for two followers, and the end of the first one."""

    def __init__(self) -> None:
        memory = SharedMemory.create("ring", 1 << 14)
        self.reports = Reports(SharedMemory.create("reports", 2 * Reports.line_bytes()), 2)
        self.eventfds = [os.eventfd(0) for _ in range(2)]
        self.writer = RingWriter(memory, self.eventfds, lambda: self.reports.get("position"))
        self.reader = RingReader(memory, self.eventfds[0], lambda position: self.reports.set(0, "position", position))
        self.orders = Orders(self.writer, 0, self.reports, lambda: None)


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring()
    yield made
    for eventfd in made.eventfds:
        os.close(eventfd)


def follower_of(carried: list[int]) -> Follower:
    """A follower of version 0 that takes orders, and carries out none that needs a device."""
    executor: Any = SimpleNamespace(compute=SimpleNamespace(thread_id=0), check=lambda: None)
    copies: Any = SimpleNamespace(report=lambda: False, carry_out=lambda kind, body: carried.append(kind))
    others: Any = None
    return Follower(Settings(), 0, executor, [], others, copies, others)


def test_a_follower_carries_out_orders_of_its_version_and_of_any_version_until_the_end(ring: Ring) -> None:
    carried: list[int] = []
    ring.orders.forget_adapter(1, 7)
    ring.orders.end()
    follower_of(carried).serve(ring.reader, ring.reports)
    assert carried == [FORGET] and ring.reports.get("sequence") == [1, 0] and ring.reports.get("ready") == [1, 0]


def test_a_follower_carries_out_no_order_of_another_version(ring: Ring) -> None:
    carried: list[int] = []
    ring.writer.write(END, ANY_VERSION + 6, b"\xc0")
    with pytest.raises(RuntimeError, match="is for version 5, this rank has 0"):
        follower_of(carried).serve(ring.reader, ring.reports)
    assert not carried


@pytest.mark.parametrize("name", ["kv_out", "state_in", "memory_done"])
def test_an_order_is_done_when_all_followers_have_carried_it_out(ring: Ring, name: Number) -> None:
    give = {
        "kv_out": lambda: ring.orders.move("kv_out", [1], [2]),
        "state_in": lambda: ring.orders.move("state_in", [1], [2]),
        "memory_done": lambda: ring.orders.memory("save"),
    }[name]
    first, second = give(), give()
    ring.reports.set(1, name, second)
    assert not ring.orders.done(name, first)
    ring.reports.set(0, name, first)
    assert ring.orders.done(name, first) and not ring.orders.done(name, second)
    ring.reports.set(0, name, second)
    assert ring.orders.done(name, second)
