"""An update that arrives as changes to the last one, on one rank.

    codes arrive --> host memory of their own, or the device's --all verified--> bucket by bucket:
                     places and values --put--> staging memory, which holds the last update --swap--> parameters
                                       --put--> the parameters, in place

The memory that the changes are made in is the *base*. Its name is the name of the content: an update sets it when all
bytes are verified, and the first write there removes it. So codes that are torn, repeated or of another base never
reach it. What a fault could still do is found:

- Staged on one rank, the result has the fingerprint that the publisher computed, bucket by bucket.
- In place, or of several ranks, the base has the fingerprint that it had when it was verified: the publisher's is of
  whole tensors. It is compared before the first change.

Changes in place are made under a hold, which begins when all codes are verified. All codes are checked once more then,
before the first of them is written.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from rollout.models.cut import Cut
from rollout.weights.parameter_map import ManifestFit
from rollout.weights.staging import WeightStaging
from trainer_bridge.transports.changed_words import find_words
from trainer_bridge.transports.fingerprint import fingerprint
from trainer_bridge.wire.delta import WORD_BYTES, Part, WeightDelta, read_content, read_delta
from trainer_bridge.wire.errors import WeightsRejected
from trainer_bridge.wire.manifest import DTYPE_BYTES, Manifest, TensorEntry

_ROUND_S = 0.02  # seconds of work before the receiver's thread looks at its messages again


class UpdateContent(NamedTuple):
    """The name of an update's bytes (empty: it has none), and how they come; None: whole."""

    name: str = ""
    delta: WeightDelta | None = None

    def to_wire(self) -> dict[str, Any]:
        """The fields of `begin`."""
        fields = {"content": self.name} if self.name else {}
        return fields if self.delta is None else {**fields, "delta": self.delta.to_wire()}


#: A whole update that is no base of others.
WHOLE = UpdateContent()


def read_update_content(fields: Mapping[str, Any], manifest: Manifest) -> UpdateContent:
    """Read the output of `to_wire`. Raises `BadRequest` and `WeightsRejected`, naming the field."""
    name, delta = read_content(fields.get("content")), fields.get("delta")
    return UpdateContent(name, None if delta is None else read_delta(delta, manifest))


def open_staging(
    staging: WeightStaging,
    manifest: Manifest,
    fit: ManifestFit,
    on_device: bool,
    content: UpdateContent,
    section: Sequence[TensorEntry] | None = None,
) -> WeightStaging | DeltaStaging:
    """Begin an update in `staging`; returns what takes its bytes. Raises `WeightsRejected` if it lacks the base.

    `section` as in `WeightStaging.open`; an update that comes as changes has none.
    """
    if content.delta is not None:
        return DeltaStaging(staging, manifest, content.delta)
    staging.open(manifest, fit, on_device, section)
    return staging


class DeltaStaging:
    """Takes the codes of a delta, in the place of `staging`, and makes the changes there.

    Raises `WeightsRejected`, with the field `delta`, if the memory does not hold the base.
    """

    def __init__(self, staging: WeightStaging, manifest: Manifest, delta: WeightDelta) -> None:
        if why := staging.base.lacks(manifest, delta.base):
            raise WeightsRejected(
                f"version {manifest.version} came as a delta, but {why}: send it whole", field="delta"
            )
        self._staging, self._base, self._manifest, self._delta = staging, staging.base, manifest, delta
        nbytes, staging.memory.written = delta.codes.total_bytes, False
        try:
            self._codes = staging.memory.codes.reserve(nbytes, slack=nbytes // 4)
        except RuntimeError as error:  # an error of the allocator
            raise WeightsRejected(
                f"the host has too little memory for the codes of a delta: {error!s:.200}", field="delta"
            ) from error
        self._missing = [entry.nbytes for entry in delta.codes.tensors]
        self._left = deque(delta.buckets())
        self._checked = False

    # --- as `WeightStaging`, for codes --------------------------------------------------------------------------------

    def arriving(self, start: int, end: int) -> torch.Tensor:
        return self._codes[start:end]

    def take(self, start: int, data: torch.Tensor) -> torch.cuda.Event | None:
        for number, _, first, end in self._delta.codes.places.within(start, start + data.numel()):
            self._missing[number] -= end - first
        target = self._codes[start : start + data.numel()]
        if target.data_ptr() != data.data_ptr():
            target.copy_(data)  # waits, if the data is on a device
        return None

    def skips(self, start: int, end: int) -> bool:
        """Every rank needs all codes."""
        return False

    def copied(self) -> bool:
        """Make the changes of some buckets; true once all are made. Raises `WeightsRejected` for damaged codes.

        All codes are verified when this is first called.
        """
        until_s = time.monotonic() + _ROUND_S
        try:
            with torch.inference_mode(), self._staging.on_stream():
                if not self._checked:
                    self._begin()
                while self._left and time.monotonic() < until_s:
                    self._change(*self._left.popleft())
        except torch.OutOfMemoryError as error:
            raise WeightsRejected("the GPU has too little memory to apply a delta", field="delta") from error
        return not self._left and self._staging.copied()

    def check(self) -> None:
        """Raise `WeightsRejected` if the result is not the publisher's, or if tensors that are one parameter differ."""
        if (stream := self._base.stream) is not None:
            with torch.inference_mode(), self._staging.on_stream():
                self._check_result(stream)
        self._staging.check()

    # --- changes ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        for entry, missing in zip(self._delta.codes.tensors, self._missing, strict=True):
            if missing:
                raise WeightsRejected(f"the code {entry.name} of a delta did not arrive whole", field="delta")
        if self._staging.in_place:
            for bucket, parts in self._left:
                self._find(bucket, parts)
        self._checked = True
        self._base.forget()

    def _find(self, bucket: int, parts: Mapping[str, TensorEntry]) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The indices of a bucket's changed words (None: all words), and their values, on the base's device."""
        start, end = self._manifest.bucket_span(bucket)
        device = self._base.device
        codes: dict[Part, torch.Tensor] = {
            part: self._codes[entry.offset : entry.end].view(torch.bfloat16).to(device, non_blocking=True)  # type: ignore[misc]
            for part, entry in parts.items()
        }
        if "all" in codes:
            return None, codes["all"].view(torch.int16)
        found = find_words(codes, (end - start) // WORD_BYTES)
        if found is None:
            raise self._bad(bucket, "has codes outside of it, or not one value for each place")
        return found

    def _change(self, bucket: int, parts: Mapping[str, TensorEntry]) -> None:
        index, values = self._find(bucket, parts)
        self._staging.memory.written = self._staging.in_place
        if (stream := self._base.stream) is not None:
            start, end = self._manifest.bucket_span(bucket)
            put_words(stream[start:end], index, values)
        else:
            self._change_kept(bucket, index, values)
        self._staging.note_copies()

    def _change_kept(self, bucket: int, index: torch.Tensor | None, values: torch.Tensor) -> None:
        """Make the changes of a bucket in the parts of its tensors that this rank keeps."""
        start, end = self._manifest.bucket_span(bucket)
        first, parts = start // WORD_BYTES, self._base.parts(start, end)
        begins = [max(kept.entry.offset, start) // WORD_BYTES - first for kept, _ in parts]
        ends = [min(kept.entry.end, end) // WORD_BYTES - first for kept, _ in parts]
        bounds = begins + ends
        if index is not None:
            bounds = torch.searchsorted(index, torch.tensor(bounds, device=index.device)).tolist()
        for i, (kept, memory) in enumerate(parts):
            lo, hi = bounds[i], bounds[len(parts) + i]
            if lo < hi:
                places = torch.arange(lo, hi, device=values.device) if index is None else index[lo:hi]
                places = places + (first - kept.entry.offset // WORD_BYTES)
                put_kept(kept.entry, kept.cut, memory, places, values[lo:hi])

    def _check_result(self, stream: torch.Tensor) -> None:
        for entry, after in zip(self._manifest.tensors, self._manifest.tensors[1:], strict=False):
            if entry.end < after.offset:  # transports need not send padding, which the publisher packs as zeros
                stream[entry.end : after.offset].zero_()
        spans = [self._manifest.bucket_span(bucket) for bucket in range(self._manifest.bucket_count)]
        found = torch.stack([fingerprint(stream[start:end]) for start, end in spans]).tolist()
        for bucket, (mine, theirs) in enumerate(zip(found, self._delta.fingerprints, strict=True)):
            if mine != theirs:
                raise self._bad(bucket, f"has the fingerprint {mine} after the changes, but {theirs} at the publisher")

    def _bad(self, bucket: int, what: str) -> WeightsRejected:
        start, end = self._manifest.bucket_span(bucket)
        names = [entry.name for entry in self._manifest.tensors if entry.offset < end and entry.end > start]
        more = f" to {names[-1]}" if len(names) > 1 else ""
        return WeightsRejected(f"bucket {bucket} of the delta ({names[0]}{more}) {what}", field="delta")


def put_words(memory: torch.Tensor, index: torch.Tensor | None, values: torch.Tensor) -> None:
    """Write words (int16) to `memory` (uint8), at places in words; None: to all of it."""
    words = memory.view(torch.int16)
    if index is None:
        words.copy_(values)
    else:
        words[index] = values


def put_kept(
    entry: TensorEntry, cut: Cut | None, memory: torch.Tensor, index: torch.Tensor, values: torch.Tensor
) -> None:
    """Write words of a whole tensor, at `index` in it, to the part of it that a rank keeps in `memory`, uint8."""
    for kept, chosen in kept_words(entry, cut, index):
        put_words(memory, kept, values if chosen is None else values[chosen])


def kept_words(
    entry: TensorEntry, cut: Cut | None, index: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """The words of a whole tensor that lie in its kept part: (indices in the part, their indices in `index`; None:
    all).

    The cut is between words (`kept_layout.in_words`).
    """
    if cut is None:
        yield index, None
        return
    inner = DTYPE_BYTES[entry.dtype] * math.prod(entry.shape[cut.dim + 1 :])  # bytes of one entry of the cut dimension
    row, kept_row, offset = cut.whole * inner // WORD_BYTES, cut.kept * inner // WORD_BYTES, 0
    rows, columns = index // row, index % row
    for begin, end in ((begin * inner // WORD_BYTES, end * inner // WORD_BYTES) for begin, end in cut.ranges):
        chosen = ((columns >= begin) & (columns < end)).nonzero()[:, 0]
        yield rows[chosen] * kept_row + columns[chosen] + (offset - begin), chosen
        offset += end - begin
