"""Hostile weight updates: refused quickly, without the memory that they ask for; the old weights keep serving."""

import contextlib
import json
import random
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from tests.support.bridge.harness import Worker, new_tensors, serves
from tests.support.robustness.corpus import (
    MAKERS,
    UNREADABLE,
    hostile_messages,
    mangled,
    throw_junk,
    too_large,
    wire_values,
)
from tests.support.robustness.limits import little_memory_and_time, rss_bytes
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.codec import decode, split_envelope
from trainer_bridge.wire.errors import WeightsRejected
from trainer_bridge.wire.manifest import Manifest, TensorEntry, checksum, from_wire, pack

WAIT_S = 20.0
WIRE_VALUES = wire_values()


@pytest.fixture
def worker() -> Iterator[Worker]:
    """A worker that must serve the same weights after the test, and then accept a good update."""
    with Worker() as worker:
        before = worker.model.snapshot()
        yield worker
        after = worker.model.snapshot()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert worker.status()["state"] in ("idle", "receiving")
        tensors = new_tensors(worker.model, 1)
        with WeightPublisher(worker.endpoint) as publisher:
            publisher.publish(tensors, version=1 << 40).applied(WAIT_S)
        assert serves(worker.model, tensors)


def rows_of(worker: Worker) -> list[list[Any]]:
    return [[name, "bfloat16", list(worker.model.views[name].shape)] for name in worker.model.names()]


def sealed(rows: list[list[Any]], version: int = 1, bucket_bytes: int = 64) -> dict[str, Any]:
    """A manifest whose digest matches its content, whatever that is."""
    entries = tuple(TensorEntry(row[0], row[1], tuple(row[2]), 0) for row in rows)
    try:
        return Manifest(version, entries, bucket_bytes).to_wire()
    except TypeError:  # what JSON cannot hold has no digest
        return {"version": version, "bucket_bytes": bucket_bytes, "tensors": rows, "digest": "0" * 32}


def begin(manifest: Any, **changes: Any) -> dict[str, Any]:
    version = manifest["version"] if isinstance(manifest, dict) and "version" in manifest else 1
    return {"action": "begin", "version": version, "manifest": manifest, "transport": "zmq", "options": {}, **changes}


def refused(worker: Worker, manifest: Any, text: str = "", **changes: Any) -> None:
    with little_memory_and_time():
        reply = worker.control(**begin(manifest, **changes))
    assert reply["op"] == "error" and reply["code"] in ("weights_rejected", "bad_request"), reply
    assert text in reply["message"] and 10 < len(reply["message"]) < 6000


# --- manifests --------------------------------------------------------------------------------------------------------


def test_absurd_shapes_are_refused(worker: Worker) -> None:
    rows = rows_of(worker)
    for value in WIRE_VALUES:
        for shape in ([value], [value, 6], [6, value], [value] * 8):
            refused(worker, sealed([[rows[0][0], "bfloat16", shape], *rows[1:]]))


def test_a_shape_of_the_right_size_and_the_wrong_form_is_refused(worker: Worker) -> None:
    rows = rows_of(worker)
    refused(worker, sealed([[rows[0][0], "bfloat16", [66]], *rows[1:]]), "wrong shapes")


def test_more_tensors_than_a_model_has_are_refused(worker: Worker) -> None:
    rows = [[f"t{i}", "float32", [0]] for i in range(200_000)]
    for size in (0, 1, 2**50):
        rows[0][2] = [size]
        manifest = {"version": 1, "bucket_bytes": 1 << 26, "tensors": rows, "digest": "0" * 32}
        refused(worker, manifest, "tensors; the model takes at most")
    with pytest.raises(WeightsRejected, match="400000 tensors"):
        from_wire(manifest | {"tensors": rows * 2})


def test_one_tensor_many_times_is_refused(worker: Worker) -> None:
    refused(worker, sealed([rows_of(worker)[0], *rows_of(worker)]), "listed twice")


def test_more_buckets_than_an_update_needs_are_refused(worker: Worker) -> None:
    """Each bucket costs the worker an entry; tiny buckets of a large stream would fill its memory."""
    refused(worker, sealed([["embed.weight", "float32", [1 << 40]]], bucket_bytes=64), "buckets")
    with pytest.raises(WeightsRejected, match="buckets"):
        pack(1, [("a", "float32", [1 << 23])], 64)


def test_unknown_names_are_refused(worker: Worker) -> None:
    for name in [*WIRE_VALUES, "x" * 513, "x" * 1_000_000, "a\0b"]:
        manifest = sealed(rows_of(worker))
        manifest["tensors"][0][0] = name
        refused(worker, manifest)


def test_a_wrong_digest_is_refused(worker: Worker) -> None:
    for digest in [*WIRE_VALUES, "0" * 32, "x" * 1_000_000, b"0" * 16]:
        refused(worker, sealed(rows_of(worker)) | {"digest": digest}, "digest")


def test_an_impossible_version_is_refused(worker: Worker) -> None:
    for version in WIRE_VALUES:
        if type(version) is not int or version != 1:  # the manifest's own
            refused(worker, sealed(rows_of(worker)) | {"version": version}, version=version)
            refused(worker, sealed(rows_of(worker)), version=version)


def test_an_impossible_bucket_size_is_refused(worker: Worker) -> None:
    for bucket_bytes in [*WIRE_VALUES, -64, 63, 65, 2**28 + 64, 64.0, "64"]:
        refused(worker, sealed(rows_of(worker)) | {"bucket_bytes": bucket_bytes})


def test_an_unknown_transport_is_refused(worker: Worker) -> None:
    for transport in [*WIRE_VALUES, "pickle", "x" * 100_000, ["zmq"], {"zmq": 1}]:
        refused(worker, sealed(rows_of(worker)), transport=transport)


def test_mangled_manifests_are_refused_and_take_no_memory(worker: Worker) -> None:
    rng = random.Random(5)
    good = begin(sealed(rows_of(worker)))
    before = rss_bytes()
    for number in range(3000):
        message = mangled(good, rng)
        if not isinstance(message, dict):
            continue
        reply = worker.control(**{str(key): value for key, value in message.items() if key not in ("v", "op", "id")})
        if reply["op"] == "ok":  # the change changed nothing
            assert message == good, (number, message)
        else:
            assert reply["code"] != "internal", (number, message, reply)
    assert rss_bytes() - before < 32 << 20


# --- the data socket --------------------------------------------------------------------------------------------------


def test_junk_on_the_data_port_takes_no_memory(worker: Worker) -> None:
    before = rss_bytes()
    assert throw_junk(worker.receiver.endpoint) > 20
    assert rss_bytes() - before < 64 << 20


@contextlib.contextmanager
def dealer(endpoint: str) -> Iterator[zmq.Socket]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        yield socket


def test_random_messages_on_the_data_socket_write_nothing(worker: Worker) -> None:
    """Also while an update is being received, with its own token: only a whole, right bucket is written."""
    rng = random.Random(7)
    manifest = pack(3, [(row[0], row[1], row[2]) for row in rows_of(worker)], 128)
    before = rss_bytes()
    with dealer(worker.receiver.endpoint) as socket:
        for _ in range(200):
            reply = worker.control(**begin(manifest.to_wire()))
            assert reply["op"] == "ok"
            token = bytes.fromhex(reply["token"])
            for _ in range(20):
                socket.send_multipart(hostile_bucket(token, rng))
            worker.status()
            while socket.poll(0):
                frames = socket.recv_multipart()
                assert frames[0][:4] in (b"WNO1", b"WAK1") or decode(split_envelope(frames)[1])["op"] == "error"
    assert rss_bytes() - before < 32 << 20


def test_each_hostile_message_to_the_weight_socket_has_one_answer(worker: Worker) -> None:
    kinds = " ".join(maker.__name__ for maker in MAKERS if maker is not too_large)  # it costs the connection
    messages = list(hostile_messages(2000, seed=8, kinds=kinds))
    before = rss_bytes()
    with dealer(worker.receiver.endpoint) as socket:
        for first in range(0, len(messages), 100):
            burst = messages[first : first + 100]
            for message in burst:
                socket.send_multipart(message.frames)
            expected, answers = Counter(message.id for message in burst), Counter[str]()
            while answers.total() < len(burst):
                assert socket.poll(20_000), "no answer comes any more"
                reply = decode(split_envelope(socket.recv_multipart())[1])
                assert reply["op"] in ("error", "ok") and reply.get("code") != "internal", reply
                answers[reply["id"] or UNREADABLE] += 1
            assert answers == expected, "each message has one answer, with its id"
    assert rss_bytes() - before < 32 << 20


def hostile_bucket(token: bytes, rng: random.Random) -> list[bytes]:
    payload = rng.randbytes(rng.choice([0, 1, 63, 64, 127, 128, 129, 4096]))
    index = rng.choice([0, 1, 2**31, 2**32 - 1])
    header = struct.pack("<4s16sII", b"WBK1", rng.choice([token, bytes(16)]), index, rng.choice([checksum(payload), 0]))
    change = rng.randrange(6)
    if change == 0:
        header = header[: rng.randrange(len(header))]
    elif change == 1:
        header = rng.randbytes(len(header))
    frames = {2: [payload, header], 3: [header], 4: [header, payload, payload], 5: [b"", header, payload]}
    # No bucket may be valid, so those of the right form get a wrong checksum.
    right = len(payload) in (64, 128) and change == 1
    return frames.get(change, [header, payload + b"x" if right else payload])


# --- folders ----------------------------------------------------------------------------------------------------------


def write_update(worker: Worker, folder: Path, edit: Any) -> dict[str, Any]:
    """Write a folder of one safetensors file whose header `edit` spoils; returns the `begin` that names it."""
    folder.mkdir()
    tensors = new_tensors(worker.model, 2)
    header: dict[str, Any] = {}
    data, checks = b"", []
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        dtype = "BF16" if tensor.dtype == torch.bfloat16 else "F32"
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
        checks.append(checksum(raw))
    text = edit(header)
    text = json.dumps(header).encode() if text is None else text
    head = struct.pack("<Q", len(text)) + text
    (folder / "model.safetensors").write_bytes(head + data)
    names = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
    manifest = pack(5, [(name, names[t.dtype], t.shape) for name, t in tensors.items()], 64)
    files = [["model.safetensors", len(head + data), [checksum(head), *checks]]]
    options = {"folder": str(folder), "files": files, "piece_bytes": 1 << 20}
    return begin(manifest.to_wire(), transport="disk", options=options)


def update(name: str, **changes: Any) -> Any:
    return lambda header: header[name].update(changes)


SPOILED = {
    "overlap": update("norm.weight", data_offsets=[0, 24]),
    "overlap of all": lambda header: [entry.update(data_offsets=[0, 8]) for entry in header.values()] and None,
    "offsets in reverse": update("norm.weight", data_offsets=[24, 0]),
    "negative offsets": update("norm.weight", data_offsets=[-24, 0]),
    "offsets beyond 64 bits": update("norm.weight", data_offsets=[2**64, 2**64 + 24]),
    "offsets beyond the file": update("norm.weight", data_offsets=[2**40, 2**40 + 24]),
    "offsets of floats": update("norm.weight", data_offsets=[0.0, 24.0]),
    "absurd shape": update("norm.weight", shape=[2**62]),
    "another type": update("norm.weight", dtype="F64"),
    "a name more": lambda header: header.update(extra={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
    "a name less": lambda header: header.pop("norm.weight") and None,
    "an entry of another type": lambda header: header.update({"norm.weight": [1]}),
    "deep JSON": lambda header: b"[" * 100_000,
    "metadata of 64 MiB": lambda header: json.dumps(header | {"__metadata__": {"x": "y" * (64 << 20)}}).encode(),
    "numbers without end": lambda header: b'{"a":' + b"9" * 100_000 + b"}",
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_folder_whose_header_lies_is_refused(worker: Worker, name: str, tmp_path: Path) -> None:
    message = write_update(worker, tmp_path / "update", SPOILED[name])
    with little_memory_and_time():
        reply = worker.control(**message)
        if reply["op"] == "ok":  # the files are read after `begin`
            reply = worker.control(action="commit", token=reply["token"], options={})
    assert reply["op"] == "error" and reply["code"] in ("weights_rejected", "not_found"), reply
    assert reply["code"] != "internal" and len(reply["message"]) < 4000


def test_a_folder_with_its_header_unspoiled_is_accepted(tmp_path: Path) -> None:
    with Worker() as worker:
        reply = worker.control(**write_update(worker, tmp_path / "update", lambda header: None))
        assert worker.control(action="commit", token=reply["token"], options={})["op"] == "ok"


@pytest.mark.parametrize(
    "folder", ["relative", "/", "/dev", "/proc/self/fd", "/etc/passwd", "a\0b", "/" + "x" * 10_000]
)
def test_a_folder_that_holds_no_update_is_refused(worker: Worker, folder: str) -> None:
    manifest = sealed(rows_of(worker), version=5)
    options = {"folder": folder, "files": [["model.safetensors", 8, [0]]], "piece_bytes": 1}
    reply = worker.control(**begin(manifest, transport="disk", options=options))
    if reply["op"] == "ok":
        reply = worker.control(action="commit", token=reply["token"], options={})
    assert reply["op"] == "error" and reply["code"] != "internal", reply


def test_a_manifest_that_passes_is_consistent() -> None:
    """`from_wire` lets only manifests pass whose tensors neither overlap nor repeat a name."""
    rng = random.Random(11)
    good = pack(1, [("a", "float32", [3, 2]), ("b", "bfloat16", [5]), ("c", "float16", [])], 64).to_wire()
    passed = 0
    for _ in range(5000):
        wire = mangled(good, rng)
        if rng.random() < 0.5 and isinstance(wire, dict) and isinstance(wire.get("tensors"), list):
            try:
                wire |= {"digest": sealed(wire["tensors"], wire["version"], wire["bucket_bytes"])["digest"]}
            except (TypeError, IndexError, KeyError, ValueError):
                continue
        try:
            manifest = from_wire(wire)
        except WeightsRejected:
            continue
        passed += 1
        ends = [0, *(entry.end for entry in manifest.tensors)]
        assert all(entry.offset >= end for entry, end in zip(manifest.tensors, ends, strict=False))
        assert len({entry.name for entry in manifest.tensors}) == len(manifest.tensors)
    assert passed > 20
