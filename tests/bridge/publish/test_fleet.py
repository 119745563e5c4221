"""Workers join and leave a publisher between two updates."""

from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.bridge.harness import Worker, new_tensors, serves, wait_for
from tests.support.bridge.parts import Watchful, enter_nccl
from trainer_bridge.transports.nccl.nccl_group import BroadcastGroup


@pytest.mark.parametrize("transport", ["zmq", "shm", "nccl"])
def test_a_worker_that_joins_gets_the_kept_update_and_one_that_left_gets_no_more(transport: str) -> None:
    with Worker() as stays, Worker() as leaves, Worker() as joins:
        endpoints = [stays.endpoint, leaves.endpoint]
        with Watchful(endpoints, transport=transport, keep=True, bucket_bytes=192) as publisher:
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


def test_a_worker_that_joins_leaves_the_group_of_the_others_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []  # of the group that each member joined

    class Noted(BroadcastGroup):
        def __init__(self, store: Any, name: str, rank: int, size: int, *more: Any, **options: Any) -> None:
            sizes.append(size)
            super().__init__(store, name, rank, size, *more, **options)

    def joined() -> list[int]:
        found, sizes[:] = sorted(sizes), []
        return found

    enter_nccl(monkeypatch, Noted)
    with Worker() as first, Worker() as second, Worker() as late:
        with Watchful([first.endpoint, second.endpoint], transport="nccl", bucket_bytes=192) as publisher:

            def publish(version: int, *workers: Worker) -> None:
                tensors = new_tensors(first.model, version)
                assert len(publisher.publish(tensors, version).applied(20)) == len(workers)
                assert all(serves(worker.model, tensors) for worker in workers)

            publish(1, first, second)
            assert joined() == [3, 3, 3]
            publisher.add(late.endpoint)
            publish(2, first, second, late)
            assert joined() == [2, 2], "only the publisher and the worker that joined"
            publish(3, first, second, late)
            publisher.remove(late.endpoint)
            publish(4, first, second)
            assert joined() == []
            publisher.add(late.endpoint)
            publisher.remove(second.endpoint)
            publish(5, first, late)
            assert joined() == [3, 3, 3], "the group lost a member: all meet again"


def test_after_many_joins_all_workers_meet_in_one_group() -> None:
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker()) for _ in range(6)]
        publisher = stack.enter_context(Watchful(workers[0].endpoint, transport="nccl", bucket_bytes=192))
        for version, worker in enumerate(workers, 1):
            if version > 1:
                publisher.add(worker.endpoint)
            tensors = new_tensors(worker.model, version)
            assert len(publisher.publish(tensors, version).applied(30)) == version
            assert all(serves(other.model, tensors) for other in workers[:version])


def test_an_update_goes_to_the_workers_of_its_time() -> None:
    with Worker() as early, Worker() as late:
        early.gate.clear()
        with Watchful(early.endpoint, transport="zmq", bucket_bytes=192) as publisher:
            first = publisher.publish(new_tensors(early.model, 1), 1)
            publisher.add(late.endpoint)
            second = publisher.publish(new_tensors(early.model, 2), 2)
            early.gate.set()
            assert reports_of(first.applied(20)) == [early.endpoint]
            assert set(reports_of(second.applied(20))) == {early.endpoint, late.endpoint}


def test_an_endpoint_joins_once_and_the_last_one_stays() -> None:
    with Worker() as worker, Watchful(worker.endpoint) as publisher:
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
