"""The files of KV pages that one rank writes and reads, and its two threads. `disk_pages` knows which there are.

    header     mark, identity of this run of this rank, epoch of the weights, weights version, key, sizes
    digest     of header and content
    content    data stored with the page (`PageMirror`), then the page

A file is used only if its header is the expected one and the digest is right: it cannot be of another run or rank, or
of weights that were given up.
"""

import fcntl
import logging
import os
import queue
import secrets
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from rollout.engine.kv.tiers.page_mover import HostMemory

log = logging.getLogger(__name__)

_PREFIX, _LOCK = "rollout-kv-", "lock"
_HEADER = struct.Struct("<8s32sQq16sQQ")
_MARK, _DIGEST_BYTES = b"ROLLKV1\0", 16
#: Bytes of a file besides its content.
FRAME_BYTES = _HEADER.size + _DIGEST_BYTES
#: The longest that reads may make no progress, and that an end waits for threads and for other ranks, seconds.
PATIENCE_S = 5.0


@dataclass(eq=False, slots=True)
class DiskJob:
    """A page that is written or read."""

    kind: Literal["write", "read"]
    order: int  # number of the order to the other ranks
    key: bytes
    page: int  # page of host memory
    oldest: int  # weights version of its KV
    epoch: int  # number of times that all KV was forgotten
    beside: bytes = b""  # data stored with the page
    beside_bytes: int = 0
    entry: Any = None  # the caller's own object
    seconds: float = 0.0  # time that the thread took
    failure: str = ""
    ended: bool = False  # set by the thread


class DiskFiles:
    """Writes pages of `memory` into files of `folder`, and reads them back.

    The writing thread calls `begin` first. Each thread calls `ended` with its jobs, in the order in which they came.
    """

    def __init__(
        self, folder: Path, memory: HostMemory, ended: Callable[[DiskJob], None], begin: Callable[[], object]
    ) -> None:
        self._folder, self._memory, self._ended, self._begin = folder, memory, ended, begin
        self._identity = secrets.token_bytes(32)
        self._using_page, self._given_up = threading.Lock(), False
        self._to_write: queue.SimpleQueue[DiskJob | Seq[bytes] | None] = queue.SimpleQueue()
        self._to_read: queue.SimpleQueue[DiskJob | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in ((self._run_writes, "kv-disk-write"), (self._run_reads, "kv-disk-read"))
        ]
        for thread in self._threads:
            thread.start()

    def write(self, order: int, key: bytes, page: int, oldest: int, epoch: int, beside: bytes = b"") -> DiskJob:
        """Begin to write a page, whose content may change meanwhile: then the file is of no use."""
        job = DiskJob("write", order, key, page, oldest, epoch, beside, len(beside))
        self._to_write.put(job)
        return job

    def read(
        self, order: int, key: bytes, page: int, oldest: int, epoch: int, beside_bytes: int = 0, entry: object = None
    ) -> DiskJob:
        """Begin to read a file into a page."""
        job = DiskJob("read", order, key, page, oldest, epoch, b"", beside_bytes, entry)
        self._to_read.put(job)
        return job

    def delete(self, keys: Seq[bytes]) -> None:
        """Delete the files of these keys, after the writes that were begun before."""
        self._to_write.put(keys)

    def give_up_reads(self) -> None:
        """No read touches a page from now on: its thread may hang."""
        with self._using_page:
            self._given_up = True

    def close(self, patience_s: float = PATIENCE_S) -> bool:
        """End the threads; false if one of them hangs."""
        self.give_up_reads()
        self._to_write.put(None)
        self._to_read.put(None)
        until_s = time.perf_counter() + patience_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.perf_counter()))
        return not any(thread.is_alive() for thread in self._threads)

    # --- the threads --------------------------------------------------------------------------------------------------

    def _run_writes(self) -> None:
        try:
            self._begin()
        except OSError as error:  # the folder was deleted meanwhile, or cannot be listed
            log.warning("the folder of KV on disk has a fault", extra={"reason": str(error)})
        content = bytearray(self._memory.page_bytes)
        while (job := self._to_write.get()) is not None:
            if not isinstance(job, DiskJob):
                for key in job:  # hundreds of thousands after an update: the loop does not make their paths
                    _try_unlink(self._path(key))
                continue
            content[:] = self._memory.memory_of(job.page)
            try:
                self._write(job, content)
            except OSError as error:
                job.failure = str(error)
                _try_unlink(_part(self._path(job.key)))
            self._end(job)

    def _write(self, job: DiskJob, content: bytearray) -> None:
        path, header = self._path(job.key), self._header(job)
        with _part(path).open("wb") as file:
            file.write(header + _digest(header, job.beside, content) + job.beside)
            file.write(content)
        _part(path).replace(path)

    def _run_reads(self) -> None:
        while (job := self._to_read.get()) is not None:
            began_s = time.perf_counter()
            try:
                self._read(job)
            except OSError as error:
                job.failure = str(error)
            job.seconds = time.perf_counter() - began_s
            self._end(job)

    def _read(self, job: DiskJob) -> None:
        path, header = self._path(job.key), self._header(job)
        data = memoryview(path.read_bytes())
        page_at = FRAME_BYTES + job.beside_bytes
        beside, page = data[FRAME_BYTES:page_at], data[page_at:]
        if data[: len(header)] != header or len(page) != self._memory.page_bytes:
            job.failure = f"{path} has another content than was written"
        elif data[len(header) : FRAME_BYTES] != _digest(header, beside, page):
            job.failure = f"{path} has a wrong checksum"
        else:
            job.beside = bytes(beside)
            with self._using_page:
                if not self._given_up:
                    self._memory.memory_of(job.page)[:] = page

    def _end(self, job: DiskJob) -> None:
        job.ended = True
        self._ended(job)

    def _path(self, key: bytes) -> Path:
        return self._folder / key.hex()

    def _header(self, job: DiskJob) -> bytes:
        numbers = job.epoch, job.oldest, job.key, job.beside_bytes, self._memory.page_bytes
        return _HEADER.pack(_MARK, self._identity, *numbers)


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


# --- the folder of a worker -------------------------------------------------------------------------------------------


def own_folder(folder: Path) -> tuple[Path, int]:
    """A subfolder of this worker, and the file that locks it."""
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        own = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
        lock = os.open(own / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (own / _LOCK).exists():
            return own, lock
        os.close(lock)  # another worker at its start took it for a leftover


def delete_files(own: Path) -> None:
    """Delete a worker's pages, before its lock is deleted: pages without a lock would stay after a kill."""
    try:
        names = os.listdir(own)
    except OSError:
        return
    for path in [own / name for name in names if name != _LOCK]:
        if path.is_dir():  # files of another rank
            shutil.rmtree(path, ignore_errors=True)
        else:
            _try_unlink(path)


def delete_left(folder: Path) -> None:
    """Delete the subfolders of workers that have ended without doing so."""
    for left in folder.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(left / _LOCK, os.O_RDWR)
        except OSError:  # another worker begins, or ends
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            delete_files(left)
            shutil.rmtree(left, ignore_errors=True)
        except BlockingIOError:  # the owner is still running
            continue
        finally:
            os.close(lock)
