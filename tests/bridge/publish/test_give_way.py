"""A publisher with a newer update queued lets workers drop the one that waits for recomputation."""

import time
from collections.abc import Iterator

import pytest

from tests.support.bridge.harness import Worker, new_tensors, serves, wait_for
from trainer_bridge import WeightsReplaced
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.errors import RolloutTimeout


@pytest.fixture
def worker() -> Iterator[Worker]:
    """Its rows are being computed again, so updates wait."""
    with Worker() as worker:
        worker.engine_gate.note_recomputing(True)
        yield worker


@pytest.mark.parametrize("transport", ["zmq", "shm", "disk"])
def test_the_newest_of_several_updates_is_the_one_that_is_applied(worker: Worker, transport: str, tmp_path) -> None:
    folder = str(tmp_path) if transport == "disk" else None
    with WeightPublisher(worker.endpoint, transport=transport, folder=folder) as publisher:
        handles = []
        for version in range(1, 5):
            handles.append(publisher.publish(tensors := new_tensors(worker.model, version), version))
            handles[-1].held(20)  # the trainer goes on at once, whatever waits
        for handle in handles[:-1]:
            with pytest.raises(WeightsReplaced, match=f"commit: .* version {handle.version}, which waited"):
                handle.applied(20)
        with pytest.raises(RolloutTimeout):
            handles[-1].applied(0.05)
        worker.engine_gate.note_recomputing(False)
        assert [report.version for report in handles[-1].applied(20)] == [4]
        assert serves(worker.model, tensors) and [update.version for update in worker.updates] == [4]


def test_an_update_that_nothing_follows_waits_as_long_as_it_must(worker: Worker) -> None:
    with WeightPublisher(worker.endpoint) as publisher:
        handle = publisher.publish(new_tensors(worker.model, 1), 1)
        wait_for(lambda: publisher.status()[0]["waits_for"] == "recompute", "the reason")
        with pytest.raises(RolloutTimeout):
            handle.applied(0.3)
        worker.engine_gate.note_recomputing(False)
        assert handle.applied(20)[0].phases["wait"] > 0.3


def test_an_update_that_waits_for_the_loop_gives_no_way(worker: Worker) -> None:
    worker.engine_gate.note_recomputing(False)
    worker.gate.clear()
    with WeightPublisher(worker.endpoint) as publisher:
        handles = [publisher.publish(new_tensors(worker.model, version), version) for version in (1, 2)]
        wait_for(lambda: worker.status()["state"] == "ready", "a ready update")
        time.sleep(0.3)  # several offers
        assert worker.status()["state"] == "ready"
        worker.gate.set()
        assert [handle.applied(20)[0].version for handle in handles] == [1, 2]
        assert [update.version for update in worker.updates] == [1, 2]


def test_each_worker_decides_for_itself(worker: Worker) -> None:
    with Worker() as idle, WeightPublisher([idle.endpoint, worker.endpoint]) as publisher:
        first = publisher.publish(new_tensors(worker.model, 1), 1)
        first.held(20)
        wait_for(lambda: idle.receiver.version == 1, "the worker without rows")
        second = publisher.publish(tensors := new_tensors(worker.model, 2), 2)
        with pytest.raises(WeightsReplaced):
            first.applied(20)
        assert list(first.reports) == [idle.endpoint] and list(first.errors) == [worker.endpoint]
        second.held(20)
        worker.engine_gate.note_recomputing(False)
        assert len(second.applied(20)) == 2
        assert serves(worker.model, tensors) and serves(idle.model, tensors)


def test_a_kept_update_that_was_replaced_is_followed_by_the_newer_one(worker: Worker) -> None:
    with WeightPublisher(worker.endpoint, keep=True) as publisher:
        first = publisher.publish(new_tensors(worker.model, 1), 1)
        second = publisher.publish(tensors := new_tensors(worker.model, 2), 2)
        with pytest.raises(WeightsReplaced):
            first.applied(20)
        second.held(20)
        worker.engine_gate.note_recomputing(False)
        second.applied(20)
        port, model = worker.port, worker.model
        worker.close()
        with Worker(port=port) as fresh:
            wait_for(lambda: fresh.receiver.version == 2, "the newer update again")
            assert serves(fresh.model, tensors) and model is not fresh.model
