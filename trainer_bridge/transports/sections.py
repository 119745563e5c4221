"""An update that is cut for the ranks of a worker before it is sent: the plan assigns its bytes to ranks.

    whole stream      |------ a ------|---- b ----|-------- c --------|          as the update's manifest has it
    rank 0 keeps      |== a ==|       |= b =|     |= c =|   |= c =|
    sections          |== a ==|= b =|= c == c =|....|== a ==|= b =|= c == c =|   rank 0's bytes, then rank 1's, ..
                      ^ bucket                      ^ bucket

A section has the parts of tensors that one rank keeps, in the order of the manifest, so that a rank copies its bytes in
one run for each tensor, and reads no other bytes. Each section begins with a bucket: a bucket belongs to one rank.
Buckets of all ranks are sent in turn, so that all ranks copy at the same time; the last rank's come first, since a
worker's first rank takes its own buckets itself, and only orders other ranks to read.

Both sides make the plan, from the update's manifest and the cuts of all ranks. A worker names its cuts once, in the
answer to a `begin` whose `sections` is empty. A later `begin` has the digest of the plan, and a worker with other cuts
refuses it. The digest covers the manifest's layout, every cut, and the plan with the order of its buckets.
"""

import bisect
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from trainer_bridge.transports.cut import Cut
from trainer_bridge.wire.errors import ProtocolError
from trainer_bridge.wire.manifest import ALIGN_BYTES, Manifest, TensorEntry

#: The part of each tensor that one rank keeps, by name; None: all of it. It keeps nothing of tensors without an entry.
RankCuts = Mapping[str, Cut | None]

_MAX_RANKS = 64
_MAX_RANGES = 64


@dataclass(frozen=True)
class SectionsManifest(Manifest):
    """The manifest of a stream of sections. `order` has the place in the stream, in buckets, of each bucket sent."""

    order: tuple[int, ...] = ()

    def bucket_span(self, index: int) -> tuple[int, int]:
        """First and past-the-last byte in the stream of the bucket that is sent as number `index`."""
        return super().bucket_span(self.order[index])


@dataclass(frozen=True)
class Sections:
    """A plan. `manifest` describes the stream of all sections; its entries have the names of the whole tensors.

    `parts` has the tensor of each entry, by its number in the update's manifest, and the cut. `begins` has the place of
    each rank's section in the stream; `ranks` and `cuts` are what it was planned from, and the digest of that.
    """

    cuts: str
    manifest: SectionsManifest
    parts: tuple[tuple[int, Cut | None], ...]
    begins: tuple[int, ...]
    ranks: tuple[RankCuts, ...]

    @cached_property
    def digest(self) -> str:
        """BLAKE2b (hex) of the plan: publisher and worker make their own, perhaps by different releases."""
        planned = [self.cuts, self.manifest.layout_digest, self.begins, self.manifest.order]
        text = json.dumps(planned, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def of_version(self, version: int) -> SectionsManifest:
        """The manifest for an update of the same layout."""
        return replace(self.manifest, version=version)

    def of_rank(self, rank: int) -> tuple[TensorEntry, ...]:
        starts = [entry.offset for entry in self.manifest.tensors]
        begin = bisect.bisect_left(starts, self.begins[rank])
        last = rank + 1 == len(self.begins)
        return self.manifest.tensors[begin : len(starts) if last else bisect.bisect_left(starts, self.begins[rank + 1])]


def plan_sections(whole: Manifest, ranks: Sequence[RankCuts]) -> Sections:
    """The plan of an update with this manifest. The cuts fit its shapes."""
    lengths = [_length(whole, cuts) for cuts in ranks]
    longest = max(lengths, default=0)
    buckets = max(1, -(-longest // whole.bucket_bytes))
    # Sections end with their last bucket: of equal ones little is padding.
    bucket_bytes = max(ALIGN_BYTES, _aligned(-(-longest // buckets)))
    entries: list[TensorEntry] = []
    parts: list[tuple[int, Cut | None]] = []
    begins: list[int] = []
    sent: list[tuple[int, int]] = []  # buckets: number in the section, minus the place in the stream
    at = 0
    for cuts, length in zip(ranks, lengths, strict=True):
        begins.append(at)
        first = at // bucket_bytes
        sent += [(number, -first - number) for number in range(-(-length // bucket_bytes))]
        for entry, number, cut in section_of(whole, cuts, at):
            entries.append(entry)
            parts.append((number, cut))
        at += -(-length // bucket_bytes) * bucket_bytes
    manifest = SectionsManifest(whole.version, tuple(entries), bucket_bytes, tuple(-at for _, at in sorted(sent)))
    return Sections(cuts_digest(whole, ranks), manifest, tuple(parts), tuple(begins), tuple(ranks))


def section_of(whole: Manifest, cuts: RankCuts, begin: int) -> list[tuple[TensorEntry, int, Cut | None]]:
    """The section of one rank, from byte `begin` on: the kept part of each tensor, its number, and the cut."""
    section, at = [], begin
    for number, entry in enumerate(whole.tensors):
        if entry.name not in cuts:
            continue
        cut = cuts[entry.name]
        part = TensorEntry(entry.name, entry.dtype, entry.shape if cut is None else cut.shape(entry.shape), at)
        if part.nbytes:
            section.append((part, number, cut))
            at = _aligned(part.end)
    return section


def _length(whole: Manifest, cuts: RankCuts) -> int:
    """Bytes of the section of one rank."""
    sizes: dict[tuple[str, tuple[int, ...], Cut | None], int] = {}  # many tensors are of one kind
    length = 0
    for entry in whole.tensors:
        if entry.name in cuts:
            kind = entry.dtype, entry.shape, cuts[entry.name]
            if (nbytes := sizes.get(kind)) is None:
                shape = entry.shape if kind[2] is None else kind[2].shape(entry.shape)
                nbytes = sizes[kind] = TensorEntry("", entry.dtype, shape, 0).nbytes
            length += _aligned(nbytes)
    return length


def cuts_digest(whole: Manifest, ranks: Sequence[RankCuts]) -> str:
    """BLAKE2b (hex) of an update's layout and of what each rank keeps of it."""
    text = json.dumps([whole.layout_digest, cuts_to_wire(whole, ranks)], separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def cuts_to_wire(whole: Manifest, ranks: Sequence[RankCuts]) -> dict[str, Any]:
    """The cuts of an update's tensors as plain data: the different ones, and by rank the number of each tensor's.

    The number is -1 for a tensor that a rank does not keep.
    """
    numbers: dict[Cut | None, int] = {None: 0}
    rows = [
        [numbers.setdefault(cuts[entry.name], len(numbers)) if entry.name in cuts else -1 for entry in whole.tensors]
        for cuts in ranks
    ]
    return {
        "cuts": [None if cut is None else [cut.dim, cut.whole, [list(pair) for pair in cut.ranges]] for cut in numbers],
        "ranks": rows,
    }


def cuts_from_wire(value: Any, whole: Manifest) -> list[RankCuts]:
    """Read what `cuts_to_wire` wrote for the same manifest. Raises `ProtocolError` for anything else."""
    if type(value) is not dict or value.keys() != {"cuts", "ranks"} or type(value["cuts"]) is not list:
        raise ProtocolError("the cuts of ranks must be a map of cuts and ranks")
    cuts = [_read_cut(each) for each in value["cuts"]]
    rows = value["ranks"]
    if type(rows) is not list or not 1 <= len(rows) <= _MAX_RANKS:
        raise ProtocolError(f"ranks must be a list of 1 to {_MAX_RANKS} ranks")
    ranks: list[RankCuts] = []
    for row in rows:
        if type(row) is not list or len(row) != len(whole.tensors):
            raise ProtocolError("each rank must have one cut for each tensor of the manifest")
        kept: dict[str, Cut | None] = {}
        for entry, number in zip(whole.tensors, row, strict=True):
            if type(number) is not int or not -1 <= number < len(cuts):
                raise ProtocolError(f"a rank's cut of {entry.name} has no valid number")
            if number >= 0:
                kept[entry.name] = cut = cuts[number]
                if cut is not None and (cut.dim >= len(entry.shape) or entry.shape[cut.dim] != cut.whole):
                    raise ProtocolError(f"a rank's cut of {entry.name} does not fit its shape {list(entry.shape)}")
        ranks.append(kept)
    return ranks


def _read_cut(value: Any) -> Cut | None:
    if value is None:
        return None
    if type(value) is not list or len(value) != 3 or type(value[2]) is not list or len(value[2]) > _MAX_RANGES:
        raise ProtocolError("a cut must be a list of dimension, size and ranges")
    dim, whole, pairs = value
    if any(type(pair) is not list or len(pair) != 2 for pair in pairs):
        raise ProtocolError("the ranges of a cut must be pairs")
    edges = [edge for pair in pairs for edge in pair]
    numbers = [dim, whole, *edges]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ProtocolError("the numbers of a cut must be integers that are not negative")
    if sorted(edges) != edges or max(edges, default=0) > whole:
        raise ProtocolError("the ranges of a cut must be in ascending order and lie in its dimension")
    return Cut(dim, whole, tuple((begin, end) for begin, end in pairs))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
