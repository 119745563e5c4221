"""The same bridge with a model and a trainer on a CUDA device: pinned memory, streams, events."""

from pathlib import Path
from typing import Literal

import pytest
import torch

from rollout.config import WeightsSettings
from rollout.weights.staging import make_staging
from rollout.weights.update_memory import UpdateMemories
from tests.support.bridge.fault_client import FaultServer, run_fault
from tests.support.bridge.harness import TinyModel, Worker, new_tensors, serves
from trainer_bridge.publish.publisher import WeightPublisher

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def slow(seconds: float) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(int(seconds * 1e9))


def test_gpu_tensors_are_read_after_the_work_before_publish_and_not_after_held() -> None:
    with Worker(model=TinyModel(device="cuda")) as worker:
        with WeightPublisher(worker.endpoint, bucket_bytes=192) as publisher:
            for version in range(1, 6):
                expected = {name: tensor.cuda() for name, tensor in new_tensors(TinyModel(), version).items()}
                tensors = {name: torch.full_like(tensor, float("nan")) for name, tensor in expected.items()}
                torch.cuda.synchronize()
                slow(0.05)  # the optimizer step that publish() comes right behind
                for name, tensor in tensors.items():
                    tensor.copy_(expected[name])
                handle = publisher.publish(tensors, version)
                handle.held(60)
                for tensor in tensors.values():
                    tensor.fill_(float("nan"))
                handle.applied(60)
                torch.cuda.synchronize()
                assert serves(worker.model, expected)


def serves_now(worker: Worker, tensors: dict[str, torch.Tensor]) -> bool:
    torch.cuda.synchronize()
    return serves(worker.model, {name: tensor.cuda() for name, tensor in tensors.items()})


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_an_update_waits_on_the_device_and_the_swap_copies_from_there(transport: str) -> None:
    arrived, staged = set(), set()
    with Worker(model=TinyModel(device="cuda"), apply="staged") as worker:
        assert worker.receiver.summary()["staging"] == "device"
        with WeightPublisher(worker.endpoint, transport=transport, bucket_bytes=192) as publisher:
            for version in range(1, 6):
                tensors = new_tensors(TinyModel(), version)
                publisher.publish(tensors, version).applied(60)
                assert serves_now(worker, tensors)
                memory = worker.staging.arriving(0, 64)
                arrived.add((memory.is_pinned(), memory.data_ptr()))
                (block,) = worker.staging.memory.blocks
                staged.add((block.is_cuda, block.data_ptr()))
    assert len(arrived) == len(staged) == 1 and arrived.pop()[0] and staged.pop()[0]


def test_bytes_are_on_the_device_before_the_update_is_ready() -> None:
    """The upload waits for earlier work of its stream; the update must not be handed over before it has run."""
    with Worker(model=TinyModel(device="cuda"), apply="staged") as worker:
        assert worker.staging.memory.place == "device"
        with worker.staging.on_stream():
            slow(0.3)
        tensors = new_tensors(TinyModel(), 1)
        with WeightPublisher(worker.endpoint, transport="zmq", bucket_bytes=192) as publisher:
            publisher.publish(tensors, 1).applied(60)
        assert serves_now(worker, tensors)


@pytest.mark.parametrize("staging", ["device", "host"])
def test_an_update_waits_where_it_was_asked_to(staging: Literal["device", "host"]) -> None:
    model, settings = TinyModel(device="cuda"), WeightsSettings(staging=staging)
    own = make_staging(model.views, settings, device_share=0.0 if staging == "device" else 1.0)
    with Worker(model=model, memories=UpdateMemories(own)) as worker:
        assert worker.receiver.summary()["staging"] == staging
        # Pinned before the first update: it takes long.
        own.memory.arrival.end_pinning()
        before = own.memory.arrival.reserve(0).untyped_storage()
        assert before.nbytes() and before.is_pinned() if staging == "host" else not before.nbytes()
        with WeightPublisher(worker.endpoint, bucket_bytes=192) as publisher:
            publisher.publish(tensors := new_tensors(TinyModel(), 1), 1).applied(60)
        assert serves_now(worker, tensors)


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_in_place_on_the_device(transport: str) -> None:
    with Worker(model=TinyModel(device="cuda"), apply="in_place") as worker:
        assert worker.receiver.summary()["staging"] is None
        with WeightPublisher(worker.endpoint, transport=transport, bucket_bytes=192) as publisher:
            for version in range(1, 4):
                tensors = new_tensors(TinyModel(), version, stacked=version == 2)
                publisher.publish(tensors, version).applied(60)
                assert serves_now(worker, tensors) and worker.engine_gate.hold == "free"


def test_trainer_and_worker_on_one_gpu_are_no_group_and_auto_takes_another_way() -> None:
    with Worker(model=TinyModel(device="cuda")) as worker, WeightPublisher(worker.endpoint) as publisher:
        tensors = {name: tensor.cuda() for name, tensor in new_tensors(TinyModel(), 1).items()}
        (report,) = publisher.publish(tensors, 1).applied(60)
        assert report.transport == "shm" and "one GPU" in report.why and serves_now(worker, tensors)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_nccl_from_one_gpu_to_another(apply: str) -> None:
    with Worker(model=TinyModel(device="cuda:1"), apply=apply) as worker:
        with WeightPublisher(worker.endpoint, bucket_bytes=192) as publisher:
            for version in range(1, 4):
                tensors = {name: tensor.to("cuda:0") for name, tensor in new_tensors(TinyModel(), version).items()}
                (report,) = publisher.publish(tensors, version).applied(60)
                torch.cuda.synchronize(1)
                assert report.transport == "nccl"
                assert serves(worker.model, {name: tensor.to("cuda:1") for name, tensor in tensors.items()})
    assert not torch.distributed.is_initialized()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("apply", ["staged", "in_place"])
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_worker_outlives_a_publisher_lost_in_mid_broadcast_between_gpus(
    faults: FaultServer, tmp_path: Path, fault: str, apply: str
) -> None:
    with Worker(model=TinyModel(device="cuda:1"), apply=apply, idle_s=5.0) as worker:

        def publish(version: int) -> dict[str, torch.Tensor]:
            tensors = {name: tensor.to("cuda:0") for name, tensor in new_tensors(TinyModel(), version).items()}
            with WeightPublisher(worker.endpoint, transport="nccl", bucket_bytes=64) as publisher:
                publisher.publish(tensors, version).applied(60)
            torch.cuda.synchronize(1)
            return {name: tensor.to("cuda:1") for name, tensor in tensors.items()}

        old = publish(1)
        run_fault(faults, worker, "nccl", tmp_path, "transfer", fault, device="cuda:0")
        gate = worker.engine_gate
        assert worker.receiver.version == 1
        assert apply == "in_place" if gate.stale else serves(worker.model, old)
        new = publish(3)  # in a group of its own
        assert serves(worker.model, new) and not gate.stale and gate.hold == "free"


def test_staging_is_not_released_while_a_copy_on_the_device_may_read_it() -> None:
    with Worker(model=TinyModel(device="cuda")) as worker:
        worker.gate.clear()
        with WeightPublisher(worker.endpoint) as publisher:
            handle = publisher.publish(new_tensors(TinyModel(), 1), 1)
            update = None
            while update is None:
                update = worker.receiver.take_ready()
            slow(0.2)
            update.copy_into()
            worker.receiver.applied(update, 0.0)
            assert not update.released  # the copies wait for the stream's earlier work
            handle.applied(60)
            torch.cuda.synchronize()
            assert update.released
