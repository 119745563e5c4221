"""The sender of each byte of an update in a group, and the layout of a bucket in the broadcast buffer.

    stream      |--0--|----2----|-0-|----2----|-0-|...     runs: consecutive bytes that one member sends
    a bucket    |--0--|-0-|-0-|    |----2----|----2----|   parts: all runs of one member, sent by one broadcast

If members hold columns of a tensor, it is one run with a negative sender, -1 minus the number of its `Columns`. Each
member sends its columns of all rows in the bucket together; what the bucket's ends leave of a row are pieces as above.

Before the buckets rank 0 broadcasts the table of runs: two rows of i64, the starts in the stream and the senders. A
table of columns follows if there are columns: rows of four i64, the number of the tensor, the bytes of a row, the first
byte of the column in a row, and the sender.

If the publisher sends everything, there is one run and a bucket is sent in the order of the stream. Otherwise every run
begins at a multiple of 64 bytes of the buffer, so it can be viewed in any dtype; the bytes between runs are zero.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trainer_bridge.transports.nccl.nccl_group import BroadcastGroup, GroupError, GroupSeat
from trainer_bridge.transports.tensors import ByteRows, copy_rows, rows_within
from trainer_bridge.wire.manifest import ALIGN_BYTES, Manifest

MAX_RUNS = 1 << 22
_ROW_BYTES = 16
_COLUMN_BYTES = 32


@dataclass(frozen=True, slots=True)
class Columns:
    """A tensor whose members hold columns: bytes of a row, and by column its first byte in a row and its member."""

    row: int
    firsts: tuple[int, ...]  # ascending, from 0
    roots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BucketPart:
    """The part of a bucket that member `root` sends: bytes `at` to `end` of the buffer."""

    root: int
    at: int
    end: int
    pieces: tuple[tuple[int, int, int], ...]  # first and past-the-last byte in the stream, offset in the buffer
    columns: tuple[tuple[ByteRows, int], ...] = ()  # rows of the stream, side by side from an offset in the buffer


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket in the broadcast buffer: its parts in the order of their broadcasts."""

    nbytes: int
    parts: tuple[BucketPart, ...]
    start: int = 0  # first byte in the stream

    def unpack(self, travelled: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The bucket's bytes (uint8) in the order of the stream: in `travelled` itself, or reordered in `out`."""
        pieces = sorted(piece for part in self.parts for piece in part.pieces)
        columns = [each for part in self.parts for each in part.columns]
        if columns:
            for start, end, at in pieces:
                out[start - self.start : end - self.start].copy_(travelled[at : at + end - start])
            for rows, at in columns:
                placed = rows._replace(start=rows.start - self.start)
                copy_rows(placed, travelled[at:], rows.width, out)
            return out[: self.nbytes]
        if len(pieces) == 1:
            return travelled[: self.nbytes]
        places = out[: self.nbytes].split([end - start for start, end, _ in pieces])
        torch._foreach_copy_(list(places), [travelled[at : at + end - start] for start, end, at in pieces])
        return out[: self.nbytes]


class Runs:
    """Run i begins at byte `firsts_R[i]` of the stream and comes from member `roots_R[i]`; int64 [runs].

    If that is negative, the run is a tensor whose members send `columns[-1 - roots_R[i]]`.
    """

    def __init__(
        self, manifest: Manifest, firsts_R: np.ndarray, roots_R: np.ndarray, columns: Sequence[Columns] = ()
    ) -> None:
        begins = np.ones(len(firsts_R), bool)
        begins[1:] = roots_R[1:] != roots_R[:-1]
        self._manifest = manifest
        self.firsts_R, self.roots_R = firsts_R[begins], roots_R[begins]
        self.columns = tuple(columns)

    @classmethod
    def alone(cls, manifest: Manifest) -> Runs:
        """One run: member 0 sends everything."""
        return cls(manifest, np.zeros(1, np.int64), np.zeros(1, np.int64))

    @classmethod
    def learn(cls, manifest: Manifest, group: BroadcastGroup, seat: GroupSeat, stop: threading.Event) -> Runs:
        """On members other than 0: receive the table that member 0 shares. Raises `GroupError`."""
        if seat.runs == 0:
            return cls.alone(manifest)
        table = group.buffer(seat.runs * _ROW_BYTES)
        group.broadcast(table).wait(stop)
        firsts_R, roots_R = table.cpu().numpy().view("<i8").reshape(2, -1)
        rising = firsts_R[0] == 0 and firsts_R[-1] < manifest.total_bytes and bool(np.all(np.diff(firsts_R) > 0))
        columns = cls._learn_columns(group, seat, stop) if seat.columns else []
        if not rising or np.any(firsts_R % 2) or np.any((roots_R < -len(columns)) | (roots_R >= seat.size)):
            raise GroupError("the publisher sent an invalid table of senders")
        sizes_R = np.append(firsts_R[1:], manifest.total_bytes) - firsts_R
        cut = [(-1 - int(root), int(size)) for root, size in zip(roots_R, sizes_R, strict=True) if root < 0]
        if len({number for number, _ in cut}) < len(cut) or any(size % columns[number].row for number, size in cut):
            raise GroupError("the publisher sent an invalid table of columns")
        return cls(manifest, firsts_R, roots_R, columns)

    @staticmethod
    def _learn_columns(group: BroadcastGroup, seat: GroupSeat, stop: threading.Event) -> list[Columns]:
        table = group.buffer(seat.columns * _COLUMN_BYTES)
        group.broadcast(table).wait(stop)
        columns: list[Columns] = []
        for number, rows in itertools.groupby(
            table.cpu().numpy().view("<i8").reshape(-1, 4).tolist(), lambda row: row[0]
        ):
            listed = list(rows)
            firsts, roots = tuple(row[2] for row in listed), tuple(row[3] for row in listed)
            row = listed[0][1]
            sound = (
                number == len(columns) and firsts[0] == 0 and all(a < b for a, b in itertools.pairwise((*firsts, row)))
            )
            sound &= not any(each % 2 for each in (*firsts, row)) and {each[1] for each in listed} == {row}
            if not sound or not all(0 <= root < seat.size for root in roots):
                raise GroupError("the publisher sent an invalid table of columns")
            columns.append(Columns(row, firsts, roots))
        return columns

    def share(self, group: BroadcastGroup, stop: threading.Event) -> None:
        """On member 0: broadcast the table. Raises `GroupError`."""
        table = torch.from_numpy(np.stack([self.firsts_R, self.roots_R]).astype("<i8").view(np.uint8).reshape(-1))
        group.broadcast(table.to(group.device)).wait(stop)
        if self.columns:
            rows = [
                (number, each.row, first, root)
                for number, each in enumerate(self.columns)
                for first, root in zip(each.firsts, each.roots, strict=True)
            ]
            table = torch.from_numpy(np.array(rows, "<i8").view(np.uint8).reshape(-1))
            group.broadcast(table.to(group.device)).wait(stop)

    @property
    def from_one(self) -> bool:
        """Whether one member sends everything."""
        return len(self) == 1 and not self.columns

    @property
    def column_count(self) -> int:
        return sum(len(each.firsts) for each in self.columns)

    def __len__(self) -> int:
        return len(self.firsts_R)

    @property
    def buffer_bytes(self) -> int:
        """Size in bytes of a buffer that holds any bucket with the padding between its runs."""
        most = min(self._manifest.bucket_bytes, self._manifest.total_bytes)
        if self.from_one:
            return most
        starts = np.arange(0, self._manifest.total_bytes, self._manifest.bucket_bytes)
        at = np.append(np.searchsorted(self.firsts_R, starts), len(self))
        widest = max((len(each.firsts) for each in self.columns), default=0)
        # A bucket has complete rows of a column, and parts of a row at its beginning and at its end.
        return most + ALIGN_BYTES * (int(np.diff(at).max()) + 1) * max(1, 3 * widest)

    def bucket(self, index: int) -> Bucket:
        start, end = self._manifest.bucket_span(index)
        if self.from_one:
            return Bucket(end - start, (BucketPart(int(self.roots_R[0]), 0, end - start, ((start, end, 0),)),))
        first, last = np.searchsorted(self.firsts_R, start, "right") - 1, np.searchsorted(self.firsts_R, end, "left")
        if np.any(self.roots_R[first:last] < 0):
            return self._bucket_with_columns(start, end, int(first), int(last))
        roots_P, begins_P = self.roots_R[first:last], np.maximum(self.firsts_R[first:last], start)
        ends_P = np.append(begins_P[1:], end)
        padded_P = -(-(ends_P - begins_P) // ALIGN_BYTES) * ALIGN_BYTES
        order_P = np.argsort(roots_P, kind="stable")
        places_P = np.cumsum(padded_P[order_P]) - padded_P[order_P]
        # Sorted by member, then by position in the stream.
        pieces = list(zip(begins_P[order_P].tolist(), ends_P[order_P].tolist(), places_P.tolist(), strict=True))
        roots, counts = np.unique(roots_P, return_counts=True)
        parts, begin = [], 0
        for root, count in zip(roots.tolist(), counts.tolist(), strict=True):
            own = tuple(pieces[begin : begin + count])
            begin += count
            parts.append(BucketPart(root, own[0][2], own[-1][2] + own[-1][1] - own[-1][0], own))
        return Bucket(end - start, tuple(parts))

    def _bucket_with_columns(self, start: int, end: int, first: int, last: int) -> Bucket:
        pieces: dict[int, list[tuple[int, int]]] = {}
        columns: dict[int, list[ByteRows]] = {}
        for run in range(first, last):
            begin, root = int(self.firsts_R[run]), int(self.roots_R[run])
            until = int(self.firsts_R[run + 1]) if run + 1 < len(self) else self._manifest.total_bytes
            lo, hi = max(begin, start), min(until, end)
            if root >= 0:
                pieces.setdefault(root, []).append((lo, hi))
                continue
            cut = self.columns[-1 - root]
            for at, past, owner in zip(cut.firsts, (*cut.firsts[1:], cut.row), cut.roots, strict=True):
                for rows in rows_within(cut.row, at, past, lo - begin, hi - begin):
                    if rows.times == 1:
                        pieces.setdefault(owner, []).append((begin + rows.start, begin + rows.start + rows.width))
                    else:
                        columns.setdefault(owner, []).append(rows._replace(start=begin + rows.start))
        parts, offset = [], 0
        for root in sorted({*pieces, *columns}):
            own, rows_of = [], []
            first_at = offset
            for lo, hi in sorted(pieces.get(root, [])):
                own.append((lo, hi, offset))
                past_end, offset = offset + hi - lo, _aligned(offset + hi - lo)
            for rows in columns.get(root, []):
                rows_of.append((rows, offset))
                past_end = offset + rows.width * rows.times
                offset = _aligned(past_end)
            parts.append(BucketPart(root, first_at, past_end, tuple(own), tuple(rows_of)))
        return Bucket(end - start, tuple(parts), start)


def _aligned(at: int) -> int:
    return -(-at // ALIGN_BYTES) * ALIGN_BYTES
