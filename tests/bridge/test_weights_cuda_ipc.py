"""GPU memory that two processes share: the transport's logic over host memory, and, with a GPU, the memory itself."""

from __future__ import annotations

import itertools
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from weights_harness import TinyModel, Worker, new_tensors, serves

from trainer_bridge import publisher as publisher_module
from trainer_bridge.errors import RolloutError
from trainer_bridge.payload import Payload
from trainer_bridge.publisher import WeightPublisher
from trainer_bridge.transports import TransferRules, cuda_ipc
from trainer_bridge.transports.cuda_ipc import CudaIpcMemory, CudaIpcReceiver, CudaIpcSender

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


def shared(worker: Worker, publisher: WeightPublisher, memory: HostMemory | None = None) -> HostMemory:
    """Give both sides the same driver."""
    memory = memory or HostMemory()
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
                assert len(memory.allocated) == 16 and memory.opened == 0
        assert memory.allocated == {}


def test_a_slot_that_changed_on_its_way_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count(1)  # of both sides, which run at the same time
    plain = cuda_ipc._low_words

    def wrong(fingerprints: Sequence[torch.Tensor]) -> list[int]:
        return [low ^ (next(calls) == 9) for low in plain(fingerprints)]

    with Worker() as worker:
        with WeightPublisher(worker.endpoint, transport="cuda_ipc", bucket_bytes=SMALL) as publisher:
            memory = shared(worker, publisher)
            publisher.publish(old := new_tensors(worker.model, 1), 1).applied(20)
            monkeypatch.setattr(cuda_ipc, "_low_words", wrong)
            with pytest.raises(RolloutError, match="damaged"):
                publisher.publish(new_tensors(worker.model, 2), 2).applied(20)
            assert serves(worker.model, old) and memory.opened == 0
            publisher.publish(new := new_tensors(worker.model, 3), 2).applied(20)
            assert serves(worker.model, new)


def test_slots_of_a_worker_that_was_given_up_are_freed_once_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    freed_open = []

    class Driver(HostMemory):
        def free(self, memory: torch.Tensor) -> None:
            freed_open.append(self.opened)
            super().free(memory)

    told, buckets = threading.Event(), []
    plain = CudaIpcReceiver.take

    def take(self: CudaIpcReceiver, *arguments: Any) -> bool:
        buckets.append(1)
        if len(buckets) == 5:
            assert told.wait(20)  # it hangs, with the slots open
        return plain(self, *arguments)

    monkeypatch.setattr(CudaIpcReceiver, "take", take)
    with Worker() as worker:
        control = worker.receiver.control

        def listen(header: Any, reply: Any) -> None:
            control(header, reply)
            if header["action"] == "abort":
                told.set()

        worker.receiver.control = listen  # type: ignore[method-assign]
        monkeypatch.setattr(publisher_module, "_ABORT_S", 20.0)
        limits = {"bucket_bytes": SMALL, "stall_s": 1.0}
        with WeightPublisher(worker.endpoint, transport="cuda_ipc", **limits) as publisher:
            memory = shared(worker, publisher, Driver())
            with pytest.raises(RolloutError, match="no acknowledgement"):
                publisher.publish(new_tensors(worker.model, 1), 1).applied(20)
            assert memory.opened == 0 and memory.allocated == {} and freed_open == [0] * 16
            publisher._rules = TransferRules(20.0, publisher._closing)
            publisher.publish(tensors := new_tensors(worker.model, 2), 2).applied(20)
            assert serves(worker.model, tensors)


def test_memory_of_another_gpu_is_refused_and_closed() -> None:
    """Torch would make a copy of it, which never changes."""
    memory, calls = CudaIpcMemory.__new__(CudaIpcMemory), []

    def call(name: str, *arguments: Any) -> None:
        calls.append(name)
        if name == "cudaIpcOpenMemHandle":
            arguments[0]._obj.value = 0x1000

    memory._call = call  # type: ignore[method-assign]
    memory._tensor = lambda pointer, nbytes: torch.zeros(nbytes, dtype=torch.uint8)  # type: ignore[method-assign]
    with pytest.raises(OSError, match="another GPU"):
        memory.open(bytes(64), 16)
    assert calls == ["cudaIpcOpenMemHandle", "cudaIpcCloseMemHandle"]


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
