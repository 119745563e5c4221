"""Keeps one rank's part of an update, which comes in pieces, until its swap.

A model on one GPU is a group of one rank, which keeps all of the stream. Bytes arrive in the staging memory itself, or
in a host buffer, and from there go to the device while decoding runs:

    stream = staging memory    |-- a --|..|---- b ----|.|-- c --|
                                   | typed view  --one copy of a swap-->  view of a fused parameter

A rank of several cuts each piece when it lands (`kept_layout`). `kept_memory` is where the kept bytes go: staging
memory, or the parameters.

Invariants:

- Updates of one layout find the memory at the same address, and share their copies.
- A piece is cut when it lands, so a swap copies contiguous memory of this rank only.
- Copies to or from a device are enqueued; the event of the last one says when all are done.
- From `lend` until the update is released the memory is not written; `busy` is true.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from rollout.config import WeightsSettings
from rollout.process.host_memory import available_bytes
from rollout.weights.delta_base import DeltaBase
from rollout.weights.kept_layout import Kept, KeptRows, cut_rows, target_of
from rollout.weights.kept_memory import DEVICE_SHARE, Allocate, InPlaceMemory, KeptMemory, StagedMemory, parameter_bytes
from rollout.weights.parameter_map import ManifestFit
from rollout.weights.staged_weights import StagedWeights, SwapCopies
from trainer_bridge.transports.sections import RankCuts
from trainer_bridge.transports.tensors import ByteRows, copy_rows
from trainer_bridge.wire.errors import WeightsRejected
from trainer_bridge.wire.manifest import DTYPE_BYTES, Manifest, Places, TensorEntry

#: Share of the host's free memory that `auto` takes for staging.
HOST_SHARE = 0.8
#: Bytes of a copy between host and device: small, so that no step's upload waits long for one.
_COPY_BYTES = 4 << 20
#: Bytes a copy between host and device, for a tensor that is cut on the device.
_CUT_BYTES = 32 << 20
#: Rows of at least this many bytes cross between host and device one by one; shorter rows are cut on the device.
_LONG_BYTES = 64 << 10

_log = logging.getLogger(__name__)


class WeightStaging:
    """The update that is kept in `memory`. Belongs to one thread at a time."""

    def __init__(self, memory: KeptMemory) -> None:
        self.memory, self.swap_copies = memory, SwapCopies()
        self.in_place, self.views = memory.in_place, memory.views
        self.base = DeltaBase(memory, self.on_stream)
        self._arriving, self._cut = Places(), False  # the tensors whose bytes arrive; whether they are kept parts
        self._missing: dict[str, int] = {}  # missing bytes of each kept tensor whose part is taken by itself
        self._event: torch.cuda.Event | None = None  # end of the last copy that is enqueued
        self._lent: StagedWeights | None = None

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

    def open(
        self,
        manifest: Manifest,
        fit: ManifestFit,
        on_device: bool = False,
        section: Sequence[TensorEntry] | None = None,
    ) -> None:
        """Begin an update; the one before is not used any more. With `on_device` all bytes arrive there, by `take`.

        With `section` the stream holds cut tensors of all ranks; `section` lists this rank's, with their offsets.
        """
        assert not self.busy, "the memory still holds an update"
        self.base.forget()
        self.memory.open(manifest, fit, on_device)
        layout = self.memory.layout
        self._arriving, self._cut = layout.places, section is not None
        self._missing = {} if layout.is_stream else {name: kept.entry.nbytes for name, kept in layout.kept.items()}
        if section is not None:
            self._expect(section)

    def _expect(self, section: Sequence[TensorEntry]) -> None:
        """Note that this rank's `section` arrives, in the place of whole tensors."""
        kept = self.memory.layout.kept
        self._arriving = Places(section)
        for entry in section:
            if entry.name in kept and kept[entry.name].shape != entry.shape:
                raise WeightsRejected(
                    f"this rank keeps {list(kept[entry.name].shape)} of {entry.name}, and {list(entry.shape)} are sent "
                    "to it",
                    field="sections",
                )
        self._missing = {name: each.nbytes for name, each in kept.items()}

    @torch.inference_mode()
    def skips(self, start: int, end: int) -> bool:
        """If this rank keeps none of these bytes, count them as arrived and return true."""
        found = []
        for _, entry, first, last in self._arriving.within(start, end):
            if (kept := self.memory.layout.kept.get(entry.name)) is not None:
                lo, hi, cut = first - entry.offset, last - entry.offset, None if self._cut else kept.cut
                if any(cut_rows(tuple(entry.shape), DTYPE_BYTES[entry.dtype], cut, lo, hi)):
                    return False
                found.append((kept, hi - lo))
        if found:
            with self.on_stream():  # a tensor may be complete now
                for kept, nbytes in found:
                    self._count(kept, nbytes)
                self.note_copies()
        return True

    def arriving(self, start: int, end: int) -> torch.Tensor:
        """Host memory of one rank where bytes of the stream arrive. Then `take` them from there."""
        return self.memory.arriving(start, end)

    @functools.cached_property
    def cuts(self) -> RankCuts:
        """The part of each tensor that this rank keeps."""
        return {name: target_of(view)[1] for name, view in self.views.items()}

    @torch.inference_mode()
    def take(self, start: int, data: torch.Tensor) -> torch.cuda.Event | None:
        """Keep what belongs to this rank of bytes `start` .. of the stream (uint8, on the host or on the device).

        Returns the event after which `data` is read; None if it is. Data of the device is read on its current stream,
        pinned data of the host on the stream of this object.
        """
        with contextlib.nullcontext() if data.is_cuda else self.on_stream():
            if self.memory.layout.is_stream:
                self._take_stream(start, data)
            else:
                self._take_tensors(start, data)
            self.note_copies()
        return self._event

    def on_stream(self) -> contextlib.AbstractContextManager:
        """The stream of copies is the current one of its device, if that is a GPU."""
        stream = self.memory.copy_stream
        return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)

    def note_copies(self) -> None:
        """Copies were enqueued on the device's current stream; `copied` says when they are made."""
        if self.memory.copy_stream is not None:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(self.memory.device))

    def copied(self) -> bool:
        """Whether all bytes that were taken are in the memory that the swap reads."""
        return self._event is None or self._event.query()

    def abandon(self) -> None:
        """Return when this update is neither written nor read."""
        if self._event is not None:
            self._event.synchronize()
        self.memory.end()

    def check(self) -> None:
        """Raise `WeightsRejected` if bytes are missing, or if tensors that are one parameter differ on this rank."""
        lacking = [name for name, missing in self._missing.items() if missing]
        if lacking:
            raise WeightsRejected(f"{len(lacking)} tensors did not arrive whole, the first is {lacking[0]}")
        layout = self.memory.layout
        for kept, other in layout.fit.aliases:
            if kept in layout.kept:
                a, b = (self.memory.values(layout.kept[name]) for name in (kept, other))
                check_equal(kept, other, a, b, self.views[kept].dtype)
        self.memory.end()

    def _take_stream(self, start: int, data: torch.Tensor) -> None:
        target = self.memory.blocks[0][start : start + data.numel()]
        if target.data_ptr() == data.data_ptr():
            return  # the bytes arrived in the staging memory itself
        piece_bytes = max(1, data.numel()) if target.device == data.device else _COPY_BYTES
        for kept, piece in zip(target.split(piece_bytes), data.split(piece_bytes), strict=True):
            kept.copy_(piece, non_blocking=True)

    def _take_tensors(self, start: int, data: torch.Tensor) -> None:
        memory = self.memory
        for _, entry, first, end in self._arriving.within(start, start + data.numel()):
            kept = memory.layout.kept.get(entry.name)
            if kept is None:
                continue
            lo, hi = first - entry.offset, end - entry.offset
            taken = kept._replace(entry=entry, cut=None) if self._cut else kept
            piece = data[first - start : end - start]
            if not memory.convert(taken, lo, piece):
                _keep(taken, lo, hi, piece, memory.block(taken))
            self._count(kept, hi - lo)

    def _count(self, kept: Kept, nbytes: int) -> None:
        """Count bytes of a tensor that have come, whether this rank keeps them or not."""
        self._missing[kept.entry.name] -= nbytes
        if self._missing[kept.entry.name] == 0:
            self.memory.complete(kept)


def _keep(kept: Kept, lo: int, hi: int, piece: torch.Tensor, block: torch.Tensor) -> None:
    """Keep in `block` what belongs to this rank of `piece`, bytes `lo` to `hi` of a tensor."""
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
                part = ByteRows(start + at, 0, min(_COPY_BYTES, width - at), 1)
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
            last = max(each.target.end for each in rows)
            gathered = torch.empty(last - first, dtype=torch.uint8, device=some.device)
            for each in rows:
                _copy_rows(each, some, begin, gathered, first)
            block[kept.at + first : kept.at + last].copy_(gathered, non_blocking=True)


def make_staging(
    views: Mapping[str, torch.Tensor],
    settings: WeightsSettings,
    shard: bool = False,
    allocate: Allocate | None = None,
    advance: Callable[[], object] = lambda: None,
    host_share: float = HOST_SHARE,
    device_share: float = DEVICE_SHARE,
) -> WeightStaging:
    """Decide once how this rank applies updates: staged if memory allows, otherwise in place.

    Host memory of one rank is ready after `arrival.end_pinning`. Several ranks stage their shards unless
    `weights.apply` is in_place: all ranks must do the same. Raises ValueError if memory is too small for the settings.
    """
    asked, cuda = settings.apply, any(view.is_cuda for view in views.values())
    memory: KeptMemory
    if asked == "in_place":
        memory = InPlaceMemory(views)
    else:
        memory = StagedMemory(views, settings.staging, allocate, shard, advance=advance, device_share=device_share)
        if not shard and memory.place == "host":
            nbytes = parameter_bytes(views)
            if asked == "auto" and nbytes > host_share * available_bytes():
                memory = InPlaceMemory(views)
            elif cuda:
                memory.arrival.begin_pinning(nbytes)
    # It costs generation time, or memory that KV could have.
    level = logging.INFO if (memory.in_place and asked == "auto") or memory.device_bytes else logging.DEBUG
    where = f", in {memory.device_bytes / 2**30:.2f} GiB of the device's memory" if memory.device_bytes else ""
    _log.log(level, "updates of the weights apply %s%s", memory.name, where, extra={"bytes": memory.device_bytes})
    return WeightStaging(memory)


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
    """The rows as they are, but with a copy for each long row."""
    for each in rows:
        start, step, width, times = each.target
        if times == 1 or width < _LONG_BYTES:
            yield each
            continue
        for i in range(times):
            yield KeptRows(each.source + i * each.source_step, 0, ByteRows(start + i * step, 0, width, 1))


def _copy_rows(rows: KeptRows, source: torch.Tensor, source_at: int, target: torch.Tensor, target_at: int) -> None:
    """Copy rows. `source` begins at byte `source_at` of the whole tensor, `target` at byte `target_at` of its part."""
    placed = rows.target._replace(start=rows.target.start - target_at)
    copy_rows(placed, source[rows.source - source_at :], rows.source_step, target)
