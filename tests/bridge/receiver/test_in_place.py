"""Bytes that land in the parameters themselves: every layout and type, and not one before generation is held."""

import threading

import pytest
import torch

from rollout.config import WeightsSettings
from rollout.engine.gate import Gate
from rollout.weights.pinned_memory import HostBuffer
from rollout.weights.staging import make_staging
from rollout.weights.update_memory import UpdateMemories
from tests.support.bridge.harness import SlowToAnswer, TinyModel, Worker, new_tensors, serves, wait_for
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.errors import RolloutError, WeightsRejected


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [64, 192, 1 << 20])
def test_every_layout_and_type_lands_as_it_would_have_been_staged(
    stacked: bool, dtype: torch.dtype, bucket_bytes: int
) -> None:
    with Worker(apply="in_place") as worker, WeightPublisher(worker.endpoint, bucket_bytes=bucket_bytes) as publisher:
        for version in (1, 2):
            tensors = new_tensors(worker.model, version, dtype=dtype, stacked=stacked)
            publisher.publish(tensors, version).applied(20)
            assert serves(worker.model, tensors) and worker.status()["apply"] == "in_place"


@pytest.mark.parametrize("first", ["embed.weight", "lm_head.weight"])
def test_tied_tensors_that_differ_leave_the_worker_stale(first: str) -> None:
    with Worker(apply="in_place") as worker, WeightPublisher(worker.endpoint, bucket_bytes=64) as publisher:
        tensors = new_tensors(worker.model, 1)
        embed = tensors.pop("embed.weight")
        names = ("embed.weight", "lm_head.weight") if first == "embed.weight" else ("lm_head.weight", "embed.weight")
        tied = {names[0]: embed, **tensors, names[1]: embed.float()}
        publisher.publish(tied, 1).applied(20)
        assert serves(worker.model, tied)
        with pytest.raises(WeightsRejected, match="differ"):
            publisher.publish({**tied, names[1]: embed + 1}, 2).applied(20)
        assert "differ" in worker.engine_gate.stale and worker.receiver.version == 1
        publisher.publish(tied, 2).applied(20)
        assert serves(worker.model, tied) and not worker.engine_gate.stale


@pytest.mark.parametrize("transport", ["shm", "zmq", "nccl", "disk"])
def test_nothing_lands_before_the_loop_has_granted_the_hold(transport: str, tmp_path) -> None:
    with Worker(apply="in_place") as worker:
        worker.gate.clear()
        before = worker.model.snapshot()
        with WeightPublisher(worker.endpoint, transport=transport, folder=str(tmp_path), bucket_bytes=64) as publisher:
            tensors = new_tensors(worker.model, 1)
            handle = publisher.publish(tensors, 1)
            wait_for(lambda: worker.engine_gate.hold != "free", "the wish for a hold")
            for _ in range(20):
                status = worker.status()
                assert status["state"] == "receiving" and status["incoming"]["arrived_bytes"] == 0
            assert all(torch.equal(before[name], tensor) for name, tensor in worker.model.parameters.items())
            worker.gate.set()
            handle.applied(20)
            assert serves(worker.model, tensors)


def test_a_publisher_that_gives_up_before_anything_landed_costs_nothing() -> None:
    with Worker(apply="in_place") as worker:
        worker.gate.clear()
        before = worker.model.snapshot()
        publisher = WeightPublisher(worker.endpoint, bucket_bytes=64)
        publisher.publish(new_tensors(worker.model, 1), 1)
        wait_for(lambda: worker.engine_gate.hold != "free", "the wish for a hold")
        publisher.close()
        wait_for(lambda: worker.engine_gate.hold == "free", "the end of the wish")
        assert worker.status()["state"] == "idle" and not worker.engine_gate.stale
        assert all(torch.equal(before[name], tensor) for name, tensor in worker.model.parameters.items())


@pytest.mark.parametrize("apply", ["in_place", "staged"])
def test_an_update_ends_with_its_publisher_though_the_answer_to_begin_is_still_on_its_way(apply: str) -> None:
    with Worker(apply=apply, idle_s=600.0) as worker, SlowToAnswer(worker) as front:
        publisher = WeightPublisher(front.endpoint, bucket_bytes=64)
        handle = publisher.publish(new_tensors(worker.model, 1), 1)
        assert front.kept.wait(60)
        closing = threading.Thread(target=publisher.close)
        closing.start()
        closing.join(0.5)  # a publisher that gives the answer up has ended by then
        front.let_go.set()
        wait_for(lambda: worker.status()["state"] == "idle", "the end of the update")
        assert worker.engine_gate.hold == "free" and not worker.engine_gate.stale
        closing.join(60)
        with pytest.raises(RolloutError, match="closed"):
            handle.applied(0)


def test_a_hold_that_nobody_wants_any_more_is_not_granted() -> None:
    gate, granted = Gate(), []
    gate.request_hold(lambda: granted.append(1))
    gate.clear_hold()
    gate.grant_hold()  # the loop had seen the wish
    assert gate.hold != "granted" and granted == []
    gate.request_hold(lambda: granted.append(2))
    assert granted == []
    gate.grant_hold()
    gate.grant_hold()
    assert granted == [2]
    gate.fail_hold("half")
    gate.request_hold(lambda: granted.append(3))  # nothing runs: no need to ask
    assert granted == [2, 3] and gate.stale == "half"


def test_a_model_that_fits_beside_itself_is_staged() -> None:
    with Worker() as worker:
        assert worker.status()["apply"] == "staged"


def test_auto_writes_in_place_where_the_host_has_no_room() -> None:
    model, settings = TinyModel(), WeightsSettings()
    memories = UpdateMemories(make_staging(model.views, settings, host_share=0.0))
    with Worker(model=model, memories=memories) as worker:
        assert worker.status()["apply"] == "in_place"
    staged = settings.model_copy(update={"apply": "staged"})
    assert make_staging(model.views, staged, host_share=0.0).memory.name == "staged"


def test_where_a_staged_update_waits_is_refused_where_there_is_no_such_place() -> None:
    with pytest.raises(ValueError, match=r"staging = device takes .* GiB of a GPU .*, 0\.0 GiB are free"):
        Worker(staging="device")
    with pytest.raises(ValueError, match="staging = host"):
        Worker(apply="in_place", staging="host")
    with Worker(staging="host") as worker:
        assert worker.receiver.summary()["staging"] == "host"


def test_host_memory_that_is_not_there_is_told_with_what_to_change() -> None:
    """Before a page is taken: a system that is short of memory ends processes."""
    with pytest.raises(ValueError, match=r"does not give 1048576\.0 GiB of pinned memory.*to in_place .*GiB are free"):
        HostBuffer(pinned=True).begin_pinning(1 << 50)
