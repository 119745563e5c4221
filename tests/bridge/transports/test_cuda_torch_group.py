"""Trainers' process groups over NCCL, from one GPU to another: torch.distributed's, and vLLM's engine."""

import ctypes
import pickle
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.support.bridge.group_trainer import trainer
from tests.support.bridge.harness import TinyModel, Worker, new_tensors, serves
from tests.support.ports import free_port
from trainer_bridge.transports.nccl.nccl_group import BroadcastGroup
from trainer_bridge.transports.torch_group.group_member import cut
from trainer_bridge.wire.manifest import pack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
VLLM = "vllm.distributed.device_communicators.pynccl_wrapper"


def rows_of(tensors: dict[str, torch.Tensor]) -> list[list[Any]]:
    return [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()]


def publish(worker: Worker, version: int, tensors: dict[str, torch.Tensor]) -> None:
    manifest = pack(version, [tuple(row) for row in rows_of(tensors)], 1 << 20).to_wire()
    begun = worker.control(action="begin", version=version, manifest=manifest, transport="torch_group", options={})
    assert worker.control(action="commit", token=begun["token"], options={})["version"] == version
    torch.cuda.synchronize(1)
    assert serves(worker.model, {name: tensor.to("cuda:1") for name, tensor in tensors.items()})


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_a_trainers_own_group_over_nccl(apply: str, tmp_path: Path) -> None:
    with Worker(model=TinyModel(device="cuda:1"), apply=apply) as worker, trainer(DEVICE="cuda:0") as sender:
        port = free_port()
        sender.join(port, 2, "mine", backend="nccl")
        told = {"kind": "torch", "backend": "nccl", "host": "127.0.0.1", "port": port, "rank": 1, "size": 2}
        assert worker.control(action="join", group="mine", meeting=told) == {"op": "ok"}
        assert sender.done() == {"ok": True}
        for version in range(1, 5):
            tensors = new_tensors(TinyModel(), version)
            save_file(tensors, file := tmp_path / f"{version}.safetensors")
            names = list(tensors)
            for part, some in enumerate([names] if version < 3 else [names[:3], names[3:]]):
                flat = version % 2 == 0
                sender.broadcast("mine", file, some, flat=flat)
                order = {"part": part, "tensors": rows_of({name: tensors[name] for name in some})}
                answer = worker.control(action="gather", group="mine", **order, packed_bytes=1 << 62 if flat else None)
                assert answer["op"] == "ok" and sender.done() == {"ok": True}
            publish(worker, version, tensors)
    assert not dist.is_initialized()


class Engine:
    """Rank 0 of a group that meets by NCCL's id, as vLLM's trainer side: it warms up, then broadcasts packed bytes."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self._thread = ThreadPoolExecutor(1)
        self._joined = self._thread.submit(self._join)
        self.nccl_id: bytes = dist.PrefixStore("id", self.store).get("0")

    def _join(self) -> BroadcastGroup:
        group = BroadcastGroup(self.store, "id", 0, 2, "", torch.device("cuda:0"), 60, connect="now")
        group.warm_up()
        torch.cuda.synchronize(0)
        return group

    def send(self, tensors: dict[str, torch.Tensor], packed_bytes: int) -> None:
        flat = [tensor.contiguous().view(-1).view(torch.uint8).to("cuda:0") for tensor in tensors.values()]
        for sizes in cut([data.numel() for data in flat], packed_bytes):
            self._joined.result().broadcast(torch.cat(flat[: len(sizes)])).wait(threading.Event())
            flat = flat[len(sizes) :]

    def close(self) -> None:
        self._joined.result().close(broken=True)


@pytest.mark.parametrize("by", ["id", "store"])
def test_vllms_engine_by_its_id(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    told: dict[str, Any] = {"kind": "vllm", "backend": "nccl", "rank": 1, "size": 2}
    with Worker(model=TinyModel(device="cuda:1")) as worker, ThreadPoolExecutor(1) as thread:
        if by == "id":
            answer = thread.submit(
                worker.control, action="join", group="engine", meeting=told | {"nccl_id": engine.nccl_id.hex()}
            )
        else:
            port = free_port()
            told |= {"host": "127.0.0.1", "port": port}
            answer = thread.submit(worker.control, action="join", group="engine", meeting=told)
            store = dist.TCPStore("127.0.0.1", port, 2, is_master=True, timeout=timedelta(seconds=60))
            store.set("broadcast_from/0/0", pickled(engine.nccl_id, monkeypatch))
        assert answer.result() == {"op": "ok"}
        for version, packed_bytes in ((1, 1 << 30), (2, 100), (3, 1)):
            tensors = new_tensors(TinyModel(), version)
            order = {"part": 0, "tensors": rows_of(tensors), "packed_bytes": packed_bytes}
            gathering = worker.ask(action="gather", group="engine", **order)
            engine.send(tensors, packed_bytes)
            assert gathering.get(timeout=60)["missing"] == []
            publish(worker, version, tensors)
        engine.close()


def pickled(nccl_id: bytes, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The id as vLLM's `StatelessProcessGroup` writes it."""
    made = {"_fields_": [("internal", ctypes.c_byte * 128)], "__module__": VLLM}
    kind: Any = type("ncclUniqueId", (ctypes.Structure,), made)
    module = types.ModuleType(VLLM)
    module.ncclUniqueId = kind  # type: ignore[attr-defined]
    for end in range(1, len(parts := VLLM.split("."))):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(parts[end - 1]))
    monkeypatch.setitem(sys.modules, VLLM, module)
    return pickle.dumps(kind.from_buffer_copy(nccl_id))
