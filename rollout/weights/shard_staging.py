"""Where one rank of a tensor group keeps its part of an update: in staging memory, or in place in its parameters.

    stream of whole tensors    |------ a ------|---- b ----|-------- c --------|     comes in pieces, in any order
    the shard's part               |== a ==|     |= b =|      |= c =|   |= c =|
    staging memory             |== a ==|= b =|= c == c =|                            in the order of the parameters
                               '---- one copy of a swap ---'                         where these lie side by side, too

The memory is on the device, allocated once, or on the host. Host memory is in blocks, which are pinned one by one when
their first bytes come: nothing is pinned before the first update. In place there is no such memory, besides that for
tensors that can only be copied as a whole, such as those that are quantised.

Invariants:

- A piece is cut when it lands, so a swap copies contiguous memory of this rank only.
- Copies to or from a device are enqueued; `event` of the last one says when all are done.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple

import torch

from rollout.models.cut import Cut, CutView, whole_shape
from rollout.weights.destination import check_equal, entries_within
from rollout.weights.parameter_map import Fit
from rollout.weights.staging import Allocate, Copy, Pins, parameter_bytes, takes_device, touch
from trainer_bridge.transports.tensors import TORCH_DTYPES, Rows, copy_rows, rows_within
from trainer_bridge.wire.errors import WeightsRejected
from trainer_bridge.wire.manifest import DTYPE_BYTES, Manifest, TensorEntry

#: Bytes of a block of host memory; a larger tensor has a block of its own.
BLOCK_BYTES = 256 << 20
#: Bytes of a copy between host and device: small, so that no step's upload waits long for one.
_COPY_BYTES = 4 << 20
#: Bytes of a tensor that cross at a time where they have to be cut on the device first, or after it.
_CUT_BYTES = 32 << 20
#: Rows of so many bytes cross between host and device one by one; shorter ones are cut on the device.
_LONG_BYTES = 64 << 10
_ALIGN = 64


class KeptRows(NamedTuple):
    """Rows of a whole tensor, by bytes, and where they lie in the kept part of it."""

    source: int
    source_step: int
    target: Rows


def cut_rows(shape: tuple[int, ...], itemsize: int, cut: Cut | None, lo: int, hi: int) -> Iterator[KeptRows]:
    """What of bytes `lo` to `hi` of a whole tensor a cut keeps, and its places in the kept part."""
    if cut is None:
        if lo < hi:
            yield KeptRows(lo, 0, Rows(lo, 0, hi - lo, 1))
        return
    inner = itemsize * math.prod(shape[cut.dim + 1 :])
    row, kept_row, offset = cut.whole * inner, cut.kept * inner, 0
    for begin, end in ((begin * inner, end * inner) for begin, end in cut.ranges):
        for start, step, width, times in rows_within(row, begin, end, lo, hi):
            at = start // row * kept_row + offset + start % row - begin
            yield KeptRows(start, step, Rows(at, kept_row if step else 0, width, times))
        offset += end - begin


class _Kept(NamedTuple):
    """A tensor of an update, and where the kept part of it is staged."""

    entry: TensorEntry
    target: torch.Tensor  # takes the kept part
    cut: Cut | None
    shape: tuple[int, ...]  # of the kept part
    block: int
    at: int  # in the block

    @property
    def nbytes(self) -> int:
        return DTYPE_BYTES[self.entry.dtype] * math.prod(self.shape)


class _Staged(NamedTuple):
    """The layout of an update, which later ones may share."""

    entries: tuple[TensorEntry, ...]
    fit: Fit
    layout: str
    starts: list[int]
    order: list[_Kept]


class ShardStaging:
    """The memory, and the update that is staged in it. Belongs to one thread at a time.

    `staging` is the setting `weights.staging`: on the device, if there is memory for it, updates do not wait for the
    host's memory in their swap. One that is larger than the parameters is staged on the host all the same. Raises
    ValueError if the device lacks the memory that was asked for. `advance` is called for each part of a long job.
    """

    def __init__(
        self,
        views: Mapping[str, torch.Tensor],
        staging: Literal["auto", "device", "host"] = "auto",
        allocate: Allocate | None = None,
        block_bytes: int = BLOCK_BYTES,
        advance: Callable[[], object] = lambda: None,
    ) -> None:
        device, nbytes = next(iter(views.values())).device, parameter_bytes(views)
        self._views, self._block_bytes = views, block_bytes
        self._memory: torch.Tensor | None = None
        if takes_device(nbytes, device, staging):
            make = allocate or (lambda size: torch.empty(size, dtype=torch.uint8, device=device))
            self._memory = make(nbytes)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._host = HostBlocks(self._stream is not None, advance)
        self._blocks: list[torch.Tensor] = []
        self._update = _Staged((), Fit((), ()), "", [], [])
        self._kept: dict[str, _Kept] = {}
        self._missing: dict[str, int] = {}  # bytes of each kept tensor
        self._copies: list[Copy] | None = None
        self._event: torch.cuda.Event | None = None  # of the last copy that is enqueued

    @property
    def place(self) -> Literal["device", "host"] | None:
        """Where updates are staged that are not larger than the parameters; None: in place."""
        return "host" if self._memory is None else "device"

    def open(self, manifest: Manifest, fit: Fit) -> None:
        """Begin an update; the one before is not used any more."""
        if self._update.layout != manifest.layout_digest:
            self._copies = None
            order, sizes = self._lay_out(manifest, fit, block_bytes=None)
            if self._memory is not None and sizes[0] <= self._memory.numel():
                self._blocks = [self._memory]
            else:
                order, sizes = self._lay_out(manifest, fit, self._block_bytes)
                self._blocks = self._host.reserve(sizes)
            starts = [entry.offset for entry in manifest.tensors]
            self._update = _Staged(manifest.tensors, fit, manifest.layout_digest, starts, order)
        self._kept = {kept.entry.name: kept for kept in self._update.order}
        self._missing = {name: kept.entry.nbytes for name, kept in self._kept.items()}

    def take(self, start: int, data: torch.Tensor) -> torch.cuda.Event | None:
        """Keep what belongs to this rank of bytes `start` .. of the stream (uint8, on the host or on the device).

        Returns the event after which `data` is read; None if it is. Data of the device is read on its current stream,
        pinned data of the host on the stream of this object.
        """
        if self._stream is None:
            self._take(start, data)
            return None
        if data.is_cuda:
            self._take(start, data)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(data.device))
        else:
            with torch.cuda.stream(self._stream):
                self._take(start, data)
                self._event = torch.cuda.Event()
                self._event.record(self._stream)
        return self._event

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """The stream of this object is the current one of its device, if that is a GPU."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def copied(self) -> bool:
        """Whether all copies into the staging memory are done."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Wait for them."""
        if self._event is not None:
            self._event.synchronize()

    def check_whole(self) -> None:
        """Raise `WeightsRejected` if bytes are missing, or if tensors that are one parameter differ on this rank."""
        lacking = [name for name, missing in self._missing.items() if missing]
        if lacking:
            raise WeightsRejected(f"{len(lacking)} tensors did not arrive whole, the first is {lacking[0]}")
        for kept, other in self._update.fit.aliases:
            if kept not in self._kept:
                continue
            a, b = (self._arrived(self._kept[name]) for name in (kept, other))
            check_equal(kept, other, a, b, self._views[kept].dtype)

    def copies(self) -> list[Copy]:
        """The copies of a swap; updates of one layout share them."""
        if self._copies is None:
            copied = set(self._update.fit.copied)
            self._copies = list(self._join([kept for kept in self._update.order if kept.entry.name in copied]))
        return self._copies

    # --- layout -------------------------------------------------------------------------------------------------------

    def _lay_out(self, manifest: Manifest, fit: Fit, block_bytes: int | None) -> tuple[list[_Kept], list[int]]:
        """The kept tensors in the order of the parameters, and the sizes of the blocks; None: it is one block."""
        names = [*fit.copied, *(other for _, other in fit.aliases)]
        entries = {entry.name: entry for entry in manifest.tensors}
        targets = {name: _target(self._views[name]) for name in names}
        order = sorted(fit.copied, key=lambda name: targets[name][0].data_ptr()) + names[len(fit.copied) :]
        laid: list[_Kept] = []
        sizes = [0]
        for name in order:
            target, cut = targets[name]
            if target.numel() == 0:
                continue
            entry, shape = entries[name], whole_shape(target)
            kept = _Kept(entry, target, cut, shape, len(sizes) - 1, sizes[-1])
            if not (laid and _follows(laid[-1], kept)):
                kept = kept._replace(at=-(-sizes[-1] // _ALIGN) * _ALIGN)
            if block_bytes is not None and kept.at and kept.at + kept.nbytes > block_bytes:
                sizes.append(0)
                kept = kept._replace(block=len(sizes) - 1, at=0)
            sizes[-1] = kept.at + kept.nbytes
            laid.append(kept)
        return laid, sizes

    def _join(self, order: list[_Kept]) -> Iterator[Copy]:
        """Copies, each of tensors that lie side by side in the parameters and in the staging memory."""
        at = 0
        while at < len(order):
            first, end = order[at], at + 1
            while end < len(order) and _follows(order[end - 1], order[end]) and _adjoins(order[end - 1], order[end]):
                end += 1
            if end == at + 1:
                yield first.target, self._staged(first)
            else:
                count = sum(kept.target.numel() for kept in order[at:end])
                staged = self._blocks[first.block][first.at :][: count * first.target.element_size()]
                yield first.target.as_strided((count,), (1,)), staged.view(first.target.dtype)
            at = end

    def _staged(self, kept: _Kept) -> torch.Tensor:
        memory = self._blocks[kept.block][kept.at : kept.at + kept.nbytes]
        return memory.view(TORCH_DTYPES[kept.entry.dtype]).view(kept.shape)

    def _arrived(self, kept: _Kept) -> torch.Tensor:
        """The values of a tensor that is complete."""
        return self._staged(kept)

    # --- pieces -------------------------------------------------------------------------------------------------------

    def _take(self, start: int, data: torch.Tensor) -> None:
        end = start + data.numel()
        for i in entries_within(self._update.entries, self._update.starts, start, end):
            entry = self._update.entries[i]
            kept = self._kept.get(entry.name)
            if kept is None:
                continue
            lo, hi = max(entry.offset, start) - entry.offset, min(entry.end, end) - entry.offset
            self._missing[entry.name] -= hi - lo
            self._cut(kept, lo, hi, data[lo + entry.offset - start :][: hi - lo])
            if self._missing[entry.name] == 0:
                self._end(kept)

    def _end(self, kept: _Kept) -> None:
        """All bytes of a tensor are taken."""

    def _block(self, kept: _Kept) -> torch.Tensor:
        """The memory of a tensor, at whose byte `kept.at` it begins."""
        self._host.pin(self._blocks[kept.block])
        return self._blocks[kept.block]

    def _cut(self, kept: _Kept, lo: int, hi: int, piece: torch.Tensor) -> None:
        """Keep what belongs to this rank of bytes `lo` to `hi` of a tensor."""
        block = self._block(kept)
        itemsize = DTYPE_BYTES[kept.entry.dtype]
        whole = tuple(kept.entry.shape)
        rows = list(cut_rows(whole, itemsize, kept.cut, lo, hi))
        if piece.device != block.device:
            rows = list(_one_by_one(rows))
        if piece.device == block.device:
            for each in rows:
                _copy_rows(each, piece, lo, block, -kept.at)
            return
        if all(each.target.times == 1 for each in rows):
            for source, _, (start, _, width, _) in rows:
                for at in range(0, width, _COPY_BYTES):
                    part = Rows(start + at, 0, min(_COPY_BYTES, width - at), 1)
                    _copy_rows(KeptRows(source + at, 0, part), piece, lo, block, -kept.at)
            return
        for begin in range(lo, hi, _CUT_BYTES):
            some = piece[begin - lo :][: min(_CUT_BYTES, hi - begin)]
            rows = list(cut_rows(whole, itemsize, kept.cut, begin, begin + some.numel()))
            if not rows:
                continue
            if block.is_cuda:  # whole to the device, and cut there
                some = some.to(block.device, non_blocking=True)
                for each in rows:
                    _copy_rows(each, some, begin, block, -kept.at)
            else:  # the kept parts of consecutive bytes are consecutive
                first = min(each.target.start for each in rows)
                last = max(_end(each.target) for each in rows)
                gathered = torch.empty(last - first, dtype=torch.uint8, device=some.device)
                for each in rows:
                    _copy_rows(each, some, begin, gathered, first)
                block[kept.at + first : kept.at + last].copy_(gathered, non_blocking=True)


class ShardInPlace(ShardStaging):
    """The parameters themselves. Generation is held meanwhile, and the device has completed all steps."""

    def __init__(self, views: Mapping[str, torch.Tensor]) -> None:
        super().__init__(views, "host")
        self._whole: dict[str, torch.Tensor] = {}  # the kept bytes of tensors that are copied as a whole

    @property
    def place(self) -> None:
        """There is no staging memory."""
        return None

    def open(self, manifest: Manifest, fit: Fit) -> None:
        """Begin an update; the one before is not continued."""
        self._whole.clear()
        if self._update.layout != manifest.layout_digest:
            order, _ = self._lay_out(manifest, fit, block_bytes=None)
            starts = [entry.offset for entry in manifest.tensors]
            order = [kept._replace(at=0) for kept in order]
            self._update = _Staged(manifest.tensors, fit, manifest.layout_digest, starts, order)
        self._others = {other for _, other in fit.aliases}
        self._kept = {kept.entry.name: kept for kept in self._update.order}
        self._missing = {name: kept.entry.nbytes for name, kept in self._kept.items()}

    def check_whole(self) -> None:
        """Raise `WeightsRejected` if bytes are missing, or if tensors that are one parameter differ on this rank."""
        super().check_whole()
        self._whole.clear()

    def copies(self) -> list[Copy]:
        """None: all is copied."""
        return []

    def _arrived(self, kept: _Kept) -> torch.Tensor:
        if kept.entry.name not in self._whole:
            return kept.target
        return self._whole[kept.entry.name].view(TORCH_DTYPES[kept.entry.dtype]).view(kept.shape)

    def _block(self, kept: _Kept) -> torch.Tensor:
        name, target = kept.entry.name, kept.target
        if _is_plain(target) and target.dtype == TORCH_DTYPES[kept.entry.dtype] and name not in self._others:
            return target.detach().view(-1).view(torch.uint8)
        if name not in self._whole:
            self._whole[name] = torch.empty(kept.nbytes, dtype=torch.uint8, device=target.device)
        return self._whole[name]

    @torch.no_grad()
    def _end(self, kept: _Kept) -> None:
        if kept.entry.name in self._whole and kept.entry.name not in self._others:
            kept.target.copy_(self._arrived(kept), non_blocking=True)
            del self._whole[kept.entry.name]


class HostBlocks:
    """Blocks of host memory, uint8. Each is pinned, if wanted, when its first bytes come."""

    def __init__(self, pinned: bool, advance: Callable[[], object] = lambda: None) -> None:
        self._pins = Pins() if pinned else None
        self._advance = advance
        self.blocks: list[torch.Tensor] = []

    def reserve(self, sizes: list[int]) -> list[torch.Tensor]:
        """Blocks of at least these sizes; blocks of before are not used any more."""
        there = [block.numel() for block in self.blocks[: len(sizes)]]
        if len(there) < len(sizes) or any(have < size for have, size in zip(there, sizes, strict=True)):
            if self._pins is not None:
                self._pins.free()
            self.blocks = []  # free them first
            self.blocks = [_pages(size) for size in sizes]
        return self.blocks

    def pin(self, block: torch.Tensor) -> None:
        """Pin one of the blocks, if it is not yet."""
        if self._pins is not None and not block.is_cuda:
            if block.numel() > BLOCK_BYTES and block not in self._pins:
                touch(block, self._advance)
            self._pins.add(block)


def _pages(nbytes: int) -> torch.Tensor:
    """Memory that takes pages as it is filled: huge ones if the system has them, which are pinned faster."""
    pages = mmap.mmap(-1, max(nbytes, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # of a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _one_by_one(rows: list[KeptRows]) -> Iterator[KeptRows]:
    """The same, in which long rows are copied one by one."""
    for each in rows:
        start, step, width, times = each.target
        if times == 1 or width < _LONG_BYTES:
            yield each
            continue
        for i in range(times):
            yield KeptRows(each.source + i * each.source_step, 0, Rows(start + i * step, 0, width, 1))


def _end(rows: Rows) -> int:
    return rows.start + (rows.times - 1) * rows.step + rows.width


def _target(view: torch.Tensor) -> tuple[torch.Tensor, Cut | None]:
    """What takes the kept part of a tensor, and the cut that makes that part."""
    return (view.kept_part, view.cut) if isinstance(view, CutView) else (view, None)


def _follows(before: _Kept, after: _Kept) -> bool:
    """Whether two tensors lie side by side in the parameters, in the type that is staged."""
    if before.block != after.block:
        return False
    a, b = before.target, after.target
    if not (_is_plain(a) and _is_plain(b)) or a.dtype != b.dtype:
        return False
    staged = {TORCH_DTYPES[before.entry.dtype], TORCH_DTYPES[after.entry.dtype]}
    same = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    return same and staged == {a.dtype} and a.data_ptr() + a.numel() * a.element_size() == b.data_ptr()


def _adjoins(before: _Kept, after: _Kept) -> bool:
    return before.at + before.nbytes == after.at


def _is_plain(target: torch.Tensor) -> bool:
    return type(target) in (torch.Tensor, torch.nn.Parameter) and target.is_contiguous()


def _copy_rows(rows: KeptRows, source: torch.Tensor, source_at: int, target: torch.Tensor, target_at: int) -> None:
    """Copy rows. `source` begins at byte `source_at` of the whole tensor, `target` at byte `target_at` of its part."""
    placed = rows.target._replace(start=rows.target.start - target_at)
    copy_rows(placed, source[rows.source - source_at :], rows.source_step, target)
