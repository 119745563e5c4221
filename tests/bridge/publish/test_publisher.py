"""Trainer to worker and back, over real sockets; and trainers whose workers misbehave."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zmq

from tests.support.bridge.harness import TinyModel, Worker, new_tensors, serves, wait_for
from tests.support.bridge.parts import packing
from tests.support.kernels.grids import checkered
from trainer_bridge import WeightPublisher as LazyPublisher
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.transports.bucket_link import reachable
from trainer_bridge.transports.payload import Payload
from trainer_bridge.wire.codec import decode, encode
from trainer_bridge.wire.errors import ConnectionLost, ProtocolError, RolloutError, RolloutTimeout, WeightsRejected

SMALL = 64  # bytes of a bucket: the tiny model takes dozens


class FakeWorker:
    """A worker that answers `begin`, acknowledges the first `acks` buckets, and then does nothing more."""

    def __init__(self, acks: int, answer: Callable[[dict], dict | None] | None = None) -> None:
        context = zmq.Context.instance()
        self.control, self.data = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
        ports = [sock.bind_to_random_port("tcp://127.0.0.1") for sock in (self.control, self.data)]
        self.endpoint, self.data_endpoint = (f"tcp://127.0.0.1:{port}" for port in ports)
        self.acks, self.buckets = acks, 0
        self.actions: list[str] = []
        self.answers: dict[str, dict] = {}  # by action; `answer` has the others
        self._answer = answer or self._grant
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _grant(self, header: dict) -> dict | None:
        grant = {"endpoint": self.data_endpoint, "window": 4}
        return {"op": "ok", "token": "ab" * 16, "grant": grant} if header["action"] == "begin" else None

    def _run(self) -> None:
        while not self._closing.is_set():
            if self.control.poll(2):
                sender, *frames = self.control.recv_multipart()
                header = decode(frames)
                if header["op"] == "status":
                    reply: dict | None = {"op": "status", "weights_endpoint": self.endpoint}
                else:
                    self.actions.append(header["action"])
                    reply = self.answers.get(header["action"]) or self._answer(header)
                if reply is not None:
                    self.control.send_multipart([sender, *encode({"v": 1, "id": header["id"], **reply})])
            while self.data.poll(0):
                sender, header, _ = self.data.recv_multipart()
                self.buckets += 1
                if self.buckets <= self.acks:
                    self.data.send_multipart([sender, b"WAK1" + header[4:24]])

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *exc: object) -> None:
        self._closing.set()
        self._thread.join()
        self.control.close(0)
        self.data.close(0)


class UntiedModel(TinyModel):
    """Its output layer is a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters["lm_head"] = torch.zeros_like(self.parameters["embed"])
        self.views["lm_head.weight"] = self.parameters["lm_head"]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("transport", ["zmq", "shm", "nccl"])
def test_a_tensor_with_two_names_is_sent_once_unless_a_worker_has_two_parameters_for_it(
    worker: Worker, transport: str, keep: bool
) -> None:
    with (
        Worker(model=UntiedModel()) as untied,
        WeightPublisher(worker.endpoint, transport=transport, keep=keep) as one,
        WeightPublisher(untied.endpoint, transport=transport, keep=keep) as other,
    ):
        for version in (1, 2):
            tensors = new_tensors(worker.model, version)
            nbytes = sum(tensor.nbytes for tensor in tensors.values())
            tied = {**tensors, "lm_head.weight": tensors["embed.weight"]}
            for publisher, receiver, expected in (
                (one, worker, nbytes),
                (other, untied, nbytes + tensors["embed.weight"].nbytes),
            ):
                update = publisher.publish(tied, version)
                (report,) = update.applied(20)
                assert (report.nbytes, update.nbytes) == (expected, expected) and not update.errors
                assert serves(receiver.model, tied)
        both = tied | {"lm_head.weight": tied["embed.weight"].clone()}  # equal, and not one tensor
        assert one.publish(both, 3).applied(20)[0].nbytes == nbytes + tensors["embed.weight"].nbytes
        for wrong in (tied["embed.weight"], torch.ones(3)):
            with pytest.raises(WeightsRejected, match="unknown tensors: other"):
                one.publish(tied | {"other": wrong}, 4).applied(20)


@pytest.mark.parametrize(
    "tied", [[], {"lm_head.weight": 1}, {"lm_head.weight": "q.weight"}, {"other": "embed.weight"}, {"q.weight": "x"}]
)
def test_names_that_are_not_tied_here_are_refused_and_disturb_nothing(worker: Worker, tied: Any) -> None:
    payload = Payload(tensors := new_tensors(worker.model, 1), 1, None)
    begin = {"action": "begin", "version": 1, "manifest": payload.manifest.to_wire(), "transport": "zmq", "options": {}}
    assert worker.control(**begin, tied=tied)["field"] == "tied"
    assert (
        worker.status()["state"] == "idle" and worker.control(**begin, tied={"lm_head.weight": "embed.weight"})["token"]
    )
    with WeightPublisher(worker.endpoint) as publisher:
        publisher.publish(tensors, 1).applied(20)
    assert serves(worker.model, tensors)


@pytest.mark.parametrize(("transport", "bucket_bytes"), checkered(["zmq", "shm", "nccl"], [SMALL, 192, 1 << 20]))
def test_tensors_arrive_whatever_the_bucket_size(worker: Worker, bucket_bytes: int, transport: str) -> None:
    tensors = new_tensors(worker.model, 1)
    with WeightPublisher(worker.endpoint, transport=transport, bucket_bytes=bucket_bytes) as publisher:
        handle = publisher.publish(tensors, version=1)
        (report,) = handle.applied(20)
        handle.held(0)
    assert serves(worker.model, tensors)
    assert (report.version, report.transport, report.endpoint) == (1, transport, worker.endpoint)
    assert report.nbytes == sum(t.nbytes for t in tensors.values()) and report.seconds > 0 and report.pause_s == 0.001


def test_pairs_parameters_and_strided_tensors_can_be_published(worker: Worker) -> None:
    tensors = new_tensors(worker.model, 1, dtype=torch.float32)
    odd = {name: torch.nn.Parameter(t.t().contiguous().t()) for name, t in tensors.items() if t.dim() == 2}
    odd |= {name: torch.stack([t, t], dim=-1)[..., 0] for name, t in tensors.items() if t.dim() != 2}
    with WeightPublisher([worker.endpoint], bucket_bytes=SMALL) as publisher:
        publisher.publish(iter(odd.items()), version=1).applied(20)
    assert serves(worker.model, tensors)


def test_tensors_may_change_right_after_held(worker: Worker) -> None:
    with WeightPublisher(worker.endpoint, bucket_bytes=SMALL) as publisher:
        for version in range(1, 11):
            tensors = new_tensors(worker.model, version)
            sent = {name: tensor.clone() for name, tensor in tensors.items()}
            handle = publisher.publish(tensors, version)
            handle.held(20)
            for tensor in tensors.values():
                tensor.fill_(float("nan"))
            handle.applied(20)
            assert serves(worker.model, sent)


def test_held_waits_while_a_worker_has_not_taken_the_buckets() -> None:
    with FakeWorker(acks=3) as fake, WeightPublisher(fake.endpoint, transport="zmq", bucket_bytes=SMALL) as publisher:
        handle = publisher.publish(new_tensors(TinyModel(), 1), 1)
        wait_for(lambda: fake.buckets == 7, "three acknowledged buckets and a full window")
        with pytest.raises(RolloutTimeout, match="transfer: version 1 still reads its tensors"):
            handle.held(0)
        with pytest.raises(RolloutTimeout, match="transfer: version 1 is not applied"):
            handle.applied(0)
        assert fake.buckets == 7  # no more than the window without an acknowledgement


def test_publishes_queue_up_in_order(worker: Worker) -> None:
    sets = [new_tensors(worker.model, seed) for seed in range(5)]
    with WeightPublisher(worker.endpoint) as publisher:
        handles = [publisher.publish(tensors, version) for version, tensors in enumerate(sets, 1)]
        assert [handle.applied(20)[0].version for handle in handles] == [1, 2, 3, 4, 5]
    assert serves(worker.model, sets[-1])
    assert [update.version for update in worker.updates] == [1, 2, 3, 4, 5]


def test_buffers_of_the_publisher_are_reused(worker: Worker) -> None:
    seen = set()

    def noted(self: Payload, index: int, out: torch.Tensor) -> int:
        seen.add(out.data_ptr())
        return Payload.start_bucket(self, index, out)

    with packing(start_bucket=noted)(worker.endpoint, transport="zmq", bucket_bytes=SMALL) as publisher:
        for version in range(1, 21):
            publisher.publish(new_tensors(worker.model, version), version).applied(20)
    assert len(seen) == 4


def test_two_workers_get_the_same_update() -> None:
    with (
        Worker() as one,
        Worker() as two,
        WeightPublisher([one.endpoint, two.endpoint], bucket_bytes=SMALL) as publisher,
    ):
        tensors = new_tensors(one.model, 1)
        reports = publisher.publish(tensors, 1).applied(20)
        assert [report.endpoint for report in reports] == [one.endpoint, two.endpoint]
        assert serves(one.model, tensors) and serves(two.model, tensors)
        assert [status["version"] for status in publisher.status()] == [1, 1]


def test_a_worker_that_rejects_does_not_stop_the_other() -> None:
    with Worker(version=9) as newer, Worker() as good:
        with WeightPublisher([newer.endpoint, good.endpoint], bucket_bytes=SMALL) as publisher:
            tensors = new_tensors(good.model, 1)
            handle = publisher.publish(tensors, 5)
            with pytest.raises(WeightsRejected, match=f"{newer.endpoint}: version 5 is not newer than version 9"):
                handle.applied(20)
            handle.held(0)
            assert list(handle.reports) == [good.endpoint] and list(handle.errors) == [newer.endpoint]
        assert serves(good.model, tensors)


def test_a_rejection_reaches_held_and_applied_and_the_next_publish_works(worker: Worker) -> None:
    with WeightPublisher(worker.endpoint) as publisher:
        tensors = new_tensors(worker.model, 1)
        del tensors["norm.weight"]
        handle = publisher.publish(tensors, 1)
        for wait in (handle.held, handle.applied):
            with pytest.raises(WeightsRejected, match="missing tensors: norm.weight") as caught:
                wait(20)
            assert caught.value.field == "manifest"
        tensors = new_tensors(worker.model, 1)
        publisher.publish(tensors, 1).applied(20)
        assert serves(worker.model, tensors)


def test_a_stalled_transfer_names_phase_and_worker_and_the_other_worker_applies(worker: Worker) -> None:
    with FakeWorker(acks=5) as fake:
        with WeightPublisher(
            [fake.endpoint, worker.endpoint], transport="zmq", bucket_bytes=SMALL, stall_s=6.0
        ) as publisher:
            tensors = new_tensors(worker.model, 1)
            handle = publisher.publish(tensors, 1)
            with pytest.raises(RolloutTimeout, match=f"transfer: no acknowledgement from {fake.endpoint}"):
                handle.applied(60)
        assert serves(worker.model, tensors) and "abort" in fake.actions


def test_a_worker_that_never_applies_times_out_in_commit() -> None:
    with FakeWorker(acks=10_000) as fake, WeightPublisher(fake.endpoint, transport="zmq", apply_s=0.1) as publisher:
        handle = publisher.publish(new_tensors(TinyModel(), 1), 1)
        with pytest.raises(RolloutTimeout, match=f"commit: no answer from {fake.endpoint} within 0.1 s"):
            handle.applied(20)
        handle.held(0)


def test_a_worker_that_is_not_there_is_named_in_begin() -> None:
    with WeightPublisher("tcp://127.0.0.1:9", begin_s=0.1) as publisher:
        handle = publisher.publish({"a": torch.zeros(1)}, 1)
        with pytest.raises(ConnectionLost, match="begin: no connection to tcp://127.0.0.1:9"):
            handle.applied(20)
        with pytest.raises(ConnectionLost):
            handle.held(0)


@pytest.mark.parametrize(
    "reply",
    [
        {"op": "result"},
        {"op": "ok"},
        {"op": "ok", "token": "ab", "grant": {}},
        {"op": "ok", "token": "ab" * 16, "grant": {"window": 0, "endpoint": "tcp://127.0.0.1:9"}},
        {"op": "ok", "token": "ab" * 16, "grant": {"window": 1, "endpoint": 5}},
    ],
)
def test_nonsense_from_a_worker_is_a_protocol_error(reply: dict[str, Any]) -> None:
    with (
        FakeWorker(acks=0, answer=lambda header: reply) as fake,
        WeightPublisher(fake.endpoint, transport="zmq") as publisher,
    ):
        with pytest.raises(ProtocolError):
            publisher.publish({"a": torch.zeros(1)}, 1).applied(20)


@pytest.mark.parametrize("changes", [{"version": float("inf")}, {"bytes": None}, {"phases": []}, {"pause_s": "x"}])
def test_a_report_that_cannot_be_read_is_a_protocol_error(changes: dict[str, Any]) -> None:
    report = {"op": "ok", "version": 1, "bytes": 4, "pause_s": 0.0, "phases": {}, **changes}
    with FakeWorker(acks=10_000) as fake:
        fake.answers["commit"] = report
        with WeightPublisher(fake.endpoint, transport="zmq") as publisher:
            with pytest.raises(ProtocolError, match="a report that cannot be read"):
                publisher.publish(new_tensors(TinyModel(), 1), 1).applied(20)


def test_closing_half_way_fails_the_handle_and_aborts() -> None:
    with FakeWorker(acks=3) as fake:
        publisher = WeightPublisher(fake.endpoint, transport="zmq", bucket_bytes=SMALL)
        running = publisher.publish(new_tensors(TinyModel(), 1), 1)
        queued = publisher.publish(new_tensors(TinyModel(), 2), 2)
        wait_for(lambda: fake.buckets == 7, "a transfer half-way")
        publisher.close()
        for handle in (running, queued):
            for wait in (handle.held, handle.applied):
                with pytest.raises(RolloutError, match="closed"):
                    wait(0)
        wait_for(lambda: "abort" in fake.actions, "the abort")
        with pytest.raises(ValueError, match="closed"):
            publisher.publish(new_tensors(TinyModel(), 3), 3)
        publisher.close()


def test_status_shows_version_and_last_update(worker: Worker) -> None:
    with WeightPublisher(worker.endpoint) as publisher:
        (before,) = publisher.status()
        assert before["version"] == 0 and before["state"] == "idle" and before["last"] is None
        tensors = new_tensors(worker.model, 1)
        publisher.publish(tensors, 4).applied(20)
        (after,) = publisher.status()
    assert after["version"] == 4 and after["last"]["bytes"] == sum(t.nbytes for t in tensors.values())
    assert {"zmq", "shm", "disk", "nccl"} <= set(after["transports"]) and after["endpoint"] == worker.receiver.endpoint


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({}, "no tensors"),
        ({"a": torch.zeros(1, dtype=torch.float64)}, "a is torch.float64"),
        ({"a": torch.zeros(1, 1).to_sparse()}, "sparse"),
        ({"a": torch.zeros(1, device="meta")}, "meta"),
        ({"a": [1.0]}, "a is a list"),
    ],
)
def test_tensors_that_cannot_be_sent_are_refused_at_once(tensors: dict, text: str) -> None:
    with WeightPublisher("tcp://127.0.0.1:9") as publisher, pytest.raises(ValueError, match=text):
        publisher.publish(tensors, 1)


@pytest.mark.parametrize(
    "arguments",
    [
        {"endpoints": []},
        {"endpoints": ["tcp://a:1", "tcp://a:1"]},
        {"endpoints": "nonsense"},
        {"endpoints": "tcp://a:1", "transport": "pigeon"},
        {"endpoints": "tcp://a:1", "transport": "disk"},
    ],
)
def test_wrong_arguments_are_value_errors(arguments: dict) -> None:
    with pytest.raises(ValueError):
        WeightPublisher(**arguments)


def test_a_wildcard_address_is_reached_through_the_workers_host() -> None:
    assert reachable("tcp://0.0.0.0:7", "tcp://10.0.0.2:5757") == "tcp://10.0.0.2:7"
    assert reachable("tcp://[::]:7", "tcp://[fe80::1]:5757") == "tcp://[fe80::1]:7"
    assert reachable("tcp://10.0.0.3:7", "tcp://10.0.0.2:5757") == "tcp://10.0.0.3:7"
    assert LazyPublisher is WeightPublisher


def test_a_worker_that_dies_before_it_answers_is_told_of_at_once() -> None:
    """One that is back on the same port knows nothing of the question: its answer would never come."""
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.rcvtimeo = 20_000
    endpoint = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
    with WeightPublisher(endpoint, begin_s=60.0) as publisher:
        handle = publisher.publish(new_tensors(TinyModel(), 1), 1)
        router.recv_multipart()
        router.close(0)
        with pytest.raises(ConnectionLost, match="begin: the connection to .* was lost"):
            handle.applied(20)


@pytest.mark.parametrize(("transport", "large"), [("auto", True), ("nccl", True), ("zmq", False), ("shm", False)])
def test_only_what_may_go_between_gpus_travels_in_large_buckets(
    monkeypatch: pytest.MonkeyPatch, transport: str, large: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("trainer_bridge.wire.manifest._USUAL_BUCKET_BYTES", 64)
    made: list[Payload] = []

    def init(self: Payload, *given: Any, **more: Any) -> None:
        Payload.__init__(self, *given, **more)
        made.append(self)

    publisher = packing(__init__=init)("tcp://127.0.0.1:9", transport=transport)
    publisher.close()
    with pytest.raises(ValueError, match="closed"):  # it was laid out, and is never sent
        publisher.publish({"a": torch.zeros(1 << 16)}, 1)
    assert made[0].manifest.bucket_bytes == (4096 if large else 64)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"bucket_bytes": 100}, "multiple of 64"), ({"begin_s": -1}, "begin_s"), ({"stall_s": 0}, "stall_s")],
)
def test_settings_that_cannot_be_are_refused_at_once(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, WeightsRejected), match=words):
        WeightPublisher("tcp://127.0.0.1:1", **wrong)
