"""Orders: a follower takes none of another version, and what one follower has done is not done by all."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.config import Settings
from rollout.ranks.follower import Follower
from rollout.ranks.orders import ANY_VERSION, END, OrderWriter
from rollout.ranks.rank_watch import LANES, LaneName
from rollout.ranks.reports import LaneReport, RankReports
from rollout.ranks.ring import RingReader, RingWriter, SharedMemory


class Ring:
    """Rank 0's end of a ring for two followers, and the end of the first one."""

    def __init__(self) -> None:
        memory = SharedMemory.create("ring", 1 << 14)
        self.reports = RankReports(SharedMemory.create("reports", 2 * RankReports.line_bytes()), 2)
        self.eventfds = [os.eventfd(0) for _ in range(2)]
        self.writer = RingWriter(memory, self.eventfds, lambda: self.reports.get("position"))
        self.reader = RingReader(memory, self.eventfds[0], lambda position: self.reports.set(0, "position", position))
        self.orders = OrderWriter(self.writer, 0, self.reports, lambda: None)


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring()
    yield made
    for eventfd in made.eventfds:
        os.close(eventfd)


def follower_of(carried: list[Any]) -> Follower:
    """A follower of version 0 that takes orders, and carries out none that needs a device."""
    executor: Any = SimpleNamespace(compute=SimpleNamespace(thread_id=0), check=lambda: None)
    copies: Any = SimpleNamespace(report=lambda: False, carry_out=lambda *order: carried.append(order))
    others: Any = None
    return Follower(Settings(), 0, executor, [], others, copies, others)


def test_a_follower_carries_out_orders_of_its_version_and_of_any_version_until_the_end(ring: Ring) -> None:
    carried: list[Any] = []
    ring.orders.give("adapters", "forget", 7)
    ring.orders.end()
    follower_of(carried).serve(ring.reader, ring.reports)
    assert (
        carried == [("adapters", 1, "forget", 7)]
        and ring.reports.get("sequence") == [1, 0]
        and ring.reports.get("ready") == [1, 0]
    )


def test_a_follower_carries_out_no_order_of_another_version(ring: Ring) -> None:
    carried: list[Any] = []
    ring.writer.write(END, ANY_VERSION + 6, b"\xc0")
    with pytest.raises(RuntimeError, match="is for version 5, this rank has 0"):
        follower_of(carried).serve(ring.reader, ring.reports)
    assert not carried


@pytest.mark.parametrize("lane", LANES)
def test_an_order_is_done_when_all_followers_have_acknowledged_it(ring: Ring, lane: LaneName) -> None:
    first, second = (ring.orders.give(lane, "fields") for _ in range(2))
    ends = [LaneReport(ring.reports, follower, lane) for follower in range(2)]
    ends[1].end(second)
    assert not ring.orders.done(lane, first)
    ends[0].end(first)
    assert ring.orders.done(lane, first) and not ring.orders.done(lane, second)
    ends[0].end(second, "no room")
    assert ring.orders.done(lane, second) and ring.orders.failures(lane, second) == ["rank 1: no room"]
    assert ring.orders.failures(lane, second + 1) == []
    assert all(ring.reports.ended(other) == [0, 0] for other in LANES if other != lane)


def test_a_lane_is_busy_from_the_beginning_of_an_order_to_its_end_and_parts_count(ring: Ring) -> None:
    end = LaneReport(ring.reports, 1, "updates")
    seen = [ring.reports.lanes(1)["updates"]]
    for act in (lambda: end.begin(1), end.advance, lambda: end.end(1)):
        act()
        seen.append(ring.reports.lanes(1)["updates"])
    assert [lane.busy for lane in seen] == [False, True, True, False] and [lane.done for lane in seen] == [0, 0, 1, 2]
    assert not any(lane.busy or lane.done for lane in ring.reports.lanes(0).values())
