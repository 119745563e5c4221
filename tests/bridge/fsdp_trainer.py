"""One rank of a trainer whose model FSDP2 shards: publishes, trains on at once, publishes again.

    fsdp_trainer.py ENDPOINT TRANSPORT OUT_FOLDER [die]

Each rank writes what it saw as JSON; rank 0 the whole tensors of each version, which are what a worker must serve.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from weights_harness import TinyModel, new_tensors

from trainer_bridge.errors import RolloutError
from trainer_bridge.publisher import WeightPublisher
from trainer_bridge.shards import Shards

BUCKET = 128


def sharded_model() -> torch.nn.Module:
    """A module with the tiny model's parameters, sharded as FSDP2 does."""
    model = torch.nn.Module()
    for name, tensor in new_tensors(TinyModel(), 1, dtype=torch.float32).items():
        *path, last = name.split(".")
        home = model
        for part in path:
            if not hasattr(home, part):
                home.add_module(part, torch.nn.Module())
            home = getattr(home, part)
        home.register_parameter(last, torch.nn.Parameter(tensor.clone()))
    return fully_shard(model)


def main(endpoint: str, transport: str, folder: Path, die: bool) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    groups = len(dist.distributed_c10d._world.pg_map)
    model = sharded_model()
    fetched: list[int] = []
    fetch = Shards.fetch
    Shards.fetch = lambda self, index, first, last: (
        fetched.append(4 * (last - first)),
        fetch(self, index, first, last),
    )[1]
    seen: dict[str, object] = {"rank": rank, "versions": [], "errors": []}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with WeightPublisher(
        endpoint, transport=transport, folder=str(folder), bucket_bytes=BUCKET, collective=True, begin_s=10, stall_s=5
    ) as publisher:
        for version in (1, 2, 3):
            state = dict(model.state_dict())
            assert all(isinstance(tensor, DTensor) for tensor in state.values())
            if version == 3:  # other placements: columns, and one that every rank has
                state["q.weight"] = distribute_tensor(state["q.weight"].full_tensor(), mesh, [Shard(1)])
                state["k.weight"] = distribute_tensor(state["k.weight"].full_tensor(), mesh, [Replicate()])
            whole = {name: tensor.full_tensor().clone() for name, tensor in state.items()}
            if rank == 0:
                save_file(whole, folder / f"{version}.safetensors")
            if die and version == 2 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                handle = publisher.publish(state, version)
                # The trainer's own collectives go on meanwhile; they are of another group.
                total = torch.ones(1)
                if not die or version == 1:
                    dist.all_reduce(total)
                handle.held(20)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(1.0)
                reports = handle.applied(20)
                seen["versions"].append([report.version for report in reports])
            except RolloutError as error:
                seen["errors"].append(str(error))
                break
    seen["groups"] = [groups, len(dist.distributed_c10d._world.pg_map)]
    seen["largest"] = max(fetched, default=0)
    (folder / f"rank-{rank}.json").write_text(json.dumps(seen))
    if not die:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), len(sys.argv) > 4)
    sys.stdout.flush()
    os._exit(0)  # a rank whose partner was killed must not wait for it at the end
