"""A worker that comes back with old weights gets the newest ones from the publisher, though the trainer has gone on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from weights_harness import Worker, new_tensors, serves, wait_for

from trainer_bridge import publisher as publisher_module
from trainer_bridge.errors import RolloutError
from trainer_bridge.publisher import WeightPublisher


@pytest.fixture(autouse=True)
def watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "_WATCH_S", 0.02)


@pytest.mark.parametrize("transport", ["shm", "zmq", "nccl", "disk"])
def test_a_worker_that_was_started_again_is_brought_up_to_date(transport: str, tmp_path: Path) -> None:
    with Worker() as other, Worker() as first:
        port, endpoints = first.port, [first.endpoint, other.endpoint]
        with WeightPublisher(
            endpoints, transport=transport, folder=str(tmp_path), keep=True, bucket_bytes=192
        ) as publisher:
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


def test_without_a_whole_update_there_is_nothing_to_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    with Worker(version=5) as worker, WeightPublisher(worker.endpoint, keep=True) as publisher:
        with pytest.raises(Exception, match="not newer"):
            publisher.publish(new_tensors(worker.model, 1), 3).applied(20)
        assert publisher._kept is not None and publisher._kept.version is None
        tensors = new_tensors(worker.model, 2)
        publisher.publish(tensors, 6).applied(20)
        assert publisher._kept.version == 6 and serves(worker.model, tensors)
        wrong = {**tensors, "stranger": torch.zeros(3)}
        with pytest.raises(Exception, match="stranger"):
            publisher.publish(wrong, 7).applied(20)
        assert publisher._kept.version is None  # the buffer may hold some of it


def test_the_buffer_is_reused() -> None:
    with Worker() as worker, WeightPublisher(worker.endpoint, keep=True) as publisher:
        seen = set()
        for version in range(1, 6):
            publisher.publish(new_tensors(worker.model, version), version).applied(20)
            assert publisher._kept is not None
            seen.add(publisher._kept._buffer.data_ptr())
        assert len(seen) == 1


@pytest.mark.parametrize("error", [RuntimeError("no memory"), RolloutError("no way")])
def test_a_fault_while_a_worker_is_brought_up_to_date_does_not_end_the_publisher(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    faults = []
    plain = WeightPublisher._publish

    def publish(self: WeightPublisher, payload: Any, handle: Any, endpoints: Any) -> None:
        if payload.again and len(faults) < 2:
            faults.append(handle)
            raise error
        plain(self, payload, handle, endpoints)

    monkeypatch.setattr(WeightPublisher, "_publish", publish)
    with Worker() as first:
        port = first.port
        with WeightPublisher(first.endpoint, transport="zmq", keep=True) as publisher:
            publisher.publish(tensors := new_tensors(first.model, 1), 1).applied(20)
            first.close()
            with Worker(port=port) as again:
                wait_for(lambda: again.receiver.version == 1, "the newest version, after two faults")
                assert serves(again.model, tensors) and len(faults) == 2
                assert all(handle.applied(0) == [] for handle in faults)  # over: nobody could wait for it for ever
                publisher.publish(tensors := new_tensors(first.model, 2), 2).applied(20)
                assert serves(again.model, tensors)
