"""The layout of an update's tensors in the memory of one rank, and which of their bytes it keeps.

A model on one GPU is a group of one rank that keeps the whole stream: memory and stream have the same layout. A rank of
several keeps what its shard needs, in the order of its parameters:

    stream of whole tensors    |------ a ------|---- b ----|-------- c --------|     comes in pieces, in any order
    the shard's part               |== a ==|     |= b =|      |= c =|   |= c =|
    staging memory             |== a ==|= b =|= c == c =|
                               '--- one copy of a swap ----'                         these lie side by side in it, too
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from rollout.models.cut import Cut, CutView, whole_shape
from rollout.weights.parameter_map import ManifestFit
from rollout.weights.staged_weights import Copy
from trainer_bridge.transports.tensors import TORCH_DTYPES, ByteRows, rows_within
from trainer_bridge.wire.manifest import DTYPE_BYTES, Manifest, Places, TensorEntry

_ALIGN = 64


class KeptRows(NamedTuple):
    """Rows of a whole tensor, by bytes, and where they lie in the kept part of it."""

    source: int
    source_step: int
    target: ByteRows


def cut_rows(shape: tuple[int, ...], itemsize: int, cut: Cut | None, lo: int, hi: int) -> Iterator[KeptRows]:
    """The rows that a cut keeps of bytes `lo` to `hi` of a whole tensor, and their places in the kept part."""
    if cut is None:
        if lo < hi:
            yield KeptRows(lo, 0, ByteRows(lo, 0, hi - lo, 1))
        return
    inner = itemsize * math.prod(shape[cut.dim + 1 :])
    row, kept_row, offset = cut.whole * inner, cut.kept * inner, 0
    for begin, end in ((begin * inner, end * inner) for begin, end in cut.ranges):
        for start, step, width, times in rows_within(row, begin, end, lo, hi):
            at = start // row * kept_row + offset + start % row - begin
            yield KeptRows(start, step, ByteRows(at, kept_row if step else 0, width, times))
        offset += end - begin


def in_words(entry: TensorEntry, cut: Cut | None) -> bool:
    """Whether each kept range of a tensor begins and ends between words of 16 bits: codes have 8 bits."""
    inner = DTYPE_BYTES[entry.dtype] * (1 if cut is None else math.prod(entry.shape[cut.dim + 1 :]))
    edges = [math.prod(entry.shape)] if cut is None else [cut.whole, *(edge for pair in cut.ranges for edge in pair)]
    return not any(edge * inner % 2 for edge in edges)


class Kept(NamedTuple):
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

    @property
    def end(self) -> int:
        return self.at + self.nbytes

    @property
    def halves_words(self) -> bool:
        """Whether the words of changes, two bytes each, are not whole in a part of the tensor."""
        return DTYPE_BYTES[self.entry.dtype] == 1 and self.entry.shape[-1] % 2 == 1


class Layout(NamedTuple):
    """The layout of an update, which later ones may share."""

    digest: str = ""  # digest of the manifest's layout
    places: Places = Places()  # places of whole tensors in the stream
    fit: ManifestFit = ManifestFit((), ())
    kept: Mapping[str, Kept] = {}  # tensors by name, in the order of the memory
    sizes: Sequence[int] = ()  # bytes of each block
    is_stream: bool = False  # the memory has the bytes of the stream at their places

    def within(self, start: int, end: int) -> Iterator[Kept]:
        """The kept tensors that have bytes from `start` to `end` of the stream, in its order."""
        for _, entry, *_ in self.places.within(start, end):
            if (kept := self.kept.get(entry.name)) is not None:
                yield kept

    def copies(self, blocks: Sequence[torch.Tensor]) -> Iterator[Copy]:
        """The copies of a swap, each of tensors that lie side by side in the parameters and in the memory."""
        copied = set(self.fit.copied)
        order = [kept for kept in self.kept.values() if kept.entry.name in copied]
        at = 0
        while at < len(order):
            first, end = order[at], at + 1
            while end < len(order) and _follows(order[end - 1], order[end]) and order[end - 1].end == order[end].at:
                end += 1
            if end == at + 1:
                yield first.target, values_of(first, blocks[first.block])
            else:
                count = sum(kept.target.numel() for kept in order[at:end])
                staged = blocks[first.block][first.at :][: count * first.target.element_size()]
                yield first.target.as_strided((count,), (1,)), staged.view(first.target.dtype)
            at = end


def values_of(kept: Kept, block: torch.Tensor) -> torch.Tensor:
    """The kept part of a tensor in its block."""
    return block[kept.at : kept.end].view(TORCH_DTYPES[kept.entry.dtype]).view(kept.shape)


def target_of(view: torch.Tensor) -> tuple[torch.Tensor, Cut | None]:
    """The tensor of a view that takes the kept part, and the cut that makes this part."""
    return (view.kept_part, view.cut) if isinstance(view, CutView) else (view, None)


def is_plain(target: torch.Tensor) -> bool:
    return type(target) in (torch.Tensor, torch.nn.Parameter) and target.is_contiguous()


def lay_out_stream(views: Mapping[str, torch.Tensor], manifest: Manifest, fit: ManifestFit) -> Layout:
    """The layout of a rank that keeps all of the stream."""
    names = {*fit.copied, *(other for _, other in fit.aliases)}
    kept = {
        entry.name: Kept(entry, views[entry.name], None, entry.shape, 0, entry.offset)
        for entry in manifest.tensors
        if entry.name in names and entry.nbytes
    }
    return Layout(manifest.layout_digest, manifest.places, fit, kept, [manifest.total_bytes], is_stream=True)


def lay_out_parts(
    views: Mapping[str, torch.Tensor], manifest: Manifest, fit: ManifestFit, block_bytes: int | None = None
) -> Layout:
    """The layout of kept parts in the order of the parameters. Without `block_bytes` they are in one block."""
    names = [*fit.copied, *(other for _, other in fit.aliases)]
    entries = {entry.name: entry for entry in manifest.tensors}
    targets = {name: target_of(views[name]) for name in names}
    order = sorted(fit.copied, key=lambda name: targets[name][0].data_ptr()) + names[len(fit.copied) :]
    laid: dict[str, Kept] = {}
    last: Kept | None = None
    sizes = [0]
    for name in order:
        target, cut = targets[name]
        if target.numel() == 0:
            continue
        kept = Kept(entries[name], target, cut, whole_shape(target), len(sizes) - 1, sizes[-1])
        if last is None or not _follows(last, kept):
            kept = kept._replace(at=-(-sizes[-1] // _ALIGN) * _ALIGN)
        if block_bytes is not None and kept.at and kept.end > block_bytes:
            sizes.append(0)
            kept = kept._replace(block=len(sizes) - 1, at=0)
        sizes[-1] = kept.end
        laid[name] = last = kept
    return Layout(manifest.layout_digest, manifest.places, fit, laid, sizes)


def _follows(before: Kept, after: Kept) -> bool:
    """Whether two tensors lie side by side in the parameters, in the type that is staged."""
    if before.block != after.block:
        return False
    a, b = before.target, after.target
    if not (is_plain(a) and is_plain(b)) or a.dtype != b.dtype:
        return False
    staged = {TORCH_DTYPES[before.entry.dtype], TORCH_DTYPES[after.entry.dtype]}
    same = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    return same and staged == {a.dtype} and a.data_ptr() + a.numel() * a.element_size() == b.data_ptr()
