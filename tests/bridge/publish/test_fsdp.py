"""A trainer of two ranks, each with its part of the weights (FSDP2), and workers that get them whole."""

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.bridge.fault_client import FaultServer
from tests.support.bridge.harness import TinyModel, Worker, new_tensors, serves, wait_for
from tests.support.bridge.parts import enter_nccl
from tests.support.kernels.grids import nightly
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.transports.base import IncomingUpdate
from trainer_bridge.transports.nccl.transport import NcclReceiver
from trainer_bridge.transports.payload import Payload

RANKS = 2
BUCKET = 128


def train(
    faults: FaultServer,
    workers: list[Worker],
    transport: str,
    folder: Path,
    fault: str = "",
    candidates: Any = None,
    devices: tuple[str, str] = ("cpu", "cpu"),
    deltas: str | None = None,
) -> list[dict]:
    """Run both ranks; what each one that lived saw."""
    order = {"endpoints": [worker.endpoint for worker in workers], "transport": transport, "candidates": candidates}
    order |= {"deltas": deltas}
    files = [folder / f"rank-{rank}.json" for rank in range(1 if fault else RANKS)]
    with ExitStack() as stack:
        for rank in range(RANKS):
            stack.enter_context(
                faults.child(role="fsdp", rank=rank, device=devices[rank], folder=str(folder), fault=fault, **order)
            )
        for file in files:
            wait_for(file.exists, f"the end of {file.stem}", 120)
    return [json.loads(file.read_text()) for file in files]


def of_version(noted: list[list[int]], version: int) -> list[int]:
    return [nbytes for at, nbytes in noted if at == version]


@pytest.mark.parametrize("transport", ["auto", "nccl", *nightly("cuda_ipc", "disk")])
def test_the_parts_of_all_ranks_arrive_as_one(faults: FaultServer, tmp_path: Path, transport: str) -> None:
    with Worker(shared=tmp_path) as worker:
        seen = train(faults, [worker], transport, tmp_path)
        assert [update.version for update in worker.updates] == [1, 2, 3]
        tensors = load_file(tmp_path / "3.safetensors")
        assert serves(worker.model, tensors)
    for rank in range(RANKS):
        assert seen[rank]["versions"] == [[1], [2], [3]] and seen[rank]["errors"] == []
        before, after = seen[rank]["groups"]
        assert after <= before + 1  # the device mesh's own; the bridge registers none
    fetched = [sum(of_version(seen[0]["fetched"], version)) for version in (1, 2, 3)]
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    if transport == "nccl":  # each rank broadcasts what it owns
        assert fetched == [0, 0, 0]
        packed = [sum(of_version(rank["packed"], 1)) for rank in seen]
        assert min(packed) > nbytes / 3 and nbytes <= sum(packed) < 1.5 * nbytes
    elif transport == "cuda_ipc":  # rank 0 reads what the other rank lends
        assert fetched == [0, 0, 0] and all(of_version(seen[0]["requested"], version) for version in (1, 2, 3))
    else:
        assert fetched == [nbytes] * 3
    if transport != "disk":
        assert all(size <= BUCKET for _, size in seen[0]["fetched"])  # one bucket, never a tensor or a model


@pytest.mark.parametrize("transport", ["zmq", *nightly("nccl")])
def test_the_parts_of_all_ranks_are_compared_with_the_last_update(
    faults: FaultServer, tmp_path: Path, transport: str
) -> None:
    with Worker() as worker:
        seen = train(faults, [worker], transport, tmp_path, deltas="host")
        assert [update.version for update in worker.updates] == [1, 2, 3]
        assert serves(worker.model, load_file(tmp_path / "3.safetensors"))
    for rank in range(RANKS):
        assert seen[rank]["versions"] == [[1], [2], [3]] and seen[rank]["errors"] == []


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_ranks_on_two_gpus_send_their_parts_to_workers_on_two_others(
    faults: FaultServer, tmp_path: Path, apply: str
) -> None:
    with ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(model=TinyModel(device=f"cuda:{gpu}"), apply=apply, idle_s=30.0))
            for gpu in (2, 3)
        ]
        seen = train(faults, workers, "auto", tmp_path, devices=("cuda:0", "cuda:1"))
        tensors = load_file(tmp_path / "3.safetensors")
        for worker, gpu in zip(workers, (2, 3), strict=True):
            torch.cuda.synchronize(gpu)
            assert [update.version for update in worker.updates] == [1, 2, 3]
            assert serves(worker.model, {name: tensor.to(f"cuda:{gpu}") for name, tensor in tensors.items()})
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    for rank in seen:
        assert rank["errors"] == [] and rank["transports"] == [["nccl", "nccl"]] * 3
        assert sum(of_version(rank["packed"], 1)) > nbytes / 3
    assert [sum(of_version(seen[0]["fetched"], version)) for version in (1, 2)] == [0, 0]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("transport", ["cuda_ipc", "shm"])
def test_parts_of_a_rank_on_another_gpu_cross_to_the_gpu_of_trainer_and_worker(
    faults: FaultServer, tmp_path: Path, transport: str
) -> None:
    with Worker(model=TinyModel(device="cuda:0"), idle_s=30.0) as worker:
        seen = train(faults, [worker], transport, tmp_path, devices=("cuda:0", "cuda:1"))
        torch.cuda.synchronize(0)
        assert [update.version for update in worker.updates] == [1, 2, 3]
        tensors = load_file(tmp_path / "3.safetensors")
        assert serves(worker.model, {name: tensor.to("cuda:0") for name, tensor in tensors.items()})
    for rank in seen:
        assert rank["errors"] == [] and rank["transports"] == [[transport]] * 3
    count = -(-max(start for _, start in seen[0]["requested"]) // BUCKET) + 1
    for version in (1, 2, 3):
        assert of_version(seen[0]["requested"], version) == [index * BUCKET for index in range(count)]
        assert of_version(seen[0]["fetched"], version) == []


def test_ranks_and_workers_meet_again_without_one_another_while_a_worker_takes_another_way(
    faults: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first worker gives up once in the middle; the last one takes no part in groups."""
    broken: list[str] = []

    class Fails:
        """The destination of an update, which has no room for a bucket in the middle once."""

        def __init__(self, destination: Any) -> None:
            self._destination = destination

        def __getattr__(self, name: str) -> Any:
            return getattr(self._destination, name)

        def put(self, start: int, data: torch.Tensor) -> None:
            if start > 4 * BUCKET and not broken:
                broken.append("here")
                raise RuntimeError("no memory")
            self._destination.put(start, data)

    class Receiver(NcclReceiver):
        def begin(self, incoming: IncomingUpdate, options: Any) -> dict[str, Any]:
            if incoming.manifest.version == 2 and self is first.receiver.receivers["nccl"]:
                incoming.destination = Fails(incoming.destination)
            return super().begin(incoming, options)

    enter_nccl(monkeypatch, receiver_type=Receiver)
    with Worker() as first, Worker() as second, Worker() as far:
        del far.receiver.receivers["nccl"]
        workers = [first, second, far]
        seen = train(faults, workers, "auto", tmp_path, candidates=["nccl", "shm", "zmq"])
        tensors = load_file(tmp_path / "3.safetensors")
        assert broken and all(serves(worker.model, tensors) for worker in workers)
        assert all([update.version for update in worker.updates] == [1, 2, 3] for worker in workers)
    for rank in seen:
        assert rank["errors"] == [] and rank["transports"] == [["nccl", "nccl", "shm"]] * 3


@pytest.mark.parametrize(("transport", "fault"), [("zmq", "die"), ("nccl", "die in group"), ("nccl", "corrupt")])
def test_a_rank_that_fails_ends_the_update_with_an_error_and_the_old_weights_serve(
    faults: FaultServer, tmp_path: Path, transport: str, fault: str
) -> None:
    with Worker() as worker:
        (seen,) = train(faults, [worker], transport, tmp_path, fault)
        assert seen["versions"] == [[1]]
        (error,) = seen["errors"]
        says = {"die": "^gather: .*rank", "die in group": "^transfer: rank 1 cannot be reached", "corrupt": "digest"}
        assert re.search(says[fault], error)
        wait_for(lambda: worker.status()["state"] == "idle", "the end of the update")
        assert serves(worker.model, load_file(tmp_path / "1.safetensors")) and worker.receiver.version == 1
        if transport == "nccl":
            tensors = new_tensors(worker.model, 9)
            with WeightPublisher(worker.endpoint, transport="nccl", bucket_bytes=BUCKET) as again:  # a new group
                again.publish(tensors, 2).applied(20)
            assert serves(worker.model, tensors)


def test_parts_without_the_other_ranks_are_refused_at_once() -> None:
    class Part(torch.Tensor):
        device_mesh = placements = ()

    with pytest.raises(ValueError, match="collective=True"):
        Payload({"a": torch.zeros(3).as_subclass(Part)}, 1, 64)
