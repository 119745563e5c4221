"""An update that sends changes alone, as `begin` describes it.

    content   32 hex digits that name the bytes of an update. A worker that has verified them can take changes to them
    delta     {base: the content that is changed, codes: manifest of the changed words, fingerprints: of the result}

The update's own manifest describes the whole result. The codes have a manifest of their own, and travel as the tensors
of a whole update do. Their names are BUCKET.PART: the number of a bucket of the whole stream, and a part of its form
(`transports.changed_words`). Buckets come in ascending order; one that is left out does not change.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, get_args

from trainer_bridge.wire.errors import BadRequest, WeightsRejected
from trainer_bridge.wire.manifest import Manifest, TensorEntry, from_wire

_CONTENT = re.compile(r"[0-9a-f]{32}")
#: A part of a bucket's form: its name in an update.
Part = Literal["gaps", "bits", "words", "all"]
#: The parts of each form.
FORMS: tuple[tuple[Part, ...], ...] = (("gaps", "words"), ("bits", "words"), ("all",))
WORD_BYTES = 2
_NAME = re.compile(rf"(0|[1-9][0-9]{{0,5}})\.({'|'.join(get_args(Part))})")
_MOST_PRINT = 1 << 64
_MOST_SHARE = 0.75  # the share of an update that its changes may take, in bytes


@dataclass(frozen=True, slots=True)
class WeightDelta:
    """The changes from one content to another. `fingerprints` has one of each bucket of the result, int64."""

    base: str
    codes: Manifest
    fingerprints: tuple[int, ...]

    def to_wire(self) -> dict[str, Any]:
        """The plain map that travels in `begin`; `read_delta` reads it."""
        return {"base": self.base, "codes": self.codes.to_wire(), "fingerprints": list(self.fingerprints)}

    def buckets(self) -> Iterator[tuple[int, dict[str, TensorEntry]]]:
        """The buckets that change, and the parts of each one's form."""
        for bucket, entries in groupby(self.codes.tensors, lambda entry: int(entry.name.partition(".")[0])):
            yield bucket, {entry.name.partition(".")[2]: entry for entry in entries}


def read_content(value: Any) -> str:
    """The name of an update's bytes; empty if `begin` has none. Raises `BadRequest`."""
    if value is None:
        return ""
    if type(value) is not str or not _CONTENT.fullmatch(value):
        raise BadRequest("content must be 32 hex digits", field="content")
    return value


def read_delta(value: Any, manifest: Manifest) -> WeightDelta:
    """Read what `to_wire` wrote, for an update with this manifest. Raises `BadRequest` and `WeightsRejected`.

    Afterwards every bucket has a form of a possible size, and no two codes are for the same bucket.
    """
    if type(value) is not dict or value.keys() != {"base", "codes", "fingerprints"}:
        raise BadRequest("delta must be a map of base, codes and fingerprints", field="delta")
    prints = value["fingerprints"]
    if type(prints) is not list or any(type(each) is not int or abs(each) >= _MOST_PRINT for each in prints):
        raise BadRequest("fingerprints must be a list of integers", field="delta.fingerprints")
    if len(prints) != manifest.bucket_count:
        raise BadRequest(
            f"fingerprints must have one of each bucket, {manifest.bucket_count}", field="delta.fingerprints"
        )
    base = read_content(value["base"])
    codes = from_wire(value["codes"], max_tensors=2 * manifest.bucket_count)
    if codes.version != manifest.version:
        raise WeightsRejected("the codes of a delta must have the update's version", field="delta.codes")
    delta = WeightDelta(base, codes, tuple(prints))
    if not base or not codes.tensors:
        raise BadRequest("a delta needs the content that it changes, and codes", field="delta")
    _check_codes(delta, manifest)
    if why := comes_whole(manifest) or exceeds_share(manifest, codes.tensor_bytes):
        raise WeightsRejected(f"version {manifest.version} came as changes, but {why}: send it whole", field="delta")
    return delta


def comes_whole(manifest: Manifest) -> str:
    """Why an update of these tensors cannot come as changes; empty: it can."""
    odd = next((entry.name for entry in manifest.tensors if entry.nbytes % WORD_BYTES), "")
    return f"{odd} has an odd number of bytes, which are no words of 16 bits" if odd else ""


def exceeds_share(manifest: Manifest, code_bytes: int) -> str:
    """Why codes of this size are too large; empty: they are not. Each rank keeps host memory for all codes."""
    if code_bytes > _MOST_SHARE * manifest.total_bytes:
        return f"its codes have {code_bytes} bytes, more than {_MOST_SHARE:.0%} of its {manifest.total_bytes}"
    return ""


def _check_codes(delta: WeightDelta, manifest: Manifest) -> None:
    for entry in delta.codes.tensors:
        if not _NAME.fullmatch(entry.name) or entry.dtype != "bfloat16" or len(entry.shape) != 1:
            raise _bad(entry.name, "is no code of a bucket")
    last = -1
    for bucket, parts in delta.buckets():
        name = next(iter(parts.values())).name
        if tuple(parts) not in FORMS or not last < bucket < manifest.bucket_count:
            raise _bad(name, "is out of order, repeated or of no bucket")
        last = bucket
        start, end = manifest.bucket_span(bucket)
        words = (end - start) // WORD_BYTES
        least = {"all": words, "bits": -(-words // 16), "gaps": 1, "words": 1}
        most = {**least, "gaps": words, "words": words}
        for part, entry in parts.items():
            if not least[part] <= entry.shape[0] <= most[part]:
                raise _bad(entry.name, f"has {entry.shape[0]} numbers, which its bucket of {words} words cannot have")


def _bad(name: str, what: str) -> WeightsRejected:
    return WeightsRejected(f"the code {name!r:.80} of the delta {what}; publish again", field="delta.codes")
