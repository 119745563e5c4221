"""One rank of a trainer on CPUs whose parts cross by memory of files, as those on GPUs do by memory that ranks lend.

    {"role": "lending", "rank", "ranks", "endpoints", "candidates", "bucket_bytes", "placements", "folder", "fault",
     "late"}

a line for `fault_server`. Version n has the tiny model's tensors of seed n. `placements` are, by version, "rows": as
FSDP2 has them, "mixed": also columns, whole tensors and one that only rank 0 has, or "replicated"; and of four ranks in
a square "replicas" of rows, a "grid" of rows and columns, or "boxes", stacked experts that are cut in their last two
dimensions. `late` is null, or a worker that rank 0 adds after the last update, which it keeps. `fault` is what befalls
a rank:

    "no memory"     the last rank cannot allocate
    "other host"    the last rank is on another host
    "no access"     rank 0 cannot map the memory of the last rank
    "dies"          rank 1 is killed while it packs a bucket of version 2
    "cannot pack"   rank 1 fails to pack a bucket of version 2
    "gives up"      rank 0's sender fails in version 2, with a bucket requested ahead
    "elsewhere"     the buckets of rank 0 are on another device than its tensors
    "stands still"  rank 0 stops in version 2, with a bucket requested ahead, and the others close
    "no room"       rank 0 has no memory left to put the third part together

Each rank writes what it saw as JSON.
"""

import contextlib
import functools
import json
import logging
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.bridge.file_memory import FileMemory, lend_from, share_from
from tests.support.bridge.harness import TinyModel, new_tensors, wait_for
from trainer_bridge.publish import lent_parts
from trainer_bridge.publish.lent_parts import BorrowedParts
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.publish.trainer_ranks import TrainerRanks
from trainer_bridge.publish.transport_choice import TransportChoice
from trainer_bridge.transports.cuda_ipc import CudaIpcSender
from trainer_bridge.transports.payload import Payload
from trainer_bridge.transports.shards import Shards
from trainer_bridge.wire.errors import RolloutError

LOSES_A_RANK = ("dies", "stands still")
CLOSE_S = 5.0  # how long a rank waits for the others before it closes


def state_of(placements: str, version: int, mesh: Any) -> dict[str, torch.Tensor]:
    """This rank's parts of a version."""
    if placements == "replicated":
        whole = new_tensors(TinyModel(), version)
        return {name: distribute_tensor(tensor, mesh, [Replicate()]) for name, tensor in whole.items()}
    if placements in ("replicas", "grid", "boxes"):
        square = init_device_mesh("cpu", (2, 2))
        whole = new_tensors(TinyModel(), version, stacked=placements == "boxes")
        cuts = {"replicas": (None, None), "grid": (2, [Shard(0), Shard(1)]), "boxes": (3, [Shard(1), Shard(2)])}
        dims, cut = cuts[placements]
        rows = [Replicate(), Shard(0)] if placements == "replicas" else [Shard(0), Replicate()]
        return {
            name: distribute_tensor(tensor, square, cut if tensor.ndim == dims and cut else rows)
            for name, tensor in whole.items()
        }
    others = {"q.weight": [Shard(1)], "experts.1.down.weight": [Shard(1)], "k.weight": [Replicate()]}
    state = {}
    for name, tensor in new_tensors(TinyModel(), version).items():
        placement = others.get(name) if placements == "mixed" else None
        state[name] = distribute_tensor(tensor, mesh, placement or [Shard(0)])
        if placements == "mixed" and name == "v.weight":
            state[name] = tensor
    return state


def kill(*_: Any) -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def fails(error: Exception) -> Any:
    """A function that raises."""

    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call


def stop(folder: Path) -> None:
    """Stop this process, once a file says so."""
    (folder / "stopped").touch()
    os.kill(os.getpid(), signal.SIGSTOP)


def arm(fault: str, rank: int, last: int, memory: FileMemory, at: list[int], folder: Path) -> None:
    """Prepare what befalls this rank."""
    if fault == "no memory" and rank == last:
        memory.allocate = fails(OSError(2, "out of memory"))  # type: ignore[method-assign]
    if fault == "other host" and rank == last:
        lent_parts.boot_id = lambda: "another one"
    if fault == "no access" and rank == 0:
        reader, mapped = memory.reader, []

        def map_some(handle: bytes, nbytes: int) -> Any:
            mapped.append(handle)
            return fails(OSError(217, "no peer access"))() if len(mapped) % last == 0 else reader(handle, nbytes)

        memory.reader = map_some  # type: ignore[method-assign]
    if fault in ("dies", "cannot pack") and rank == 1:
        own, buckets = Shards.own_bytes, []

        def stumble(self: Shards, *given: Any) -> Any:
            buckets.append(at[0])
            if buckets[-1] == 2 and len(buckets) - buckets.index(2) == 5:
                (kill if fault == "dies" else fails(RuntimeError("out of luck")))()
            return own(self, *given)

        Shards.own_bytes = stumble  # type: ignore[method-assign]
    if fault == "elsewhere":
        Payload.device = property(lambda self: torch.device("cpu", 0))  # type: ignore[assignment,method-assign]
    if fault == "no room" and rank == 0:
        read, reads = BorrowedParts.read, []

        def read_some(self: BorrowedParts, *given: Any) -> None:
            reads.append(at[0])
            if reads.count(at[0]) == 3:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
            read(self, *given)

        BorrowedParts.read = read_some  # type: ignore[method-assign]
    if fault in ("gives up", "stands still") and rank == 0:
        pack, calls = CudaIpcSender.pack, []
        act = fails(RolloutError("it gives up")) if fault == "gives up" else functools.partial(stop, folder)

        def give_up(self: CudaIpcSender, *given: Any) -> Any:
            calls.append(at[0])
            return act() if calls[-1] == 2 and calls.count(2) == 2 else pack(self, *given)

        CudaIpcSender.pack = give_up  # type: ignore[method-assign]


def watch(seen: dict[str, Any], at: list[int]) -> None:
    """Note requests, bytes that come through the host, portions that are packed, and releases."""
    request, fetch, portions, release = TrainerRanks.request, Shards.fetch, Payload.pack_portions, Payload.release

    def request_noted(self: TrainerRanks, first: int, count: int, place: int) -> None:
        seen["requested"] += [[at[0], first + i] for i in range(count)]
        request(self, first, count, place)

    def fetch_noted(self: Shards, index: int, first: int, last: int) -> torch.Tensor:
        seen["fetched"].append([at[0], self.locals[index].element_size() * (last - first)])
        return fetch(self, index, first, last)

    def portions_noted(self: Payload, outs: dict[int, torch.Tensor]) -> None:
        for out in outs.values():
            out.fill_(255)  # what was there is not what is read
        portions(self, outs)
        seen["events"] += [[at[0], "packed", self.manifest.bucket_span(index)[0]] for index in outs]

    def release_noted(self: Payload) -> None:
        seen["events"].append([at[0], "released"])
        release(self)

    TrainerRanks.request, Shards.fetch = request_noted, fetch_noted  # type: ignore[method-assign]
    Payload.pack_portions, Payload.release = portions_noted, release_noted  # type: ignore[assignment,method-assign]


class Warnings(logging.Handler):
    """Notes what the bridge warns of."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._texts = texts

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(record.getMessage())


def train_lending(order: dict[str, Any]) -> None:
    """One rank, from start to end."""
    rank, ranks, folder = order["rank"], order["ranks"], Path(order["folder"])
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (ranks,))
    seen: dict[str, Any] = {"versions": [], "transports": [], "errors": [], "mapped": [], "warnings": []}
    seen |= {"requested": [], "fetched": [], "events": [], "buffers": []}
    WeightPublisher.abort_s = 20.0  # a worker on a busy machine may take this long to answer
    at, memory = [0], FileMemory(folder / "lent")
    watch(seen, at)
    arm(order["fault"], rank, ranks - 1, memory, at, folder)
    logging.getLogger("trainer_bridge").addHandler(Warnings(seen["warnings"]))
    TransportChoice.candidates = lambda self, payload: ("shm",) if payload.again else order["candidates"]  # type: ignore[method-assign]
    with WeightPublisher(
        order["endpoints"],
        bucket_bytes=order["bucket_bytes"],
        collective=True,
        keep=order["late"] is not None,
        begin_s=60 if order["fault"] != "stands still" else CLOSE_S,
        stall_s=60,
    ) as publisher:
        share_from(publisher, folder / "slots")
        lend_from(publisher, memory)
        for version, placements in enumerate(order["placements"], 1):
            at[0] = version
            try:
                state = state_of(placements, version, mesh)
                handle = publisher.publish(state, version)
                if order["fault"] == "stands still" and version == 2:
                    wait_for((folder / "stopped").exists, "rank 0 to stop", 60)
                    began_s = time.monotonic()
                    publisher.close()
                    seen["closed_s"] = time.monotonic() - began_s
                handle.held(60)
                for tensor in state.values():
                    (tensor.to_local() if hasattr(tensor, "to_local") else tensor).fill_(-1)
                reports = handle.applied(60)
                seen["versions"].append(version)
                seen["transports"].append([report.transport for report in reports])
            except RolloutError as error:
                seen["errors"].append(str(error))
                with contextlib.suppress(RolloutError):
                    handle.applied(60)  # the end of it
                if order["fault"] in LOSES_A_RANK:
                    break
            seen["mapped"].append(memory.readers)
            seen["buffers"].append(len(list((folder / "lent").iterdir())))
        if order["late"] is not None and rank == 0:
            publisher.add(order["late"])
            wait_for(lambda: publisher.status()[-1]["version"] == version, "the kept update at the late worker")
    draft = folder / f"{rank}.part"
    draft.write_text(json.dumps(seen))
    draft.rename(folder / f"rank-{rank}.json")
    if order["fault"] not in LOSES_A_RANK:
        dist.barrier()
        dist.destroy_process_group()
