"""A transport is one file and one entry: one that is declared here carries updates to a real receiver.

`files` writes each bucket to a file of its own in a folder that publisher and worker share.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.bridge.harness import Worker, new_tensors, serves
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.transports import registry
from trainer_bridge.transports.base import IncomingUpdate, Recipient, TransferRules, TransportReceiver, TransportSender
from trainer_bridge.transports.payload import Payload
from trainer_bridge.transports.registry import TRANSPORTS, Transport
from trainer_bridge.wire.errors import BadRequest, WeightsRejected
from trainer_bridge.wire.manifest import checksum, checksums_digest

SMALL = 64


class FilesReceiver(TransportReceiver):
    """Reads one bucket at a time, as soon as its file is there."""

    name = "files"

    def __init__(self) -> None:
        self._folder, self._checksums = Path(), list[int]()

    def begin(self, incoming: IncomingUpdate, options: Mapping[str, Any]) -> dict[str, Any]:
        folder = options.get("folder")
        if set(options) != {"folder"} or type(folder) is not str or not Path(folder).is_dir():
            raise BadRequest("transport files takes a folder that this worker can read", field="options.folder")
        self._folder, self._checksums = Path(folder), []
        return {}

    def advance(self, incoming: IncomingUpdate | None) -> bool:
        if incoming is None or not incoming.may_land:
            return False
        index = len(self._checksums)
        file = self._folder / str(index)
        if index == incoming.manifest.bucket_count or not file.exists():
            return False
        data = file.read_bytes()
        start, end = incoming.manifest.bucket_span(index)
        if len(data) != end - start:
            raise WeightsRejected(f"bucket {index} has {len(data)} bytes; the manifest says {end - start}")
        np.copyto(incoming.destination.memory(start, end), np.frombuffer(data, np.uint8))
        incoming.arrived(start, end)
        self._checksums.append(checksum(memoryview(data)))
        return True

    def finish(self, incoming: IncomingUpdate, options: Mapping[str, Any]) -> bool:
        if len(self._checksums) < incoming.manifest.bucket_count:
            return False
        if options != {"checksums": checksums_digest(self._checksums)}:
            raise WeightsRejected("the buckets are not those that were sent", field="options")
        return True


class FilesSender(TransportSender):
    """Writes the buckets once, for all workers. `damage` changes the first byte after its checksum is taken.

    `told` is the folder's name for the workers.
    """

    name, why = "files", "there is a folder"

    def __init__(self, folder: Path, damage: bool = False, told: str = "{}") -> None:
        self._folder, self._damage, self._told = folder, damage, told

    def prepare(self, payload: Payload) -> dict[str, Any]:
        (self._folder / str(payload.manifest.version)).mkdir()
        return {"folder": self._told.format(self._folder / str(payload.manifest.version))}

    def transfer(self, payload: Payload, recipients: Sequence[Recipient], rules: TransferRules) -> dict[str, Any]:
        buffer, checks = torch.empty(payload.manifest.bucket_bytes, dtype=torch.uint8), []
        for index in range(payload.manifest.bucket_count):
            if rules.closing.is_set():
                return {}
            data = buffer.numpy()[: payload.pack_bucket(index, buffer)]
            checks.append(checksum(memoryview(data)))
            data[0] ^= self._damage
            draft = self._folder / "draft"
            draft.write_bytes(data)
            draft.rename(self._folder / str(payload.manifest.version) / str(index))  # whole, or not there
        payload.read()
        return {"checksums": checksums_digest(checks)}

    def release(self, payload: Payload, applied: bool) -> None:
        shutil.rmtree(self._folder / str(payload.manifest.version))


@pytest.fixture(params=[False, True], ids=["whole", "damaged"])
def damage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """The entry, before a worker or a publisher is made; whether its buckets are damaged on their way."""

    def sender(publisher: registry.PublisherSetup) -> TransportSender:
        return FilesSender(tmp_path, request.param)

    monkeypatch.setitem(TRANSPORTS, "files", Transport(lambda worker: FilesReceiver(), sender, auto=0))
    return request.param


@pytest.mark.parametrize("apply", ["staged", "in_place"])
@pytest.mark.parametrize("asked", ["files", "auto"])
def test_one_entry_adds_a_transport(damage: bool, asked: str, apply: str, tmp_path: Path) -> None:
    """The worker offers it, a publisher finds it by name and by `auto`, and damage leaves no wrong weights in use."""
    with Worker(apply=apply) as worker, Worker(apply=apply) as other:
        assert "files" in worker.status()["transports"]
        endpoints = [worker.endpoint, other.endpoint]
        with WeightPublisher(endpoints, transport=asked, bucket_bytes=SMALL) as publisher:
            handle = publisher.publish(tensors := new_tensors(worker.model, 1), 1)
            if damage:
                with pytest.raises(WeightsRejected, match="not those that were sent"):
                    handle.applied(20)
                assert worker.updates == [] and worker.receiver.version == 0
                return
            reports = handle.applied(20)
            assert [report.transport for report in reports] == ["files", "files"]
            assert asked != "auto" or reports[0].why == "there is a folder"
            assert serves(worker.model, tensors) and serves(other.model, tensors)
            tensors = new_tensors(worker.model, 2)
            publisher.publish(tensors, 2).applied(20)
            assert serves(worker.model, tensors) and worker.receiver.version == 2
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_cannot_use_it_gets_the_update_by_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal in `begin` that names `options` is one of the transport: `auto` goes on to the next."""
    entry = Transport(lambda worker: FilesReceiver(), lambda publisher: FilesSender(tmp_path, told="{}/none"), auto=0)
    monkeypatch.setitem(TRANSPORTS, "files", entry)
    with Worker() as worker, WeightPublisher(worker.endpoint, bucket_bytes=SMALL) as publisher:
        (report,) = publisher.publish(tensors := new_tensors(worker.model, 1), 1).applied(20)
        assert report.transport == "shm" and "not files: " in report.why and serves(worker.model, tensors)
