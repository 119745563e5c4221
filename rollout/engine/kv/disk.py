"""KV pages in a folder on local disk: pages that leave host memory are written there, and read back on demand.

Two threads write and read; no other thread waits for them. `HostTier` says what is written and read. A page is a file
of its own, in a subfolder of this worker. States of linear attention are pages of another folder:

    header     mark, identity of the model and of this worker's run, epoch of its weights, weights version, key, sizes
    digest     of header and content
    content    data stored with the page (`PageMirror`), then the page

A file is used only if its header is the expected one and the digest is right: it cannot be of another model, of another
worker, or of weights that were given up. A faulty folder costs hits, and nothing else:

- After a failed write nothing more is written. Existing files are still read.
- A read that fails, or returns other content, is a miss.
- A read that takes longer than `_PATIENCE_S` is given up, and the folder is not used any more.

The subfolder is locked while its worker lives. It is deleted when the worker ends, or when the next worker starts that
has the same folder.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import queue
import secrets
import shutil
import struct
import tempfile
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

log = logging.getLogger(__name__)

_PREFIX, _LOCK = "rollout-kv-", "lock"
_HEADER = struct.Struct("<8s32sQq16sQQ")
_MARK, _DIGEST_BYTES = b"ROLLKV1\0", 16
#: The most jobs of each thread that have not ended; a read takes a page of host memory, of which it may use a quarter.
_MOST_JOBS = 64
#: The longest that a read may take, and how long the end of a worker waits for its threads, seconds.
_PATIENCE_S = 5.0
#: The longest that the loop waits before it looks for commands again, seconds: a disk may be slow.
_WAIT_S = 0.02


@dataclass(eq=False, slots=True)
class DiskJob:
    """A page that is written or read."""

    kind: Literal["write", "read"]
    key: bytes
    oldest: int  # weights version of its KV
    page: int  # page of host memory
    header: bytes
    path: Path
    beside: bytes = b""  # data stored with the page
    entry: Any = None  # the caller's own object
    began_s: float = math.inf  # time at which the thread began to read
    seconds: float = 0.0  # time that the thread took
    failure: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _given_up: bool = False
    _over: bool = False

    def give_up(self) -> bool:
        """Give up the job: the thread does not touch the page any more. False if the job is done already."""
        with self._lock:
            self._given_up = not self._over
            return self._given_up

    def use_page(self, use: Callable[[], None]) -> None:
        """The thread reads or writes the page, unless the job was given up."""
        with self._lock:
            if not self._given_up:
                use()
                self._over = True


class NoDisk:
    """No folder: nothing is written or found."""

    may_write = may_read = reading = False
    pages = total = 0

    def has(self, key: bytes, oldest: int) -> bool:
        """False."""
        return False

    def write(self, key: bytes, page: int, oldest: int, beside: bytes) -> DiskJob:
        """Never called, since `may_write` is False."""
        raise AssertionError

    def read(self, key: bytes, page: int, entry: object) -> DiskJob:
        """Never called, since `may_read` is False."""
        raise AssertionError

    def finished(self) -> Seq[DiskJob]:
        """None."""
        return ()

    def keep(self, job: DiskJob, good: bool) -> None:
        """No-op."""

    def wait(self, most_s: float) -> None:
        """No-op."""

    def forget_all(self) -> None:
        """No-op."""

    def forget_older(self, oldest: int) -> None:
        """No-op."""

    def check(self) -> None:
        """No-op."""

    def close(self) -> None:
        """No-op."""


NO_DISK = NoDisk()


class DiskPages:
    """At most `most_bytes` of pages in a subfolder of `folder`. `page` gives the bytes of a page of host memory.

    `identity` says what the KV depends on besides the tokens and the weights: the model and the form of a page.

    Raises ValueError if the folder cannot be written to, or may not hold a page.
    """

    def __init__(
        self,
        folder: str,
        most_bytes: int,
        identity: bytes,
        page: Callable[[int], memoryview],
        page_bytes: int,
        host_pages: int,
    ) -> None:
        self.total = most_bytes // (page_bytes + _HEADER.size + _DIGEST_BYTES)
        if not self.total:
            raise ValueError(f"disk_kv_gib holds no page of {page_bytes} bytes: raise it")
        self.failure = ""  # reason why nothing is written any more
        self._identity = blake2b(identity + secrets.token_bytes(16), digest_size=32).digest()
        self._page, self._page_bytes = page, page_bytes
        self._most_reads = max(1, min(_MOST_JOBS, host_pages // 4))
        self._epoch = 0
        self._known: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # (version, extra bytes); oldest use first
        self._reads: dict[DiskJob, None] = {}
        self._writes = 0
        self._ended: deque[DiskJob] = deque()
        self._something_ended = threading.Event()
        self._lock_file: int | None  # None once it is closed
        try:
            self._folder, self._lock_file = _own_folder(Path(folder))
        except OSError as error:
            raise ValueError(f"disk_kv_folder = {folder} cannot be used: {error}") from None
        self._to_write: queue.SimpleQueue[DiskJob | list[bytes] | None] = queue.SimpleQueue()
        self._to_read: queue.SimpleQueue[DiskJob | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=run, args=(Path(folder),), name=name, daemon=True)
            for run, name in ((self._run_writes, "kv-disk-write"), (self._run_reads, "kv-disk-read"))
        ]
        for thread in self._threads:
            thread.start()

    # --- the caller's side --------------------------------------------------------------------------------------------

    @property
    def pages(self) -> int:
        """Pages that can be read."""
        return len(self._known)

    @property
    def may_write(self) -> bool:
        """Whether a write may begin now."""
        return not self.failure and self._writes < _MOST_JOBS

    @property
    def reading(self) -> bool:
        """True while reads are under way."""
        return bool(self._reads)

    @property
    def writing(self) -> bool:
        """True while writes are under way."""
        return self._writes > 0

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
        job = DiskJob("write", key, oldest, page, *self._file(key, oldest, len(beside)), beside)
        self._writes += 1
        self._to_write.put(job)
        return job

    def read(self, key: bytes, page: int, entry: object) -> DiskJob:
        """Begin to read a page of the folder into a free page of host memory."""
        oldest, beside = self._known[key]
        self._known.move_to_end(key)
        job = DiskJob("read", key, oldest, page, *self._file(key, oldest, beside), entry=entry)
        self._reads[job] = None
        self._to_read.put(job)
        return job

    def finished(self) -> Seq[DiskJob]:
        """The jobs that have ended since the last call, and reads that are given up."""
        self._something_ended.clear()
        late_s = time.perf_counter() - _PATIENCE_S  # first: a read that ends from now on is not late
        ended = []
        while self._ended:
            job = self._ended.popleft()
            if job.kind == "write":
                self._writes -= 1
                ended.append(job)
            elif job in self._reads:  # a read that was given up is ignored
                del self._reads[job]
                ended.append(job)
        late = any(job.began_s < late_s for job in self._reads)  # the others wait for the same thread
        for job in [job for job in self._reads if job.give_up()] if late else ():
            del self._reads[job]
            job.failure = f"a read took longer than {_PATIENCE_S:g} s"
            self._stop(job.failure)
            self._known.clear()
            ended.append(job)
        for job in ended:
            self._note(job)
        return ended

    def keep(self, job: DiskJob, good: bool) -> None:
        """Note the end of a write; `good` if the page kept its content until then."""
        if job.failure:
            return
        if not good or job.header != self._file(job.key, job.oldest, len(job.beside))[0]:
            self._known.pop(job.key, None)
            self._delete([job.key])
            return
        self._known[job.key] = job.oldest, len(job.beside)
        while len(self._known) > self.total:
            self._delete([self._known.popitem(last=False)[0]])

    def wait(self, most_s: float) -> None:
        """Block until a job has ended, for `most_s` seconds at most, if a read is under way."""
        if self._reads:
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
        """End the threads and delete the files."""
        if self._lock_file is None:
            return
        for job in self._reads:  # a thread that hangs must not write to memory that others have by then
            job.give_up()
        self._to_write.put(None)
        self._to_read.put(None)
        for thread in self._threads:
            thread.join(_PATIENCE_S)
        _delete_files(self._folder)
        if not any(thread.is_alive() for thread in self._threads):  # else the next worker deletes the rest
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

    def _file(self, key: bytes, oldest: int, beside: int) -> tuple[bytes, Path]:
        """The header and the path of a page's file."""
        numbers = self._epoch, oldest, key, beside, self._page_bytes
        return _HEADER.pack(_MARK, self._identity, *numbers), self._folder / key.hex()

    def _delete(self, keys: list[bytes]) -> None:
        if keys:
            self._to_write.put(keys)

    # --- the threads --------------------------------------------------------------------------------------------------

    def _run_writes(self, folder: Path) -> None:
        try:
            _delete_left(folder)
        except OSError as error:  # the folder was deleted meanwhile, or cannot be listed
            log.warning("files of KV that other workers left are not deleted", extra={"reason": str(error)})
        content = bytearray(self._page_bytes)
        while (job := self._to_write.get()) is not None:
            if isinstance(job, list):
                for key in job:  # hundreds of thousands after an update: the loop does not make their paths
                    _try_unlink(self._folder / key.hex())
                continue
            content[:] = self._page(job.page)
            try:
                self._write(job, content)
            except OSError as error:
                job.failure = str(error)
                _try_unlink(_part(job.path))
            self._end(job)

    @staticmethod
    def _write(job: DiskJob, content: bytearray) -> None:
        with _part(job.path).open("wb") as file:
            file.write(job.header + _digest(job.header, job.beside, content) + job.beside)
            file.write(content)
        _part(job.path).replace(job.path)

    def _run_reads(self, _: Path) -> None:
        while (job := self._to_read.get()) is not None:
            job.began_s = time.perf_counter()
            try:
                self._read(job)
            except OSError as error:
                job.failure = str(error)
            job.seconds = time.perf_counter() - job.began_s
            self._end(job)

    def _read(self, job: DiskJob) -> None:
        data = memoryview(job.path.read_bytes())
        start = len(job.header) + _DIGEST_BYTES
        beside = len(data) - start - self._page_bytes
        digest = bytes(data[len(job.header) : start])
        if data[: len(job.header)] != job.header or beside < 0:
            job.failure = f"{job.path} has another content than was written"
        elif digest != _digest(job.header, data[start : start + beside], data[start + beside :]):
            job.failure = f"{job.path} has a wrong checksum"
        else:
            job.beside = bytes(data[start : start + beside])
            job.use_page(lambda: _copy(data[start + beside :], self._page(job.page)))

    def _end(self, job: DiskJob) -> None:
        self._ended.append(job)
        self._something_ended.set()


def _copy(source: memoryview, target: memoryview) -> None:
    target[:] = source


def _digest(header: bytes, beside: bytes | memoryview, content: bytearray | memoryview) -> bytes:
    digest = blake2b(header, digest_size=_DIGEST_BYTES)
    digest.update(beside)
    digest.update(content)
    return digest.digest()


def _part(path: Path) -> Path:
    return path.with_suffix(".part")


def _try_unlink(path: Path) -> None:
    """Delete a file that is no longer read. If that fails, the file is deleted with its folder."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.debug("a file of KV is left", extra={"reason": str(error)})


def _own_folder(folder: Path) -> tuple[Path, int]:
    """A subfolder of this worker, and the file that locks it."""
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        own = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
        lock = os.open(own / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (own / _LOCK).exists():
            return own, lock
        os.close(lock)  # another worker that begins took it for one that is left


def _delete_files(own: Path) -> None:
    """Delete a worker's pages, before its lock is deleted: pages without a lock would stay after a kill."""
    try:
        names = os.listdir(own)
    except OSError:
        return
    for name in names:
        if name != _LOCK:
            _try_unlink(own / name)


def _delete_left(folder: Path) -> None:
    """Delete the subfolders of workers that have ended without doing so."""
    for left in folder.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(left / _LOCK, os.O_RDWR)
        except OSError:  # another worker begins, or ends
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _delete_files(left)
            shutil.rmtree(left, ignore_errors=True)
        except BlockingIOError:  # the owner is still running
            continue
        finally:
            os.close(lock)
