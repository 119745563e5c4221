"""One rank of a trainer whose model FSDP2 shards: publishes, trains on at once, publishes again.

    {"role": "fsdp", "rank", "endpoints", "transport", "candidates", "device", "folder", "fault",
        "deltas"}
    {"role": "tensor parallel", "rank", "endpoints", "updates", "counting", "folder"}    see `train_tensor_parallel`

a line for `fault_server`. On CPUs "cuda_ipc" goes by files. `candidates` are the transports that `auto` tries, null:
the usual ones. `fault` is what befalls rank 1 in version 2: "die" before it publishes, "die in group" after it has
broadcast some buckets, "corrupt": a bit of what it broadcasts changes on its way. Each rank writes what it saw as JSON;
rank 0 the whole tensors of each version, which are what a worker must serve.
"""

import json
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.bridge.file_memory import FileMemory, lend_from, share_from
from tests.support.bridge.harness import TinyModel, new_tensors
from tests.support.worker.harness import tensors
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.publish.trainer_ranks import TrainerRanks
from trainer_bridge.publish.transport_choice import TransportChoice
from trainer_bridge.transports.nccl.nccl_group import BroadcastGroup
from trainer_bridge.transports.payload import Payload
from trainer_bridge.transports.shards import Shards
from trainer_bridge.wire.errors import RolloutError

BUCKET = 128
RANKS = 2


def sharded_model(mesh: Any, device: torch.device) -> torch.nn.Module:
    """A module with the tiny model's parameters, sharded as FSDP2 does."""
    model = torch.nn.Module()
    for name, tensor in new_tensors(TinyModel(), 1, dtype=torch.float32).items():
        *path, last = name.split(".")
        home = model
        for part in path:
            if not hasattr(home, part):
                home.add_module(part, torch.nn.Module())
            home = getattr(home, part)
        home.register_parameter(last, torch.nn.Parameter(tensor.clone().to(device)))
    return fully_shard(model, mesh=mesh)


def watch(seen: dict[str, Any], version: list[int], dies_in: int) -> None:
    """Note what is fetched and what is packed to be broadcast from here, by version; die in the middle of `dies_in`."""
    fetch, pack, request = Shards.fetch, Payload.pack_pieces, TrainerRanks.request

    def request_noted(self: TrainerRanks, start: int, end: int, place: int) -> None:
        seen["requested"].append([version[0], start])
        request(self, start, end, place)

    def fetch_noted(self: Shards, index: int, first: int, last: int) -> torch.Tensor:
        seen["fetched"].append([version[0], self.locals[index].element_size() * (last - first)])
        return fetch(self, index, first, last)

    def pack_noted(self: Payload, pieces: Any, out: torch.Tensor, columns: Any = ()) -> None:
        rows = sum(rows.width * rows.times for rows, _ in columns)
        seen["packed"].append([version[0], rows + sum(end - start for start, end, _ in pieces)])
        if sum(of == dies_in for of, _ in seen["packed"]) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        pack(self, pieces, out, columns)

    Shards.fetch, Payload.pack_pieces = fetch_noted, pack_noted  # type: ignore[method-assign]
    TrainerRanks.request = request_noted  # type: ignore[method-assign]


def corrupt(version: list[int]) -> None:
    """One bit changes after the fingerprint was taken, in the third broadcast of version 2 from here."""
    broadcast, own = BroadcastGroup.broadcast, []

    def flip(self: BroadcastGroup, data: torch.Tensor, root: int = 0) -> Any:
        if root and version[0] == 2:
            own.append(root)
            if len(own) == 3:
                data[0] ^= 1
        return broadcast(self, data, root)

    BroadcastGroup.broadcast = flip  # type: ignore[method-assign]


def train_fsdp(order: dict[str, Any]) -> None:
    """One rank, from start to end."""
    rank, folder, fault = order["rank"], Path(order["folder"]), order["fault"]
    device = torch.device(order["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=30),
    )
    groups = len(dist.distributed_c10d._world.pg_map)
    mesh = init_device_mesh(device.type, (RANKS,))
    model = sharded_model(mesh, device)
    seen: dict[str, Any] = {"versions": [], "transports": [], "errors": [], "fetched": [], "packed": []}
    seen |= {"requested": []}
    WeightPublisher.abort_s = 20.0  # for which a worker on a busy machine may take to answer
    at = [0]
    watch(seen, at, dies_in=2 if fault == "die in group" and rank == 1 else 0)
    if fault == "corrupt" and rank == 1:
        corrupt(at)
    if order["candidates"]:
        TransportChoice.candidates = lambda self, payload: order["candidates"]  # type: ignore[method-assign]
    with WeightPublisher(
        order["endpoints"],
        transport=order["transport"],
        folder=str(folder),
        bucket_bytes=BUCKET,
        collective=True,
        begin_s=30,
        stall_s=30,
        deltas=order["deltas"],
    ) as publisher:
        if device.type == "cpu" and order["transport"] == "cuda_ipc":
            share_from(publisher, folder)
            lend_from(publisher, FileMemory(folder))
        for version in (1, 2, 3):
            at[0] = version
            state = dict(model.state_dict())
            assert all(isinstance(tensor, DTensor) for tensor in state.values())
            if version == 3:  # other placements: columns, and one that every rank has
                state["q.weight"] = distribute_tensor(state["q.weight"].full_tensor(), mesh, [Shard(1)])
                state["k.weight"] = distribute_tensor(state["k.weight"].full_tensor(), mesh, [Replicate()])
            whole = {name: tensor.full_tensor().cpu().clone() for name, tensor in state.items()}
            if rank == 0:
                save_file(whole, folder / f"{version}.safetensors")
            if fault == "die" and version == 2 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                handle = publisher.publish(state, version)
                # The trainer's own collectives go on; they use another group.
                total = torch.ones(1)
                if not fault or version == 1:
                    dist.all_reduce(total)
                handle.held(60)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(1.0)
                reports = handle.applied(60)
                seen["versions"].append([report.version for report in reports])
                seen["transports"].append([report.transport for report in reports])
            except RolloutError as error:
                seen["errors"].append(str(error))
                break
    seen["groups"] = [groups, len(dist.distributed_c10d._world.pg_map)]
    draft = folder / f"{rank}.part"
    draft.write_text(json.dumps(seen))
    draft.rename(folder / f"rank-{rank}.json")
    if not fault:
        dist.barrier()
        dist.destroy_process_group()


#: How a tensor-parallel trainer cuts its tensors: by outputs, or by inputs where the results of its ranks are added up.
_BY_INPUTS = ("down.weight", "down_proj.weight", "o_proj.weight")


def tensor_parallel_state(whole: dict[str, torch.Tensor], mesh: Any) -> dict[str, torch.Tensor]:
    """This rank's parts of tensors, as a tensor-parallel trainer has them."""
    return {
        name: distribute_tensor(
            tensor.clone(),
            mesh,
            [Replicate() if "norm" in name else Shard(1 if name.endswith(_BY_INPUTS) else 0)],
        )
        for name, tensor in whole.items()
    }


def counting_step(version: int) -> int:
    """In which step the checkpoint of a version counts, where a trainer sends such."""
    return 1 + version % 2


def train_tensor_parallel(order: dict[str, Any]) -> None:
    """One rank of a tensor-parallel trainer on CPUs: it sends several updates by gloo, one after the other.

    They are the tiny model's, whose seeds are their versions, or with `counting` those of the checkpoints that count.
    """
    rank, folder = order["rank"], Path(order["folder"])
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (RANKS,))
    seen: dict[str, Any] = {"versions": [], "fetched": [], "packed": [], "requested": []}
    at = [0]
    watch(seen, at, dies_in=0)
    with WeightPublisher(
        order["endpoints"], transport="nccl", bucket_bytes=BUCKET, collective=True, begin_s=60, stall_s=60
    ) as publisher:
        for version in range(1, order["updates"] + 1):
            at[0] = version
            whole = tensors(counting_step(version)) if order["counting"] else new_tensors(TinyModel(), version)
            handle = publisher.publish(tensor_parallel_state(whole, mesh), version)
            seen["versions"].append([report.version for report in handle.applied(120)])
    draft = folder / f"{rank}.part"
    draft.write_text(json.dumps(seen))
    draft.rename(folder / f"rank-{rank}.json")
    dist.barrier()
    dist.destroy_process_group()
