"""The codec: what goes in comes out, and whatever the bytes, nothing but `WireError` is raised."""

import subprocess
import sys

import msgpack
import numpy as np
import pytest
import zmq
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainer_bridge.wire import codec as wire
from trainer_bridge.wire.codec import WireError, WireLimits, decode, encode

DTYPES = ["bool", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]


def packed(value: object) -> bytes:
    return msgpack.packb(value)


def reference(blob: object = 0, dtype: object = "<i4", shape: object = (2,)) -> bytes:
    return packed({"a": {"blob": blob, "dtype": dtype, "shape": shape}})


# --- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (0, 7), (2, 1, 3)])
def test_every_type_and_shape_survives(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    back = decode(encode({"x": array}))["x"]
    assert back.dtype == array.dtype and back.shape == shape
    np.testing.assert_array_equal(back, array)


def test_byte_order_on_the_wire_is_little_endian() -> None:
    frames = encode({"x": np.array([1, 2], ">i4")})
    assert frames[1] == b"\1\0\0\0\2\0\0\0"
    assert msgpack.unpackb(frames[0])["x"] == {"blob": 0, "dtype": "<i4", "shape": [2]}


def test_strided_arrays_arrive_as_their_elements() -> None:
    array = np.arange(24, dtype=np.int16).reshape(4, 6)[::2, ::-3].T
    np.testing.assert_array_equal(decode(encode({"x": array}))["x"], array)


def test_arrays_are_found_at_any_depth_and_stay_in_their_places() -> None:
    header = {"a": [{"b": (1, np.int32([7]))}, np.float64([0.5])], "c": {"d": np.uint8([])}}
    back = decode(encode(header))
    assert back["a"][0]["b"][0] == 1 and back["a"][0]["b"][1].tolist() == [7]
    assert back["a"][1].tolist() == [0.5] and back["c"]["d"].shape == (0,)


def test_decoded_arrays_share_memory_with_the_frame_and_are_read_only() -> None:
    frames = encode({"x": np.arange(1000)})
    array = decode(frames)["x"]
    assert np.shares_memory(array, np.frombuffer(frames[1], np.uint8))
    with pytest.raises(ValueError):
        array[0] = 1


def test_encoded_blob_does_not_change_with_its_array() -> None:
    array = np.int32([1])
    frames = encode({"x": array})
    array[0] = 2
    assert decode(frames)["x"].tolist() == [1]


@pytest.mark.parametrize("make", [bytearray, memoryview, zmq.Frame])
def test_any_bytes_like_frame_is_read(make: type) -> None:
    frames = [make(frame) for frame in encode({"x": np.int32([1, 2])})]
    array = decode(frames)["x"]
    assert array.tolist() == [1, 2] and not array.flags.writeable


def test_numpy_scalars_become_plain_numbers() -> None:
    back = decode(encode({"a": np.float32(1.5), "b": [np.int64(-3)], "c": np.bool_(True)}))
    assert back == {"a": 1.5, "b": [-3], "c": True}
    assert [type(value) for value in (back["a"], back["b"][0], back["c"])] == [float, int, bool]


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), plain, max_size=5))
@settings(max_examples=100, deadline=None)
def test_plain_headers_survive(header: dict) -> None:
    assert decode(encode(header)) == header


# --- what cannot be sent ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({1: 2}, "keys must be strings"),
        ({"blob": 1, "dtype": 2, "shape": 3}, "rename"),
        ({1, 2}, "of type set"),
        (np.array(["a"]), "an array of"),
        (np.array([1 + 2j]), "complex"),
        (np.datetime64("2020-01-01"), "datetime64"),
        (np.zeros([1] * 9), "9 dimensions"),
        (2**64, "64 bits"),
    ],
)
def test_what_a_message_cannot_hold_is_refused(value: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        encode({"deep": [value]})


def test_nesting_that_no_reader_takes_is_not_written() -> None:
    value: list = []
    for _ in range(40):
        value = [value]
    with pytest.raises(ValueError, match="too deeply"):
        encode({"x": value})


# --- broken messages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([], "no frames"),
        ([b""], "not valid msgpack"),
        ([b"\xc1"], "not valid msgpack"),
        ([packed({"a": "text"})[:-1]], "not valid msgpack"),
        ([b"\x81\xa1a\xa1\xff"], "not valid msgpack"),  # not UTF-8
        ([packed({}) + b"\0"], "bytes follow"),
        ([packed([1])], "is a list"),
        ([packed(None)], "is a NoneType"),
        ([b"\x81\x01\x02"], "not valid msgpack"),  # {1: 2}
        ([b"\x81\xc4\x01a\x02"], "not a string"),  # {b"a": 2}
        ([b"\x81\xa1x\x81\xc4\x01a\x02"], "not a string"),
        ([b"\x82\xa1a\x01\xa1a\x02"], "twice"),
        ([packed({"a": msgpack.ExtType(5, b"x")})], "extension"),
        ([packed({"a": msgpack.Timestamp(1, 0)})], "timestamp"),
        ([b"\x81\xa1a" + b"\x91" * 40 + b"\x01"], "nested deeper"),
        ([b"\x81\xa1a" + b"\x91" * 5000], "not valid msgpack"),
        ([b"\x81\xa1a\xdd\xff\xff\xff\xff"], "not valid msgpack"),  # a list of 4 billion
        ([packed({"blob": 0, "dtype": "<i4", "shape": [1]}), b"1234"], "itself"),
        ([packed({}), b"1234"], "blob 0 is not referred to"),
        ([reference()], "blob 0, but the message has 0"),
        ([reference(-1), b"12345678"], "blob -1"),
        ([reference("0"), b"12345678"], "blob '0'"),
        ([reference(False), b"12345678"], "blob False"),
        ([packed({"a": [{"blob": 0, "dtype": "<i4", "shape": [1]}] * 2}), b"1234"], "twice"),
        ([reference(), b"1234567"], "7 bytes, but shape .* needs 8"),
        ([reference(dtype=">i4"), b"12345678"], "dtype"),
        ([reference(dtype="O"), b"12345678"], "dtype"),
        ([reference(dtype=["<i4"]), b"12345678"], "dtype"),
        ([reference(shape=2), b"12345678"], "shape"),
        ([reference(shape=[2.0]), b"12345678"], "shape"),
        ([reference(shape=[True] * 2), b"12345678"], "shape"),
        ([reference(shape=[-1, -2]), b"12345678"], "negative"),
        ([reference(shape=[0, 2**63]), b""], "absurdly"),
        ([reference(shape=[0] + [2**25] * 3), b""], "absurdly"),
        ([reference(shape=[1] * 9), b"1234"], "at most 8"),
        ([reference(dtype="|b1", shape=[2]), b"\1\2"], "booleans"),
    ],
)
def test_a_broken_message_says_what_is_wrong(frames: list[bytes], said: str) -> None:
    with pytest.raises(WireError, match=said) as caught:
        decode(frames)
    assert caught.value.code == "bad_message"


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (WireLimits(max_message_bytes=100), "at most 100"),
        (WireLimits(max_header_bytes=20), "at most 20, and long arrays as blobs"),
        (WireLimits(max_blobs=1), "more than 1 blobs"),
        (WireLimits(max_items=2), "more than 2 entries"),
        (WireLimits(max_depth=2), "deeper than 2"),
        (WireLimits(max_containers=3), "more than 3"),
    ],
)
def test_each_limit_is_kept(limits: WireLimits, said: str) -> None:
    frames = encode({"x": np.zeros(100, np.uint8), "y": [np.zeros(1, np.uint8), [1]]})
    decode(frames)
    with pytest.raises(WireError, match=said):
        decode(frames, limits)


def only_wire_errors(frames: list[bytes]) -> None:
    try:
        assert type(decode(frames)) is dict
    except WireError:
        pass
    found = wire.header_id(frames)
    assert found is None or 1 <= len(found) <= 128


@given(st.lists(st.binary(max_size=60), max_size=4))
@example([b"\xdf\xff\xff\xff\xff"])
@example([b"\xc7\x00\xff"])
@settings(max_examples=300, deadline=None)
def test_random_bytes_raise_nothing_else(frames: list[bytes]) -> None:
    only_wire_errors(frames)


@given(plain, st.lists(st.binary(max_size=9), max_size=2))
@settings(max_examples=150, deadline=None)
def test_random_msgpack_raises_nothing_else(value: object, blobs: list[bytes]) -> None:
    only_wire_errors([msgpack.packb(value), *blobs])


VALID = encode(
    {"v": 1, "op": "generate", "id": "r", "prompt": np.arange(3, dtype=np.int32), "x": [{"y": np.float16([[1]])}, -1]}
)


@given(st.data())
@settings(max_examples=500, deadline=None)
def test_mutations_and_truncations_raise_nothing_else(data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in VALID]
    for _ in range(data.draw(st.integers(1, 4))):
        frame = data.draw(st.sampled_from(frames))
        at = data.draw(st.integers(0, max(0, len(frame) - 1)))
        if data.draw(st.booleans()):
            frame[at : at + 1] = data.draw(st.binary(max_size=3))
        else:
            del frame[at:]
    only_wire_errors([bytes(frame) for frame in frames])


shapes = st.lists(st.integers(-2, 4) | st.sampled_from([2**31, 2**32, 2**63, 2**64 - 1]), max_size=10)


@given(st.integers(-1, 2), st.sampled_from([*DTYPES, "<i4", "<f8", "O", "V4", ""]), shapes, st.binary(max_size=16))
@settings(max_examples=300, deadline=None)
def test_random_references_raise_nothing_else(index: int, dtype: str, shape: list[int], blob: bytes) -> None:
    only_wire_errors([reference(index, dtype, shape), blob])


# --- envelope and id -------------------------------------------------------------------------------------------------


def test_the_envelope_goes_off_and_on_again() -> None:
    assert wire.split_envelope([b"", b"h", b""]) == (True, [b"h", b""])
    assert wire.split_envelope([b"h", b""]) == (False, [b"h", b""])
    assert wire.split_envelope([]) == (False, [])
    assert wire.join_envelope(True, [b"h"]) == [b"", b"h"]
    assert wire.join_envelope(False, [b"h"]) == [b"h"]


@pytest.mark.parametrize(
    ("frames", "found"),
    [
        ([packed({"v": 9, "x": {"deep": [1, 2]}, "id": "r7", "y": 1})], "r7"),
        ([b"", packed({"id": "r7"})], "r7"),
        ([packed({"id": "r7", "x": "long"})[:-2]], "r7"),  # cut off after the id
        ([packed({"x": "long", "id": "r7"})[:5]], None),
        ([packed({"id": 7})], None),
        ([packed({"id": ""})], None),
        ([packed({"id": "i" * 129})], None),
        ([packed([1])], None),
        ([packed({"id": "r7", "x": "y" * (1 << 17)})], "r7"),
        ([], None),
    ],
)
def test_the_id_of_a_broken_message_is_found_if_it_can_be(frames: list[bytes], found: str | None) -> None:
    assert wire.header_id(frames) == found


def test_the_codec_imports_nothing_heavy() -> None:
    code = "import sys, trainer_bridge.wire.codec; print([m for m in ('torch', 'pydantic', 'zmq') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
