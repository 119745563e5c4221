"""Shared memory between publisher and workers: who is on one host, what a segment must be, and that none is left."""

import fcntl
import gc
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.bridge.harness import Worker, new_tensors, serves
from tests.support.bridge.parts import enter
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.transports.payload import Payload
from trainer_bridge.transports.shm import Segment, ShmSender, boot_id
from trainer_bridge.wire.errors import BadRequest, RolloutError, WeightsRejected

SMALL = 64


def segments() -> int:
    """Mappings of segments in this process, which is publisher and worker."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:rollout-weights")


def test_one_segment_serves_several_workers_and_nothing_is_left_of_it() -> None:
    files = set(os.listdir("/dev/shm"))
    with Worker() as one, Worker() as two:
        endpoints = [one.endpoint, two.endpoint]
        with WeightPublisher(endpoints, transport="shm", bucket_bytes=SMALL) as publisher:
            for version in (1, 2):
                tensors = new_tensors(one.model, version)
                reports = publisher.publish(tensors, version).applied(20)
                assert [report.transport for report in reports] == ["shm", "shm"]
                assert serves(one.model, tensors) and serves(two.model, tensors)
                assert segments() == 1  # the publisher's; the workers let go of theirs
                assert set(os.listdir("/dev/shm")) == files
    links = [Path("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
    assert segments() == 0 and not [
        link for link in links if link.is_symlink() and "memfd:rollout-weights" in os.readlink(link)
    ]


def test_auto_takes_shared_memory_on_one_host_and_says_so(worker: Worker) -> None:
    with WeightPublisher(worker.endpoint) as publisher:
        (report,) = publisher.publish(new_tensors(worker.model, 1), 1).applied(20)
    assert (report.transport, report.why) == ("shm", ShmSender.why)


@pytest.mark.parametrize("change", ["boot_id", "secret", "pid"])
def test_auto_takes_a_socket_when_the_host_is_another_one_and_says_why(
    worker: Worker, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {"boot_id": "0" * 36, "secret": "0" * 64, "pid": 1 << 22}[change]
    asked = []

    class Elsewhere(ShmSender):
        def prepare(self, payload: Payload) -> dict[str, Any]:
            asked.append(1)
            return {**super().prepare(payload), change: other}

    enter(monkeypatch, "shm", sender=lambda publisher: Elsewhere())
    with WeightPublisher(worker.endpoint) as publisher:
        for version in (1, 2):
            tensors = new_tensors(worker.model, version)
            (report,) = publisher.publish(tensors, version).applied(20)
            assert report.transport == "zmq" and serves(worker.model, tensors)
            assert "shm" in report.why and worker.endpoint in report.why
    assert len(asked) == 1  # what one update found out the next one knows


def test_memory_that_cannot_be_pinned_is_a_reason_for_another_transport(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Segment) -> None:
        raise RuntimeError("the driver is full")

    class OnGpu:
        """A payload whose tensors are on a GPU, as the sender sees it."""

        on_gpu = True

        def __init__(self, payload: Payload) -> None:
            self.manifest = payload.manifest

    class Sender(ShmSender):
        def prepare(self, payload: Payload) -> dict[str, Any]:
            return super().prepare(OnGpu(payload))  # type: ignore[arg-type]

    monkeypatch.setattr(Segment, "pin", full)
    enter(monkeypatch, "shm", sender=lambda publisher: Sender())
    with WeightPublisher(worker.endpoint) as publisher:
        (report,) = publisher.publish(tensors := new_tensors(worker.model, 1), 1).applied(20)
        assert report.transport == "zmq" and "shm" in report.why and "the driver is full" in report.why
        assert serves(worker.model, tensors) and segments() == 0


def test_memory_that_the_system_does_not_give_is_a_reason_for_another_transport(worker: Worker) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_192, limits[1]))
    try:
        with WeightPublisher(worker.endpoint) as publisher:
            (report,) = publisher.publish(tensors := new_tensors(worker.model, 1), 1).applied(20)
            assert report.transport == "zmq" and "shm" in report.why and serves(worker.model, tensors)
        with WeightPublisher(worker.endpoint, transport="shm") as publisher, pytest.raises(RolloutError, match="zmq"):
            publisher.publish(new_tensors(worker.model, 2), 2).applied(20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert serves(worker.model, tensors) and segments() == 0


def noting(plain: Any, calls: list) -> Any:
    return lambda self, payload: (calls.append(1), plain(self, payload))[1]


def test_workers_of_different_reach_get_the_same_update_each_its_way() -> None:
    with Worker() as near, Worker() as far, Worker() as gone_by:
        del far.receiver.receivers["shm"]  # as a worker of before, or of another host
        endpoints = [near.endpoint, far.endpoint, gone_by.endpoint]
        with WeightPublisher(endpoints, bucket_bytes=SMALL) as publisher:
            for version in (1, 2, 3):
                tensors = new_tensors(near.model, version)
                sent = {name: tensor.clone() for name, tensor in tensors.items()}
                handle = publisher.publish(tensors, version)
                handle.held(20)
                for tensor in tensors.values():
                    tensor.fill_(float("nan"))
                reports = handle.applied(20)
                assert [report.transport for report in reports] == ["shm", "zmq", "shm"]
                assert all(serves(worker.model, sent) for worker in (near, far, gone_by))


def test_a_refusal_of_the_weights_is_no_reason_to_try_another_transport(worker: Worker) -> None:
    wrong = {**new_tensors(worker.model, 1), "stranger": torch.zeros(3)}
    with WeightPublisher(worker.endpoint) as publisher:
        with pytest.raises(WeightsRejected, match="stranger"):
            publisher.publish(wrong, 1).applied(20)
        (report,) = publisher.publish(new_tensors(worker.model, 1), 1).applied(20)
        assert report.transport == "shm"


@pytest.fixture
def offer(worker: Worker) -> Iterator[Any]:
    """`begin` with options that are not quite the segment's."""
    payload = Payload(new_tensors(worker.model, 1), 1, SMALL)
    sender = ShmSender()
    options = sender.prepare(payload)

    def begin(**changes: Any) -> dict[str, Any]:
        manifest = payload.manifest.to_wire()
        fields = {"version": 1, "manifest": manifest, "transport": "shm", "options": {**options, **changes}}
        return worker.control(action="begin", **fields)

    yield begin
    sender.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"boot_id": ""},
        {"boot_id": "x"},
        {"secret": ""},
        {"secret": "é" * 64},
        {"secret": "0" * 64},
        {"pid": 0},
        {"pid": -1},
        {"pid": 1 << 40},
        {"fd": -1},
        {"fd": 1 << 40},
        {"slots": 0},
        {"slots": 65},
        {"slots": 5},
        {"slot_bytes": 0},
        {"slot_bytes": 100},
        {"slot_bytes": 1 << 50},
        {"slot_bytes": True},
        {"more": 1},
    ],
)
def test_broken_options_are_refused_by_name(worker: Worker, offer: Any, changes: dict[str, Any]) -> None:
    reply = offer(**changes)
    assert (reply["op"], reply["code"], reply["field"]) == ("error", "bad_request", "options"), reply
    assert worker.status()["state"] == "idle" and segments() == 1
    assert offer()["op"] == "ok"


def test_only_sealed_memory_is_mapped(worker: Worker, offer: Any, tmp_path: Path) -> None:
    """A file could be cut off under the worker, which would kill it; so could memory without a seal."""
    secret = "7" * 64
    content = secret.encode() + bytes(4096 + 4 * 4096 - len(secret))
    (tmp_path / "file").write_bytes(content)
    file = os.open(tmp_path / "file", os.O_RDWR)
    unsealed, sealed = (os.memfd_create("x", os.MFD_ALLOW_SEALING) for _ in range(2))
    os.write(unsealed, content)
    os.write(sealed, content)
    fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    read, write = os.pipe()
    for fd in (file, unsealed, read, write):
        assert offer(fd=fd, secret=secret)["field"] == "options"
        os.close(fd)
    assert offer(fd=sealed, secret=secret)["op"] == "ok"
    os.close(sealed)


def test_a_bucket_that_comes_another_way_than_agreed_ends_the_update(worker: Worker, offer: Any) -> None:
    from trainer_bridge.transports.bucket_link import BUCKET, BUCKET_MAGIC

    token = bytes.fromhex(offer()["token"])
    import zmq

    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(worker.receiver.endpoint)
    socket.send_multipart([BUCKET.pack(BUCKET_MAGIC, token, 0, 0), bytes(SMALL)])
    assert socket.poll(20_000)
    refusal = socket.recv()
    assert refusal[:4] == b"WNO1" and b"shm" in refusal[20:]
    assert worker.status()["state"] == "idle" and worker.updates == []
    socket.close(0)


def test_where_the_system_does_not_tell_its_boot_there_is_no_shared_memory(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert len(boot_id()) == 36
    monkeypatch.setattr("trainer_bridge.transports.shm._BOOT_ID", tmp_path / "none")
    with WeightPublisher(worker.endpoint, transport="shm") as publisher, pytest.raises(BadRequest, match="one host"):
        publisher.publish(new_tensors(worker.model, 1), 1).applied(20)
