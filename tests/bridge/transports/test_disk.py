"""The disk transport: a folder that others can read, and files that lie."""

import json
import os
import signal
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save

from tests.support.bridge.harness import TinyModel, Worker, new_tensors, serves
from tests.support.patience import PATIENCE_S
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.transports.base import Destination, IncomingUpdate
from trainer_bridge.transports.disk import DiskReceiver, DiskSender
from trainer_bridge.transports.payload import Payload
from trainer_bridge.wire.errors import RolloutError, WeightsRejected


def folders(root: Path) -> list[str]:
    """Of updates; the mark of a publisher that lives is left out."""
    return sorted(path.name.rsplit("-", 1)[0] for path in root.iterdir() if path.is_dir())


class Unused(Destination):
    """The destination of an update of which no byte lands."""

    def unused(self, *how: Any) -> Any:
        raise AssertionError("bytes land")

    wait_for_room = memory = landed = put = unused


def test_an_update_through_a_folder(worker: Worker, tmp_path: Path) -> None:
    with WeightPublisher(worker.endpoint, transport="disk", folder=str(tmp_path)) as publisher:
        for version in (1, 2, 3):
            tensors = new_tensors(worker.model, version, stacked=version == 2)
            sent = {name: tensor.clone() for name, tensor in tensors.items()}
            handle = publisher.publish(tensors, version)
            handle.held(20)
            for tensor in tensors.values():
                tensor.fill_(float("nan"))
            (report,) = handle.applied(20)
            assert report.transport == "disk" and serves(worker.model, sent)
    assert folders(tmp_path) == ["version-2", "version-3"]  # older ones are removed


PUBLISHES = """
import os, signal, sys
from tests.support.bridge.harness import TinyModel, new_tensors
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.transports.payload import Payload
publisher = WeightPublisher(sys.argv[1], transport="disk", folder=sys.argv[2])
for version in (1, 2, 3):
    publisher.publish(new_tensors(TinyModel(), version), version).applied(60)
Payload.host_copy = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
publisher.publish(new_tensors(TinyModel(), 4), 4).applied(60)
"""


def test_the_next_publisher_removes_what_a_killed_one_left(worker: Worker, tmp_path: Path) -> None:
    other = tmp_path / ".version-9-of-somebody.part"
    other.mkdir()
    command = [sys.executable, "-c", PUBLISHES, worker.endpoint, tmp_path]
    assert subprocess.run(command, timeout=PATIENCE_S).returncode == -signal.SIGKILL
    assert folders(tmp_path) == sorted([".version-9-of", ".version-4", "version-2", "version-3"])
    with WeightPublisher(worker.endpoint, transport="disk", folder=str(tmp_path)) as publisher:
        publisher.publish(new_tensors(worker.model, 5), 5).applied(20)
        assert folders(tmp_path) == [".version-9-of", "version-3", "version-5"]
        with WeightPublisher(worker.endpoint, transport="disk", folder=str(tmp_path)) as second:
            second.publish(new_tensors(worker.model, 6), 6).applied(20)
            second.publish(new_tensors(worker.model, 7), 7).applied(20)
        assert folders(tmp_path) == [".version-9-of", "version-3", "version-5", "version-6", "version-7"]
    assert all(path.is_dir() for path in tmp_path.iterdir()), "no mark is left"


def test_what_a_publisher_on_another_host_left_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    payload = Payload(new_tensors(TinyModel(), 1), 1, 64)
    with monkeypatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: "elsewhere")
        abroad = DiskSender(str(tmp_path))
        abroad.prepare(payload)
        abroad._mark._release()  # as its end does
    payload = Payload(new_tensors(TinyModel(), 2), 2, 64)
    here = DiskSender(str(tmp_path), keep=1)
    here.prepare(payload)
    here.release(payload, applied=True)
    assert folders(tmp_path) == ["version-1", "version-2"]


def test_the_folder_is_a_readable_checkpoint_of_several_files(worker: Worker, tmp_path: Path) -> None:
    tensors = new_tensors(worker.model, 1)
    tensors["lm_head.weight"] = tensors["embed.weight"]  # shared memory is written under both names
    payload = Payload(tensors, 1, 64)
    options = DiskSender(str(tmp_path), file_bytes=300).prepare(payload)
    assert len(options["files"]) > 3
    index = json.loads((Path(options["folder"]) / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        with safe_open(Path(options["folder"]) / file, "pt") as reader:
            assert torch.equal(reader.get_tensor(name), tensors[name])
    assert offer(worker, payload, options)["op"] == "ok"
    assert serves(worker.model, tensors)


@pytest.mark.parametrize("error", [RolloutError("gather: rank 1 cannot be reached"), OSError(28, "no space left")])
def test_an_update_that_cannot_be_written_leaves_no_draft(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    plain = Payload.host_copy

    def copy(self: Payload, index: int) -> torch.Tensor:
        if index == 3:
            raise error
        return plain(self, index)

    with WeightPublisher(worker.endpoint, transport="disk", folder=str(tmp_path)) as publisher:
        with monkeypatch.context() as patch:
            patch.setattr(Payload, "host_copy", copy)
            with pytest.raises(RolloutError, match="cannot be reached|no space left"):
                publisher.publish(new_tensors(worker.model, 1), 1).applied(20)
        assert folders(tmp_path) == []
        publisher.publish(tensors := new_tensors(worker.model, 2), 2).applied(20)
        assert serves(worker.model, tensors)


def test_a_folder_that_cannot_be_written_is_an_error_of_prepare(worker: Worker, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with WeightPublisher(worker.endpoint, transport="disk", folder=str(tmp_path / "file")) as publisher:
        with pytest.raises(RolloutError, match="prepare: cannot write to"):
            publisher.publish(new_tensors(worker.model, 1), 1).applied(20)


def offer(worker: Worker, payload: Payload, options: dict) -> dict:
    """Begin and commit; the first error, or the report."""
    manifest = payload.manifest.to_wire()
    begun = worker.control(
        action="begin", version=payload.manifest.version, manifest=manifest, transport="disk", options=options
    )
    if begun["op"] == "error":
        return begun
    return worker.control(action="commit", token=begun["token"], options={})


def written(worker: Worker, root: Path) -> tuple[Payload, dict, Path]:
    payload = Payload(new_tensors(worker.model, 1), 1, 64)
    options = DiskSender(str(root)).prepare(payload)
    return payload, options, Path(options["folder"]) / options["files"][0][0]


def note(options: dict, path: Path) -> None:
    """Make the first file's length and the checksum of its header true again after the file was changed."""
    data = path.read_bytes()
    header_end = 8 + int.from_bytes(data[:8], "little")
    checks = options["files"][0][2]
    checks[0] = xxhash.xxh3_64_intdigest(data[:header_end]) & 0xFFFFFFFF
    options["files"][0][1] = len(data)


def rewrite_header(path: Path, change) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    packed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(packed)) + packed + data[8 + length :])


def assert_refused(worker: Worker, payload: Payload, options: dict, text: str) -> None:
    before = worker.model.snapshot()
    reply = offer(worker, payload, options)
    assert reply["op"] == "error" and reply["code"] in ("weights_rejected", "bad_request"), reply
    assert text in reply["message"], reply
    assert worker.updates == [] and worker.status()["state"] == "idle"
    assert all(torch.equal(before[name], tensor) for name, tensor in worker.model.parameters.items())


@pytest.mark.parametrize("keep_note", [True, False])
@pytest.mark.parametrize("size", [0, 7, 40, -1])
def test_a_truncated_file_is_refused(worker: Worker, tmp_path: Path, size: int, keep_note: bool) -> None:
    payload, options, path = written(worker, tmp_path)
    path.write_bytes(path.read_bytes()[:size])
    if not keep_note:
        note(options, path)
    assert_refused(worker, payload, options, "model-00001")


def test_a_changed_byte_is_found(worker: Worker, tmp_path: Path) -> None:
    payload, options, path = written(worker, tmp_path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert_refused(worker, payload, options, "is damaged")


def test_a_file_of_other_tensors_is_refused(worker: Worker, tmp_path: Path) -> None:
    payload, options, path = written(worker, tmp_path)
    path.write_bytes(save({"stranger": torch.zeros(3)}))
    note(options, path)
    assert_refused(worker, payload, options, "stranger")


def test_files_without_a_tensor_are_refused(worker: Worker, tmp_path: Path) -> None:
    payload, _, _ = written(worker, tmp_path)
    tensors = new_tensors(worker.model, 1)
    del tensors["norm.weight"]
    options = DiskSender(str(tmp_path)).prepare(Payload(tensors, 1, 64))
    assert_refused(worker, payload, options, "the files hold no norm.weight")


def swap_offsets(header: dict) -> None:
    a, b = header["q.weight"], header["embed.weight"]
    a["data_offsets"], b["data_offsets"] = b["data_offsets"], a["data_offsets"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda h: h["q.weight"].update(shape=[6, 8]), "holds q.weight as"),
        (lambda h: h["q.weight"].update(dtype="F16"), "holds q.weight as"),
        (lambda h: h["q.weight"].update(dtype=["F16"]), "holds q.weight as"),
        (lambda h: h["q.weight"].update(data_offsets=[0, 1 << 60]), "bytes for q.weight"),
        (lambda h: h["q.weight"].update(data_offsets=[-96, 0]), "hole or an overlap"),
        (lambda h: h["q.weight"].update(data_offsets="no"), "broken offsets"),
        (lambda h: h["q.weight"].update(more=1), "broken header entry"),
        (lambda h: h.update({"q.weight": 3}), "broken header entry"),
        (swap_offsets, "bytes for"),
    ],
)
def test_a_header_that_lies_is_refused(worker: Worker, tmp_path: Path, change, text: str) -> None:
    payload, options, path = written(worker, tmp_path)
    rewrite_header(path, change)
    note(options, path)
    assert_refused(worker, payload, options, text)


@pytest.mark.parametrize("header", [b"not json", b"[]", b"[" * 100_000, b"\xff\xfe"])
def test_a_header_that_is_not_a_map_is_refused(worker: Worker, tmp_path: Path, header: bytes) -> None:
    payload, options, path = written(worker, tmp_path)
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    note(options, path)
    assert_refused(worker, payload, options, "has a header that is not")


def test_only_regular_files_inside_the_folder_are_opened(worker: Worker, tmp_path: Path) -> None:
    payload, options, path = written(worker, tmp_path)
    outside = tmp_path / "outside.safetensors"
    path.rename(outside)
    path.symlink_to(outside)
    assert_refused(worker, payload, options, "cannot be opened")
    path.unlink()
    os.mkfifo(path)
    assert_refused(worker, payload, options, "not a regular file")
    path.unlink()
    path.mkdir()
    assert_refused(worker, payload, options, "not a regular file")
    for name in (
        "../outside.safetensors",
        str(outside),
        "a/b.safetensors",
        ".safetensors",
        "model.bin",
        "x\0.safetensors",
    ):
        tricky = {**options, "files": [[name, *options["files"][0][1:]]]}
        assert_refused(worker, payload, tricky, "not a plain name")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"folder": "relative"}, "absolute"),
        ({"folder": "/nowhere/at/all"}, "cannot open"),
        ({"folder": 3}, "folder (str)"),
        ({"files": []}, "list of"),
        ({"files": [["a.safetensors", -1.5, 0]]}, "list of"),
        ({"files": [["a.safetensors", 1, 0]]}, "list of"),
        ({"files": [["a.safetensors", 1, [0.5]]]}, "list of"),
        ({"files": [["a.safetensors", 1, []]]}, "list of"),
        ({"files": [["a.safetensors", -1, [0]]]}, "list of"),
        ({"files": [["a.safetensors", 1, [0]]] * 2}, "twice"),
        ({"piece_bytes": 0}, "piece_bytes must be"),
        ({"piece_bytes": 1 << 40}, "piece_bytes must be"),
        ({"piece_bytes": "64"}, "piece_bytes (int)"),
        ({"piece_bytes": 16}, "checksums"),
        ({"extra": 1}, "takes the options"),
    ],
)
def test_broken_options_are_refused(worker: Worker, tmp_path: Path, change: dict, text: str) -> None:
    payload, options, _ = written(worker, tmp_path)
    assert_refused(worker, payload, {**options, **change}, text)


@pytest.mark.parametrize("piece_bytes", [1, 24, 64, 1 << 20])
def test_every_piece_has_its_checksum(worker: Worker, tmp_path: Path, piece_bytes: int) -> None:
    payload = Payload(new_tensors(worker.model, 1), 1, 64)
    options = DiskSender(str(tmp_path), piece_bytes=piece_bytes).prepare(payload)
    (name, nbytes, checks), *_ = options["files"]
    with safe_open(Path(options["folder"]) / name, "pt") as reader:
        sizes = [reader.get_tensor(key).nbytes for key in reader.keys()]  # noqa: SIM118 -- no mapping
    assert len(checks) == 1 + sum(-(-size // piece_bytes) for size in sizes)
    for number in range(0, len(checks), 5):
        spoiled = [check ^ (at == number) for at, check in enumerate(checks)]
        assert_refused(worker, payload, {**options, "files": [[name, nbytes, spoiled]]}, "is damaged")
    assert offer(worker, payload, options)["op"] == "ok"


def test_pieces_that_have_no_checksums_take_no_memory(tmp_path: Path) -> None:
    payload = Payload({"a": torch.zeros(1 << 17)}, 1, 1 << 20)
    options = DiskSender(str(tmp_path)).prepare(payload) | {"piece_bytes": 1}
    receiver, incoming = DiskReceiver(), IncomingUpdate(payload.manifest, "disk", bytes(16), Unused())
    incoming.open.set()
    receiver.begin(incoming, options)
    tracemalloc.start()
    with pytest.raises(WeightsRejected, match="checksums"):
        receiver.advance(incoming)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    receiver.close()
    assert most < 1 << 20, "a piece is a tuple: so many would take 30 MB"


def test_a_refused_folder_does_not_stop_the_next_update(worker: Worker, tmp_path: Path) -> None:
    payload, options, path = written(worker, tmp_path)
    path.write_bytes(b"")
    assert offer(worker, payload, options)["op"] == "error"
    tensors = new_tensors(worker.model, 2)
    with WeightPublisher(worker.endpoint, transport="disk", folder=str(tmp_path)) as publisher:
        publisher.publish(tensors, 1).applied(20)
    assert serves(worker.model, tensors)


def test_updates_that_nobody_takes_do_not_push_out_those_that_are_served(worker: Worker, tmp_path: Path) -> None:
    with WeightPublisher(worker.endpoint, transport="disk", folder=str(tmp_path)) as publisher:
        tensors = new_tensors(worker.model, 1)
        publisher.publish(tensors, 1).applied(20)
        for version in (2, 3, 4):
            with pytest.raises(WeightsRejected):
                publisher.publish({**tensors, "stranger": torch.zeros(3)}, version).applied(20)
            assert folders(tmp_path) == ["version-1", f"version-{version}"]
        publisher.publish(tensors, 5).applied(20)
        assert folders(tmp_path) == ["version-1", "version-5"]
