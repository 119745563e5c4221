"""Where one rank keeps its part of an update: in staging memory, or in place in its parameters.

A model on one GPU is a group of one rank, which keeps all of the stream. Bytes arrive in the staging memory itself, or
in a host buffer, and from there go to the device while decoding runs:

    stream = staging memory    |-- a --|..|---- b ----|.|-- c --|
                                   | typed view  --one copy of a swap-->  view of a fused parameter

In a group of several ranks, a rank keeps what its shard needs, cut from pieces that it takes from another memory:

    stream of whole tensors    |------ a ------|---- b ----|-------- c --------|     comes in pieces, in any order
    the shard's part               |== a ==|     |= b =|      |= c =|   |= c =|
    staging memory             |== a ==|= b =|= c == c =|                            in the order of the parameters
                               '--- one copy of a swap ----'                         where these lie side by side, too

Staging memory is on the device, allocated once, or on the host. For one rank, a thread of the start gets the pages of
host memory, which is pinned when the start ends. For several ranks it is in blocks; each is pinned when its first bytes
come, so nothing is pinned before the first update. In place there is no staging memory, except for tensors that can
only be copied as a whole, such as quantised ones.

Invariants:

- Updates of one layout find the memory at the same address, and share their copies.
- A piece is cut when it lands, so a swap copies contiguous memory of this rank only.
- Copies to or from a device are enqueued; the event of the last one says when all are done.
- From `lend` until the update is released the memory is not written; `busy` is true.
- While the memory has a content, by `verified`, it holds those bytes and no others: changes to them can be made there.
"""

import bisect
import contextlib
import functools
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch

from rollout.config import WeightsSettings
from rollout.models.cut import Cut, CutView, whole_shape
from rollout.process.host_memory import available_bytes
from rollout.process.progress import stage
from rollout.weights.parameter_map import ManifestFit
from rollout.weights.pinned_memory import BLOCK_BYTES, HostBlocks, PagesBeside
from rollout.weights.staged_weights import Copy, StagedWeights, SwapCopies
from trainer_bridge.transports.fingerprint import fingerprint
from trainer_bridge.transports.sections import RankCuts
from trainer_bridge.transports.tensors import TORCH_DTYPES, Rows, copy_rows, rows_within
from trainer_bridge.wire.errors import WeightsRejected
from trainer_bridge.wire.manifest import DTYPE_BYTES, Manifest, TensorEntry

#: Allocates memory of a device: uint8 [bytes].
Allocate = Callable[[int], torch.Tensor]
#: Share of the memory left by the weights that staging on the device may take: the rest is for KV.
DEVICE_SHARE = 1 / 3
#: Share of the host's free memory that `auto` takes for staging.
HOST_SHARE = 0.8
#: Bytes of a copy between host and device: small, so that no step's upload waits long for one.
_COPY_BYTES = 4 << 20
#: Bytes of a tensor that cross at a time where they have to be cut on the device first, or after it.
_CUT_BYTES = 32 << 20
#: Rows of this many bytes cross between host and device one by one; shorter ones are cut on the device.
_LONG_BYTES = 64 << 10
_ALIGN = 64

_log = logging.getLogger(__name__)


def parameter_bytes(views: Mapping[str, torch.Tensor]) -> int:
    """Bytes of an update in the parameters' own dtypes, with padding; memory with several names counts once."""
    storages = {}
    for view in views.values():
        widened = 2 if view.dtype == torch.uint8 else 1  # codes: each arrives as a 16-bit number
        storage = view.untyped_storage()
        storages[storage.data_ptr() or storage._cdata] = widened * storage.nbytes()  # on the meta device no address
    return sum(storages.values()) + 64 * len(views)


def takes_device(
    nbytes: int,
    device: torch.device,
    place: Literal["auto", "device", "host"],
    device_share: float = DEVICE_SHARE,
    free_bytes: int | None = None,
) -> bool:
    """Whether updates of `nbytes` are staged on the device; `place` is the setting. Raises ValueError if it is full.

    `free_bytes` of the device are what the driver reports, if they are not given.
    """
    if free_bytes is None:
        free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    if place == "device" and nbytes > free_bytes:
        raise ValueError(
            f"weights.staging = device takes {nbytes / (1 << 30):.1f} GiB of a GPU next to the weights, "
            f"{free_bytes / (1 << 30):.1f} GiB are free; set it to host, or weights.apply to in_place"
        )
    return place == "device" or (place == "auto" and nbytes <= device_share * free_bytes)


class KeptRows(NamedTuple):
    """Rows of a whole tensor, by bytes, and where they lie in the kept part of it."""

    source: int
    source_step: int
    target: Rows


def cut_rows(shape: tuple[int, ...], itemsize: int, cut: Cut | None, lo: int, hi: int) -> Iterator[KeptRows]:
    """The rows that a cut keeps of bytes `lo` to `hi` of a whole tensor, and their places in the kept part."""
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


def in_words(entry: TensorEntry, cut: Cut | None) -> bool:
    """Whether each kept range of a tensor begins and ends between words of 16 bits: codes have 8 bits."""
    inner = DTYPE_BYTES[entry.dtype] * (1 if cut is None else math.prod(entry.shape[cut.dim + 1 :]))
    edges = [math.prod(entry.shape)] if cut is None else [cut.whole, *(edge for pair in cut.ranges for edge in pair)]
    return not any(edge * inner % 2 for edge in edges)


class _Kept(NamedTuple):
    """A tensor of an update, and where the kept part of it is staged."""

    entry: TensorEntry
    target: torch.Tensor  # takes the kept part
    cut: Cut | None
    shape: tuple[int, ...]  # shape of the kept part
    block: int
    at: int  # in the block

    @property
    def nbytes(self) -> int:
        return DTYPE_BYTES[self.entry.dtype] * math.prod(self.shape)


class KeptPart(NamedTuple):
    """The part of a tensor that this rank keeps: its memory, uint8 [bytes], and the cut that made it."""

    entry: TensorEntry
    memory: torch.Tensor
    cut: Cut | None


class _Layout(NamedTuple):
    """The layout of an update, which later ones may share."""

    digest: str = ""  # digest of the manifest's layout
    entries: tuple[TensorEntry, ...] = ()
    starts: Sequence[int] = ()
    fit: ManifestFit = ManifestFit((), ())
    order: Sequence[_Kept] = ()


class _Arriving(NamedTuple):
    """The tensors whose bytes arrive, and where these begin in what arrives; `cut`: they are this rank's parts."""

    entries: Sequence[TensorEntry] = ()
    starts: Sequence[int] = ()
    cut: bool = False


class WeightStaging:
    """The memory, and the update that is staged in it. Belongs to one thread at a time.

    `place` is the setting `weights.staging`: on the device, if there is memory for it, updates do not wait for the
    host's memory in their swap. One that is larger than the parameters is staged on the host all the same. `allocate`
    makes the memory, by default torch does. A `shard` keeps its part only. `advance` is called for each part of a long
    job. Raises ValueError if the device lacks the memory that was asked for.
    """

    name: Literal["staged", "in_place"] = "staged"
    in_place = False

    def __init__(
        self,
        views: Mapping[str, torch.Tensor],
        place: Literal["auto", "device", "host"] = "auto",
        allocate: Allocate | None = None,
        shard: bool = False,
        block_bytes: int = BLOCK_BYTES,
        advance: Callable[[], object] = lambda: None,
        device_share: float = DEVICE_SHARE,
    ) -> None:
        device = next((view.device for view in views.values()), torch.device("cpu"))
        nbytes = parameter_bytes(views)
        self.views, self.swap_copies = views, SwapCopies()
        self._shard, self._block_bytes = shard, block_bytes
        self._memory: torch.Tensor | None = None
        if takes_device(nbytes, device, place, device_share):
            make = allocate or (lambda size: torch.empty(size, dtype=torch.uint8, device=device))
            self._memory = make(nbytes)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._host = HostBlocks(self._stream is not None, advance)  # host memory of a shard
        self._buffer = torch.empty(0, dtype=torch.uint8)  # host memory where bytes arrive, with one rank
        self._pages: PagesBeside | None = None  # the memory of that, from the start on
        self._growing = threading.Lock()  # an update may come before the end of the start
        self._blocks: Sequence[torch.Tensor] = []
        self._layout, self._arriving = _Layout(), _Arriving()
        self._kept: dict[str, _Kept] = {}
        self._missing: dict[str, int] = {}  # bytes of each kept tensor of a shard
        self._copies: list[Copy] | None = None
        self._event: torch.cuda.Event | None = None  # end of the last copy that is enqueued
        self._lent: StagedWeights | None = None
        self.written = False  # in place: some parameters have bytes of this update
        self._content = ""  # names the bytes that the memory holds; empty: not known
        self._whole_only = ""  # a tensor of the last update that changes cannot be made to
        self._prints: list[int] = []  # fingerprints of these bytes, where the result of changes can't be compared
        self._code_memory = torch.empty(0, dtype=torch.uint8)

    @property
    def place(self) -> Literal["device", "host"] | None:
        """Where updates are staged that are not larger than the parameters; None: in place."""
        return "host" if self._memory is None else "device"

    @property
    def device_bytes(self) -> int:
        """Bytes of the device that are kept for staged updates."""
        return 0 if self._memory is None or self._stream is None else self._memory.numel()

    @property
    def busy(self) -> bool:
        """Whether the memory holds an update that may still be read."""
        if self._lent is not None and self._lent.released:
            self._lent = None
        return self._lent is not None

    def lend(self, update: StagedWeights) -> None:
        """Keep the memory as it is until `update` is released."""
        assert not self.busy, "the staging memory holds another update"
        self._lent = update

    def begin_pinning(self, nbytes: int, pages: Callable[[int], PagesBeside] = PagesBeside) -> None:
        """Begin to take host memory of one rank: for 61 GB this takes half a minute. Raises ValueError without it."""
        with _pinned_or_told(nbytes):
            if nbytes > (free := available_bytes()):
                raise OSError(0, f"{free / (1 << 30):.1f} GiB are free")
            self._pages = pages(nbytes)

    def end_pinning(self) -> None:
        """Have that memory pinned, before anything decodes. Raises ValueError if it is not given."""
        with self._growing:
            self._end_pinning()

    def _end_pinning(self) -> None:
        if self._pages is not None and self._buffer.numel() == 0:
            with stage("pinning host memory for updates of the weights"), _pinned_or_told(parameter_bytes(self.views)):
                self._buffer = self._pages.pinned()

    def reserve(self, nbytes: int) -> torch.Tensor:
        """Host memory of one rank, uint8, which grows when it is too small."""
        with self._growing:
            if self._buffer.numel() < nbytes:
                self._end_pinning()
            if self._buffer.numel() < nbytes:
                self._pages = None
                self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old one first
                self._buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._stream is not None)
            return self._buffer[:nbytes]

    # --- one update ---------------------------------------------------------------------------------------------------

    def open(
        self,
        manifest: Manifest,
        fit: ManifestFit,
        on_device: bool = False,
        section: Sequence[TensorEntry] | None = None,
    ) -> None:
        """Begin an update; the one before is not used any more. With `on_device` all bytes arrive there, by `take`.

        With `section` the stream that arrives has this rank's parts of tensors, at these places, and other ranks'.
        """
        assert not self.busy, "the staging memory still holds an update"
        self.forget()
        if not self._shard:
            self._open_stream(manifest, fit, on_device)
        elif self._layout.digest != manifest.layout_digest:
            order, sizes = self._lay_out(manifest, fit, block_bytes=None)
            if self._memory is not None and sizes[0] <= self._memory.numel():
                self._blocks = [self._memory]
            else:
                order, sizes = self._lay_out(manifest, fit, self._block_bytes)
                self._blocks = self._host.reserve(sizes)
            self._set_layout(manifest, fit, order)
        self._kept = {kept.entry.name: kept for kept in self._layout.order}
        self._expect(section)
        if not self._shard:
            self._missing.clear()

    def _expect(self, section: Sequence[TensorEntry] | None) -> None:
        """Note what arrives: whole tensors, or this rank's `section`."""
        if section is None:
            self._arriving = _Arriving(self._layout.entries, self._layout.starts)
        else:
            self._arriving = _Arriving(section, [entry.offset for entry in section], cut=True)
        for entry in section or ():
            kept = self._kept.get(entry.name)
            if kept is not None and kept.shape != entry.shape:
                raise WeightsRejected(
                    f"this rank keeps {list(kept.shape)} of {entry.name}, and {list(entry.shape)} are sent to it",
                    field="sections",
                )
        whole = section is None
        self._missing = {name: kept.entry.nbytes if whole else kept.nbytes for name, kept in self._kept.items()}

    def wants(self, start: int, end: int) -> bool:
        """Whether bytes `start` to `end` of what arrives have some of a tensor for this rank."""
        return any(True for _ in entries_within(self._arriving.entries, self._arriving.starts, start, end))

    @functools.cached_property
    def cuts(self) -> RankCuts:
        """What this rank keeps of each tensor."""
        return {name: _target(view)[1] for name, view in self.views.items()}

    @property
    def stream(self) -> torch.Tensor:
        """All bytes of an update of one rank, uint8, once they are `copied`."""
        return self._blocks[0]

    def memory(self, start: int, end: int) -> torch.Tensor:
        """Host memory of one rank where bytes of the stream arrive. Then `take` them from there."""
        return self._buffer[start:end]

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
            with self.on_stream():
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
        """Whether all bytes that were taken are in the memory that the swap reads."""
        return self._event is None or self._event.query()

    def abandon(self) -> None:
        """Return when this update is neither written nor read."""
        if self._event is not None:
            self._event.synchronize()

    def check(self) -> None:
        """Raise `WeightsRejected` if bytes are missing, or if tensors that are one parameter differ on this rank."""
        lacking = [name for name, missing in self._missing.items() if missing]
        if lacking:
            raise WeightsRejected(f"{len(lacking)} tensors did not arrive whole, the first is {lacking[0]}")
        for kept, other in self._layout.fit.aliases:
            if kept not in self._kept:
                continue
            a, b = (self._arrived(self._kept[name]) for name in (kept, other))
            check_equal(kept, other, a, b, self.views[kept].dtype)

    def copies(self) -> list[Copy]:
        """The copies of a swap; updates of one layout share them."""
        if self._copies is None:
            copied = set(self._layout.fit.copied)
            self._copies = list(self._join([kept for kept in self._layout.order if kept.entry.name in copied]))
        return self._copies

    # --- the base of changes (`rollout.weights.delta`) ----------------------------------------------------------------

    def verified(self, content: str) -> None:
        """Note that all bytes of this update are verified, and named by `content`; empty: they have no name."""
        self._whole_only = next((name for name, kept in self._kept.items() if not self._takes_changes(kept)), "")
        self._content = "" if self._whole_only else content
        self._prints = self._fingerprints() if self._content else []

    def forget(self) -> None:
        """The memory may be written: it holds no bytes that are known."""
        self._content = ""

    def lacks_base(self, manifest: Manifest, content: str) -> str:
        """Why the memory does not hold the bytes that `content` names; empty: it does."""
        if self._whole_only:
            return f"{self._whole_only} is not kept as it is sent, in words of 16 bits, so changes cannot be made to it"
        if self._content != content:
            return "this worker does not hold the update that they change"
        if self._layout.digest != manifest.layout_digest:
            return "they are of other tensors, or in other buckets, than the update that they change"
        if name := next((kept.entry.name for kept in self._kept.values() if self._shard and _halves_words(kept)), ""):
            return f"a rank's part of {name}, whose rows have an odd number of bytes, is not whole words"
        if self._prints != self._fingerprints():
            self.forget()
            return "the bytes that they change are no longer the verified ones"
        return ""

    def code_memory(self, nbytes: int) -> torch.Tensor:
        """Host memory for codes, uint8 [nbytes]; one memory for all updates."""
        if self._code_memory.numel() < nbytes:
            self._code_memory = torch.empty(0, dtype=torch.uint8)
            self._code_memory = torch.empty(
                nbytes + nbytes // 4, dtype=torch.uint8, pin_memory=self._stream is not None
            )
        return self._code_memory[:nbytes]

    @property
    def whole_stream(self) -> torch.Tensor | None:
        """The memory, if it holds the whole stream in its order; None: it holds kept parts of tensors."""
        return None if self._shard else self.stream

    @property
    def base_device(self) -> torch.device:
        """The device of the memory that changes are made in."""
        return self._blocks[0].device

    def kept_parts(self, start: int, end: int) -> Iterator[KeptPart]:
        """The kept tensors that have bytes from `start` to `end` of the stream, in its order."""
        for i in entries_within(self._layout.entries, self._layout.starts, start, end):
            kept = self._kept.get(self._layout.entries[i].name)
            if kept is not None:
                yield KeptPart(kept.entry, self._base(kept), kept.cut)

    def note_changes(self) -> None:
        """Changes of the memory were enqueued on `on_stream`; `copied` says when they are made."""
        if self._stream is not None:
            self._event = torch.cuda.Event()
            self._event.record(self._stream)

    def _takes_changes(self, kept: _Kept) -> bool:
        return in_words(kept.entry, kept.cut)

    def _base(self, kept: _Kept) -> torch.Tensor:
        return self._blocks[kept.block][kept.at : kept.at + kept.nbytes]

    def _fingerprints(self) -> list[int]:
        """Fingerprints of the kept parts; none where the result is compared, or where the host would read all of it."""
        if not self._shard or (self._stream is not None and self.base_device.type == "cpu"):
            return []
        with self.on_stream():
            prints = [fingerprint(_aligned(self._base(kept))) for kept in self._kept.values()]
            return torch.stack(prints).tolist() if prints else []

    # --- layout -------------------------------------------------------------------------------------------------------

    def _set_layout(self, manifest: Manifest, fit: ManifestFit, order: Sequence[_Kept]) -> None:
        starts = [entry.offset for entry in manifest.tensors]
        self._layout = _Layout(manifest.layout_digest, manifest.tensors, starts, fit, order)
        self._copies = None

    def _open_stream(self, manifest: Manifest, fit: ManifestFit, on_device: bool) -> None:
        """Lay the memory out as the stream is."""
        nbytes = manifest.total_bytes
        fits = self._memory is not None and nbytes <= self._memory.numel()
        host = self.reserve(0 if on_device and fits else nbytes)
        if self._layout.digest != manifest.layout_digest:
            self._blocks = [self._memory[:nbytes] if fits and self._memory is not None else host]
            kept = {*fit.copied, *(other for _, other in fit.aliases)}
            entries = [entry for entry in manifest.tensors if entry.name in kept and entry.nbytes]
            order = [_Kept(entry, self.views[entry.name], None, entry.shape, 0, entry.offset) for entry in entries]
            self._set_layout(manifest, fit, order)

    def _lay_out(self, manifest: Manifest, fit: ManifestFit, block_bytes: int | None) -> tuple[list[_Kept], list[int]]:
        """The kept tensors in the order of the parameters, and the sizes of the blocks; None: it is one block."""
        names = [*fit.copied, *(other for _, other in fit.aliases)]
        entries = {entry.name: entry for entry in manifest.tensors}
        targets = {name: _target(self.views[name]) for name in names}
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
        if self._shard:
            self._take_tensors(start, data)
        else:
            self._take_stream(start, data)

    def _take_stream(self, start: int, data: torch.Tensor) -> None:
        target = self.stream[start : start + data.numel()]
        if target.data_ptr() == data.data_ptr():
            return  # the bytes arrived in the staging memory itself
        piece_bytes = max(1, data.numel()) if target.device == data.device else _COPY_BYTES
        for kept, piece in zip(target.split(piece_bytes), data.split(piece_bytes), strict=True):
            kept.copy_(piece, non_blocking=self._stream is not None)

    def _take_tensors(self, start: int, data: torch.Tensor) -> None:
        end, arriving = start + data.numel(), self._arriving
        for i in entries_within(arriving.entries, arriving.starts, start, end):
            entry = arriving.entries[i]
            kept = self._kept.get(entry.name)
            if kept is None:
                continue
            lo, hi = max(entry.offset, start) - entry.offset, min(entry.end, end) - entry.offset
            self._missing[entry.name] -= hi - lo
            taken = kept._replace(entry=entry, cut=None) if arriving.cut else kept
            self._keep(taken, lo, hi, data[lo + entry.offset - start :][: hi - lo])
            if self._missing[entry.name] == 0:
                self._end(kept)

    def _end(self, kept: _Kept) -> None:
        """All bytes of a tensor are taken."""

    def _block(self, kept: _Kept) -> torch.Tensor:
        """The memory of a tensor, at whose byte `kept.at` it begins."""
        self._host.pin(self._blocks[kept.block])
        return self._blocks[kept.block]

    def _keep(self, kept: _Kept, lo: int, hi: int, piece: torch.Tensor) -> None:
        """Keep what belongs to this rank of `piece`, bytes `lo` to `hi` of a tensor."""
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


class InPlace(WeightStaging):
    """The parameters themselves. Generation is held meanwhile, and the device has completed all steps."""

    name = "in_place"
    in_place = True

    def __init__(self, views: Mapping[str, torch.Tensor]) -> None:
        super().__init__(views, "host", shard=True)  # tensors are written one by one, also by one rank
        self._whole: dict[str, torch.Tensor] = {}  # the kept bytes of tensors that are copied as a whole
        self._others: set[str] = set()  # second names of parameters

    @property
    def place(self) -> None:
        return None

    def open(
        self,
        manifest: Manifest,
        fit: ManifestFit,
        on_device: bool = False,
        section: Sequence[TensorEntry] | None = None,
    ) -> None:
        """Begin an update; the one before is not continued."""
        self._whole.clear()
        self.written = False
        self.forget()
        if self._layout.digest != manifest.layout_digest:
            order, _ = self._lay_out(manifest, fit, block_bytes=None)
            self._set_layout(manifest, fit, [kept._replace(at=0) for kept in order])
        self._others = {other for _, other in fit.aliases}
        self._kept = {kept.entry.name: kept for kept in self._layout.order}
        self._expect(section)

    def memory(self, start: int, end: int) -> torch.Tensor:
        """As `WeightStaging.memory`; the same memory for all bytes, once `take` has read those before."""
        return self.reserve(end - start)

    def check(self) -> None:
        super().check()
        self._free()

    def abandon(self) -> None:
        """As `WeightStaging.abandon`."""
        super().abandon()
        self._free()

    def copies(self) -> list[Copy]:
        """None: all is copied."""
        return []

    @property
    def base_device(self) -> torch.device:
        return next(iter(self.views.values())).device

    def _takes_changes(self, kept: _Kept) -> bool:
        return super()._takes_changes(kept) and self._as_sent(kept)

    def _as_sent(self, kept: _Kept) -> bool:
        same = kept.target.dtype == TORCH_DTYPES[kept.entry.dtype] and kept.entry.name not in self._others
        return same and _is_plain(kept.target)

    def _base(self, kept: _Kept) -> torch.Tensor:
        return kept.target.detach().view(-1).view(torch.uint8)

    def _free(self) -> None:
        self._whole.clear()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def _arrived(self, kept: _Kept) -> torch.Tensor:
        if kept.entry.name not in self._whole:
            return kept.target
        return self._whole[kept.entry.name].view(TORCH_DTYPES[kept.entry.dtype]).view(kept.shape)

    def _keep(self, kept: _Kept, lo: int, hi: int, piece: torch.Tensor) -> None:
        target, sent = kept.target, TORCH_DTYPES[kept.entry.dtype]
        if kept.cut is None and target.dtype != sent and _is_plain(target) and kept.entry.name not in self._others:
            values, self.written = piece.view(sent), True
            first = lo // sent.itemsize
            # Waits, if the values are on the host: they are converted there, and take no memory of the device.
            target.detach().view(-1)[first : first + values.numel()].copy_(values)
        else:
            super()._keep(kept, lo, hi, piece)

    def _block(self, kept: _Kept) -> torch.Tensor:
        name, target = kept.entry.name, kept.target
        if self._as_sent(kept):
            self.written = True
            return self._base(kept)
        if name not in self._whole:
            self._whole[name] = torch.empty(kept.nbytes, dtype=torch.uint8, device=target.device)
        return self._whole[name]

    @torch.inference_mode()
    def _take(self, start: int, data: torch.Tensor) -> None:
        super()._take(start, data)

    def _end(self, kept: _Kept) -> None:
        if kept.entry.name in self._whole and kept.entry.name not in self._others:
            self.written = True
            kept.target.copy_(self._arrived(kept), non_blocking=True)
            del self._whole[kept.entry.name]


def make_staging(
    views: Mapping[str, torch.Tensor],
    settings: WeightsSettings,
    shard: bool = False,
    allocate: Allocate | None = None,
    advance: Callable[[], object] = lambda: None,
    host_share: float = HOST_SHARE,
    device_share: float = DEVICE_SHARE,
) -> WeightStaging:
    """How this rank applies updates, decided once: staged if memory allows, otherwise in place.

    Host memory of one rank is ready after `end_pinning`. Several ranks stage their shards unless `weights.apply` is
    in_place: they must all do the same. Raises ValueError if there is no memory for what the settings ask for.
    """
    asked, cuda = settings.apply, any(view.is_cuda for view in views.values())
    staging: WeightStaging
    if asked == "in_place":
        staging = InPlace(views)
    else:
        staging = WeightStaging(views, settings.staging, allocate, shard, advance=advance, device_share=device_share)
        if not shard and staging.place == "host":
            nbytes = parameter_bytes(views)
            if asked == "auto" and nbytes > host_share * available_bytes():
                staging = InPlace(views)
            elif cuda:
                staging.begin_pinning(nbytes)
    # It costs generation time, or memory that KV could have.
    level = logging.INFO if (staging.in_place and asked == "auto") or staging.device_bytes else logging.DEBUG
    where = f", in {staging.device_bytes / 2**30:.2f} GiB of the device's memory" if staging.device_bytes else ""
    _log.log(level, "updates of the weights apply %s%s", staging.name, where, extra={"bytes": staging.device_bytes})
    return staging


@contextlib.contextmanager
def _pinned_or_told(nbytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"the host does not give {nbytes / (1 << 30):.1f} GiB of pinned memory for updates of the weights: set "
            f"weights.staging to device, or weights.apply to in_place ({error.strerror or error!s:.200})"
        ) from error


def _aligned(memory: torch.Tensor) -> torch.Tensor:
    """The same bytes at a place where words of 32 bits may begin."""
    return memory if memory.storage_offset() % 4 == 0 else memory.clone()


def entries_within(entries: Sequence[TensorEntry], starts: Sequence[int], start: int, end: int) -> Iterator[int]:
    """The numbers of the tensors that have bytes from `start` to `end` of the stream; `starts` are their offsets."""
    for i in range(max(0, bisect.bisect_right(starts, start) - 1), len(entries)):
        if entries[i].offset >= end:
            return
        if max(entries[i].offset, start) < min(entries[i].end, end):
            yield i


def check_equal(kept: str, other: str, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise `WeightsRejected` unless `a` and `b` are equal, bit for bit or after the conversion to the parameter."""
    same = (
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) if a.dtype == b.dtype else False
    )
    if not same and not torch.equal(a.to(dtype), b.to(dtype)):
        raise WeightsRejected(
            f"{kept} and {other} are one parameter of the worker's model, but differ: send one of them. If it is an "
            "output layer that the trainer's model does not tie to its embedding, start the worker with a checkpoint "
            "that has both tensors, and tie_word_embeddings = false in config.json",
            field="manifest",
        )


def _one_by_one(rows: list[KeptRows]) -> Iterator[KeptRows]:
    """The same rows; long ones are copied one by one."""
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
    """The tensor of a view that takes the kept part, and the cut that makes this part."""
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


def _halves_words(kept: _Kept) -> bool:
    """Whether the words of changes, two bytes each, are not whole in a part of a tensor."""
    return DTYPE_BYTES[kept.entry.dtype] == 1 and kept.entry.shape[-1] % 2 == 1


def _is_plain(target: torch.Tensor) -> bool:
    return type(target) in (torch.Tensor, torch.nn.Parameter) and target.is_contiguous()


def _copy_rows(rows: KeptRows, source: torch.Tensor, source_at: int, target: torch.Tensor, target_at: int) -> None:
    """Copy rows. `source` begins at byte `source_at` of the whole tensor, `target` at byte `target_at` of its part."""
    placed = rows.target._replace(start=rows.target.start - target_at)
    copy_rows(placed, source[rows.source - source_at :], rows.source_step, target)
