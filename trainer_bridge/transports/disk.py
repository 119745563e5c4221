"""The transport `disk`: a folder of safetensors files on a path that trainer and workers share.

    <folder>/version-12-5f0c.../model-00001-of-00003.safetensors ... model.safetensors.index.json

The publisher writes the folder under a temporary name and renames it when it is complete, so a reader never finds an
incomplete folder. Any reader of Hugging Face checkpoints can read it. The worker gets names, sizes and checksums of the
files in `begin`, reads them while it generates, and writes their bytes directly to the staging memory.

A file is read in pieces: its header, then parts of at most `piece_bytes` of each tensor. Each has a checksum, so every
rank of a worker reads and verifies only pieces that it keeps in part.

Names contain a word of their publisher, which keeps a file with this word locked. The next publisher on the same host
that writes to the folder removes incomplete updates of a killed publisher, and treats complete ones as its own.

Invariants of the reader:

- It opens regular files only, by plain names inside the folder, without following links.
- It trusts no number in a file: each tensor's dtype, shape and length must be what the manifest says, the tensors
  follow each other without holes, and a file ends where its last tensor ends.
- Files are never mapped: a file that shrinks during the read is an error, not a crash.
"""

import bisect
import functools
import json
import os
import re
import secrets
import shutil
import socket
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from trainer_bridge.scratch import OwnerMark, inherit
from trainer_bridge.transports.base import (
    IncomingUpdate,
    Keep,
    Recipient,
    TransferRules,
    TransportReceiver,
    TransportSender,
    check_options,
)
from trainer_bridge.transports.payload import Payload
from trainer_bridge.wire.errors import BadRequest, RolloutError, WeightsRejected
from trainer_bridge.wire.manifest import TensorEntry, checksum

DEFAULT_FILE_BYTES = 256 << 20
_MARK = ".publisher-"
_WHOLE, _CODES = "version", "delta"  # how the names of folders begin: codes of changes are no checkpoint

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8_e4m3fn"}
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors")
_MAX_FILES, _MAX_FILE_BYTES = 1 << 16, 1 << 46
_MAX_HEADER_BYTES = 100 << 20  # the limit of the format's own library
_SPARE_HEADER_BYTES = 1 << 20  # space for a file's metadata
_ENTRY_HEADER_BYTES = 4096  # space for one tensor's entry, its name included
_MOST_PIECE_BYTES = 64 << 20
_OPTIONS = {"folder": str, "files": list, "piece_bytes": int}
#: Bytes of a piece: few enough that a rank reads little besides its part of a tensor.
DEFAULT_PIECE_BYTES = 1 << 20


# --- worker ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _FileNote:
    """One file as `begin` describes it."""

    name: str
    nbytes: int
    checksums: Sequence[int]  # header, then pieces
    offset: int  # first byte in the joined files


class DiskReceiver(TransportReceiver):
    """Reads the folder that `begin` names, a piece at a time."""

    name = "disk"

    def __init__(self) -> None:
        self._folder = -1
        self._todo: list[_FileNote] = []
        self._entries: dict[str, TensorEntry] = {}
        self._file: _OpenFile | None = None
        self._piece_bytes = DEFAULT_PIECE_BYTES

    def begin(self, incoming: IncomingUpdate, options: Mapping[str, Any]) -> dict[str, Any]:
        """Open the folder. Reading starts at once, before `commit`."""
        check_options(self.name, options, _OPTIONS)
        piece_bytes = options["piece_bytes"]
        if not 1 <= piece_bytes <= _MOST_PIECE_BYTES:
            raise BadRequest(f"piece_bytes must be 1 to {_MOST_PIECE_BYTES}", field="options.piece_bytes")
        notes = _read_notes(options["files"])
        self._folder = _open_folder(options["folder"])
        self._todo, self._piece_bytes = notes, piece_bytes
        self._entries = {entry.name: entry for entry in incoming.manifest.tensors}
        incoming.destination.offer(self.name, options)
        return {}

    def advance(self, incoming: IncomingUpdate | None) -> bool:
        """Read one piece of one file, unless only other ranks keep it."""
        if incoming is None or not incoming.may_land or (self._file is None and not self._todo):
            return False
        try:
            if self._file is None:
                self._file = _OpenFile(self._folder, self._todo.pop(0), self._entries, self._piece_bytes)
            self._file.read_piece(incoming)
            if self._file.done:
                self._file.close()
                self._file = None
        except OSError as error:
            raise WeightsRejected(f"the worker cannot read the folder: {error}", field="options.folder") from error
        return True

    def finish(self, incoming: IncomingUpdate, options: Mapping[str, Any]) -> bool:
        """Verify that the files held every tensor."""
        check_options(self.name, options, {})
        if self._file is not None or self._todo or incoming.destination.unread():
            return False
        if self._entries:
            raise WeightsRejected(f"the files hold no {', '.join(list(self._entries)[:8])}; write every tensor")
        return True

    def drop(self, incoming: IncomingUpdate, error: Exception | None) -> None:
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._folder >= 0:
            os.close(self._folder)
        self._folder, self._file, self._todo, self._entries = -1, None, [], {}


class _OpenFile:
    """One safetensors file that is being read into the staging memory."""

    def __init__(self, folder: int, note: _FileNote, entries: dict[str, TensorEntry], piece_bytes: int) -> None:
        self._note, self._piece_bytes = note, piece_bytes
        self._fd = _open_file(folder, note)
        self._pieces_read = self._place = 0  # place: first byte of the next piece in the file
        try:
            self._pieces = self._read_header(entries)
        except BaseException:
            self.close()
            raise

    @property
    def done(self) -> bool:
        """Whether all of it is read and verified."""
        return self._pieces_read == len(self._pieces)

    def read_piece(self, incoming: IncomingUpdate) -> None:
        """Read the next piece to its place in the stream, unless it is left to other ranks."""
        if self.done:
            return
        start, end = self._pieces[self._pieces_read]
        place, self._place = self._place, self._place + end - start
        self._pieces_read += 1
        check = self._note.checksums[self._pieces_read]
        if incoming.destination.leave_to_owner(self._note.offset + place, start, end, check):
            incoming.note(end - start)
            return
        _read_at(self._fd, self._note, place, memoryview(incoming.destination.memory(start, end)), check)  # type: ignore[arg-type]
        incoming.arrived(start, end)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read_header(self, entries: dict[str, TensorEntry]) -> list[tuple[int, int]]:
        """Check the header against the manifest; return the spans of the stream that the file fills, in file order."""
        if self._note.nbytes < 8:
            raise self._bad("is too short for a safetensors file")
        length = int.from_bytes(os.pread(self._fd, 8, 0), "little")
        self._place = 8 + length
        if self._place > self._note.nbytes:
            raise self._bad("has a header longer than itself")
        if length > min(_MAX_HEADER_BYTES, _SPARE_HEADER_BYTES + _ENTRY_HEADER_BYTES * len(entries)):
            raise self._bad("has a header longer than its tensors need")
        data = bytearray(self._place)
        _read_at(self._fd, self._note, 0, memoryview(data), self._note.checksums[0])
        try:
            header = json.loads(data[8:])
        except (ValueError, RecursionError) as error:
            raise self._bad("has a header that is not JSON") from error
        if type(header) is not dict:
            raise self._bad("has a header that is not a map")
        header.pop("__metadata__", None)
        pieces: list[tuple[int, int]] = []
        at = 0
        for start, _, name in sorted(self._check_tensor(name, value, entries) for name, value in header.items()):
            entry = entries.pop(name)
            if start != at:
                raise self._bad(f"has a hole or an overlap before {name}")
            at += entry.nbytes
            starts = range(entry.offset, entry.end, self._piece_bytes)
            if len(pieces) + len(starts) >= len(self._note.checksums):
                raise self._bad(f"has more pieces than its {len(self._note.checksums)} checksums")  # maybe by far
            pieces += [(start, min(start + self._piece_bytes, entry.end)) for start in starts]
        if self._place + at != self._note.nbytes:
            raise self._bad("does not end where its last tensor ends")
        if len(self._note.checksums) != 1 + len(pieces):
            raise self._bad(f"has {len(pieces)} pieces, but {len(self._note.checksums)} checksums")
        return pieces

    def _check_tensor(self, name: str, value: Any, entries: dict[str, TensorEntry]) -> tuple[int, int, str]:
        entry = entries.get(name)
        if entry is None:
            raise self._bad(f"holds {name!r:.80}, which is not in the manifest or was in an earlier file")
        if type(value) is not dict or value.keys() != {"dtype", "shape", "data_offsets"}:
            raise self._bad(f"has a broken header entry for {name}")
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if type(dtype) is not str or _DTYPES.get(dtype) != entry.dtype or shape != list(entry.shape):
            raise self._bad(
                f"holds {name} as {dtype!r:.20} {shape!r:.80}, the manifest {entry.dtype} {list(entry.shape)}"
            )
        if type(offsets) is not list or len(offsets) != 2 or any(type(offset) is not int for offset in offsets):
            raise self._bad(f"has broken offsets for {name}")
        if offsets[1] - offsets[0] != entry.nbytes:
            raise self._bad(f"has {offsets[1] - offsets[0]} bytes for {name}, which needs {entry.nbytes}")
        return offsets[0], offsets[1], name

    def _bad(self, what: str) -> WeightsRejected:
        return _bad_file(self._note, what)


class OpenFolder:
    """The folder of an update, from which a rank reads its pieces, by the options of `begin`: `OfferedMemory`.

    Pieces are numbered over all files in their order. Raises `RolloutError`.
    """

    def __init__(self, options: Mapping[str, Any], device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._notes = _read_notes(options["files"])
        self._offsets = [note.offset for note in self._notes]
        self._folder = _open_folder(options["folder"])

    def read(self, index: int, start: int, nbytes: int, check: int, keep: Keep) -> None:
        """Like `OfferedMemory.read`. `close` may be called meanwhile."""
        note = self._notes[bisect.bisect_right(self._offsets, index) - 1]
        piece = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        fd = _open_file(self._folder, note)
        try:
            _read_at(fd, note, index - note.offset, memoryview(piece.numpy()), check)  # type: ignore[arg-type]
        except OSError as error:
            raise _bad_file(note, f"cannot be read: {error.strerror}") from error
        finally:
            os.close(fd)
        if (kept := keep(start, piece)) is not None:
            kept.synchronize()

    def close(self) -> None:
        if self._folder >= 0:
            os.close(self._folder)
        self._folder = -1


def _open_folder(folder: str) -> int:
    if not os.path.isabs(folder) or "\0" in folder:
        raise BadRequest("the folder must be an absolute path", field="options.folder")
    try:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise WeightsRejected(
            f"the worker cannot open {folder!r}: {error.strerror}; use a folder that it can read",
            field="options.folder",
        ) from error


def _open_file(folder: int, note: _FileNote) -> int:
    """A regular file of the folder, which has its size."""
    try:
        # O_NONBLOCK: opening a pipe must not wait for its writer.
        fd = os.open(note.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError as error:
        raise _bad_file(note, f"cannot be opened: {error.strerror}") from error
    found, why = os.fstat(fd), ""
    if not stat.S_ISREG(found.st_mode):
        why = "is not a regular file"
    elif found.st_size != note.nbytes:
        why = f"has {found.st_size} bytes, but was written with {note.nbytes}; it is cut off or changed"
    if why:
        os.close(fd)
        raise _bad_file(note, why)
    return fd


def _read_at(fd: int, note: _FileNote, place: int, out: memoryview, check: int) -> None:
    """Read and verify the bytes from `place` of a file on. Raises `WeightsRejected` and OSError."""
    done = 0
    while done < len(out):
        count = os.preadv(fd, [out[done:]], place + done)
        if count == 0:
            raise _bad_file(note, "ended before its last tensor")
        done += count
    if (found := checksum(out)) != check:
        raise _bad_file(note, f"is damaged: checksum {found:08x}, written as {check:08x}")


def _bad_file(note: _FileNote, what: str) -> WeightsRejected:
    return WeightsRejected(f"{note.name} {what}", field="options.files")


def _read_notes(files: list[Any]) -> list[_FileNote]:
    wrong = BadRequest("files must be a list of [name, bytes, checksums]", field="options.files")
    if not 1 <= len(files) <= _MAX_FILES:
        raise wrong
    notes, offset = [], 0
    for item in files:
        if type(item) is not list or [type(part) for part in item] != [str, int, list] or not item[2]:
            raise wrong
        if not 0 <= item[1] <= _MAX_FILE_BYTES or any(type(check) is not int for check in item[2]):
            raise wrong
        if not _FILE_NAME.fullmatch(item[0]):
            raise BadRequest(f"{item[0]!r:.80} is not a plain name of a .safetensors file", field="options.files")
        name, nbytes, checks = item
        notes.append(_FileNote(name, nbytes, checks, offset))
        offset += nbytes
    if len({note.name for note in notes}) != len(notes):
        raise BadRequest("a file is listed twice", field="options.files")
    return notes


# --- trainer ---------------------------------------------------------------------------------------------------------


class DiskSender(TransportSender):
    """Writes one folder for each update, for all workers.

    Keeps the newest `keep` folders that a worker took, and the newest folder that no worker has taken yet. After the
    end they stay.
    """

    name = "disk"

    def __init__(
        self,
        folder: str,
        file_bytes: int = DEFAULT_FILE_BYTES,
        keep: int = 2,
        piece_bytes: int = DEFAULT_PIECE_BYTES,
    ) -> None:
        assert keep >= 1 and file_bytes >= 1 and piece_bytes >= 1
        self._root = Path(folder).resolve()
        self._file_bytes, self._piece_bytes = file_bytes, piece_bytes
        self._keep = keep
        self._taken: list[Path] = []
        self._fresh: list[Path] = []  # folders that no worker has taken yet
        self._word = secrets.token_hex(4)  # a part of the names of this publisher's folders
        self._mark: OwnerMark | None = None

    def prepare(self, payload: Payload) -> dict[str, Any]:
        """Write the folder; afterwards the tensors are not read. Raises `RolloutError` if writing fails."""
        kind = _WHOLE if payload.delta is None else _CODES
        name = f"{kind}-{payload.manifest.version}-{self._word}{secrets.token_hex(4)}"
        final, draft = self._root / name, self._root / f".{name}.part"
        try:
            self._claim()
            draft.mkdir()
            files = self._write_files(payload, draft)
            draft.rename(final)
        except BaseException as error:
            shutil.rmtree(draft, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            raise RolloutError(f"prepare: cannot write to {self._root}: {error}; free or choose a folder") from error
        self._fresh.append(final)
        payload.read()
        return {"folder": str(final), "files": files, "piece_bytes": self._piece_bytes}

    def transfer(self, payload: Payload, recipients: Sequence[Recipient], rules: TransferRules) -> dict[str, Any]:
        """Nothing to do: the workers read the files."""
        return {}

    def release(self, payload: Payload, applied: bool) -> None:
        """Remove the oldest folders."""
        if applied and self._fresh:
            self._taken.append(self._fresh.pop())
        for folders, most in ((self._taken, self._keep), (self._fresh, 0 if applied else 1)):
            while len(folders) > most:
                shutil.rmtree(folders.pop(0), ignore_errors=True)

    def close(self) -> None:
        """End the claim: the folders that are kept stay."""
        if self._mark is not None:
            self._mark.close()
            self._mark = None

    def _claim(self) -> None:
        """Mark this publisher as alive, and inherit from killed publishers of this host."""
        if self._mark is not None:
            return
        self._root.mkdir(parents=True, exist_ok=True)
        for mark in self._root.glob(f"{_MARK}*"):
            inherit(mark, functools.partial(self._inherit, mark.name.removeprefix(_MARK)))
        self._taken.sort(key=lambda folder: folder.stat().st_mtime)
        self._mark = OwnerMark(self._root / f"{_MARK}{self._word}", socket.gethostname())

    def _inherit(self, word: str, host: str) -> bool:
        # Locks of other hosts need not be visible here.
        if host != socket.gethostname() or not re.fullmatch("[0-9a-f]{8}", word):
            return False
        for kind in (_WHOLE, _CODES):
            for draft in self._root.glob(f".{kind}-*-{word}*.part"):
                shutil.rmtree(draft, ignore_errors=True)
            self._taken += self._root.glob(f"{kind}-*-{word}*")
        return True

    def _write_files(self, payload: Payload, draft: Path) -> list[list[Any]]:
        groups = _group(payload.manifest.tensors, self._file_bytes)
        files: list[list[Any]] = []
        home: dict[str, str] = {}
        for number, group in enumerate(groups, 1):
            name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            entries = [payload.manifest.tensors[i] for i in group]
            data = save({entry.name: payload.host_copy(i) for i, entry in zip(group, entries, strict=True)})
            (draft / name).write_bytes(data)
            files.append([name, len(data), _checksums(data, self._piece_bytes)])
            home |= {entry.name: name for entry in entries}
        index = {"metadata": {"total_size": payload.manifest.tensor_bytes}, "weight_map": home}
        (draft / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        return files


def _checksums(data: bytes, piece_bytes: int) -> list[int]:
    """The checksums of a file: of its header and each piece, in its order."""
    (length,) = struct.unpack("<Q", data[:8])
    header, view = json.loads(data[8 : 8 + length]), memoryview(data)
    header.pop("__metadata__", None)
    checks, base = [checksum(view[: 8 + length])], 8 + length
    for begin, end in sorted(value["data_offsets"] for value in header.values()):
        pieces = range(begin, end, piece_bytes)
        checks += [checksum(view[base + at : base + min(at + piece_bytes, end)]) for at in pieces]
    return checks


def _group(tensors: Sequence[TensorEntry], file_bytes: int) -> list[list[int]]:
    """Indices of the tensors of each file, in order."""
    groups: list[list[int]] = []
    size = file_bytes + 1
    for i, entry in enumerate(tensors):
        if size + entry.nbytes > file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(i)
        size += entry.nbytes
    return groups
