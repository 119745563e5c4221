"""GPU memory that two processes share: the transport's logic over host memory, and, with a GPU, the memory itself."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from weights_harness import TinyModel, Worker, new_tensors, serves

from trainer_bridge.errors import RolloutError
from trainer_bridge.payload import Payload
from trainer_bridge.publisher import WeightPublisher
from trainer_bridge.transports import cuda_ipc
from trainer_bridge.transports.cuda_ipc import CudaIpcReceiver, CudaIpcSender

SMALL = 64


class HostMemory:
    """What a driver does, for one process: memory, handles of it, and a count of who holds what."""

    def __init__(self) -> None:
        self.allocated: dict[bytes, torch.Tensor] = {}
        self.opened = 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        self.allocated[secrets.token_bytes(64)] = memory
        return memory

    def free(self, memory: torch.Tensor) -> None:
        self.allocated = {key: other for key, other in self.allocated.items() if other is not memory}

    def handle(self, memory: torch.Tensor) -> bytes:
        return next(key for key, other in self.allocated.items() if other is memory)

    def open(self, handle: bytes, nbytes: int) -> torch.Tensor:
        if handle not in self.allocated:
            raise OSError(201, "invalid handle")
        self.opened += 1
        return self.allocated[handle][:nbytes]

    def close(self, memory: torch.Tensor) -> None:
        self.opened -= 1


def shared(worker: Worker, publisher: WeightPublisher) -> HostMemory:
    """Give both sides the same driver."""
    memory = HostMemory()
    receivers = worker.receiver._receivers
    receivers["cuda_ipc"] = CudaIpcReceiver(receivers["zmq"], memory)
    publisher._choice._senders["cuda_ipc"] = CudaIpcSender(None, memory)
    return memory


@pytest.mark.parametrize("apply", ["staged", "in_place"])
@pytest.mark.parametrize("bucket_bytes", [SMALL, 192, 1 << 20])
def test_buckets_go_through_shared_slots_and_nothing_stays_open(apply: str, bucket_bytes: int) -> None:
    with Worker(apply=apply) as worker:
        with WeightPublisher(worker.endpoint, transport="cuda_ipc", bucket_bytes=bucket_bytes) as publisher:
            memory = shared(worker, publisher)
            for version in (1, 2, 3):
                tensors = new_tensors(worker.model, version)
                (report,) = publisher.publish(tensors, version).applied(20)
                assert report.transport == "cuda_ipc" and serves(worker.model, tensors)
                assert len(memory.allocated) == 4 and memory.opened == 0
        assert memory.allocated == {}


def test_a_slot_that_changed_on_its_way_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = []
    plain = cuda_ipc._check_sum

    def wrong(data: torch.Tensor) -> int:
        sums.append(1)
        return plain(data) ^ (len(sums) == 9)

    with Worker() as worker:
        with WeightPublisher(worker.endpoint, transport="cuda_ipc", bucket_bytes=SMALL) as publisher:
            memory = shared(worker, publisher)
            publisher.publish(old := new_tensors(worker.model, 1), 1).applied(20)
            monkeypatch.setattr(cuda_ipc, "_check_sum", wrong)
            with pytest.raises(RolloutError, match="damaged"):
                publisher.publish(new_tensors(worker.model, 2), 2).applied(20)
            assert serves(worker.model, old) and memory.opened == 0
            publisher.publish(new := new_tensors(worker.model, 3), 2).applied(20)
            assert serves(worker.model, new)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"boot_id": "x"}, "options"),
        ({"handles": []}, "options.handles"),
        ({"handles": [5]}, "options.handles"),
        ({"handles": ["zz"]}, "options.handles"),
        ({"handles": ["00"]}, "options.handles"),
        ({"handles": ["00" * 64]}, "options"),
        ({"slot_bytes": 1}, "options"),
        ({"slot_bytes": 1 << 40}, "options"),
        ({"more": 1}, "options"),
    ],
)
def test_broken_options_are_refused_by_name(changes: dict[str, Any], field: str) -> None:
    payload, memory = Payload(new_tensors(TinyModel(), 1), 1, SMALL), HostMemory()
    options = CudaIpcSender(None, memory).prepare(payload)
    with Worker() as worker:
        receivers = worker.receiver._receivers
        receivers["cuda_ipc"] = CudaIpcReceiver(receivers["zmq"], memory)
        begin = {"action": "begin", "version": 1, "manifest": payload.manifest.to_wire(), "transport": "cuda_ipc"}
        reply = worker.control(**begin, options={**options, **changes})
        assert (reply["op"], reply["code"], reply["field"]) == ("error", "bad_request", field), reply
        assert memory.opened == 0 and worker.control(**begin, options=options)["op"] == "ok"


def test_tensors_on_the_cpu_have_no_gpu_memory_to_share() -> None:
    with Worker() as worker, WeightPublisher(worker.endpoint, transport="cuda_ipc") as publisher:
        with pytest.raises(RolloutError, match="prepare: no GPU memory.*another transport"):
            publisher.publish(new_tensors(worker.model, 1), 1).applied(20)


PUBLISH = """
import sys, torch
from weights_harness import TinyModel, new_tensors
from trainer_bridge.publisher import WeightPublisher
with WeightPublisher(sys.argv[1], bucket_bytes=192) as publisher:
    for version in (1, 2, 3):
        tensors = {name: tensor.cuda() for name, tensor in new_tensors(TinyModel(), version).items()}
        (report,) = publisher.publish(tensors, version).applied(60)
        assert report.transport == "cuda_ipc", report
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_another_process_publishes_from_the_same_gpu(apply: str) -> None:
    with Worker(model=TinyModel(device="cuda"), apply=apply) as worker:
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        subprocess.run(
            [sys.executable, "-c", PUBLISH, worker.endpoint],
            check=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": path},
        )
        torch.cuda.synchronize()
        expected = {name: tensor.cuda() for name, tensor in new_tensors(TinyModel(), 3).items()}
        assert serves(worker.model, expected)
