"""An append-only file of requests, their tokens and their results.

    file     "RLLJRNL1"  record *
    record   bytes(u32)  crc32(u32)  check(u32)  payload          little-endian; size and CRC of the payload, and the
                                                                  CRC of those two
    payload  msgpack [kind, request id, frame, frame...]          the frames of a header, as on the wire
    kinds    "request"  once, first     "leg"     a worker was asked     "chunk"   new tokens
             "result"   the end         "forget"  drop the id

A process that is killed leaves at most its last record torn; that is cut off when the file is opened again. Damage
anywhere else is an error, and nothing is cut. Which records an id has is kept in memory, what they hold is not.

One client at a time has the file, by a lock that ends with the process; any number may read it without a client.
Dropped records are cleared out by writing the file anew once they are more than half of it. Nothing in it is ever
executed.
"""

import fcntl
import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import msgpack

from trainer_bridge.client.results import Chunk, GenerateResult, read_chunk, read_result
from trainer_bridge.process_bound import ProcessBound
from trainer_bridge.wire import codec as wire
from trainer_bridge.wire.errors import JournalFailed, ProtocolError

logger = logging.getLogger(__name__)

Fsync = Literal["never", "results", "always"]

_MAGIC = b"RLLJRNL1"
_HEAD = struct.Struct("<II")
_CHECK = struct.Struct("<I")
_HEAD_BYTES = _HEAD.size + _CHECK.size
_COMPACT_BYTES = 1 << 20  # fewer dropped bytes than this are not worth a new file
#: Fields that may differ when a request is sent again, because they do not affect the drawn tokens.
_NOT_MARKED = (
    "stream",
    "stream_every",
    "join_chunks",
    "priority",
    "deadline_s",
    "session",
    "session_lease_s",
    "end_of_session",
)


@dataclass(frozen=True, slots=True)
class JournaledRequest:
    """The journal's records of a request. `texts` are texts of whole completions, with `result` only."""

    mark: str  # tells whether a request is the same
    fields: dict[str, Any]  # fields of the original request
    seed: int
    started_unix_s: float
    chunks: list[Chunk]
    legs: list[tuple[str, str]]  # (endpoint, id there) of everything that workers were asked
    result: GenerateResult | None = None  # has no completions, since `chunks` hold them
    texts: list[str | None] = field(default_factory=list)


@dataclass(slots=True)
class _Index:
    """The records of an id: (offset, bytes) of each, and whether the last record is the result."""

    spans: list[tuple[int, int]] = field(default_factory=list)
    finished: bool = False

    @property
    def size(self) -> int:
        return sum(size for _, size in self.spans)


def fingerprint(fields: Mapping[str, Any]) -> str:
    """A digest of a request's content, independent of the order of its keys."""
    digest = blake2b(digest_size=16)
    for frame in wire.encode(_sorted({name: value for name, value in fields.items() if name not in _NOT_MARKED})):
        digest.update(len(frame).to_bytes(8, "little") + frame)
    return digest.hexdigest()


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, (list, tuple)) else value


class Journal(ProcessBound):
    """The file, open for one client. Raises `JournalFailed` where it cannot be read or written.

    With `read_only` the file must be there and stays as it is; only `ids` and `read` may be called.
    """

    _instead = "open it in one process at a time"
    _idle_after_fork = frozenset({"close"})
    _fd = -1

    def __init__(
        self,
        path: str | os.PathLike[str],
        fsync: Fsync = "never",
        read_only: bool = False,
        sync: Callable[[int], object] = os.fsync,
    ) -> None:
        if fsync not in ("never", "results", "always"):
            raise ValueError(f"journal_fsync is {fsync!r}; use 'never', 'results' or 'always'")
        self.path = Path(path)
        self._new_file = self.path.with_name(f"{self.path.name}.new")
        self._fsync, self._read_only, self._sync = fsync, read_only, sync
        self._ids: dict[str, _Index] = {}
        self._end = 0
        try:
            self._fd = _open_locked(self.path, read_only)
        except OSError as error:
            raise JournalFailed(f"the journal {self.path} cannot be opened: {error}") from error
        try:
            if not read_only:
                self._new_file.unlink(missing_ok=True)  # left by a client that was killed while it rewrote the file
            self._load()
        except BaseException:
            self.close()
            raise

    def __del__(self) -> None:
        self.close()  # releases the lock of a client that is dropped without `close`

    def _leave_after_fork(self) -> None:
        """Close the inherited file, whose lock the forked process would keep otherwise."""
        self.close()

    # --- writing ------------------------------------------------------------------------------------------------------

    def begin(self, request_id: str, mark: str, seed: int, started_unix_s: float, fields: dict[str, Any]) -> None:
        """Record a request."""
        header = {"mark": mark, "seed": seed, "started_unix_s": started_unix_s, "fields": fields}
        self._append("request", request_id, header)

    def sent(self, request_id: str, endpoint: str, leg_id: str) -> None:
        """Record that a worker was asked for all of a request, or for a part."""
        self._append("leg", request_id, {"endpoint": endpoint, "leg": leg_id})

    def add(self, request_id: str, chunk: Chunk) -> None:
        """Record new tokens."""
        header = {name: getattr(chunk.part, name) for name in chunk.part.__dataclass_fields__}
        self._append("chunk", request_id, header | {"offset": chunk.offset, **chunk.score_fields()})

    def finish(self, request_id: str, result: GenerateResult) -> None:
        """Record the result: all of the request has arrived."""
        apart = ("completions", *result.scores())
        header = {name: getattr(result, name) for name in result.__dataclass_fields__ if name not in apart}
        header |= result.score_fields()
        header["timing"] = asdict(result.timing)
        header["texts"] = [completion.text for completion in result.completions]
        self._append("result", request_id, header)

    def forget(self, ids: Iterable[str]) -> None:
        """Drop requests; unknown ids are ignored."""
        for request_id in ids:
            if request_id in self._ids:
                self._append("forget", request_id, {})
        self._compact_if_due()

    # --- reading ------------------------------------------------------------------------------------------------------

    def ids(self) -> dict[str, bool]:
        """Every recorded request, oldest first, and whether it is finished."""
        return {request_id: index.finished for request_id, index in self._ids.items()}

    def read(self, request_id: str) -> JournaledRequest | None:
        """The saved part of a request."""
        index = self._ids.get(request_id)
        if index is None:
            return None
        try:
            records = [self._record_at(offset, size) for offset, size in index.spans]
            first = records[0][1]
            saved = JournaledRequest(
                first["mark"],
                first["fields"],
                first["seed"],
                first["started_unix_s"],
                chunks=[read_chunk(header) for kind, header in records if kind == "chunk"],
                legs=[(header["endpoint"], header["leg"]) for kind, header in records if kind == "leg"],
            )
            return _with_result(saved, records[-1][1]) if index.finished else saved
        except (ProtocolError, wire.WireError, KeyError) as error:
            raise JournalFailed(f"the journal {self.path} has records of {request_id!r} that cannot be read") from error

    def close(self) -> None:
        """Close the file and release its lock."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # --- records ------------------------------------------------------------------------------------------------------

    def _append(self, kind: str, request_id: str, header: dict[str, Any]) -> None:
        """Write a record, and wait for the disk as `journal_fsync` says."""
        payload = msgpack.packb([kind, request_id, *wire.encode(header)], use_bin_type=True)
        head = _HEAD.pack(len(payload), zlib.crc32(payload))
        record = head + _CHECK.pack(zlib.crc32(head)) + payload
        try:
            _write_all(self._fd, record)
            if self._fsync == "always" or (self._fsync == "results" and kind == "result"):
                self._sync(self._fd)
        except OSError as error:
            self._drop_torn()
            raise JournalFailed(f"the journal {self.path} cannot be written: {error}") from error
        self._note(kind, request_id, len(record))

    def _drop_torn(self) -> None:
        """Cut off the rest of a failed write, so that later records can be read."""
        try:
            os.ftruncate(self._fd, self._end)
        except OSError:
            logger.exception("the journal %s has a torn record at byte %d", self.path, self._end)

    def _record_at(self, offset: int, size: int) -> tuple[str, dict[str, Any]]:
        record = os.pread(self._fd, size, offset)
        parsed = _parse(record)
        if parsed is None:
            raise JournalFailed(f"the journal {self.path} was changed at byte {offset} while this client used it")
        return parsed[0], wire.decode(parsed[2:], wire.REPLY_LIMITS)

    def _load(self) -> None:
        """Find every record; cut off a torn one at the end."""
        size = os.fstat(self._fd).st_size
        head = os.pread(self._fd, len(_MAGIC), 0)
        if head != _MAGIC and _MAGIC.startswith(head):
            if not self._read_only:
                os.ftruncate(self._fd, 0)
                _write_all(self._fd, _MAGIC)
            self._end = len(_MAGIC)
            return
        if head != _MAGIC:
            raise JournalFailed(f"{self.path} is not a journal; name another file")
        self._end = len(_MAGIC)
        with open(self._fd, "rb", closefd=False) as file:
            file.seek(self._end)
            while self._end < size:
                record = _read_record(file, size - self._end)
                parsed = None if record is None else _parse(record)
                if record is None or parsed is None:
                    self._cut(size, record)
                    return
                self._note(parsed[0], parsed[1], len(record))

    def _note(self, kind: str, request_id: str, size: int) -> None:
        """Keep the place of the record at the end of the file."""
        if kind == "request":
            self._ids[request_id] = _Index()
        if kind == "forget":
            self._ids.pop(request_id, None)
        elif request_id in self._ids:
            self._ids[request_id].spans.append((self._end, size))
            self._ids[request_id].finished = kind == "result"
        else:
            raise JournalFailed(f"the journal {self.path} has a {kind} at byte {self._end} without its request")
        self._end += size

    def _cut(self, size: int, record: bytes | None) -> None:
        """Cut off the tail that a killed process or machine leaves: an incomplete record, or zeros."""
        if record is not None and self._end + len(record) < size:
            rest = os.pread(self._fd, size - self._end, self._end)
            if any(rest):
                raise JournalFailed(
                    f"the journal {self.path} is damaged at byte {self._end} of {size}; restore it, or cut it there"
                )
        what = "passed over" if self._read_only else "cut"
        logger.warning("%d bytes at the end of the journal %s were torn; %s", size - self._end, self.path, what)
        if not self._read_only:
            os.ftruncate(self._fd, self._end)

    # --- clearing out -------------------------------------------------------------------------------------------------

    def _compact_if_due(self) -> None:
        live = sum(index.size for index in self._ids.values())
        dead = self._end - len(_MAGIC) - live
        if dead > max(live, _COMPACT_BYTES):
            self._compact()

    def _compact(self) -> None:
        """Replace the file by a new one with the remaining records."""
        self._new_file.unlink(missing_ok=True)
        try:
            fd = _open_locked(self._new_file)
            try:
                moved = self._copy_to(fd)
                self._sync(fd)
                os.replace(self._new_file, self.path)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            raise JournalFailed(f"the journal {self.path} cannot be compacted: {error}") from error
        os.close(self._fd)
        self._fd, self._ids, self._end = fd, moved, os.fstat(fd).st_size

    def _copy_to(self, fd: int) -> dict[str, _Index]:
        _write_all(fd, _MAGIC)
        moved: dict[str, _Index] = {}
        end = len(_MAGIC)
        for request_id, index in self._ids.items():
            spans = []
            for offset, size in index.spans:
                _write_all(fd, os.pread(self._fd, size, offset))
                spans.append((end, size))
                end += size
            moved[request_id] = _Index(spans, index.finished)
        return moved


def _with_result(saved: JournaledRequest, header: dict[str, Any]) -> JournaledRequest:
    texts, extra, endpoint, resumes = (header.pop(name) for name in ("texts", "extra", "endpoint", "resumes"))
    result = read_result({**header, **extra, "completions": []}, endpoint)
    return replace(saved, result=replace(result, resumes=resumes), texts=texts)


def _open_locked(path: Path, read_only: bool = False) -> int:
    """A file descriptor that appends, or only reads, with the lock of the file that has this name."""
    access, lock = os.O_RDWR | os.O_APPEND | os.O_CREAT, fcntl.LOCK_EX
    if read_only:
        access, lock = os.O_RDONLY, fcntl.LOCK_SH
    while True:
        fd = os.open(path, access | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, lock | fcntl.LOCK_NB)
            if os.path.exists(path) and os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except BlockingIOError:
            os.close(fd)
            raise JournalFailed(
                f"the journal {path} is in use by another client, or by a process that was forked from one; end it, or "
                "give each client a journal of its own"
            ) from None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # another client put a new file in its place meanwhile


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read_record(file: Any, left: int) -> bytes | None:
    """The next record, its payload unchecked; only its head if that is damaged; None if the file ends too early."""
    head = file.read(_HEAD_BYTES)
    if len(head) < _HEAD_BYTES:
        return None
    size = _HEAD.unpack_from(head)[0]
    if _CHECK.pack(zlib.crc32(head[: _HEAD.size])) != head[_HEAD.size :]:
        return head
    return head + file.read(size) if _HEAD_BYTES + size <= left else None


def _parse(record: bytes) -> list[Any] | None:
    """The parts [kind, id, frames...] of a record; None if it is torn or damaged."""
    size, checksum = _HEAD.unpack_from(record)
    payload = record[_HEAD_BYTES:]
    if len(payload) != size or zlib.crc32(payload) != checksum:
        return None
    try:
        parsed = msgpack.unpackb(payload, raw=False)
    except (ValueError, msgpack.UnpackException):
        return None
    if not isinstance(parsed, list) or len(parsed) < 3 or not all(isinstance(item, str) for item in parsed[:2]):
        return None
    return parsed
