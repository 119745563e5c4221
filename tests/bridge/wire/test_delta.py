"""Descriptions of changes from strangers: what could not be made is refused before any memory is taken for it."""

from collections.abc import Callable
from typing import Any

import pytest

from trainer_bridge.wire.delta import WeightDelta, read_content, read_delta
from trainer_bridge.wire.errors import BadRequest, RolloutError, WeightsRejected
from trainer_bridge.wire.manifest import pack

UPDATE = pack(3, [("a", "bfloat16", (40,)), ("b", "float32", (30,))], 64)  # 248 bytes, 4 buckets: the last has 56
BASE = "0123456789abcdef" * 2
GOOD = [("0.gaps", 2), ("0.words", 3), ("1.bits", 2), ("1.words", 9), ("3.all", 28)]


def codes(*entries: tuple[str, int], version: int = 3, dtype: str = "bfloat16") -> dict[str, Any]:
    return pack(version, [(name, dtype, (count,)) for name, count in entries], 64).to_wire()


def wire(**changes: Any) -> dict[str, Any]:
    return {"base": BASE, "codes": codes(*GOOD), "fingerprints": [1, -2, 3, 4], **changes}


def test_a_sound_delta_is_read_as_it_was_written() -> None:
    delta = read_delta(wire(), UPDATE)
    assert delta.to_wire() == wire() and isinstance(delta, WeightDelta)
    assert [(bucket, sorted(parts)) for bucket, parts in delta.buckets()] == [
        (0, ["gaps", "words"]),
        (1, ["bits", "words"]),
        (3, ["all"]),
    ]


@pytest.mark.parametrize(
    "entries",
    [
        [("0.gaps", 2)],  # places without values
        [("0.words", 2)],
        [("0.gaps", 2), ("0.bits", 2), ("0.words", 2)],
        [("0.all", 32), ("0.words", 2)],
        [("0.words", 2), ("0.gaps", 2)],
        [("1.all", 32), ("0.all", 32)],  # out of order
        [("0.gaps", 1), ("0.words", 1), ("1.all", 32), ("0.bits", 2)],
        [("4.all", 32)],  # no such bucket
        [("3.all", 32)],  # of another size
        [("0.bits", 3), ("0.words", 1)],
        [("0.gaps", 1), ("0.words", 33)],  # more values than words
        [("0.gaps", 33), ("0.words", 1)],
        [("00.all", 32)],
        [("-1.all", 32)],
        [("0.every", 32)],
        [("a", 32)],
    ],
)
def test_codes_that_no_bucket_has_are_refused(entries: list[tuple[str, int]]) -> None:
    with pytest.raises(WeightsRejected) as caught:
        read_delta(wire(codes=codes(*entries)), UPDATE)
    assert caught.value.field == "delta.codes"


@pytest.mark.parametrize(
    "change",
    [
        lambda good: None,
        lambda good: [],
        lambda good: {"base": BASE},
        lambda good: {**good, "more": 1},
        lambda good: {**good, "base": ""},
        lambda good: {**good, "base": None},
        lambda good: {**good, "base": BASE.upper()},
        lambda good: {**good, "base": 7},
        lambda good: {**good, "fingerprints": [1, 2, 3]},
        lambda good: {**good, "fingerprints": [1, 2, 3, True]},
        lambda good: {**good, "fingerprints": [1, 2, 3, 1 << 70]},
        lambda good: {**good, "fingerprints": {}},
        lambda good: {**good, "codes": codes()},
        lambda good: {**good, "codes": codes(*GOOD, version=4)},
        lambda good: {**good, "codes": codes(*GOOD, dtype="float32")},
        lambda good: {**good, "codes": {**good["codes"], "digest": "0" * 32}},
        lambda good: {**good, "codes": 1},
    ],
)
def test_anything_else_is_refused_with_its_field(change: Callable[[Any], Any]) -> None:
    with pytest.raises((BadRequest, WeightsRejected)) as caught:
        read_delta(change(wire()), UPDATE)
    assert caught.value.field


@pytest.mark.parametrize("value", ["", "0" * 31, "g" * 32, "0" * 33, 5, b"0" * 32, []])
def test_a_content_is_32_hex_digits(value: Any) -> None:
    with pytest.raises(RolloutError):
        read_content(value)
    assert read_content(None) == "" and read_content("ab" * 16) == "ab" * 16


def test_changes_that_are_nearly_the_whole_update_are_refused_before_they_take_memory() -> None:
    most = [("0.all", 32), ("1.all", 32), ("3.all", 28)]  # 184 of 248 bytes
    assert read_delta(wire(codes=codes(*most)), UPDATE)
    with pytest.raises(WeightsRejected, match="send it whole") as caught:
        read_delta(wire(codes=codes(*most[:2], ("2.gaps", 1), ("2.words", 3), most[2])), UPDATE)
    assert caught.value.field == "delta"


def test_a_tensor_that_is_no_words_is_named_by_the_refusal_of_changes() -> None:
    update = pack(3, [("a", "bfloat16", (40,)), ("odd", "float8_e4m3fn", (115,))], 64)
    with pytest.raises(WeightsRejected, match="odd has an odd number of bytes") as caught:
        read_delta(wire(codes=codes(("0.all", 32))), update)
    assert caught.value.field == "delta"
