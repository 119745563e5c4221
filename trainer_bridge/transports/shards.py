"""The parts of an update's tensors that each trainer rank holds, and how rank 0 puts a tensor together from them.

    Shard(0), as FSDP2 makes it     each rank holds a run of the tensor's elements    fetched or sent run by run
    another Shard                   each rank holds columns of the same rows          fetched by tensor, or sent by rows
    several Shards                  each rank holds a box                             fetched tensor by tensor
    Replicate                       the lowest rank that holds a part sends it

There are three ways. `trainer_ranks` carries the messages of the first two:

    through the host        rank 0 requests parts (`fetch`), the other ranks answer (`local_piece`, `local_whole`)
    through lent buffers    each rank packs its portions of buckets (`own_portion`), rank 0 reads them (`portions`)
    in a group              ranks send what they own to the workers (`senders`, `columns`, `own_run`, `own_rows`)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from trainer_bridge.transports.cut import Cut
from trainer_bridge.transports.sections import Sections
from trainer_bridge.transports.tensors import ByteRows, rows_within
from trainer_bridge.wire.errors import RolloutError
from trainer_bridge.wire.manifest import Manifest

HEADER = 3  # numbers at the start of a table: version, tensors, a digest of version, names, types and shapes
_DEVICE = 5  # numbers after the header: the name of the GPU that has the parts
_DIMS = 8  # most dimensions, equal to the limit of manifests
_DIGEST_DIGITS = 15  # hexadecimal digits within 63 bits

#: The part of a tensor that a rank holds: first index and size in each dimension.
Box = tuple[tuple[int, ...], tuple[int, ...]]


class LentParts(Protocol):
    """Rank 0's access to the other ranks' parts of an update, in memory that rank 0's GPU reads.

    Methods raise `RolloutError`. They are called with the stream current that packs the buckets.
    """

    def bucket(self, index: int) -> AbstractContextManager[None]:
        """Have all ranks pack their portions of a bucket; they can be read inside."""

    def read(self, rank: int, byte: int, out: torch.Tensor) -> None:
        """Copy the packed bytes of a rank at the place of this byte of the stream, on the current stream."""


class TrainerGroup(Protocol):
    """Rank 0's requests to the other trainer ranks. Methods raise `RolloutError` if a rank is gone."""

    address: str  # address of this host for the other trainers

    def fetch(self, index: int, first: int, parts: Sequence[tuple[int, torch.Tensor]], last: int) -> None:
        """Fill `parts`, pairs of a rank and the memory for its share of elements `first` to `last` of a tensor."""

    def fetch_whole(self, index: int, parts: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Fill `parts`, pairs of a rank and memory for its whole part of a tensor."""

    def borrow(self, lenders: Sequence[int], manifest: Manifest, device: torch.device) -> LentParts | None:
        """Access to the parts of these ranks from `device`; None if they must come through the host."""

    def cut(self, sections: Sections | None, whole: Manifest) -> None:
        """Have the ranks pack the parts of a plan in the place of whole tensors; None: whole tensors again."""

    def join(self, order: dict[str, Any]) -> None:
        """Make the ranks that have a place in a group join it."""

    def ending(self, out: torch.Tensor, rank: int, timeout_s: float) -> None:
        """Wait for a rank's report about its part in a group, written to `out`."""


def is_spread(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


class Shards:
    """The tensors of one update on one rank. On ranks other than 0, `mine` marks the tensors it sends parts of."""

    def __init__(self, tensors: Sequence[torch.Tensor], digest: str) -> None:
        self.shapes = [tuple(tensor.shape) for tensor in tensors]
        self.boxes = [_box(tensor) for tensor in tensors]
        self.locals = [tensor.to_local() if is_spread(tensor) else tensor for tensor in tensors]  # type: ignore[attr-defined]
        self.mine = [False] * len(self.shapes)
        self.devices: list[str] = []  # names of GPUs, by rank
        self.lenders: list[int] = []  # rank 0: the other ranks that send parts
        self.ranks: TrainerGroup | None = None
        self._digest = int(digest[:_DIGEST_DIGITS], 16)
        self._owners: list[list[tuple[int, Box]]] = []  # (rank, box) pairs of each tensor
        self._whole: tuple[int, torch.Tensor] | None = None  # the last tensor that was fetched whole

    def table(self, version: int, device: str) -> torch.Tensor:
        """The rank's part of each tensor and its GPU, `device`, as numbers: int64 [any]."""
        rows = np.zeros((len(self.boxes), 1 + 2 * _DIMS), np.int64)
        for row, box in zip(rows, self.boxes, strict=True):
            if box is not None:
                starts, sizes = box
                row[0] = 1
                row[1 : 1 + len(starts)] = starts
                row[1 + _DIMS : 1 + _DIMS + len(sizes)] = sizes
        header = np.array([version, len(self.boxes), self._digest], np.int64)
        gpu = np.frombuffer(device.encode().ljust(8 * _DEVICE, b"\0"), np.int64)
        return torch.from_numpy(np.concatenate([header, gpu, rows.reshape(-1)]))

    def learn(self, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """Rank 0: choose the senders, uint8 [ranks, tensors]. Raises `RolloutError` if a tensor lacks a part."""
        self.devices = [table[HEADER:][:_DEVICE].numpy().tobytes().rstrip(b"\0").decode() for table in tables]
        rows = [table[HEADER + _DEVICE :].view(-1, 1 + 2 * _DIMS).tolist() for table in tables]
        mask = torch.zeros(len(tables), len(self.shapes), dtype=torch.uint8)
        for index, shape in enumerate(self.shapes):
            owners: list[tuple[int, Box]] = []
            for rank in range(len(tables)) if self.boxes[index] is not None else ():
                row = rows[rank][index]
                box = tuple(row[1 : 1 + len(shape)]), tuple(row[1 + _DIMS : 1 + _DIMS + len(shape)])
                if row[0] and math.prod(box[1]) and box not in [known for _, known in owners]:
                    owners.append((rank, box))
                    mask[rank, index] = 1
            if owners and sum(math.prod(sizes) for _, (_, sizes) in owners) != math.prod(shape):
                raise RolloutError(f"prepare: the ranks' parts of tensor {index}, {list(shape)}, do not cover it")
            self._owners.append(owners)
        self.lenders = [rank for rank in range(1, len(tables)) if mask[rank].any()]
        return mask

    def spread(self, index: int) -> bool:
        """Whether this tensor is a DTensor."""
        return self.boxes[index] is not None

    def senders(self, index: int) -> list[tuple[int, int]]:
        """Rank 0: first element and sender of each run of a tensor; rank 0 sends it all if parts are not runs."""
        if not self._in_runs(index):
            return [(0, 0)]
        shape = self.shapes[index]
        return sorted((_cut(box, shape, 0, math.prod(shape))[0], rank) for rank, box in self._owners[index])

    def columns(self, index: int) -> tuple[int, list[tuple[int, int]]] | None:
        """Rank 0: if ranks hold columns of a tensor, the elements of a row, and by column the first one and its rank.

        The tensor is taken as a matrix: the dimension that is cut and all later ones form a row.
        """
        shape, owners = self.shapes[index], self._owners[index]
        if not owners or self._in_runs(index):
            return None
        dim = _cut_dim(owners[0][1], shape)
        if dim is None or any(_cut_dim(box, shape) != dim for _, box in owners):
            return None
        inner = math.prod(shape[dim + 1 :])
        return shape[dim] * inner, sorted((starts[dim] * inner, rank) for rank, (starts, _) in owners)

    def own_run(self, index: int, first: int, last: int) -> torch.Tensor | None:
        """A view of these elements that this rank sends, of a run or of a row of its columns.

        None on rank 0 if it must fetch them.
        """
        box, shape, local = self.boxes[index], self.shapes[index], self.locals[index]
        if box is None:
            return None
        if _is_run(box, shape) and (self.ranks is None or self._in_runs(index)):
            return _local_run(local, box, shape, first, last)
        if self.ranks is not None and self.columns(index) is None:
            return None
        rows, before = _as_rows(local, box, shape)
        row, at = divmod(first, math.prod(shape) // len(rows))
        return rows[row, at - before : at - before + last - first]

    def own_rows(self, index: int, first: int, times: int) -> torch.Tensor:
        """The columns of this rank in `times` rows: [rows, elements]; element `first` is in the first row."""
        box, shape = self.boxes[index], self.shapes[index]
        assert box is not None, "only a part of a DTensor has columns"
        rows, _ = _as_rows(self.locals[index], box, shape)
        row = first // (math.prod(shape) // len(rows))
        return rows[row : row + times]

    def portions(
        self, index: int, first: int, last: int, cut: Cut | None = None
    ) -> list[tuple[int, list[Portion]]] | None:
        """Rank 0: the senders of elements `first` to `last`, and what each sends of them, as `own_portion` has it.

        None if a part is a box of another kind.
        """
        shape = self.shapes[index]
        sent = [(rank, _portion(box, shape, cut, first, last)) for rank, box in self._owners[index]]
        known = [(rank, portion) for rank, portion in sent if portion is not None]
        return known if known and len(known) == len(sent) else None

    def own_portion(self, index: int, first: int, last: int, cut: Cut | None = None) -> list[Portion]:
        """The rank's part of elements `first` to `last` of a tensor, or of what a cut keeps of it."""
        box = self.boxes[index]
        return [] if box is None else _portion(box, self.shapes[index], cut, first, last) or []

    def own_bytes(self, index: int, portion: Portion) -> tuple[torch.Tensor, int]:
        """The bytes of this rank's part from the beginning of a portion on, and from each of its rows to the next."""
        local = self.locals[index]
        flat = local.contiguous().view(-1)
        return flat[portion.place :].view(torch.uint8), portion.step * local.element_size()

    def _in_runs(self, index: int) -> bool:
        return bool(self._owners[index]) and all(_is_run(box, self.shapes[index]) for _, box in self._owners[index])

    def fetch(self, index: int, first: int, last: int) -> torch.Tensor:
        """Rank 0: elements `first` to `last` of a tensor, in host memory, while the other ranks `serve`."""
        assert self.ranks is not None
        shape, local = self.shapes[index], self.locals[index]
        if not self._in_runs(index):
            return self._fetch_whole(index).reshape(-1)[first:last]
        out = torch.empty(last - first, dtype=local.dtype)
        parts = []
        for rank, box in self._owners[index]:
            start, end = _cut(box, shape, first, last)
            if start >= end:
                continue
            if rank == 0:
                out[start - first : end - first].copy_(_local_run(local, box, shape, start, end))
            else:
                parts.append((rank, out[start - first : end - first].view(torch.uint8)))
        if parts:
            self.ranks.fetch(index, first, parts, last)
        return out

    def local_piece(self, index: int, first: int, last: int) -> torch.Tensor | None:
        """Other ranks: the bytes of these elements that rank 0 expects from this rank; None if it has none."""
        box, shape = self.boxes[index], self.shapes[index]
        if box is None or not self.mine[index]:
            return None
        start, end = _cut(box, shape, first, last)
        if start >= end:
            return None
        return _local_run(self.locals[index], box, shape, start, end).cpu().view(torch.uint8)

    def local_whole(self, index: int) -> torch.Tensor | None:
        """Other ranks: the bytes of the whole part that rank 0 expects from this rank; None if it expects none."""
        if not self.mine[index]:
            return None
        return self.locals[index].contiguous().cpu().view(-1).view(torch.uint8)

    def _fetch_whole(self, index: int) -> torch.Tensor:
        assert self.ranks is not None
        if self._whole is not None and self._whole[0] == index:
            return self._whole[1]
        local = self.locals[index]
        out = torch.empty(self.shapes[index], dtype=local.dtype)
        parts = {rank: torch.empty(box[1], dtype=local.dtype) for rank, box in self._owners[index] if rank}
        if parts:
            self.ranks.fetch_whole(index, [(rank, part.view(-1).view(torch.uint8)) for rank, part in parts.items()])
        for rank, (starts, sizes) in self._owners[index]:
            place = out[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]
            place.copy_(parts.get(rank, local))
        self._whole = (index, out)
        return out


def _box(tensor: Any) -> Box | None:
    """The rank's part of a DTensor; None for a plain tensor."""
    if not is_spread(tensor):
        return None
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    unknown = [placement for placement in tensor.placements if type(placement) not in (Shard, Replicate)]
    if unknown:
        raise ValueError(
            f"a tensor has the placement {unknown[0]}; publish DTensors of Shard and Replicate, or gather it first"
        )
    sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(sizes) != tuple(tensor.to_local().shape):
        raise ValueError(
            f"a DTensor {list(tensor.shape)} has a part of shape {list(tensor.to_local().shape)}, not {sizes}"
        )
    return tuple(starts), tuple(sizes)


class Portion(NamedTuple):
    """Rows of elements of a tensor, or of what a cut keeps of it, and their place in the part of a rank."""

    rows: ByteRows
    place: int  # place of the first element
    step: int  # elements from each row to the next


class _Layout(NamedTuple):
    """A box as columns of some rows of a matrix, in elements."""

    row: int  # elements of a row of the matrix
    begin: int  # the first column of the box
    width: int  # columns of the box
    top: int  # the first row of the box
    rows: int  # rows in the box


def _portion(box: Box, shape: tuple[int, ...], cut: Cut | None, first: int, last: int) -> list[Portion] | None:
    """A box's part of elements `first` to `last` of what a cut keeps; None if these are no rows."""
    layouts = _layouts(box, shape, cut)
    if layouts is None:
        return None
    portions = []
    for kept, held in layouts:
        lo, hi = max(first, kept.top * kept.row), min(last, (kept.top + kept.rows) * kept.row)
        if kept.width == kept.row and held.width == held.row:
            rows = [ByteRows(lo, 0, hi - lo, 1)] if lo < hi else []
        else:
            rows = list(rows_within(kept.row, kept.begin, kept.begin + kept.width, lo, hi))
        for each in rows:
            row, column = divmod(each.start, kept.row)
            place = (row - kept.top + held.top) * held.row + column - kept.begin + held.begin
            portions.append(Portion(each, place, held.row if each.step else 0))
    return portions


@functools.lru_cache(1 << 14)
def _layouts(box: Box, shape: tuple[int, ...], cut: Cut | None) -> list[tuple[_Layout, _Layout]] | None:
    """The common part of each range of a cut with a box: in what the cut keeps, and in the box. None: no rows."""
    if not shape:
        return [(_Layout(1, 0, 1, 0, 1),) * 2]
    starts, sizes = box
    dim, ranges = (0, ((0, shape[0]),)) if cut is None else (cut.dim, cut.ranges)
    kept_shape = shape if cut is None else cut.shape(shape)
    layouts, before = [], 0
    for begin, end in ranges:
        lo, hi = max(begin, starts[dim]), min(end, starts[dim] + sizes[dim])
        if lo < hi and 0 not in sizes:
            size = (*sizes[:dim], hi - lo, *sizes[dim + 1 :])
            kept_at = (*starts[:dim], before + lo - begin, *starts[dim + 1 :])
            held_at = tuple(lo - starts[dim] if each == dim else 0 for each in range(len(shape)))
            inner = max(_last_cut(size, kept_shape), _last_cut(size, sizes))
            pair = _layout(kept_at, size, kept_shape, inner), _layout(held_at, size, sizes, inner)
            if pair[0] is None or pair[1] is None:
                return None
            layouts.append((pair[0], pair[1]))
        before += end - begin
    return layouts


def _last_cut(size: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The last dimension of a tensor that a box of this size cuts; 0 if there is none."""
    return max((dim for dim in range(len(shape)) if size[dim] != shape[dim]), default=0)


def _layout(at: tuple[int, ...], size: tuple[int, ...], shape: tuple[int, ...], dim: int) -> _Layout | None:
    """A box in a tensor as a matrix whose rows have dimension `dim` and all later ones.

    None if the box cuts a dimension between the first one and `dim`.
    """
    if size[1:dim] != shape[1:dim]:
        return None
    inner = math.prod(shape[dim + 1 :])
    if not dim:
        return _Layout(inner, 0, inner, at[0], size[0])
    rows = math.prod(shape[1:dim])  # rows of one index in the first dimension
    return _Layout(shape[dim] * inner, at[dim] * inner, size[dim] * inner, at[0] * rows, size[0] * rows)


def _is_run(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether a box is a run of the tensor's elements in row-major order."""
    return all(size == whole for size, whole in zip(box[1][1:], shape[1:], strict=True))


def _cut_dim(box: Box, shape: tuple[int, ...]) -> int | None:
    """The only dimension that a box cuts; None if there are several."""
    cut = [dim for dim, size in enumerate(box[1]) if size != shape[dim]]
    return cut[0] if len(cut) == 1 else None


def _as_rows(local: torch.Tensor, box: Box, shape: tuple[int, ...]) -> tuple[torch.Tensor, int]:
    """The part, cut in one dimension, as a matrix, and the column of the whole at which it begins."""
    dim = _cut_dim(box, shape)
    assert dim is not None, "columns are cut in one dimension"
    inner = math.prod(shape[dim + 1 :])
    return local.reshape(math.prod(shape[:dim]), -1), box[0][dim] * inner


def _cut(box: Box, shape: tuple[int, ...], first: int, last: int) -> tuple[int, int]:
    """The elements from `first` to `last` that lie in a run: start and end; without such elements start >= end."""
    row = math.prod(shape[1:])
    start = box[0][0] * row if shape else 0
    return max(first, start), min(last, start + math.prod(box[1]))


def _local_run(local: torch.Tensor, box: Box, shape: tuple[int, ...], start: int, end: int) -> torch.Tensor:
    """Elements `start` to `end` of the whole tensor, from a part that is a run."""
    before = box[0][0] * math.prod(shape[1:]) if shape else 0
    return local.contiguous().view(-1)[start - before : end - before]
