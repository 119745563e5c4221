"""A publisher whose every byte the test chooses."""

import struct
from typing import Any

import torch
import zmq

from tests.support.bridge.harness import Worker, new_tensors
from trainer_bridge.transports.payload import Payload
from trainer_bridge.wire.manifest import checksum, checksums_digest

BUCKET = 128


class RawPublisher:
    """Sends the protocol's bytes by hand, so that each of them can be wrong."""

    def __init__(self, worker: Worker, tensors: dict[str, torch.Tensor], version: int = 1) -> None:
        self.worker = worker
        payload = Payload(tensors, version, BUCKET)
        self.manifest = payload.manifest
        self.buckets = []
        for index in range(self.manifest.bucket_count):
            out = torch.empty(BUCKET, dtype=torch.uint8)
            self.buckets.append(out[: payload.pack_bucket(index, out)].numpy().tobytes())
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.connect(worker.receiver.endpoint)

    def begin(self, **changes: Any) -> dict[str, Any]:
        reply = self.worker.control(**self.begin_fields(**changes))
        self.token = bytes.fromhex(reply.get("token", ""))
        return reply

    def begin_fields(self, **changes: Any) -> dict[str, Any]:
        return {
            "action": "begin",
            "version": self.manifest.version,
            "manifest": self.manifest.to_wire(),
            "transport": "zmq",
            "options": {},
            **changes,
        }

    def send(self, index: int, data: bytes | None = None, check: int | None = None, token: bytes | None = None) -> None:
        data = self.buckets[index] if data is None else data
        check = checksum(data) if check is None else check
        self.socket.send_multipart([struct.pack("<4s16sII", b"WBK1", token or self.token, index, check), data])

    def answer(self) -> tuple[bytes, Any]:
        assert self.socket.poll(20_000), "no answer from the worker"
        message = self.socket.recv()
        rest = message[20:]
        return message[:4], struct.unpack("<I", rest)[0] if message[:4] == b"WAK1" else rest.decode()

    def send_all(self) -> None:
        for index in range(len(self.buckets)):
            self.send(index)
            assert self.answer() == (b"WAK1", index)

    def commit(self, **changes: Any) -> dict[str, Any]:
        return self.worker.control(**self.commit_fields(**changes))

    def commit_fields(self, **changes: Any) -> dict[str, Any]:
        digest = checksums_digest([checksum(bucket) for bucket in self.buckets])
        return {"action": "commit", "token": self.token.hex(), "options": {"checksums": digest}, **changes}

    def close(self) -> None:
        self.socket.close(0)


def publish(worker: Worker, seed: int, version: int) -> dict[str, torch.Tensor]:
    """A good update from start to end."""
    tensors = new_tensors(worker.model, seed)
    raw = RawPublisher(worker, tensors, version)
    assert raw.begin()["op"] == "ok"
    raw.send_all()
    reply = raw.commit()
    raw.close()
    assert reply["op"] == "ok" and reply["version"] == version
    assert set(reply["phases"]) == {"receive", "verify", "wait", "apply"}
    return tensors


def assert_rejected(reply: dict[str, Any], text: str, code: str = "weights_rejected") -> None:
    assert reply["op"] == "error" and reply["code"] == code and text in reply["message"], reply
