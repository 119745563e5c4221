"""Memory of two ranks that goes and comes back together: real memory, ring and reports, the follower in a thread."""

import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import torch

from rollout.engine.device.rank_orders import MemoryOfRanks
from rollout.engine.device.releasable import MemoryShortError, PermanentMemory, ReleasableMemory
from rollout.engine.device.streams import CpuDevice
from rollout.engine.step.execute import Executor, Streams
from rollout.ranks.adapters import AdapterCopies
from rollout.ranks.copies import FollowerCopies
from rollout.ranks.ordered_work import OrderedWork
from rollout.ranks.orders import END, OrderWriter, SharedRelay
from rollout.ranks.reports import RankReports
from rollout.ranks.ring import RingReader, RingWriter, SharedMemory
from tests.support.engine.strict_pages import StrictPages

CPU = torch.device("cpu")


class Host(CpuDevice):
    """A device whose host may have no more pinned memory."""

    full = False

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory."""
        if self.full:
            raise RuntimeError("no more pinned memory")
        return super().host_buffer(shape, dtype)


class Rank:
    """The memory of one rank, with a kept tensor and another one."""

    def __init__(self, value: float) -> None:
        self.pages, self.value, self.host = StrictPages(), value, Host()
        self.memory = ReleasableMemory(self.host, self.pages)
        self.weights = torch.full((100,), value)
        self.memory.take_over([self.weights], kept=True)
        self.kv = self.memory.zeros((10,), torch.float32)

    def check(self, kept: bool = True) -> None:
        """Assert that the memory is there, with what should be in it."""
        assert not self.memory.released
        assert (self.weights == (self.value if kept else 0.0)).all() and (self.kv == 0.0).all()


class Two:
    """Two ranks; the second one carries out orders in a thread."""

    def __init__(self, relay: SharedRelay | None = None) -> None:
        self.mine, self.other = Rank(1.0), Rank(2.0)
        self.reports = RankReports(SharedMemory.create("reports", RankReports.line_bytes()), 1)
        ring, eventfd, device = SharedMemory.create("ring", 1 << 16), os.eventfd(0), CpuDevice()
        position = lambda at: self.reports.set(0, "position", at)  # noqa: E731
        self.orders = OrderWriter(
            RingWriter(ring, [eventfd], lambda: self.reports.get("position")), 0, self.reports, lambda: None, relay
        )
        self.reader = RingReader(ring, eventfd, position)
        step: Any = SimpleNamespace(features=())  # sleeps run no step
        self.executor = Executor(device, Streams.make(device), step)
        adapters = AdapterCopies(SharedMemory.create("adapters", 0), 1, torch.float32, CPU, self.reports)
        self.updates = OrderedWork("updates", CPU, self.reports, 0)
        self.copies = FollowerCopies(self.executor, adapters, self.updates, self.other.memory, self.reports, 0)
        self.group = MemoryOfRanks(self.mine.memory, self.orders)
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def close(self) -> None:
        """End the second rank."""
        self.orders.end()
        self.thread.join(30)
        self.executor.close()
        assert not self.thread.is_alive()

    def _follow(self) -> None:
        while True:
            if not self.reader.wait(0.1):
                continue
            head, body = self.reader.read()
            fields = msgpack.unpackb(body)
            body.release()
            if head.kind == END:
                return
            self.copies.carry_out(*fields)
            self.reader.done(head)


@pytest.fixture
def two() -> Iterator[Two]:
    made = Two()
    yield made
    made.close()


def test_both_ranks_keep_their_weights_and_get_zeros_elsewhere(two: Two) -> None:
    for _ in range(2):
        for rank in (two.mine, two.other):
            rank.kv.fill_(9.0)
        two.group.save()
        two.group.release()
        assert two.mine.memory.released and two.other.memory.released and two.group.released
        two.group.restore()
        for rank in (two.mine, two.other):
            rank.check()


def test_memory_that_the_other_rank_maps_is_unmapped_first_and_freed_last() -> None:
    seen: list[str] = []

    class Relay:
        def unmap(self) -> None:
            seen.append("unmap")

        def free(self) -> int:
            assert two.mine.memory.released and two.other.memory.released
            seen.append("free")
            return 1000

    two = Two(Relay())
    two.group.save()
    assert seen == []
    assert two.group.release() >= 1000 and seen == ["unmap", "free"]
    two.group.restore()
    assert seen == ["unmap", "free"]
    two.close()


def test_a_deep_sleep_drops_the_weights_of_both(two: Two) -> None:
    two.group.save()
    two.group.release()
    two.group.forget()
    two.group.restore()
    for rank in (two.mine, two.other):
        rank.check(kept=False)


@pytest.mark.parametrize("short", ["mine", "other"])
@pytest.mark.parametrize("kept", [True, False])
def test_if_one_rank_gets_no_memory_the_other_one_gives_its_own_back(two: Two, short: str, kept: bool) -> None:
    if kept:
        two.group.save()
    two.group.release()
    getattr(two, short).pages.short_after = 1
    for _ in range(2):
        with pytest.raises(MemoryShortError, match="rank 1: waking takes" if short == "other" else "^waking takes"):
            two.group.restore()
        assert two.mine.memory.released and two.other.memory.released
    getattr(two, short).pages.short_after = None
    two.group.restore()
    for rank in (two.mine, two.other):
        rank.check(kept)


@pytest.mark.parametrize("full", ["mine", "other"])
def test_if_one_rank_cannot_keep_its_weights_none_sleeps(two: Two, full: str) -> None:
    host = getattr(two, full).host
    host.full = True
    with pytest.raises(MemoryShortError, match="no more pinned memory"):
        two.group.save()
    for rank in (two.mine, two.other):
        rank.check()
    host.full = False
    two.group.save()
    two.group.release()
    two.group.restore()
    for rank in (two.mine, two.other):
        rank.check()


def test_no_memory_is_given_back_while_pieces_of_an_update_are_on_their_way_into_it(two: Two) -> None:
    written = threading.Event()
    two.updates.put(1, written.wait)
    sleep = threading.Thread(target=two.group.release)
    sleep.start()
    sleep.join(0.3)
    assert sleep.is_alive() and not two.other.memory.released
    written.set()
    sleep.join(30)
    assert not sleep.is_alive() and two.other.memory.released and two.mine.memory.released
    two.group.restore()


def test_ranks_that_cannot_sleep_get_no_orders_about_their_memory(two: Two) -> None:
    before = two.orders.ordered
    memory = two.orders.memory_of_all(PermanentMemory(CpuDevice()))
    memory.forget()
    assert not memory.sleeps and two.orders.ordered == before
    assert two.orders.memory_of_all(two.mine.memory).sleeps
