"""A process that has imported everything and forks a publisher, a worker or a rank for each line on its standard input.

    {"role": "publisher", "endpoint", "transport", "folder", "phase", "fault", "version", "seed", "device"}
        and "deltas" or "sections": it publishes the version whole; the fault is in the next one, which is sent as
        changes, or cut for the ranks of the worker
    {"role": "worker", "port", "settings"}, and "folder" where `cuda_ipc` may come
    {"role": "rank", "endpoint", "rank", "publishes", "timeout_s", "folder"}
    {"role": "fsdp", ...}, {"role": "tensor parallel", ...}                  see `fsdp_trainer`
    {"role": "lending", ...}                                                 see `lending_trainer`

Each line is answered with the child's pid. A publisher does to itself what `fault` says when it gets to `phase`. Of two
ranks of a trainer only those with `publishes` take part in the update; each writes what it saw as JSON.
"""

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.bridge.file_memory import share_from
from tests.support.bridge.fsdp_trainer import train_fsdp, train_tensor_parallel
from tests.support.bridge.harness import TinyModel, Worker, new_tensors, wait_for
from tests.support.bridge.lending_trainer import train_lending
from trainer_bridge.publish import transport_choice
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.transports import bucket_link, cuda_ipc, disk
from trainer_bridge.transports.nccl import nccl_group
from trainer_bridge.transports.payload import Payload
from trainer_bridge.wire.errors import RolloutError

SMALL = 64
_MIDDLE = {"cuda_ipc": 17}  # buckets begun by then: half of 16 slots are packed before any is announced
_SOONER = 5


def stop_here(fault: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    time.sleep(60)  # a stop reaches the threads one after the other


def after(owner: Any, name: str, then: Any) -> None:
    """Call `then(result, *arguments)` after each call of a method."""
    plain = getattr(owner, name)

    def call(*arguments: Any, **more: Any) -> Any:
        result = plain(*arguments, **more)
        then(result, *arguments)
        return result

    setattr(owner, name, call)


def middle(transport: str) -> int:
    """The bucket whose packing begins in the middle of a transfer: the worker has had others by then."""
    return _MIDDLE.get(transport, _SOONER)


def arm(transport: str, phase: str, fault: str, packed_before: int = 0) -> None:
    seen = []

    def in_the_middle(*_: Any) -> None:
        seen.append(1)
        if len(seen) == packed_before + middle(transport):
            stop_here(fault)

    if fault == "corrupt":
        corrupt()
    elif phase == "prepare":
        after(transport_choice.TransportChoice, "next_options", lambda *_: stop_here(fault))
    elif phase == "begin":
        after(transport_choice.TransportChoice, "refused", lambda *_: stop_here(fault))
    elif phase == "transfer":
        after(Payload, "start_bucket", in_the_middle)
        after(Payload, "host_copy", in_the_middle)
    elif phase == "commit":
        after(WeightPublisher, "_deliver", lambda *_: stop_here(fault))


def corrupt() -> None:
    """One bit of one bucket changes after its checksum was taken."""
    buckets = []

    def flip(data: torch.Tensor) -> None:
        buckets.append(1)
        if len(buckets) == _SOONER:
            data[0] ^= 1

    after(cuda_ipc, "fingerprint", lambda _, data: flip(data))
    after(bucket_link, "checksum", lambda _, data: flip(torch.frombuffer(data, dtype=torch.uint8)))
    broadcast = nccl_group.BroadcastGroup.broadcast
    nccl_group.BroadcastGroup.broadcast = lambda self, data, *root: (flip(data), broadcast(self, data, *root))[1]  # type: ignore[method-assign]

    def flip_file(options: dict[str, Any], *_: Any) -> None:
        path = Path(options["folder"]) / options["files"][0][0]
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    after(disk.DiskSender, "prepare", flip_file)


def publish_deltas(order: dict[str, Any]) -> None:
    how = {"transport": order["transport"], "folder": order["folder"], "bucket_bytes": SMALL, "deltas": "host"}
    tensors = new_tensors(TinyModel(), order["seed"])
    with WeightPublisher(order["endpoint"], **how) as publisher:
        publisher.publish(tensors, order["version"]).applied(20)
        buckets = Payload(tensors, 0, SMALL).manifest.bucket_count  # are packed before the codes of the next version
        arm(order["transport"], order["phase"], order["fault"], buckets)
        publisher.publish(changed(tensors, order["seed"]), order["version"] + 1).applied(20)


def changed(tensors: dict[str, torch.Tensor], seed: int, share: float = 0.4) -> dict[str, torch.Tensor]:
    """The same tensors with other values in a share of the places."""
    draw = torch.Generator().manual_seed(seed)
    places = {name: torch.rand(tensor.shape, generator=draw) < share for name, tensor in tensors.items()}
    return {name: torch.where(places[name], tensor + 1, tensor) for name, tensor in tensors.items()}


def publish(order: dict[str, Any]) -> None:
    if "deltas" in order:
        publish_deltas(order)
        return
    tensors = {name: tensor.to(order["device"]) for name, tensor in new_tensors(TinyModel(), order["seed"]).items()}
    with WeightPublisher(
        order["endpoint"], transport=order["transport"], folder=order["folder"], bucket_bytes=SMALL
    ) as publisher:
        if order["transport"] == "cuda_ipc" and order["device"] == "cpu":
            share_from(publisher, Path(order["folder"]))
        version = order["version"]
        if "sections" in order:
            publisher.publish(tensors, version).applied(20)
            tensors, version = new_tensors(TinyModel(), order["seed"] + 1), version + 1
        arm(order["transport"], order["phase"], order["fault"])
        publisher.publish(tensors, version).applied(20)


def work(order: dict[str, Any]) -> None:
    shared = Path(order["folder"]) if "folder" in order else None
    with Worker(port=order["port"], shared=shared, **order["settings"]):
        time.sleep(60)


def train(order: dict[str, Any]) -> None:
    rank, folder = order["rank"], Path(order["folder"])
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    publisher = WeightPublisher(order["endpoint"], transport="zmq", collective=True, begin_s=20)
    ranks = publisher.ranks
    assert ranks is not None
    ranks.timeout_s = ranks._timeout_s = order["timeout_s"]  # they have met: from here on it is waited for
    seen = {"error": ""}
    if order["publishes"]:
        handle = publisher.publish(new_tensors(TinyModel(), 1), 1)
        try:
            if rank == 0:
                handle.applied(20)
            publisher.close()
            handle.applied(0)
        except RolloutError as error:
            seen["error"] = str(error)
    else:
        wait_for((folder / f"rank-{1 - rank}.json").exists, "the end of the other rank", 60)
    publisher.close()
    draft = folder / f"{rank}.part"
    draft.write_text(json.dumps(seen))
    draft.rename(folder / f"rank-{rank}.json")


_ROLES = {
    "publisher": publish,
    "worker": work,
    "rank": train,
    "fsdp": train_fsdp,
    "tensor parallel": train_tensor_parallel,
    "lending": train_lending,
}


def main() -> None:
    faulthandler.enable()  # a child that crashes says where each of its threads was
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the children are not waited for
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                _ROLES[order["role"]](order)
            except Exception as error:
                print(repr(error), file=sys.stderr, flush=True)
            os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
