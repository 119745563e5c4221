"""Workers join and leave a publisher between two updates."""

from __future__ import annotations

import pytest

from tests.support.bridge.harness import Worker, new_tensors, serves, wait_for
from trainer_bridge.publish import publisher as publisher_module
from trainer_bridge.publish.publisher import WeightPublisher


@pytest.fixture(autouse=True)
def watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "_WATCH_S", 0.02)


@pytest.mark.parametrize("transport", ["zmq", "shm", "nccl"])
def test_a_worker_that_joins_gets_the_kept_update_and_one_that_left_gets_no_more(transport: str) -> None:
    with Worker() as stays, Worker() as leaves, Worker() as joins:
        endpoints = [stays.endpoint, leaves.endpoint]
        with WeightPublisher(endpoints, transport=transport, keep=True, bucket_bytes=192) as publisher:
            first = new_tensors(stays.model, 1)
            publisher.publish(first, 1).applied(20)
            publisher.add(joins.endpoint)
            wait_for(lambda: joins.receiver.version == 1, "the kept update")
            assert serves(joins.model, first)
            publisher.remove(leaves.endpoint)
            assert publisher.endpoints == [stays.endpoint, joins.endpoint] and len(publisher.status()) == 2
            second = new_tensors(stays.model, 2)
            reports = publisher.publish(second, 2).applied(20)
            assert set(reports_of(reports)) == {stays.endpoint, joins.endpoint}
            assert serves(stays.model, second) and serves(joins.model, second) and serves(leaves.model, first)
            assert len(stays.updates) == 2, "each update once"


def test_an_update_goes_to_the_workers_of_its_time() -> None:
    with Worker() as early, Worker() as late:
        early.gate.clear()
        with WeightPublisher(early.endpoint, transport="zmq", bucket_bytes=192) as publisher:
            first = publisher.publish(new_tensors(early.model, 1), 1)
            publisher.add(late.endpoint)
            second = publisher.publish(new_tensors(early.model, 2), 2)
            early.gate.set()
            assert reports_of(first.applied(20)) == [early.endpoint]
            assert set(reports_of(second.applied(20))) == {early.endpoint, late.endpoint}


def test_an_endpoint_joins_once_and_the_last_one_stays() -> None:
    with Worker() as worker, WeightPublisher(worker.endpoint) as publisher:
        with pytest.raises(ValueError, match="already"):
            publisher.add(worker.endpoint)
        with pytest.raises(ValueError, match="ZeroMQ"):
            publisher.add("here:1")
        for endpoint in (worker.endpoint, "tcp://127.0.0.1:9"):
            with pytest.raises(ValueError, match="not an endpoint"):
                publisher.remove(endpoint)
    with pytest.raises(ValueError, match="closed"):
        publisher.add("tcp://127.0.0.1:9")


def reports_of(reports: list) -> list[str]:
    return [report.endpoint for report in reports]
