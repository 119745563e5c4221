"""KV pages in a folder on local disk: pages that leave host memory are written there, and read back on demand.

`known` says what is written and read. The threads of `disk_files` do it, and no other thread waits for them. A page
is a file in a subfolder of this worker. States of linear attention are pages of another subfolder.

With several ranks each rank writes and reads its part of a page; other ranks' subfolders lie in rank 0's. A page is
written or read when all ranks have done so, and failed if any of them failed. A faulty folder costs hits, and nothing
else:

- After a failed write nothing more is written. Existing files are still read.
- A read that fails, or returns other content, is a miss.
- If no read ends for `patience_s`, all reads are given up, and the folder is not used any more. The other ranks hear
  this before any order that uses the pages of host memory again.

The subfolder is locked while its worker lives. It is deleted when the worker ends, or when the next worker starts that
has the same folder.
"""

import functools
import logging
import os
import shutil
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path

from rollout.engine.device.rank_orders import NO_RANK_ORDERS, RankOrders
from rollout.engine.kv.tiers.disk_files import (
    FRAME_BYTES,
    PATIENCE_S,
    DiskFiles,
    DiskJob,
    delete_files,
    delete_left,
    own_folder,
)
from rollout.engine.kv.tiers.page_mover import HostMemory
from rollout.process.watchdog import ObservedTime

log = logging.getLogger(__name__)

#: The most jobs of each thread that have not ended; a read takes a page of host memory, and may use a quarter of it.
_MOST_JOBS = 64
#: The longest that the loop waits before it looks for commands again, seconds: a disk may be slow.
_WAIT_S = 0.02
#: The time between two looks at other ranks, seconds.
_LOOK_S = 0.001
#: The most that a look at reads counts is twice this time: the process may have been stopped meanwhile.
_READS_LOOK_S = 0.5
#: The most keys of one order.
_KEYS = 4096


class DiskPages:
    """Pages of `memory`, at most `most_bytes`, in a subfolder of `folder`.

    With `orders` the other ranks keep their parts, too; `name` is the first part of the names of the lanes.

    Raises ValueError if the folder cannot be written to, or may not hold a page.
    """

    def __init__(
        self,
        folder: str,
        most_bytes: int,
        memory: HostMemory,
        name: str = "kv",
        orders: RankOrders = NO_RANK_ORDERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.patience_s = PATIENCE_S
        self.total = most_bytes // (memory.page_bytes + FRAME_BYTES)
        if not self.total:
            raise ValueError(f"disk_kv_gib holds no page of {memory.page_bytes} bytes: raise it")
        self.failure = ""  # reason why nothing is written any more
        self._most_reads = max(1, min(_MOST_JOBS, memory.pages // 4))
        self._epoch = 0
        self._known: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # (version, extra bytes); oldest use first
        self._reads: deque[DiskJob] = deque()
        self._writes: deque[DiskJob] = deque()
        self._waited_s = 0.0  # seconds for the next read to end
        self._observed_time = functools.partial(ObservedTime, _READS_LOOK_S, clock)
        self._observed = self._observed_time()
        self._something_ended = threading.Event()
        self._orders, self._write_lane, self._read_lane = orders, f"{name}_write", f"{name}_read"
        self._lock_file: int | None  # None once it is closed
        try:
            self._folder, self._lock_file = own_folder(Path(folder))
        except OSError as error:
            raise ValueError(f"disk_kv_folder = {folder} cannot be used: {error}") from None
        orders.give(self._write_lane, "open", str(self._folder))
        clean = functools.partial(delete_left, Path(folder))
        self._files = DiskFiles(self._folder, memory, lambda job: self._something_ended.set(), clean)

    @property
    def pages(self) -> int:
        """Pages that can be read."""
        return len(self._known)

    @property
    def may_write(self) -> bool:
        """Whether a write may begin now."""
        return not self.failure and len(self._writes) < _MOST_JOBS

    @property
    def reading(self) -> bool:
        """True while reads are under way."""
        return bool(self._reads)

    @property
    def writing(self) -> bool:
        """True while writes are under way."""
        return bool(self._writes)

    @property
    def may_read(self) -> bool:
        """Whether a read may begin now."""
        return len(self._reads) < self._most_reads

    def has(self, key: bytes, oldest: int) -> bool:
        """Whether the page with this key can be read, with KV of no version before `oldest`."""
        known = self._known.get(key)
        return known is not None and known[0] >= oldest

    def write(self, key: bytes, page: int, oldest: int, beside: bytes) -> DiskJob:
        """Begin to write a page of host memory, whose content may change before the end: see `keep`."""
        fields = key, page, oldest, self._epoch
        order = self._orders.give(self._write_lane, "write", *fields)
        self._writes.append(self._files.write(order, *fields, beside))
        return self._writes[-1]

    def read(self, key: bytes, page: int, entry: object) -> DiskJob:
        """Begin to read a page of the folder into a free page of host memory."""
        if not self._reads:
            self._waited_s, self._observed = 0.0, self._observed_time()
        oldest, beside = self._known[key]
        self._known.move_to_end(key)
        fields = key, page, oldest, self._epoch
        order = self._orders.give(self._read_lane, "read", *fields)
        self._reads.append(self._files.read(order, *fields, beside, entry))
        return self._reads[-1]

    def finished(self) -> Seq[DiskJob]:
        """The jobs that have ended on all ranks since the last call, and reads that are given up."""
        self._something_ended.clear()
        self._waited_s += self._observed.passed_s()  # first: a read that ends from now on is not late
        written, read = self._ended(self._writes, self._write_lane), self._ended(self._reads, self._read_lane)
        if read:
            self._waited_s = 0.0
        elif self._reads and self._waited_s > self.patience_s:
            read = self._give_up_reads()
        for job in [*written, *read]:
            self._note(job)
        return [*written, *read]

    def _ended(self, jobs: deque[DiskJob], lane: str) -> list[DiskJob]:
        ended = []
        while jobs and jobs[0].ended and self._orders.done(lane, jobs[0].order):
            job = jobs.popleft()
            # A rank tells its last failure only: older jobs that end at the same time count as failed, too.
            job.failure = job.failure or "; ".join(self._orders.failures(lane, job.order))
            ended.append(job)
        return ended

    def _give_up_reads(self) -> list[DiskJob]:
        self._orders.give(self._read_lane, "give up")
        self._files.give_up_reads()
        given_up = list(self._reads)
        self._reads.clear()
        self._known.clear()
        self._stop(f"a read took longer than {self.patience_s:g} s")
        for job in given_up:
            job.failure = "it is given up"
        return given_up

    def keep(self, job: DiskJob, good: bool) -> None:
        """Note the end of a write; `good` if the page kept its content until then."""
        if job.failure:
            return
        if not good or job.epoch != self._epoch:
            self._known.pop(job.key, None)
            self._delete([job.key])
            return
        self._known[job.key] = job.oldest, len(job.beside)
        while len(self._known) > self.total:
            self._delete([self._known.popitem(last=False)[0]])

    def wait(self, most_s: float) -> None:
        """Block until a job has ended, for `most_s` seconds at most, if a read is under way."""
        if not self._reads:
            return
        if self._reads[0].ended:  # other ranks read
            time.sleep(min(most_s, _LOOK_S))
        else:
            self._something_ended.wait(min(most_s, _WAIT_S))

    def forget_all(self) -> None:
        """The weights have changed: ignore everything that was written before."""
        self._epoch += 1
        self._delete(list(self._known))
        self._known.clear()

    def forget_older(self, oldest: int) -> None:
        """Ignore KV with a weights version before `oldest` from now on."""
        old = [key for key, (version, _) in self._known.items() if version < oldest]
        for key in old:
            del self._known[key]
        self._delete(old)

    def check(self) -> None:
        """Assert that nothing is read, and that there are no more pages than may be."""
        assert not self._reads, "a page is being read from disk"
        assert len(self._known) <= self.total, "there are too many pages on disk"

    def close(self) -> None:
        """End the threads of all ranks and delete the files."""
        if self._lock_file is None:
            return
        order = self._orders.give(self._write_lane, "close")
        all_ended = self._files.close(self.patience_s)
        until_s = time.perf_counter() + self.patience_s
        while not (done := self._orders.done(self._write_lane, order)) and time.perf_counter() < until_s:
            time.sleep(_LOOK_S)
        delete_files(self._folder)
        if all_ended and done:  # else the next worker deletes the rest
            shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock_file)
        self._lock_file = None

    def _note(self, job: DiskJob) -> None:
        if not job.failure:
            return
        self._known.pop(job.key, None)
        if job.kind == "write":
            self._stop(job.failure)
        else:
            log.warning("KV could not be read from disk, and is computed", extra={"reason": job.failure})

    def _stop(self, why: str) -> None:
        if not self.failure:
            self.failure = f"KV is no longer written to {self._folder}: {why}"
            log.warning("%s", self.failure)

    def _delete(self, keys: list[bytes]) -> None:
        for first in range(0, len(keys), _KEYS):
            part = keys[first : first + _KEYS]
            self._orders.give(self._write_lane, "delete", part)
            self._files.delete(part)


class NoDisk(DiskPages):
    """No folder: nothing is written or found."""

    def __init__(self) -> None:
        self.total = self._most_reads = self._epoch = 0
        self.failure, self._lock_file = "there is no folder", None
        self._known, self._reads, self._writes = OrderedDict(), deque(), deque()

    def finished(self) -> Seq[DiskJob]:
        return ()


NO_DISK = NoDisk()
