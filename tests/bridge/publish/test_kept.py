"""A worker that comes back with old weights gets the newest ones from the publisher, though the trainer has gone on."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.bridge.harness import TinyModel, Worker, new_tensors, serves, wait_for
from tests.support.bridge.parts import Watchful, packing
from tests.support.kernels.grids import nightly
from trainer_bridge.publish.kept_update import KeptUpdate
from trainer_bridge.transports.payload import Payload
from trainer_bridge.wire.errors import ConnectionLost, RolloutError, RolloutTimeout, Unavailable, WeightsRejected


@pytest.mark.parametrize("transport", ["shm", "zmq", "nccl", "disk"])
def test_a_worker_that_was_started_again_is_brought_up_to_date(transport: str, tmp_path: Path) -> None:
    with Worker() as other, Worker() as first:
        port, endpoints = first.port, [first.endpoint, other.endpoint]
        with Watchful(endpoints, transport=transport, folder=str(tmp_path), keep=True, bucket_bytes=192) as publisher:
            for version in (1, 2):
                tensors = new_tensors(first.model, version)
                sent = {name: tensor.clone() for name, tensor in tensors.items()}
                handle = publisher.publish(tensors, version)
                handle.held(20)
                for tensor in tensors.values():
                    tensor.fill_(float("nan"))  # the trainer's next step
                handle.applied(20)
            first.close()
            with Worker(port=port) as again:
                wait_for(lambda: again.receiver.version == 2, "the newest version")
                assert serves(again.model, sent)
                assert [update.version for update in other.updates] == [1, 2]  # no update twice
                tensors = new_tensors(first.model, 3)
                publisher.publish(tensors, 3).applied(20)
                assert serves(again.model, tensors) and serves(other.model, tensors)


@pytest.mark.parametrize("transport", ["shm", "zmq", "nccl"])
def test_an_update_that_is_refused_leaves_the_one_before(transport: str) -> None:
    with Worker(version=5) as worker:
        port = worker.port
        with Watchful(worker.endpoint, transport=transport, keep=True) as publisher:
            with pytest.raises(WeightsRejected, match="not newer"):
                publisher.publish(new_tensors(worker.model, 1), 3).applied(20)
            tensors = new_tensors(worker.model, 2)
            publisher.publish(tensors, 6).applied(20)
            with pytest.raises(WeightsRejected, match="stranger"):
                publisher.publish({**tensors, "stranger": torch.zeros(3)}, 7).applied(20)
            with pytest.raises(WeightsRejected, match="not newer"):
                publisher.publish(new_tensors(worker.model, 3), 6).applied(20)
            worker.close()
            with Worker(port=port) as again:
                wait_for(lambda: again.receiver.version == 6, "the newest version")
                assert serves(again.model, tensors)


@pytest.mark.parametrize("transport", ["zmq", "nccl", *nightly("shm", "disk")])
def test_an_update_that_found_nobody_is_brought_to_who_comes_back(transport: str, tmp_path: Path) -> None:
    with Worker() as first:
        port, endpoint, model = first.port, first.endpoint, first.model
        with Watchful(endpoint, transport=transport, folder=str(tmp_path), keep=True, bucket_bytes=192) as publisher:
            publisher.publish(new_tensors(model, 1), 1).applied(20)
            first.close()
            handle = publisher.publish(tensors := new_tensors(model, 2), 2)
            sent = {name: tensor.clone() for name, tensor in tensors.items()}
            with pytest.raises((ConnectionLost, RolloutTimeout)):
                handle.applied(60)  # longer than the publisher waits: the update is over, and kept
            for tensor in tensors.values():
                tensor.fill_(float("nan"))  # the trainer's next step
            with Worker(port=port) as again:
                wait_for(lambda: again.receiver.version == 2, "the newest version")
                assert serves(again.model, sent)


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_an_update_whose_worker_was_lost_in_the_middle_is_brought_to_it(transport: str) -> None:
    with Worker() as first:
        port, endpoint, model = first.port, first.endpoint, first.model

        def start_bucket(self: Payload, index: int, out: torch.Tensor) -> int:
            if self.manifest.version == 2 and index == 5 and not first.closing.is_set():
                first.close()
            return Payload.start_bucket(self, index, out)

        with packing(Watchful, start_bucket=start_bucket)(
            endpoint, transport=transport, keep=True, bucket_bytes=64
        ) as publisher:
            publisher.publish(new_tensors(model, 1), 1).applied(20)
            handle = publisher.publish(tensors := new_tensors(model, 2), 2)
            with pytest.raises(RolloutError):
                handle.applied(120)
            with Worker(port=port) as again:
                wait_for(lambda: again.receiver.version == 2, "the newest version")
                assert serves(again.model, tensors)


def test_a_stale_worker_is_brought_what_it_had(tmp_path: Path) -> None:
    with (
        Worker(apply="in_place") as worker,
        Watchful(worker.endpoint, transport="zmq", keep=True) as publisher,
        Watchful(worker.endpoint, transport="zmq", bucket_bytes=64) as other,
    ):
        publisher.publish(tensors := new_tensors(worker.model, 3), 3).applied(20)
        wrong = new_tensors(worker.model, 4)
        wrong["lm_head.weight"] = wrong["embed.weight"] + 1  # they are one parameter: found out at the end
        with pytest.raises(WeightsRejected):
            other.publish(wrong, 4).applied(20)
        wait_for(lambda: not worker.engine_gate.stale and serves(worker.model, tensors), "whole weights")
        wait_for(lambda: worker.status()["state"] == "idle", "the end of the update")
        assert worker.receiver.version == 3


def test_what_is_refused_for_its_content_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with Worker() as worker, Watchful(worker.endpoint, transport="zmq", keep=True) as publisher:
        publisher.publish(tensors := new_tensors(worker.model, 1), 1).applied(20)
        wrong = new_tensors(worker.model, 4)
        wrong["lm_head.weight"] = wrong["embed.weight"] + 1  # they are one parameter: found out at the end
        with pytest.raises(WeightsRejected):
            publisher.publish(wrong, 4).applied(20)
        assert serves(worker.model, tensors)
        worker.close()
        refused = noted(monkeypatch, "refused")
        with Worker(port=worker.port) as again:
            time.sleep(0.2)  # ten looks for workers that came back
            assert refused == [] and again.receiver.version == 0


def noted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """The endpoints that a method of `KeptUpdate` is called with from now on."""
    method, endpoints = getattr(KeptUpdate, name), []

    def note(self: KeptUpdate, endpoint: str) -> None:
        method(self, endpoint)
        endpoints.append(endpoint)

    monkeypatch.setattr(KeptUpdate, name, note)
    return endpoints


def test_a_worker_that_refuses_it_is_left_alone_and_others_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    refused, forgiven = noted(monkeypatch, "refused"), noted(monkeypatch, "forgive")

    class OtherModel(TinyModel):
        def __init__(self) -> None:
            super().__init__()
            del self.views["norm.weight"]

    with Worker() as one, Worker() as other, Watchful([one.endpoint, other.endpoint], keep=True) as publisher:
        publisher.publish(tensors := new_tensors(one.model, 1), 1).applied(20)
        other.close()
        with Worker(model=OtherModel(), port=other.port):
            wait_for(lambda: refused.count(other.endpoint) == 3, "the publisher gives it up")
            one.close()
            with Worker(port=one.port) as again:
                wait_for(lambda: again.receiver.version == 1, "the newest version")
                assert serves(again.model, tensors)
        forgiven.clear()
        wait_for(lambda: other.endpoint in forgiven, "the publisher to notice that the worker is gone")
        with Worker(port=other.port) as right:
            wait_for(lambda: right.receiver.version == 1, "the newest version")
            assert serves(right.model, tensors)


def test_an_update_that_a_sleeping_worker_refused_is_not_kept() -> None:
    with Worker() as worker, Watchful(worker.endpoint, transport="zmq", keep=True) as publisher:
        publisher.publish(new_tensors(worker.model, 1), 1).applied(20)
        worker.sleep()
        with pytest.raises(Unavailable):
            publisher.publish(tensors := new_tensors(worker.model, 2), 2).applied(20)
        worker.wake()
        publisher.publish(tensors, 2).applied(20)
        assert serves(worker.model, tensors)


def test_a_publisher_that_is_closed_keeps_nothing_more() -> None:
    kept = []

    def fill(self: Payload, index: int, out: torch.Tensor) -> tuple[int, int]:
        kept.append(index)
        publisher.closing.set()
        return Payload._fill(self, index, out)

    with Worker() as worker:
        tensors, endpoint = new_tensors(worker.model, 1), worker.endpoint
    publisher_type = packing(_fill=fill)
    with publisher_type(endpoint, transport="zmq", keep=True, begin_s=0.2, bucket_bytes=64) as publisher:
        with pytest.raises(RolloutError):
            publisher.publish(tensors, 1).applied(20)
        assert kept == [0]


def test_the_buffer_is_reused() -> None:
    seen = []

    def noted(self: Payload, memory: Callable[[], torch.Tensor] | None) -> None:
        def place() -> torch.Tensor:
            assert memory is not None
            kept = memory()
            seen.append(kept.data_ptr())
            return kept

        Payload.keep_in(self, None if memory is None else place)

    with Worker() as worker, packing(keep_in=noted)(worker.endpoint, keep=True) as publisher:
        for version in range(1, 6):
            publisher.publish(new_tensors(worker.model, version), version).applied(20)
    assert len(seen) == 5 and len(set(seen)) == 1


@pytest.mark.parametrize("error", [RuntimeError("no memory"), RolloutError("no way")])
def test_a_fault_while_a_worker_is_brought_up_to_date_does_not_end_the_publisher(error: Exception) -> None:
    faults = []

    class Fails(Watchful):
        def _publish(self, payload: Any, handle: Any, endpoints: Any) -> None:
            if payload.again and len(faults) < 2:
                faults.append(handle)
                raise error
            super()._publish(payload, handle, endpoints)

    with Worker() as first:
        port = first.port
        with Fails(first.endpoint, transport="zmq", keep=True) as publisher:
            publisher.publish(tensors := new_tensors(first.model, 1), 1).applied(20)
            first.close()
            with Worker(port=port) as again:
                wait_for(lambda: again.receiver.version == 1, "the newest version, after two faults")
                assert serves(again.model, tensors) and len(faults) == 2
                assert all(handle.applied(0) == [] for handle in faults)  # over: a wait ends
                publisher.publish(tensors := new_tensors(first.model, 2), 2).applied(20)
                assert serves(again.model, tensors)
