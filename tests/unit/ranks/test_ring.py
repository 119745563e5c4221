"""The ring: order, wrap-around, overrun, readers in other processes, damaged memory."""

import errno
import os
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rollout.ranks.reports import RankReports
from rollout.ranks.ring import RingBrokenError, RingReader, RingWriter, SharedMemory, SharedMemoryError


class Ring:
    """A writer and its readers, in one process."""

    def __init__(self, size: int, readers: int = 1) -> None:
        self.lost = False
        self.memory = SharedMemory.create("ring", size)
        self.reports = RankReports(SharedMemory.create("reports", readers * RankReports.line_bytes()), readers)
        self.eventfds = [os.eventfd(0) for _ in range(readers)]
        self.writer = RingWriter(self.memory, self.eventfds, lambda: self.reports.get("position"), lambda: self.lost)
        self.readers = [self._reader(i, eventfd) for i, eventfd in enumerate(self.eventfds)]

    def _reader(self, which: int, eventfd: int) -> RingReader:
        memory = SharedMemory(self.memory.descriptor)
        return RingReader(memory, eventfd, lambda position: self.reports.set(which, "position", position))

    def take(self, which: int = 0, timeout_s: float = 60.0) -> tuple[int, int, int, bytes, bytes]:
        reader = self.readers[which]
        assert reader.wait(timeout_s)
        head, body = reader.read()
        layout, rest = bytes(body[: head.layout]), bytes(body[head.layout :])
        body.release()
        reader.done(head)
        return head.sequence, head.kind, head.version, layout, rest


@contextmanager
def ring(size: int, readers: int = 1) -> Iterator[Ring]:
    made = Ring(size, readers)
    yield made
    for descriptor in (made.memory.descriptor, *made.eventfds):
        os.close(descriptor)


def test_every_reader_gets_all_records_in_order_whatever_their_sizes_and_however_they_wrap() -> None:
    draws = random.Random(3)
    records = [(draws.randrange(1, 6), draws.randbytes(draws.choice([0, 1, 40, 64, 900, 1900]))) for _ in range(400)]
    with ring(4096, readers=3) as made:
        got: list[list[tuple[int, int, bytes]]] = [[], [], []]

        def read(which: int) -> None:
            pauses = random.Random(which)
            for _ in records:
                sequence, kind, version, layout, rest = made.take(which)
                assert (version, layout) == (sequence // 7, b"layout")
                got[which].append((sequence, kind, rest))
                if pauses.random() < 0.05:
                    time.sleep(0.002)

        threads = [threading.Thread(target=read, args=(which,)) for which in range(3)]
        for thread in threads:
            thread.start()
        for sequence, (kind, body) in enumerate(records, 1):
            cut = len(body) // 2
            assert made.writer.write(kind, sequence // 7, b"layout", body[:cut], memoryview(body)[cut:]) == sequence
        for thread in threads:
            thread.join(60)
        assert got == [[(i, kind, body) for i, (kind, body) in enumerate(records, 1)]] * 3


def test_a_full_ring_waits_for_the_slowest_reader_and_nothing_unread_is_overwritten() -> None:
    with ring(4096, readers=2) as made:
        for i in range(4):
            made.writer.write(1, 0, b"", bytes([i]) * 900)
        waits = threading.Thread(target=lambda: made.writer.write(1, 0, b"", bytes([4]) * 900))
        waits.start()
        assert [made.take(0)[4][0] for _ in range(4)] == [0, 1, 2, 3]
        waits.join(0.2)
        assert waits.is_alive() and made.writer.sequence == 4, "the other reader has taken none"
        assert [made.take(1)[4][0] for _ in range(5)] == [0, 1, 2, 3, 4]
        waits.join(60)
        assert made.take(0)[4][0] == 4


def test_a_full_ring_of_a_lost_group_drops_what_is_written() -> None:
    with ring(4096) as made:
        for i in range(4):
            made.writer.write(1, 0, b"", bytes([i]) * 900)
        waits = threading.Thread(target=lambda: made.writer.write(1, 0, b"", bytes(900)))
        waits.start()
        made.lost = True
        waits.join(60)
        assert not waits.is_alive() and made.writer.write(1, 0, b"", bytes(900)) == 4
        assert [made.take()[4][0] for _ in range(4)] == [0, 1, 2, 3]


def test_a_reader_without_records_waits_no_longer_than_asked_and_wakes_at_once() -> None:
    with ring(4096) as made:
        assert not made.readers[0].wait(0.02)
        timer = threading.Timer(0.05, lambda: made.writer.write(2, 5, b"ab"))
        timer.start()
        assert made.take() == (1, 2, 5, b"ab", b"")
        timer.join()


def test_a_body_that_never_fits_is_refused() -> None:
    with ring(4096) as made:
        made.writer.write(1, 0, b"", bytes(made.writer.largest))
        made.take()
        with pytest.raises(ValueError, match="larger than a record may be"):
            made.writer.write(1, 0, b"x", bytes(made.writer.largest))


def test_a_record_that_was_overwritten_is_noticed() -> None:
    with ring(4096) as made:
        made.writer.write(1, 0, b"", b"one")
        made.memory.map()[:8] = (7).to_bytes(8, "little")
        assert made.readers[0].wait(1)
        with pytest.raises(RingBrokenError, match="expected order 1"):
            made.readers[0].read()


def test_memory_that_grows_after_a_process_has_inherited_it_is_read_there() -> None:
    code = """
import os, sys
from rollout.ranks.ring import RingReader, SharedMemory
memory, eventfd = SharedMemory(int(sys.argv[1])), int(sys.argv[2])
reader = RingReader(memory, eventfd, lambda position: None)
print("started", flush=True)
assert reader.wait(60)
head, body = reader.read()
print(head.sequence, bytes(body).decode(), flush=True)
"""
    memory, eventfd = SharedMemory.create("late", 0), os.eventfd(0)
    command = [sys.executable, "-c", code, str(memory.descriptor), str(eventfd)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=(memory.descriptor, eventfd)) as child:
        assert child.stdout is not None and child.stdout.readline() == "started\n"
        memory.grow(1 << 16)
        RingWriter(memory, [eventfd], lambda: [0]).write(1, 0, b"hello")
        assert child.stdout.readline() == "1 hello\n"
    assert child.returncode == 0


def test_reports_of_followers_and_of_topics_do_not_touch_one_another() -> None:
    memory = SharedMemory.create("reports", 3 * RankReports.line_bytes())
    reports = RankReports(memory, 3)
    reports.set_text(1, "end", "ä" * 400)
    reports.set_text(1, "updates", "no")
    reports.set(1, "launched", 5)
    reports.add(1, "launched")
    assert reports.get("launched") == [0, 6, 0] and reports.get("ready") == [0, 0, 0]
    assert reports.text(1, "end").startswith("äää") and reports.text(0, "end") == reports.text(2, "end") == ""
    reports.set_text(1, "end", "short")
    seen = RankReports(SharedMemory(memory.descriptor), 3)  # as another process maps them
    assert seen.text(1, "end") == "short" and seen.text(1, "updates") == "no"


def test_memory_that_the_system_does_not_give_is_an_error_that_says_what_to_change() -> None:
    memory = SharedMemory.create("small", 4096)
    memory.map()[:4] = b"kept"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        for reserve in (False, True):
            with pytest.raises(SharedMemoryError, match="cannot share 2.0 MiB of memory .*: free memory, or raise"):
                memory.grow(2 << 20, reserve)
            assert memory.size == 4096 and memory.map()[:4] == b"kept"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    memory.grow(2 << 20, reserve=True)
    assert os.fstat(memory.descriptor).st_blocks * 512 >= 2 << 20, "it has its pages"
    assert memory.map()[:4] == b"kept" and memory.map()[-1:] == b"\0"
    os.close(memory.descriptor)


@pytest.mark.parametrize("failing", ["posix_fallocate", "ftruncate"])
def test_memory_that_cannot_be_had_leaves_the_one_of_before(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    memory, plain = SharedMemory.create("small", 4096), getattr(os, failing)

    def no_space(descriptor: int, *sizes: int) -> None:
        if sizes[-1] > 4096:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(descriptor, *sizes)

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, no_space)
        with pytest.raises(SharedMemoryError, match="No space left on device"):
            memory.grow(1 << 20, reserve=True)
    assert memory.size == 4096
    os.close(memory.descriptor)
