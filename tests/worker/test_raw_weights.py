"""Publishing weights with ZeroMQ and msgpack alone, by the letter of `docs/reference/protocol.md`."""

import json
import struct
from hashlib import blake2b

import pytest
import xxhash
import zmq
from safetensors.torch import load_file

from tests.support.worker.harness import TWOS, text_of
from tests.support.worker.raw_client import RawClient
from trainer_bridge.client.launch import WorkerProcess

BUCKET_BYTES = 64 * 1000


def digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def build_update(version: int) -> tuple[dict, list[bytes]]:
    """The manifest of the twos, and the buckets of its stream."""
    weights = load_file(TWOS / "model.safetensors")
    listed = [[name, "float32", list(tensor.shape)] for name, tensor in weights.items()]
    stream = b""
    for tensor in weights.values():
        stream += bytes(-len(stream) % 64) + tensor.numpy().tobytes()
    layout = digest(compact([BUCKET_BYTES, listed]))
    manifest = {"version": version, "bucket_bytes": BUCKET_BYTES, "tensors": listed}
    manifest["digest"] = digest(compact([version, layout]))
    return manifest, [stream[at : at + BUCKET_BYTES] for at in range(0, len(stream), BUCKET_BYTES)]


@pytest.mark.parametrize("damage", [None, "check", "checksums", "a bucket is missing"])
def test_an_update_by_hand(weights_worker: WorkerProcess, ledger: dict[int, int], damage: str | None) -> None:
    with RawClient(weights_worker.endpoint) as raw, zmq.Context() as context, context.socket(zmq.DEALER) as data:
        data.linger, data.rcvtimeo = 0, 60_000
        before = raw.ask("weights", "s", action="status")
        assert before["op"] == "ok" and before["state"] == "idle" and {"zmq", "disk"} <= set(before["transports"])
        version = before["version"] + 1
        manifest, buckets = build_update(version)
        begun = raw.ask("weights", "b", action="begin", version=version, manifest=manifest, transport="zmq", options={})
        assert begun["op"] == "ok" and begun["version"] == version, begun
        token, window = bytes.fromhex(begun["token"]), begun["grant"]["window"]
        assert begun["grant"]["endpoint"] == before["endpoint"] == weights_worker.weights_endpoint and window >= 1
        data.connect(begun["grant"]["endpoint"])
        checks, refused = b"", None
        for index, bucket in enumerate(buckets):
            if damage == "a bucket is missing" and index == 2:
                continue
            check = (xxhash.xxh3_64_intdigest(bucket) & 0xFFFFFFFF) ^ (damage == "check" and index == 2)
            checks += struct.pack("<I", check)
            data.send_multipart([b"WBK1" + token + struct.pack("<II", index, check), bucket])
            answer = data.recv()  # a window of one is within any window
            if answer[:4] == b"WNO1":
                assert answer[4:20] == token
                refused = answer[20:].decode()
                break
            assert answer == b"WAK1" + token + struct.pack("<I", index)
        checksums = digest(checks[::-1] if damage == "checksums" else checks)
        reply = raw.ask("weights", "c", action="commit", token=begun["token"], options={"checksums": checksums})
        if damage is None:
            assert (reply["op"], reply["version"]) == ("ok", version), reply
            ledger[version] = 2
            assert reply["pause_s"] > 0 and reply["bytes"] > 400_000 and "apply" in reply["phases"]
        else:
            assert (reply["op"], reply["code"]) == ("error", "weights_rejected"), reply
            assert (refused is not None) == (damage == "check")
        after = raw.ask("weights", "s", action="status")
        assert (after["state"], after["version"]) == ("idle", version if damage is None else version - 1)
        again = raw.ask("weights", "d", action="commit", token="00" * 16, options={})
        assert (again["op"], again["code"]) == ("error", "not_found")
        completion = raw.ask("generate", "g", prompt="17:", max_tokens=9)["completions"][0]
        assert text_of(completion["token_ids"]) == (" 18 19 20" if ledger[after["version"]] == 1 else " 19 21 23")
        assert completion["versions"] == [[after["version"], 9]]
