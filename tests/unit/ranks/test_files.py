"""Files of KV of two ranks: a page is written or read when both have done it, and failed if one of them failed."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from rollout.engine.device.streams import CpuDevice
from rollout.engine.kv.tiers.disk_files import PATIENCE_S, DiskJob
from rollout.engine.kv.tiers.disk_pages import DiskPages
from rollout.engine.kv.tiers.page_mover import HostMemory
from rollout.ranks.copies import FollowerFiles
from rollout.ranks.orders import OrderWriter
from rollout.ranks.rank_watch import LaneName
from rollout.ranks.reports import LaneReport, RankReports
from rollout.ranks.ring import RingReader, RingWriter, SharedMemory

PAGE_BYTES = 64
A, B = b"a" * 16, b"b" * 16


class Orders(OrderWriter):
    """The orders of rank 0, which waits for the last one: `follow` carries that out."""

    follow: Callable[[], None]

    def give(self, lane: LaneName, *fields: Any, number: int | None = None) -> int:
        number = super().give(lane, *fields, number=number)
        if fields == ("close",):
            self.follow()
        return number


class TwoRanks:
    """The files of two ranks in one process; the second takes its orders when the test says so."""

    def __init__(self, folder: Path) -> None:
        ring, self.eventfd = SharedMemory.create("ring", 1 << 18), os.eventfd(0)
        reports = RankReports(SharedMemory.create("reports", RankReports.line_bytes()), 1)
        self.reader = RingReader(ring, self.eventfd, lambda position: reports.set(0, "position", position))
        writer = RingWriter(ring, [self.eventfd], lambda: reports.get("position"))
        orders = Orders(writer, 0, reports, lambda: None)
        orders.follow = self.follow
        self.memories = [HostMemory(CpuDevice(), 32, PAGE_BYTES) for _ in range(2)]
        for rank, memory in enumerate(self.memories):
            for page in range(memory.pages):
                memory.memory_of(page)[:] = bytes([100 * rank + page]) * PAGE_BYTES
        self.disk = DiskPages(str(folder), 1 << 20, self.memories[0], "kv", orders)
        lanes = LaneReport(reports, 0, "kv_write"), LaneReport(reports, 0, "kv_read")
        self.follower = FollowerFiles(self.memories[1], 1, *lanes)
        (own,) = folder.iterdir()
        self.folders = [own, own / "rank1"]

    def follow(self) -> None:
        """Carry out the orders that were given to the second rank."""
        while self.reader.wait(0.0):
            head, body = self.reader.read()
            lane, number, *fields = msgpack.unpackb(body[: head.layout])
            assert lane in ("kv_write", "kv_read")
            self.follower.carry_out(number, *fields)
            body.release()
            self.reader.done(head)

    def ended(self, jobs: int) -> list[DiskJob]:
        """The next jobs that end."""
        self.follow()
        ended: list[DiskJob] = []
        until_s = time.perf_counter() + 20
        while len(ended) < jobs and time.perf_counter() < until_s:
            for job in self.disk.finished():
                ended.append(job)
                if job.kind == "write":
                    self.disk.keep(job, good=True)
        assert len(ended) == jobs
        return ended

    def write(self, *keys: bytes) -> None:
        """Write pages 0, 1 .. under these keys."""
        for page, key in enumerate(keys):
            self.disk.write(key, page, 0, b"")
        self.ended(len(keys))

    def content(self, page: int) -> list[int]:
        """The first byte of a page in each rank's memory."""
        return [memory.memory_of(page)[0] for memory in self.memories]

    def hang(self, rank: int, key: bytes) -> Callable[[], object]:
        """Have this rank's read of a file hang until the result is called: then it gets the content of the file."""
        path = self.folders[rank] / key.hex()
        content = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        return lambda: path.write_bytes(content)  # waits for the read

    def close(self) -> None:
        self.disk.close()
        os.close(self.eventfd)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[TwoRanks]:
    two = TwoRanks(tmp_path)
    yield two
    two.close()
    assert list(tmp_path.iterdir()) == [], "the files of both ranks are deleted"


def test_each_rank_writes_and_reads_its_own_part(ranks: TwoRanks) -> None:
    ranks.write(A, B)
    ranks.disk.read(A, 7, None), ranks.disk.read(B, 8, None)
    assert [job.failure for job in ranks.ended(2)] == ["", ""]
    assert (ranks.content(7), ranks.content(8)) == ([0, 100], [1, 101])


def test_a_page_is_there_when_all_ranks_have_written_it_and_a_read_ends_with_the_last_rank(ranks: TwoRanks) -> None:
    job = ranks.disk.write(A, 0, 0, b"")
    while not job.ended:
        time.sleep(0.001)
    assert not ranks.disk.finished() and ranks.disk.writing
    ranks.ended(1)
    assert ranks.disk.has(A, 0)
    job = ranks.disk.read(A, 7, None)
    while not job.ended:
        time.sleep(0.001)
    assert not ranks.disk.finished() and ranks.disk.reading
    ranks.disk.wait(0.01)
    ranks.ended(1)
    assert ranks.content(7) == [0, 100]


@pytest.mark.parametrize("how", ["spoiled", "deleted", "other rank's"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_read_that_fails_in_one_rank_fails_in_all(ranks: TwoRanks, rank: int, how: str) -> None:
    ranks.write(A, B)
    path = ranks.folders[rank] / A.hex()
    data = path.read_bytes()
    path.unlink()
    if how != "deleted":
        other = (ranks.folders[1 - rank] / A.hex()).read_bytes()
        path.write_bytes(other if how == "other rank's" else data[:-1] + bytes([data[-1] ^ 1]))
    ranks.disk.read(A, 7, None)
    (job,) = ranks.ended(1)
    assert job.failure and ("rank 1" in job.failure) == (rank == 1) and not ranks.disk.has(A, 0)
    assert ranks.content(7)[rank] == 100 * rank + 7, "the page keeps its content"
    ranks.disk.read(B, 8, None)
    assert ranks.ended(1)[0].failure == "" and ranks.content(8) == [1, 101]


def test_no_read_counts_as_good_beside_one_that_fails_in_another_rank(ranks: TwoRanks) -> None:
    ranks.write(A, B)
    (ranks.folders[1] / A.hex()).write_bytes(b"")
    for key in (A, B):
        ranks.disk.read(key, 7, None)
    first, _ = ranks.ended(2)
    assert first.failure and not ranks.disk.has(A, 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_page_that_one_rank_cannot_write_is_absent_and_nothing_more_is_written(ranks: TwoRanks, rank: int) -> None:
    ranks.write(A)
    (ranks.folders[rank] / f"{B.hex()}.part").mkdir()
    ranks.write(B)
    assert ranks.disk.has(A, 0) and not ranks.disk.has(B, 0) and not ranks.disk.may_write
    assert ranks.disk.failure and ("rank 1" in ranks.disk.failure) == (rank == 1)
    ranks.disk.read(A, 7, None)
    assert ranks.ended(1)[0].failure == "" and ranks.content(7) == [0, 100]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_slow_rank_delays_a_read(ranks: TwoRanks, rank: int) -> None:
    ranks.write(A)
    go_on = ranks.hang(rank, A)
    ranks.disk.read(A, 7, None)
    ranks.follow()
    assert not ranks.disk.finished() and ranks.disk.reading
    go_on()
    assert ranks.ended(1)[0].failure == "" and ranks.content(7) == [0, 100]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_read_that_is_given_up_touches_no_page_after_the_order(ranks: TwoRanks, rank: int) -> None:
    ranks.write(A, B)
    go_on = ranks.hang(rank, A)
    ranks.disk.read(A, 7, None), ranks.disk.read(B, 8, None)
    ranks.follow()
    ranks.disk.patience_s = 0.05
    assert all(job.failure for job in ranks.ended(2)) and not ranks.disk.reading and ranks.disk.failure
    ranks.disk.patience_s = PATIENCE_S
    assert not ranks.disk.has(A, 0) and not ranks.disk.has(B, 0)
    ranks.follow()  # rank 0 gives later orders after this one
    go_on()
    ranks.disk.close()  # its threads end
    assert ranks.disk.finished() == []
    ranks.disk.check()
    assert ranks.content(7)[rank] == 100 * rank + 7


def test_new_weights_delete_the_files_of_all_ranks(ranks: TwoRanks) -> None:
    keys = [bytes([page]) * 16 for page in range(5)]
    ranks.write(*keys[:2])
    for number in range(256, 256 + 5000):  # more than one order deletes
        ranks.disk.keep(DiskJob("write", 0, number.to_bytes(16, "big"), 0, 0, 0), good=True)
    ranks.write(*keys[2:])
    assert all((folder / key.hex()).exists() for folder in ranks.folders for key in keys)
    ranks.disk.forget_all()
    ranks.write(A)
    assert not any((folder / key.hex()).exists() for folder in ranks.folders for key in keys)
    ranks.disk.read(A, 9, None)
    assert ranks.ended(1)[0].failure == "" and ranks.content(9) == [0, 100]
