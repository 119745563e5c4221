"""The wire codec: one header map and any number of binary blobs, as ZeroMQ frames.

    message = [b""?, header, blob 0, blob 1, ...]

`header` is one msgpack map with string keys. `encode` moves every numpy array that it finds in a header into a blob
and leaves a reference in its place; `decode` puts read-only arrays back, without a copy.

    {"blob": 0, "dtype": "<i4", "shape": [3]}

Invariants:

- Whatever the bytes, `decode` returns a header or raises `WireError`. Nothing in a message is ever executed.
- Every blob is referred to exactly once, and is exactly as long as its shape and type say.
- A map with exactly the keys `blob`, `dtype` and `shape` is a reference; `encode` refuses data that looks like one.

Both sides of every socket use this file. It imports msgpack and numpy only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

PROTOCOL_VERSION = 1
MAX_ID_CHARS = 128

Frame = Any  # bytes, bytearray, memoryview or zmq.Frame

_REFERENCE_KEYS = {"blob", "dtype", "shape"}
_MAX_DIMS = 8
_ID_SCAN_BYTES = 1 << 16
_KEYS = {str}
_PLAIN = {type(None), bool, int, float, str, bytes}
_READABLE = _PLAIN | {dict, list}
_TYPE_NAMES = ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8")
_TYPES = {name: np.dtype(name) for name in _TYPE_NAMES}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_TYPES |= {alias: np.dtype(alias) for alias in ("bool", "i1", "u1", "<i1", "<u1")}


class WireError(ValueError):
    """A message that is not well-formed. `code` is the protocol's error code; the text says what to change."""

    def __init__(self, message: str, code: str = "bad_message") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class WireLimits:
    """The limits of `decode`. The defaults are for messages from strangers."""

    max_message_bytes: int = 64 << 20  # all frames
    max_header_bytes: int = 16 << 20
    max_blobs: int = 256
    max_depth: int = 32  # maps and lists inside each other, the header counted
    max_containers: int = 1 << 20  # maps and lists in a header: bounds the memory that a small message can claim
    max_items: int = 1 << 16  # most entries of one map or list: bounds the time for which Python's lock is held


#: Limits for replies, whose size follows from the request.
REPLY_LIMITS = WireLimits(
    max_message_bytes=1 << 34,
    max_header_bytes=1 << 30,
    max_blobs=1 << 20,
    max_depth=64,
    max_containers=1 << 24,
    max_items=1 << 30,
)
DEFAULT_LIMITS = WireLimits()


# --- writing ---------------------------------------------------------------------------------------------------------


def encode(header: dict[str, Any], *, max_depth: int = DEFAULT_LIMITS.max_depth) -> list[bytes]:
    """Turn a header into frames: the header first, then one blob for each numpy array found anywhere in it.

    Arrays may be of any byte order and stride; they travel little-endian and contiguous. Tuples travel as lists and
    numpy scalars as plain numbers. Raises ValueError, naming the place, for anything that a message cannot hold.
    """
    blobs: list[bytes] = []
    plain = _plain(header, blobs, "header", max_depth)
    try:
        packed = msgpack.packb(plain, use_bin_type=True)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"the header cannot be packed: {error}; integers have at most 64 bits") from error
    return [packed, *blobs]


def _plain(value: Any, blobs: list[bytes], where: str, depth: int) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, np.ndarray):
        return _reference(value, blobs, where)
    if isinstance(value, np.generic):
        return _scalar(value, where)
    if depth == 0:
        raise ValueError(f"{where} is nested too deeply for a message; flatten it")
    if isinstance(value, dict):
        return _plain_map(value, blobs, where, depth)
    if isinstance(value, (list, tuple)):
        if _PLAIN.issuperset(map(type, value)):
            return value
        return [_plain(item, blobs, f"{where}[{i}]", depth - 1) for i, item in enumerate(value)]
    if isinstance(value, (str, int, float, bytearray, memoryview)):
        return value
    raise ValueError(f"{where} is of type {type(value).__name__}, which a message cannot hold; convert it first")


def _plain_map(value: dict[Any, Any], blobs: list[bytes], where: str, depth: int) -> dict[str, Any]:
    for key in value:
        if not isinstance(key, str):
            raise ValueError(f"{where} has the key {key!r}; keys must be strings")
    if value.keys() == _REFERENCE_KEYS:
        raise ValueError(f"{where} has exactly the keys blob, dtype and shape, which mark a blob; rename one")
    return {key: _plain(item, blobs, f"{where}[{key!r}]", depth - 1) for key, item in value.items()}


def _reference(array: np.ndarray, blobs: list[bytes], where: str) -> dict[str, Any]:
    name = _NAMES.get(array.dtype) or array.dtype.newbyteorder("<").str
    if name not in _TYPES:
        raise ValueError(f"{where} is an array of {array.dtype}; a blob holds one of {', '.join(_TYPE_NAMES)}")
    if array.ndim > _MAX_DIMS:
        raise ValueError(f"{where} has {array.ndim} dimensions; a blob has at most {_MAX_DIMS}")
    blobs.append(array.astype(_TYPES[name], copy=False).tobytes())
    return {"blob": len(blobs) - 1, "dtype": name, "shape": list(array.shape)}


def _scalar(value: np.generic, where: str) -> Any:
    plain = value.item()
    if type(plain) not in _PLAIN:
        raise ValueError(f"{where} is a {value.dtype} scalar, which a message cannot hold; convert it first")
    return plain


# --- reading ---------------------------------------------------------------------------------------------------------


def decode(frames: Sequence[Frame], limits: WireLimits = DEFAULT_LIMITS) -> dict[str, Any]:
    """Turn frames (without envelope: header first) into a header whose references are read-only numpy arrays.

    The arrays share memory with the frames, which must not be changed afterwards. Raises `WireError`, and nothing
    else, when the frames are not a well-formed message or exceed `limits`.
    """
    views = [memoryview(frame).cast("B").toreadonly() for frame in frames]
    _check_sizes(views, limits)
    header = _unpack(views[0], limits)
    if type(header) is not dict:
        raise WireError(f"the header is a {type(header).__name__}; send one msgpack map with string keys")
    _Reader(views[1:], limits).resolve(header)
    return header


def _check_sizes(views: list[memoryview], limits: WireLimits) -> None:
    if not views:
        raise WireError("the message has no frames; send a header")
    if len(views) - 1 > limits.max_blobs:
        raise WireError(f"the message has more than {limits.max_blobs} blobs; send fewer")
    total = sum([view.nbytes for view in views])
    if total > limits.max_message_bytes:
        raise WireError(f"the message has {total} bytes; send at most {limits.max_message_bytes}")
    if views[0].nbytes > limits.max_header_bytes:
        raise WireError(
            f"the header has {views[0].nbytes} bytes; send at most {limits.max_header_bytes}, and long arrays as blobs"
        )


def _unpack(header: memoryview, limits: WireLimits) -> Any:
    containers = 0

    def count() -> None:
        nonlocal containers
        containers += 1
        if containers > limits.max_containers:
            raise WireError(f"the header has more than {limits.max_containers} maps and lists; send fewer")

    def on_map(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        count()
        result = dict(pairs)
        if not _KEYS.issuperset(map(type, result)):
            raise WireError("a map in the header has a key that is not a string; use string keys")
        if len(result) != len(pairs):
            raise WireError("a map in the header has the same key twice; send each key once")
        return result

    def on_list(items: list[Any]) -> list[Any]:
        count()
        return items

    try:
        return msgpack.unpackb(
            header,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=on_map,
            list_hook=on_list,
            ext_hook=_no_extension,
            max_str_len=header.nbytes,
            max_bin_len=header.nbytes,
            max_array_len=min(header.nbytes, limits.max_items),
            max_map_len=min(header.nbytes, limits.max_items),
            max_ext_len=header.nbytes,
        )
    except WireError:
        raise
    except msgpack.ExtraData:
        raise WireError("bytes follow the header's map; send one msgpack map and nothing after it") from None
    except (ValueError, TypeError, OverflowError, MemoryError, RecursionError, msgpack.UnpackException) as error:
        if any(f"exceeds {name}({limits.max_items})" in str(error) for name in ("max_array_len", "max_map_len")):
            raise WireError(
                f"a map or list in the header has more than {limits.max_items} entries; send long arrays as blobs"
            ) from None
        raise WireError(f"the header is not valid msgpack ({str(error) or type(error).__name__})") from None


def _no_extension(code: int, data: bytes) -> Any:
    raise WireError(f"the header has a msgpack extension (type {code}); send plain values only")


class _Reader:
    """Checks an unpacked header and replaces its references by arrays, in place. Not recursive."""

    def __init__(self, blobs: list[memoryview], limits: WireLimits) -> None:
        self.blobs = blobs
        self.limits = limits
        self.used = [False] * len(blobs)

    def resolve(self, header: dict[str, Any]) -> None:
        if header.keys() == _REFERENCE_KEYS:
            raise WireError("the header is itself a blob reference; send a map of fields")
        todo: list[tuple[Any, int]] = [(header, 1)]
        while todo:
            container, depth = todo.pop()
            if depth > self.limits.max_depth:
                raise WireError(f"the header is nested deeper than {self.limits.max_depth}; flatten it")
            todo.extend((child, depth + 1) for child in self._children(container))
        if not all(self.used):
            raise WireError(
                f"blob {self.used.index(False)} is not referred to; a reference is a map of exactly blob, dtype, shape"
            )

    def _children(self, container: Any) -> list[Any]:
        """The maps and lists right inside a container, after the references in it became arrays."""
        values = container.values() if isinstance(container, dict) else container
        types = set(map(type, values))
        if types <= _PLAIN:
            return []
        if not types <= _READABLE:
            raise WireError("the header has a msgpack timestamp; send plain values only")
        children = []
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, value in list(items):
            if type(value) is dict and len(value) == 3 and value.keys() == _REFERENCE_KEYS:
                container[key] = self._array(value)
            elif type(value) is dict or type(value) is list:
                children.append(value)
        return children

    def _array(self, reference: dict[str, Any]) -> np.ndarray:
        index, name, shape = reference["blob"], reference["dtype"], reference["shape"]
        if type(index) is not int or not 0 <= index < len(self.blobs):
            raise WireError(f"a reference names blob {index!r:.40}, but the message has {len(self.blobs)} blobs")
        if self.used[index]:
            raise WireError(f"blob {index} is referred to twice; send it twice or refer to it once")
        self.used[index] = True
        if type(name) is not str or name not in _TYPES:
            raise WireError(f"blob {index} has dtype {name!r:.40}; use one of {', '.join(_TYPE_NAMES)}")
        dtype, blob = _TYPES[name], self.blobs[index]
        self._check_shape(index, shape)
        needed = math.prod(shape) * dtype.itemsize
        if blob.nbytes != needed:
            raise WireError(f"blob {index} has {blob.nbytes} bytes, but shape {shape} of {name} needs {needed}")
        return _read_blob(index, blob, dtype, shape)

    def _check_shape(self, index: int, shape: Any) -> None:
        if type(shape) is not list or len(shape) > _MAX_DIMS or any([type(size) is not int for size in shape]):
            raise WireError(f"the shape of blob {index} must be a list of at most {_MAX_DIMS} integers")
        if any([not 0 <= size <= self.limits.max_message_bytes for size in shape]):
            raise WireError(f"the shape {shape} of blob {index} has a size that is negative or absurdly large")


def _read_blob(index: int, blob: memoryview, dtype: np.dtype, shape: list[int]) -> np.ndarray:
    if blob.nbytes == 0:
        if math.prod(size for size in shape if size) * dtype.itemsize > 1 << 62:  # more than numpy can address
            raise WireError(f"the shape {shape} of blob {index} is absurdly large")
        array = np.empty(shape, dtype)
        array.flags.writeable = False
        return array
    if dtype == np.bool_ and np.frombuffer(blob, np.uint8).max() > 1:
        raise WireError(f"blob {index} is of booleans but has bytes other than 0 and 1")
    flat = np.frombuffer(blob, dtype)
    return flat if len(shape) == 1 else flat.reshape(shape)


# --- envelopes -------------------------------------------------------------------------------------------------------


def split_envelope(frames: Sequence[Frame]) -> tuple[bool, list[Frame]]:
    """Take the empty delimiter off, if any: `(had_delimiter, frames from the header on)`."""
    if frames and len(frames[0]) == 0:
        return True, list(frames[1:])
    return False, list(frames)


def join_envelope(had_delimiter: bool, frames: Sequence[Frame]) -> list[Frame]:
    """Put the empty delimiter back in front of a reply if its request had it."""
    return [b"", *frames] if had_delimiter else list(frames)


def header_id(frames: Sequence[Frame]) -> str | None:
    """The `id` of a message that may be broken, or None: for the error that answers it. Never raises.

    Reads the first 64 KiB of the header up to its `id`, so a message whose `id` comes early can be cut off later.
    """
    _, frames = split_envelope(frames)
    if not frames:
        return None
    start = bytes(memoryview(frames[0]).cast("B")[:_ID_SCAN_BYTES])
    unpacker = msgpack.Unpacker(raw=False, strict_map_key=True, max_buffer_size=_ID_SCAN_BYTES)
    try:
        unpacker.feed(start)
        for _ in range(unpacker.read_map_header()):
            if unpacker.unpack() == "id":
                found = unpacker.unpack()
                return found if isinstance(found, str) and 1 <= len(found) <= MAX_ID_CHARS else None
            unpacker.skip()
    except (ValueError, TypeError, OverflowError, MemoryError, RecursionError, msgpack.UnpackException):
        return None
    return None
