"""A client of ZeroMQ and msgpack alone, by `docs/reference/protocol.md`. Imports nothing of the project."""

from __future__ import annotations

import math
import struct
from typing import Any

import msgpack
import zmq

TIMEOUT_S = 60.0
_FORMATS = {"<i4": "i", "<f4": "f", "<i8": "q", "|u1": "B", "<u2": "H"}


def pack_blob(values: list, dtype: str, index: int = 0) -> tuple[dict[str, Any], bytes]:
    """A reference and its blob."""
    data = struct.pack(f"<{len(values)}{_FORMATS[dtype]}", *values)
    return {"blob": index, "dtype": dtype, "shape": [len(values)]}, data


def unpack_blobs(value: Any, blobs: list[bytes], types: dict[str, str], name: str = "") -> Any:
    """`value` with lists in place of references; notes in `types` which field had which dtype."""
    if isinstance(value, dict) and value.keys() == {"blob", "dtype", "shape"}:
        shape, dtype, data = value["shape"], value["dtype"], blobs[value["blob"]]
        types[name], count = dtype, math.prod(shape)
        assert len(data) == count * struct.calcsize(f"<{_FORMATS[dtype]}")
        return nested(list(struct.unpack(f"<{count}{_FORMATS[dtype]}", data)), shape)
    if isinstance(value, dict):
        return {key: unpack_blobs(item, blobs, types, key) for key, item in value.items()}
    if isinstance(value, list):
        return [unpack_blobs(item, blobs, types, name) for item in value]
    return value


def nested(values: list, shape: list[int]) -> list:
    """Row-major values as lists of lists."""
    if len(shape) == 1:
        return values
    size = math.prod(shape[1:])
    return [nested(values[i * size : (i + 1) * size], shape[1:]) for i in range(shape[0])]


class RawClient:
    """One REQ or DEALER socket. `delimiter` puts an empty frame in front, as REQ sockets do by themselves."""

    def __init__(self, endpoint: str, kind: int = zmq.DEALER, *, delimiter: bool = False) -> None:
        self.types: dict[str, str] = {}  # dtypes of the blobs of the last reply, by field
        self._delimiter = delimiter
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.linger = 0
        self._socket.rcvtimeo = int(TIMEOUT_S * 1000)
        self._socket.connect(endpoint)

    def send(self, op: str, request_id: str, blobs: tuple[bytes, ...] = (), **fields: Any) -> None:
        """Send a request."""
        self.send_frames([msgpack.packb({"v": 1, "op": op, "id": request_id, **fields}), *blobs])

    def send_frames(self, frames: list[bytes]) -> None:
        """Send whatever it is."""
        self._socket.send_multipart([b"", *frames] if self._delimiter else frames)

    def receive(self) -> dict[str, Any]:
        """The next reply, with lists for its blobs."""
        frames = self._socket.recv_multipart()
        assert (frames[0] == b"") == self._delimiter, "a delimiter exactly when the request had one"
        header = msgpack.unpackb(frames[1] if self._delimiter else frames[0])
        self.types = {}
        reply = unpack_blobs(header, frames[2:] if self._delimiter else frames[1:], self.types)
        assert reply["v"] == 1
        return reply

    def ask(self, op: str, request_id: str, blobs: tuple[bytes, ...] = (), **fields: Any) -> dict[str, Any]:
        """One request and its only reply."""
        self.send(op, request_id, blobs, **fields)
        reply = self.receive()
        assert reply["id"] == request_id
        return reply

    def receive_all(self, request_id: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The chunks of a request and the reply that ends it."""
        chunks = []
        while (reply := self.receive())["op"] == "chunk":
            assert reply["id"] == request_id
            chunks.append(reply)
        assert reply["id"] == request_id
        return chunks, reply

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._socket.close()
        self._context.term()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def log_probs_of_a_certain_model(values: list[float]) -> bool:
    """True if every token was as good as certain, as the counting checkpoints are."""
    return all(math.isfinite(value) and -1e-4 < value <= 0 for value in values)
