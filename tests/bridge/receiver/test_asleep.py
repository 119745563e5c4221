"""The door of a worker that sleeps: no update begins while it is shut, and one that has begun is inside to its end."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.support.bridge.fault_client import time_passes
from tests.support.bridge.harness import Worker, new_tensors, serves, wait_for
from tests.support.bridge.parts import Watchful, enter_nccl, packing
from tests.support.kernels.grids import checkered
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.transports.nccl.transport import NcclSender
from trainer_bridge.transports.payload import Payload
from trainer_bridge.wire.errors import Unavailable, WeightsRejected
from trainer_bridge.wire.manifest import pack


@pytest.mark.parametrize(("apply", "transport"), checkered(["staged", "in_place"], ["zmq", "shm", "nccl", "disk"]))
def test_a_worker_that_is_asleep_refuses_an_update_and_takes_it_after_the_wake(apply, transport, tmp_path) -> None:
    with (
        Worker(apply=apply) as worker,
        WeightPublisher(worker.endpoint, transport=transport, folder=str(tmp_path), bucket_bytes=64) as publisher,
    ):
        before = worker.model.snapshot()
        gate = worker.engine_gate
        worker.sleep()
        assert not gate.update_inside
        tensors = new_tensors(worker.model, 1)
        with pytest.raises(Unavailable, match="asleep.*wake it"):
            publisher.publish(tensors, 1).applied(20)
        assert all(torch.equal(before[name], now) for name, now in worker.model.snapshot().items())
        assert not gate.update_inside and worker.engine_gate.hold == "free"
        assert worker.status()["state"] == "asleep"
        worker.wake()
        assert worker.status()["state"] == "idle"
        publisher.publish(tensors, 1).applied(20)
        assert serves(worker.model, tensors)
        wait_for(lambda: not gate.update_inside, "the door to be empty")


def test_an_update_is_inside_from_its_begin_until_it_is_in_use() -> None:
    with Worker() as worker, WeightPublisher(worker.endpoint, bucket_bytes=64) as publisher:
        worker.gate.clear()
        gate = worker.engine_gate
        handle = publisher.publish(new_tensors(worker.model, 1), 1)
        wait_for(lambda: worker.status()["state"] == "ready", "a whole update")
        worker.sleep()
        assert gate.update_inside
        with WeightPublisher(worker.endpoint) as late:
            waiting = late.publish(new_tensors(worker.model, 2), 2)  # its begin waits for the first to be applied
            worker.gate.set()
            handle.applied(20)
            with pytest.raises(Unavailable, match="asleep"):
                waiting.applied(20)
        wait_for(lambda: not gate.update_inside, "the door to be empty")
        assert worker.receiver.version == 1


@pytest.mark.parametrize("when", ["begun", "half-way"])
def test_a_group_that_is_kept_serves_the_update_inside_and_is_let_go_of_behind_it(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    second = threading.Event()  # the second update may begin

    def shut(*_: Any) -> None:
        if second.is_set() and not gate.sleep.ordered:
            worker.sleep()
            worker.status()  # the receiver has seen it

    class Sender(NcclSender):
        def transfer(self, *given: Any) -> dict[str, Any]:
            if when == "begun":  # the publisher was told that the group is kept, and has not given it out yet
                shut()
            return super().transfer(*given)

    enter_nccl(monkeypatch, sender_type=Sender)
    how = {} if when == "begun" else {"start_bucket": before(shut, Payload.start_bucket)}
    with Worker() as worker, packing(**how)(worker.endpoint, transport="nccl", bucket_bytes=64) as publisher:
        gate, kept = worker.engine_gate, worker.receiver.receivers["nccl"].kept
        publisher.publish(new_tensors(worker.model, 1), 1).applied(20)
        assert kept.name
        second.set()
        publisher.publish(tensors := new_tensors(worker.model, 2), 2).applied(20)
        assert serves(worker.model, tensors) and gate.sleep.ordered
        wait_for(lambda: not gate.update_inside, "the door to be empty")
        assert not kept.name


def before(first: Callable[..., None], then: Callable[..., Any]) -> Callable[..., Any]:
    def both(*arguments: Any) -> Any:
        first(*arguments)
        return then(*arguments)

    return both


@pytest.mark.parametrize("how", ["aborted", "silent", "alone", "newer"])
def test_an_update_that_comes_to_nothing_leaves(how: str) -> None:
    with Worker(idle_s=1.0 if how == "alone" else 60.0) as worker:
        gate = worker.engine_gate
        begin = _begin(worker, version=1)
        assert begin["op"] == "ok" and (gate.update_inside or how == "alone")
        if how == "aborted":
            assert worker.control(action="abort", token=begin["token"])["op"] == "ok"
        elif how == "newer":
            worker.sleep()
            assert _begin(worker, version=2)["code"] == "unavailable" and gate.update_inside, "the first goes on"
            assert worker.control(action="abort", token=begin["token"])["op"] == "ok"
        with time_passes(60.0) if how == "silent" else nullcontext():
            # A question wakes the receiver, so "alone" asks none.
            wait_for(lambda: (how == "alone" or worker.status()) and not gate.update_inside, "the door to be empty")


def _begin(worker: Worker, version: int) -> dict:
    """A begin by hand, after which no byte comes."""
    rows = [
        (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for name, tensor in new_tensors(worker.model, version).items()
    ]
    manifest = pack(version, rows, 64).to_wire()
    return worker.control(action="begin", version=version, manifest=manifest, transport="zmq", options={})


def test_weights_that_were_dropped_are_cured_by_an_update_in_place() -> None:
    with Worker(apply="in_place") as worker, WeightPublisher(worker.endpoint, bucket_bytes=64) as publisher:
        gate = worker.engine_gate
        gate.lose_weights("dropped")
        assert gate.hold == "granted" and gate.dropped and worker.status()["stale"] == "dropped"
        with pytest.raises(WeightsRejected):
            publisher.publish({"embed.weight": new_tensors(worker.model, 1)["embed.weight"]}, 1).applied(20)
        assert gate.dropped and gate.stale == "dropped" and gate.hold != "free"
        tensors = new_tensors(worker.model, 1)
        publisher.publish(tensors, 1).applied(20)
        assert serves(worker.model, tensors) and not (gate.stale or gate.dropped or gate.hold != "free")


def test_the_version_that_was_dropped_may_come_again_after_half_of_it_was_written_in_place() -> None:
    with Worker(apply="in_place") as worker, WeightPublisher(worker.endpoint, bucket_bytes=64) as publisher:
        tensors = new_tensors(worker.model, 1)
        publisher.publish(tensors, 1).applied(20)
        gate = worker.engine_gate
        gate.lose_weights("dropped")
        assert not gate.failed
        with WeightPublisher(worker.endpoint, bucket_bytes=64) as other:
            with pytest.raises(WeightsRejected, match="differ"):
                other.publish({**tensors, "lm_head.weight": tensors["embed.weight"] + 1}, 1).applied(20)
            assert gate.failed and "in part" in gate.stale and worker.status()["dropped"]
            other.publish(tensors, 1).applied(20)
        assert serves(worker.model, tensors) and not (gate.stale or gate.dropped or gate.failed)


def test_the_version_that_was_dropped_may_come_again_and_a_publisher_that_keeps_it_sends_it() -> None:
    with Worker() as worker, Watchful(worker.endpoint, bucket_bytes=64, keep=True) as publisher:
        tensors = new_tensors(worker.model, 1)
        publisher.publish(tensors, 2).applied(20)
        gate = worker.engine_gate
        worker.sleep()
        for parameter in worker.model.parameters.values():
            parameter.fill_(float("nan"))
        gate.lose_weights("dropped")
        for _ in range(5):
            assert worker.status()["state"] == "asleep" and len(worker.updates) == 1
        with pytest.raises(WeightsRejected, match="not newer"), WeightPublisher(worker.endpoint) as other:
            worker.wake()
            other.publish(new_tensors(worker.model, 2), 1).applied(20)
        wait_for(lambda: not gate.stale, "the weights of before")
        assert serves(worker.model, tensors) and worker.receiver.version == 2
        with WeightPublisher(worker.endpoint) as other, pytest.raises(WeightsRejected, match="not newer"):
            other.publish(new_tensors(worker.model, 2), 2).applied(20)
