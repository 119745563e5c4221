"""The contents of a weight update: version, tensors, and the layout of their bytes in one packed stream.

    tensors, in order     |-- a --|..|---- b ----|.|------ c ------|      each starts at a multiple of 64 bytes
    stream, 0..total      |.......bucket 0.......|.......bucket 1......|  each bucket but the last: bucket_bytes

Invariants:

- Offsets follow from the order, dtypes and shapes by one rule (`pack`), so both sides compute them and none is sent.
- Every boundary (tensor start, bucket start) is a multiple of 64 bytes, so any piece can be viewed in any dtype.
- `from_wire` reads data from strangers: it returns a manifest that is sound in itself or raises `WeightsRejected`,
  and allocates no more than the message already did. Whether the manifest fits a model is `ParameterMap.check`.

Bytes in transfer are checked by 32 bits of XXH3: it finds damage, lets other threads run, and is five times as fast as
CRC-32 (11 GB/s a core). It does not defend against forgery: a client that may talk to the worker may send it weights
anyway. BLAKE2b digests fix the manifest and the list of all checksums.
"""

import bisect
import hashlib
import json
import math
import operator
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, SupportsIndex

import xxhash

from trainer_bridge.wire.errors import WeightsRejected

ALIGN_BYTES = 64
MAX_BUCKET_BYTES = 256 << 20
MAX_VERSION = (1 << 63) - 1
MAX_TENSORS = 1 << 18
#: Types that may be sent; the worker converts them to the type of its parameter. `float8_e4m3fn` are codes, which come
#: with the scales of their blocks.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}

_MAX_DIMS = 8
_MAX_NAME_CHARS = 512
_MAX_STREAM_BYTES = 1 << 50
_MAX_BUCKETS = 1 << 18
_USUAL_BUCKET_BYTES = 64 << 20
_USUAL_BUCKETS = 64
_LOW_32 = (1 << 32) - 1
_FIELDS = {"version", "bucket_bytes", "tensors", "digest"}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: its Hugging Face name, dtype, shape, and where its bytes start in the stream."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, contiguous, without padding."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def end(self) -> int:
        """The end of its bytes in the stream."""
        return self.offset + self.nbytes


class EntryBytes(NamedTuple):
    """Some bytes of a tensor of a stream."""

    number: int  # the tensor's place in the order
    entry: TensorEntry
    start: int  # first byte in the stream
    end: int  # past the last


class Places:
    """Tensors in the order of a stream, to be found by its bytes."""

    def __init__(self, entries: Sequence[TensorEntry] = ()) -> None:
        self._entries, self._starts = entries, [entry.offset for entry in entries]

    def at(self, byte: int) -> int:
        """The number of the last tensor that begins at this byte or before it."""
        return bisect.bisect_right(self._starts, byte) - 1

    def within(self, start: int, end: int) -> Iterator[EntryBytes]:
        """The tensors that have bytes from `start` to `end`, and these bytes."""
        for number in range(max(0, self.at(start)), len(self._entries)):
            entry = self._entries[number]
            if entry.offset >= end:
                return
            found = EntryBytes(number, entry, max(entry.offset, start), min(entry.end, end))
            if found.start < found.end:
                yield found


@dataclass(frozen=True)
class Manifest:
    """An update of the weights. Make one with `pack` or `from_wire`."""

    version: int
    tensors: tuple[TensorEntry, ...]
    bucket_bytes: int

    @cached_property
    def total_bytes(self) -> int:
        """Length of the packed stream, padding between tensors included."""
        return self.tensors[-1].end if self.tensors else 0

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(entry.nbytes for entry in self.tensors)

    @property
    def bucket_count(self) -> int:
        """Buckets that the stream is cut in."""
        return -(-self.total_bytes // self.bucket_bytes)

    def bucket_span(self, index: int) -> tuple[int, int]:
        """First and past-the-last byte of a bucket in the stream."""
        assert 0 <= index < self.bucket_count, f"bucket {index} of {self.bucket_count}"
        start = index * self.bucket_bytes
        return start, min(start + self.bucket_bytes, self.total_bytes)

    @cached_property
    def places(self) -> Places:
        return Places(self.tensors)

    @cached_property
    def layout_digest(self) -> str:
        """BLAKE2b (hex) of everything but the version: equal for updates that pack the same tensors the same way."""
        return _digest([self.bucket_bytes, _rows(self.tensors)])

    @cached_property
    def digest(self) -> str:
        """BLAKE2b (hex) of the manifest."""
        return _digest([self.version, self.layout_digest])

    def to_wire(self) -> dict[str, Any]:
        """The plain map that travels in `begin`; `from_wire` reads it."""
        return {
            "version": self.version,
            "bucket_bytes": self.bucket_bytes,
            "tensors": _rows(self.tensors),
            "digest": self.digest,
        }


def usual_bucket_bytes(total_bytes: int, gpus: bool) -> int:
    """64 MiB; with `gpus` up to 256 MiB, as long as the update still has 64 buckets.

    A host needs about 0.8 ms for a bucket of any size; in this time a link between GPUs moves 256 MiB.
    """
    if not gpus:
        return _USUAL_BUCKET_BYTES
    even = total_bytes // _USUAL_BUCKETS // ALIGN_BYTES * ALIGN_BYTES
    return min(max(even, _USUAL_BUCKET_BYTES), MAX_BUCKET_BYTES)


def pack(version: SupportsIndex, tensors: Iterable[tuple[str, str, Sequence[int]]], bucket_bytes: int) -> Manifest:
    """Lay out tensors, given as (name, dtype, shape) in the order in which they will be sent.

    The version may be an integer of NumPy or torch. Raises `WeightsRejected` for a version, dtype, shape, bucket size
    or repeated name that no update can have.
    """
    plain_version = _plain(version)
    _check_version(plain_version)
    check_bucket_bytes(bucket_bytes)
    entries: list[TensorEntry] = []
    names: set[str] = set()
    end = 0
    for name, dtype, shape in tensors:
        entry = TensorEntry(name, dtype, tuple(shape), -(-end // ALIGN_BYTES) * ALIGN_BYTES)
        _check_entry(entry)
        if name in names:
            raise _rejected(f"the tensor {name} is listed twice; send each name once")
        names.add(name)
        end = entry.end
        if end > _MAX_STREAM_BYTES:
            raise _rejected(f"the tensors up to {name} take {end} bytes, which no worker holds")
        entries.append(entry)
    if end > _MAX_BUCKETS * bucket_bytes:
        raise _rejected(f"{end} bytes in buckets of {bucket_bytes} are more than {_MAX_BUCKETS} buckets; enlarge them")
    return Manifest(plain_version, tuple(entries), bucket_bytes)


def from_wire(value: Any, max_tensors: int = MAX_TENSORS) -> Manifest:
    """Read what `to_wire` wrote. Raises `WeightsRejected` for anything else, a wrong digest included.

    More than `max_tensors` are refused before they are looked at.
    """
    if type(value) is not dict or value.keys() != _FIELDS:
        raise _rejected(f"the manifest must be a map of exactly {', '.join(sorted(_FIELDS))}")
    rows = value["tensors"]
    if type(rows) is list and len(rows) > max_tensors:
        raise _rejected(f"the manifest has {len(rows)} tensors; the model takes at most {max_tensors}")
    if type(rows) is not list or not all(_is_row(row) for row in rows):
        raise _rejected("the manifest's tensors must be a list of [name, dtype, shape]")
    _check_version(value["version"])
    manifest = pack(value["version"], rows, value["bucket_bytes"])
    if type(value["digest"]) is not str or value["digest"] != manifest.digest:
        raise _rejected("the manifest's digest does not match its content; it was changed on its way")
    return manifest


def checksum(data: Any) -> int:
    """The lowest 32 bits of XXH3-64 of a bytes-like object."""
    return xxhash.xxh3_64(data).intdigest() & _LOW_32  # a single call holds Python's lock before xxhash 4


def checksums_digest(checksums: Sequence[int]) -> str:
    """BLAKE2b (hex) of a list of checksums in bucket order: pins the whole stream in `commit`."""
    return _blake2b(struct.pack(f"<{len(checksums)}I", *checksums))


def _rows(tensors: Iterable[TensorEntry]) -> list[list[Any]]:
    return [[entry.name, entry.dtype, list(entry.shape)] for entry in tensors]


def _is_row(row: Any) -> bool:
    return type(row) is list and len(row) == 3 and type(row[2]) is list


def _digest(value: Any) -> str:
    # JSON with fixed separators is one byte string for one value, on every platform.
    return _blake2b(json.dumps(value, separators=(",", ":")).encode())


def _blake2b(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _plain(number: Any) -> Any:
    """An integer of whatever type as Python's own; anything else, and a bool, as it is."""
    try:
        return number if isinstance(number, bool) else operator.index(number)
    except TypeError:
        return number


def _check_version(version: Any) -> None:
    if type(version) is not int or not 0 <= version <= MAX_VERSION:
        raise _rejected(f"the version must be an integer from 0 to {MAX_VERSION}, not {version!r:.40}", "version")


def check_bucket_bytes(bucket_bytes: Any) -> None:
    """Raise `WeightsRejected` for a size that no bucket can have."""
    if type(bucket_bytes) is not int or not ALIGN_BYTES <= bucket_bytes <= MAX_BUCKET_BYTES:
        raise _rejected(
            f"bucket_bytes must be an integer from {ALIGN_BYTES} to {MAX_BUCKET_BYTES}, not {bucket_bytes!r:.40}"
        )
    if bucket_bytes % ALIGN_BYTES:
        raise _rejected(f"bucket_bytes must be a multiple of {ALIGN_BYTES}, not {bucket_bytes}")


def _check_entry(entry: TensorEntry) -> None:
    name, dtype, shape = entry.name, entry.dtype, entry.shape
    if type(name) is not str or not 1 <= len(name) <= _MAX_NAME_CHARS:
        raise _rejected(f"a tensor's name must be a string of 1 to {_MAX_NAME_CHARS} characters, not {name!r:.80}")
    if type(dtype) is not str or dtype not in DTYPE_BYTES:
        raise _rejected(f"{name} has dtype {dtype!r:.40}; send one of {', '.join(DTYPE_BYTES)}")
    if len(shape) > _MAX_DIMS or any(type(size) is not int or not 0 <= size <= _MAX_STREAM_BYTES for size in shape):
        raise _rejected(f"{name} has shape {list(shape)!r:.80}; send at most {_MAX_DIMS} sizes that are not negative")


def _rejected(message: str, field: str = "manifest") -> WeightsRejected:
    return WeightsRejected(message, field=field)
