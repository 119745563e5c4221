"""The tensors of one `publish`, and the packing of their bytes into buckets.

Nothing is copied before a transport requests a bucket. A bucket is filled directly from the tensors: on a GPU by
copies to pinned memory on a side stream, ordered after all work that was on the trainer's current stream when `publish`
was called.
"""

import contextlib
import functools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from trainer_bridge.transports.cut import Cut
from trainer_bridge.transports.sections import Sections
from trainer_bridge.transports.shards import LentParts, Shards, is_spread
from trainer_bridge.transports.tensors import TORCH_DTYPES, ByteRows, copy_rows, typed_view
from trainer_bridge.wire.delta import WeightDelta
from trainer_bridge.wire.errors import RolloutError
from trainer_bridge.wire.manifest import DTYPE_BYTES, Manifest, TensorEntry, pack, usual_bucket_bytes

#: (tensor, first, past the last element, out): writes these elements of a DTensor, as bytes.
_Write = Callable[[int, int, int, torch.Tensor], None]

NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]

_log = logging.getLogger(__name__)

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class Payload:
    """An update to publish. Holds references to the tensors until `release`.

    With `spread` tensors may be DTensors, whose parts are fetched from the ranks that hold them. `bucket_bytes` None
    means the usual size. With `once` a tensor that comes under several names has the first one, until
    `use_every_name`; not with `spread`, since all ranks must do the same.

    Raises ValueError for tensors that cannot be sent: a dtype that is not in `TORCH_DTYPES`, sparse tensors, or
    several CUDA devices.
    """

    def __init__(
        self,
        named_tensors: NamedTensors,
        version: int,
        bucket_bytes: int | None,
        spread: bool = False,
        once: bool = False,
    ) -> None:
        if isinstance(named_tensors, torch.nn.Module):
            raise ValueError("publish takes the tensors by name, not the model; pass model.state_dict()")
        pairs = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
        tensors = [(name, _checked(name, tensor)) for name, tensor in pairs]
        if not tensors:
            raise ValueError("there are no tensors to publish; pass every parameter of the model")
        if bucket_bytes is None:  # the same on all ranks, even if the tensors of some are not on a GPU
            total_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
            bucket_bytes = usual_bucket_bytes(total_bytes, torch.cuda.is_available())
        self._version, self._bucket_bytes = version, bucket_bytes
        self._every = tensors
        #: Names that are left out, and the name of the same tensor.
        self.tied = _tied(tensors) if once and not spread else {}
        self._tensors: list[torch.Tensor]
        self._arrange()
        self.shards: Shards | None = None
        if any(is_spread(tensor) for tensor in self._tensors) or spread:
            if not spread:
                raise ValueError(
                    "some tensors are DTensors, spread over ranks: make the WeightPublisher with collective=True, and "
                    "publish, on every rank"
                )
            self.shards = Shards(self._tensors, self.manifest.digest)
            self._tensors = self.shards.locals
        self.adapter: dict[str, Any] | None = None  # name and configuration; None for the model
        self.on_release: Callable[[], object] = lambda: None
        self.again = False  # a kept update that is sent again
        self.content = ""  # names the update's bytes, for workers that may take changes to them later
        self.delta: WeightDelta | None = None  # the tensors are the codes of changes
        #: The update's own manifest, if the tensors are codes or `sections`.
        self.update: Manifest | None = None
        self.sections: Sections | None = None
        self._keep_in: Callable[[], torch.Tensor] | None = None
        self._kept: torch.Tensor | None = None
        self._borrow = self.shards is not None  # rank 0 has not asked yet whether the other ranks lend
        self._lent: LentParts | None = None
        self._packing = threading.Lock()  # senders of several transports pack at the same time
        self._readers = 1
        self._released = threading.Event()
        self._stream, self._after = _side_stream(self._tensors)

    def _arrange(self) -> None:
        tensors = [(name, tensor) for name, tensor in self._every if name not in self.tied]
        facts = ((name, _NAMES[tensor.dtype], tensor.shape) for name, tensor in tensors)
        self.manifest: Manifest = pack(self._version, facts, self._bucket_bytes)
        self._tensors = [tensor for _, tensor in tensors]

    def begin_fields(self) -> dict[str, Any]:
        """The fields of `begin` that describe the update."""
        manifest = self.update or self.manifest
        optional = {
            "content": self.content,
            "delta": self.delta and self.delta.to_wire(),
            "adapter": self.adapter,
            "tied": self.tied,
            "sections": self.sections and self.sections.digest,
        }
        fields = {"version": manifest.version, "manifest": manifest.to_wire()}
        return fields | {name: value for name, value in optional.items() if value}

    def use_every_name(self) -> None:
        """List each tensor under all of its names. Call it before anything is sent."""
        self.tied = {}
        self.use_whole()
        self._arrange()

    @property
    def may_be_cut(self) -> bool:
        """Whether it may be sent in sections: it is not kept in another order."""
        return self.adapter is None and self.delta is None and self._keep_in is None

    def use_sections(self, sections: Sections) -> None:
        """Send the parts that a worker's ranks keep, in the place of whole tensors, until `use_whole`."""
        self.update, self.sections = self.manifest, sections
        self.manifest = sections.of_version(self.manifest.version)
        self._tell_ranks()

    def use_whole(self) -> None:
        """Send whole tensors again. Call it before anything is sent."""
        if self.update is not None and self.sections is not None:
            self.manifest, self.update, self.sections = self.update, None, None
            self._tell_ranks()

    def _tell_ranks(self) -> None:
        """Rank 0: have the other ranks pack the same stream."""
        if self.shards is not None and self.shards.ranks is not None:
            self.shards.ranks.cut(self.sections, self.update or self.manifest)
            self._borrow, self._lent = True, None

    @property
    def lends(self) -> bool:
        """Rank 0: whether the other ranks' parts come through memory that its GPU reads."""
        return self._lent_parts() is not None

    def _part(self, index: int) -> tuple[int, Cut | None]:
        """The number of the whole tensor of entry `index` of the manifest, and the cut of this part."""
        return (index, None) if self.sections is None else self.sections.parts[index]

    @property
    def spread(self) -> bool:
        """Whether other ranks hold parts of it."""
        return self.shards is not None and any(box is not None for box in self.shards.boxes)

    @property
    def on_gpu(self) -> bool:
        """Whether buckets should be pinned."""
        return self._stream is not None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self._stream is None else self._stream.device

    def keep_in(self, memory: Callable[[], torch.Tensor] | None) -> None:
        """Keep sent bytes in `memory()`, host memory for the whole stream; it is called at the first bytes."""
        self._keep_in, self._kept = memory, None

    @property
    def kept(self) -> torch.Tensor | None:
        """The memory that keeps the sent bytes, if any."""
        if self._kept is None and self._keep_in is not None:
            self._kept = self._keep_in()
        return self._kept

    def keep_all(self, stop: threading.Event) -> None:
        """Keep the whole stream unless all of it was sent. Raises as `pack_bucket`, and once `stop` is set."""
        kept = self.kept
        if kept is None or self._released.is_set():
            return
        for index in range(self.manifest.bucket_count):
            if stop.is_set():
                raise RolloutError("keep: the publisher was closed", code="closed")
            with self._packing:
                self._fill(index, kept[self.manifest.bucket_span(index)[0] :])
                self._synchronize()

    def pack_bucket(self, index: int, out: torch.Tensor) -> int:
        """Write bucket `index` to the start of `out` (uint8, on the host or `device`), complete on return.

        Returns the number of bytes. Raises `RolloutError` if the tensors were released meanwhile.
        """
        nbytes = self.start_bucket(index, out)
        self._synchronize()
        return nbytes

    def start_bucket(self, index: int, out: torch.Tensor) -> int:
        """`pack_bucket` without the wait: on a GPU only later work in `on_side_stream` may read the bytes."""
        with self._packing:
            start, end = self._fill(index, out)
            if (kept := self.kept) is not None:
                self._synchronize()
                kept[start:end].copy_(out[: end - start])
            return end - start

    def _fill(self, index: int, out: torch.Tensor) -> tuple[int, int]:
        """Begin to write a bucket; return its start and end in the stream."""
        self._check_there()
        start, end = self.manifest.bucket_span(index)
        with self.on_side_stream():
            try:
                if (lent := self._lent_parts()) is not None:
                    self._put_together(lent, index, start, end, out)
                    return start, end
            except torch.cuda.OutOfMemoryError as error:
                _log.warning("a bucket of weights comes through host memory: %s", str(error).partition("\n")[0])
            self._pack(start, end, out, self._fetch)
        return start, end

    def _put_together(self, lent: LentParts, index: int, start: int, end: int, out: torch.Tensor) -> None:
        """Write a bucket of parts that rank 0's GPU reads; if `out` is on the host, in memory of that GPU first."""
        there = out.device == self.device
        data = out if there else torch.empty(end - start, dtype=torch.uint8, device=self.device)
        copies: list[tuple[ByteRows, torch.Tensor, int, torch.Tensor]] = []
        with lent.bucket(index):  # all reads first: a GPU that processes share changes slowly from reads to copies
            for i, entry, lo, hi in self.manifest.places.within(start, end):
                if self.shards is not None and self.shards.spread(self._part(i)[0]):
                    copies += self._read_lent(i, *_elements(entry, lo, hi), data[lo - start : hi - start])
        for copy in copies:
            copy_rows(*copy)
        self._pack(start, end, data, lambda *_: None)
        if not there:
            out[: end - start].copy_(data, non_blocking=True)

    def _lent_parts(self) -> LentParts | None:
        """Access to the other ranks' parts in memory that they lend; None if they lend no memory or need not."""
        if self._borrow:
            self._borrow = False
            assert self.shards is not None
            if self.spread and self.shards.ranks is not None:
                self._lent = self.shards.ranks.borrow(self.shards.lenders, self.manifest, self.device)
        return self._lent

    def pack_portions(self, outs: Mapping[int, torch.Tensor]) -> None:
        """Other ranks: write what rank 0 expects of each of these buckets, complete on return.

        This rank's rows of a tensor follow each other, at the place where the tensor's bytes begin in the bucket.
        Raises `RolloutError` if the tensors were released.
        """
        with self._packing:
            self._check_there()
            with self.on_side_stream():
                for index, out in outs.items():
                    self._pack_portion(*self.manifest.bucket_span(index), out)
            self._synchronize()

    def _pack_portion(self, start: int, end: int, out: torch.Tensor) -> None:
        assert self.shards is not None, "a collective publisher's payload knows its shards"
        for i, entry, lo, hi in self.manifest.places.within(start, end):
            at, itemsize = lo - start, DTYPE_BYTES[entry.dtype]
            number, cut = self._part(i)
            if not self.shards.mine[number]:
                continue
            for portion in self.shards.own_portion(number, *_elements(entry, lo, hi), cut):
                rows = portion.rows
                source, step = self.shards.own_bytes(number, portion)
                width = rows.width * itemsize
                copy_rows(ByteRows(0, width, width, rows.times), source, step, out[at:])
                at += width * rows.times

    def pack_pieces(
        self,
        pieces: Sequence[tuple[int, int, int]],
        out: torch.Tensor,
        columns: Sequence[tuple[ByteRows, int]] = (),
    ) -> None:
        """Write the pieces that this trainer rank sends: (first byte in the stream, past the last, place in `out`).

        After them come its `columns`: rows of the stream, and their place in `out`. Both are sorted by place; `out` is
        zero between them. Otherwise as `start_bucket`.
        """
        with self._packing:
            self._check_there()
            written = pieces[0][2] if pieces else columns[0][1]
            with self.on_side_stream():
                for start, end, at in pieces:
                    out[written:at].zero_()
                    written = at + end - start
                    self._pack(start, end, out[at:written], self._write_own)
                for rows, at in columns:
                    out[written:at].zero_()
                    written = at + rows.width * rows.times
                    self._pack_rows(rows, out[at:written])

    def _pack_rows(self, rows: ByteRows, out: torch.Tensor) -> None:
        i = self.manifest.places.at(rows.start)
        entry = self.manifest.tensors[i]
        assert self.shards is not None, "columns are of DTensors"
        own = self.shards.own_rows(i, (rows.start - entry.offset) // DTYPE_BYTES[entry.dtype], rows.times)
        out.view(own.dtype).view(own.shape).copy_(own, non_blocking=own.is_cuda)

    def _pack(self, start: int, end: int, out: torch.Tensor, spread: _Write) -> None:
        """Write bytes `start` to `end` of the stream; `spread` writes elements of a DTensor."""
        written = 0
        for i, entry, lo, hi in self.manifest.places.within(start, end):
            out[written : lo - start].zero_()  # padding between tensors: no byte of an old bucket is sent
            self._copy_piece(i, entry, lo, hi, out[lo - start : hi - start], spread)
            written = hi - start
        out[written : end - start].zero_()

    def wait_packed(self) -> None:
        """Return when all packing that was started has finished."""
        with contextlib.suppress(RuntimeError):  # the device may be gone
            self._synchronize()

    def _check_there(self) -> None:
        if self._released.is_set():
            raise RolloutError("transfer: the tensors were released before they were sent", code="closed")

    def _synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _fetch(self, i: int, first: int, last: int, out: torch.Tensor) -> None:
        assert self.shards is not None
        number, cut = self._part(i)
        if cut is None:
            out.copy_(self.shards.fetch(number, first, last).view(torch.uint8))  # the fetched rows are freed on return
            return
        shape = self.shards.shapes[number]
        whole = self.shards.fetch(number, 0, math.prod(shape)).view(shape)
        out.copy_(cut.take(whole).reshape(-1)[first:last].view(torch.uint8))

    def _write_own(self, i: int, first: int, last: int, out: torch.Tensor) -> None:
        assert self.shards is not None
        own = self.shards.own_run(i, first, last)
        if own is None:
            self._fetch(i, first, last, out)
        else:
            out.copy_(own.view(torch.uint8), non_blocking=own.is_cuda)

    def _read_lent(
        self, i: int, first: int, last: int, out: torch.Tensor
    ) -> list[tuple[ByteRows, torch.Tensor, int, torch.Tensor]]:
        """Read the lent rows of these elements; returns the copies to make then, as `copy_rows` takes them."""
        shards, lent, entry = self.shards, self._lent, self.manifest.tensors[i]
        assert shards is not None and lent is not None
        number, cut = self._part(i)
        portions = shards.portions(number, first, last, cut)
        if portions is None:
            self._fetch(i, first, last, out)
            return []
        copies, itemsize = [], DTYPE_BYTES[entry.dtype]
        for rank, portion in portions:
            byte = entry.offset + first * itemsize
            for each in portion:
                rows = each.rows
                place = ByteRows(
                    (rows.start - first) * itemsize, rows.step * itemsize, rows.width * itemsize, rows.times
                )
                nbytes = place.width * place.times
                if rank == 0:
                    copies.append((place, *shards.own_bytes(number, each), out))
                elif place.times == 1 or place.step == place.width:
                    lent.read(rank, byte, out[place.start : place.start + nbytes])
                else:
                    together = torch.empty(nbytes, dtype=torch.uint8, device=out.device)
                    lent.read(rank, byte, together)
                    copies.append((place, together, place.width, out))
                byte += nbytes
        return copies

    def host_copy(self, index: int) -> torch.Tensor:
        """Tensor number `index` as a contiguous copy in host memory. Complete on return."""
        entry = self.manifest.tensors[index]
        out = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
        with self._packing, self.on_side_stream():
            if self.shards is not None and self.shards.spread(index):
                out.view(-1).copy_(self.shards.fetch(index, 0, out.numel()))
            else:
                out.copy_(self._tensors[index])
        if (kept := self.kept) is not None:
            typed_view(kept, entry).copy_(out)
        return out

    def expect_readers(self, count: int) -> None:
        """Set how many senders will call `read` before the tensors are free."""
        with self._packing:
            self._readers = count

    def read(self) -> None:
        """Note that a sender no longer reads the tensors."""
        with self._packing:
            self._readers -= 1
            last = self._readers == 0
        if last:
            self.release()

    def release(self) -> None:
        """Drop the tensors: the trainer may change them from now on."""
        with self._packing:
            if self._released.is_set():
                return
            self.wait_packed()  # a sender that failed may have begun to copy
            self._tensors, self._every = [], []
            self.shards = self._lent = None
            self._borrow = False
            self._released.set()
        self.on_release()

    def wait_released(self, timeout: float | None) -> bool:
        """Wait until `release` was called; false when `timeout` seconds pass first."""
        return self._released.wait(timeout)

    def _copy_piece(
        self,
        i: int,
        entry: TensorEntry,
        lo: int,
        hi: int,
        out: torch.Tensor,
        spread: _Write,
    ) -> None:
        first, last = _elements(entry, lo, hi)
        number, cut = self._part(i)
        if self.shards is not None and self.shards.spread(number):
            spread(i, first, last, out)
            return
        tensor = self._tensors[number]
        if cut is not None and tensor.is_contiguous():
            source, shape = tensor.view(-1).view(torch.uint8), tuple(tensor.shape)
            part = out if out.device == source.device else source.new_empty(hi - lo)  # one copy to the host
            for at, step, rows in cut.rows(shape, tensor.element_size(), lo - entry.offset, hi - entry.offset):
                copy_rows(rows._replace(start=rows.start - (lo - entry.offset)), source[at:], step, part)
            if part is not out:
                out[: hi - lo].copy_(part, non_blocking=True)
            return
        if not tensor.is_contiguous() and tensor.ndim and (cut is None or cut.dim):
            inner = math.prod(entry.shape[1:])  # copy the rows that have these elements, not the whole tensor
            top = first // inner
            tensor, first, last = tensor[top : -(-last // inner)], first - top * inner, last - top * inner
        part = tensor if cut is None else cut.take(tensor)
        piece = part.contiguous().view(-1)[first:last]
        # Copied as bytes: a tensor may begin at any byte of a bucket part.
        out.copy_(piece.view(torch.uint8), non_blocking=piece.is_cuda)

    @contextlib.contextmanager
    def on_side_stream(self) -> Iterator[None]:
        """Context for work that runs after the enqueued packing, and after the trainer's work before `publish`."""
        if self._stream is None or self._after is None:
            yield
            return
        self._stream.wait_event(self._after)
        # Without the first, leaving the second would make the thread's device current, with a context there.
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            yield


def _tied(tensors: Sequence[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Names of tensors that are an earlier one under another name, as `state_dict` has tied embeddings; that name."""
    first: dict[tuple, str] = {}  # names by memory
    tied = {}
    for name, tensor in tensors:
        if tensor.numel() and not is_spread(tensor):  # other tensors have no address of their own
            memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            if first.setdefault(memory, name) != name:
                tied[name] = first[memory]
    return tied


def _checked(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}; publish torch tensors")
    if tensor.dtype not in _NAMES or tensor.layout != torch.strided:
        raise ValueError(f"{name} is {tensor.dtype}, {tensor.layout}; publish dense {', '.join(TORCH_DTYPES)} tensors")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on {tensor.device}; move it to the CPU or a CUDA device")
    return tensor.detach()


def _elements(entry: TensorEntry, lo: int, hi: int) -> tuple[int, int]:
    """The elements of a tensor in bytes `lo` to `hi` of the stream."""
    itemsize = DTYPE_BYTES[entry.dtype]
    return (lo - entry.offset) // itemsize, (hi - entry.offset) // itemsize


def _side_stream(tensors: list[torch.Tensor]) -> tuple[torch.cuda.Stream | None, torch.cuda.Event | None]:
    devices = sorted({tensor.device.index for tensor in tensors if tensor.is_cuda})
    if not devices:
        return None, None
    if len(devices) > 1:
        raise ValueError(f"the tensors are on CUDA devices {devices}; gather them on one before publishing")
    after = torch.cuda.Event()
    after.record(torch.cuda.current_stream(devices[0]))
    return _stream_of(devices[0]), after


@functools.cache
def _stream_of(device: int) -> torch.cuda.Stream:
    """The side stream of a GPU, one for all updates: torch reuses memory only on its first stream."""
    return torch.cuda.Stream(device)
