"""Which member of a group sends which bytes of an update, and the layout of a bucket in the broadcast buffer.

    stream      |--0--|----2----|-0-|----2----|-0-|...     runs: consecutive bytes that one member sends
    a bucket    |--0--|-0-|-0-|    |----2----|----2----|   parts: all runs of one member, sent by one broadcast

If the publisher sends everything, there is one run and a bucket is sent in the order of the stream. Otherwise every run
begins at a multiple of 64 bytes of the buffer, so it can be viewed in any dtype; the bytes between runs are zero.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import torch

from trainer_bridge.transports.nccl.group import BroadcastGroup, GroupError, GroupSeat
from trainer_bridge.wire.manifest import ALIGN_BYTES, Manifest

MAX_RUNS = 1 << 22
_ROW_BYTES = 16


@dataclass(frozen=True, slots=True)
class BucketPart:
    """The part of a bucket that member `root` sends: bytes `at` to `end` of the buffer."""

    root: int
    at: int
    end: int
    pieces: tuple[tuple[int, int, int], ...]  # first and past-the-last byte in the stream, place in the buffer


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket in the broadcast buffer: its parts in the order of their broadcasts."""

    nbytes: int
    parts: tuple[BucketPart, ...]

    def unpack(self, travelled: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The bucket's bytes (uint8) in the order of the stream: in `travelled` itself, or reordered in `out`."""
        pieces = sorted(piece for part in self.parts for piece in part.pieces)
        if len(pieces) == 1:
            return travelled[: self.nbytes]
        places = out[: self.nbytes].split([end - start for start, end, _ in pieces])
        torch._foreach_copy_(list(places), [travelled[at : at + end - start] for start, end, at in pieces])
        return out[: self.nbytes]


class Runs:
    """Run i begins at byte `firsts_R[i]` of the stream and comes from member `roots_R[i]`; int64 [runs]."""

    def __init__(self, manifest: Manifest, firsts_R: np.ndarray, roots_R: np.ndarray) -> None:
        begins = np.ones(len(firsts_R), bool)
        begins[1:] = roots_R[1:] != roots_R[:-1]
        self._manifest = manifest
        self.firsts_R, self.roots_R = firsts_R[begins], roots_R[begins]

    @classmethod
    def alone(cls, manifest: Manifest) -> Runs:
        """One run: member 0 sends everything."""
        return cls(manifest, np.zeros(1, np.int64), np.zeros(1, np.int64))

    @classmethod
    def learn(cls, manifest: Manifest, group: BroadcastGroup, place: GroupSeat, stop: threading.Event) -> Runs:
        """On members other than 0: receive the table that member 0 shares. Raises `GroupError`."""
        if place.runs == 0:
            return cls.alone(manifest)
        table = group.buffer(place.runs * _ROW_BYTES)
        group.broadcast(table).wait(stop)
        firsts_R, roots_R = table.cpu().numpy().view("<i8").reshape(2, -1)
        rising = firsts_R[0] == 0 and firsts_R[-1] < manifest.total_bytes and bool(np.all(np.diff(firsts_R) > 0))
        if not rising or np.any(firsts_R % 2) or np.any((roots_R < 0) | (roots_R >= place.size)):
            raise GroupError("the publisher sent an invalid table of senders")
        return cls(manifest, firsts_R, roots_R)

    def share(self, group: BroadcastGroup, stop: threading.Event) -> None:
        """On member 0: broadcast the table. Raises `GroupError`."""
        table = torch.from_numpy(np.stack([self.firsts_R, self.roots_R]).astype("<i8").view(np.uint8).reshape(-1))
        group.broadcast(table.to(group.device)).wait(stop)

    def __len__(self) -> int:
        return len(self.firsts_R)

    @property
    def buffer_bytes(self) -> int:
        """Size in bytes of a buffer that holds any bucket with the padding between its runs."""
        most = min(self._manifest.bucket_bytes, self._manifest.total_bytes)
        if len(self) == 1:
            return most
        starts = np.arange(0, self._manifest.total_bytes, self._manifest.bucket_bytes)
        at = np.append(np.searchsorted(self.firsts_R, starts), len(self))
        return most + ALIGN_BYTES * (int(np.diff(at).max()) + 1)

    def bucket(self, index: int) -> Bucket:
        """The layout of a bucket."""
        start, end = self._manifest.bucket_span(index)
        if len(self) == 1:
            return Bucket(end - start, (BucketPart(int(self.roots_R[0]), 0, end - start, ((start, end, 0),)),))
        first, last = np.searchsorted(self.firsts_R, start, "right") - 1, np.searchsorted(self.firsts_R, end, "left")
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
