"""The trainer of the swap benchmark: a process for each rank, which publishes the weights of a shape on command.

    python -m scripts.bench.swap_trainer ORDER      ORDER: JSON of `Order`

    a line on its input                    a line on its output
    {"do": "bandwidth"}                    {"copy_bytes_per_s", "upload_bytes_per_s" (pinned host memory to a GPU)}
    {"do": "publish", "version",
     "transport"}                          {"published_at_s" (Unix), "held_s", "report"}  or  {"error"}
    {"do": "visible"}                      {}: from now on tokens reveal the version of the weights
    {"do": "memory"}                       {"resident_mib", "device_bytes" (in use on the GPU by all processes)}

It ends with its input. With several ranks, each has its part of every tensor as in FSDP2. A trainer with memory for
some layers only sends their tensors under the names of all layers (`scripts.bench.swap_weights`).
"""

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from scripts.bench.memory import resident_mib
from scripts.bench.swap_weights import make_visible, shape_tensors, show
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.errors import RolloutError

_COPY_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}
_COPIES = 8


@dataclass(frozen=True, slots=True)
class Order:
    """The settings of a rank."""

    folder: str  # of the checkpoint without weights
    endpoints: list[str]  # of the workers
    device: str
    bucket_bytes: int | None  # None: the usual ones
    disk: str  # folder of the transport disk
    limit_s: float  # of an update
    rank: int = 0
    ranks: int = 1
    store: str = ""  # file where several ranks meet
    layers: int = 0  # that the trainer has memory for; 0: all


class Trainer:
    """The trainer's ranks, as the benchmark sees them."""

    def __init__(self, order: Order, devices: Sequence[str]) -> None:
        places = [replace(order, device=device, rank=i, ranks=len(devices)) for i, device in enumerate(devices)]
        self._ranks = [_RankProcess(place) for place in places]
        try:
            self.facts = self._answer()  # `bytes` and `tensors` of an update, `held_bytes` of the first rank
        except BaseException:
            self.kill()
            raise

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """Send an order to all ranks; returns the first answer or an error. Raises RuntimeError if a rank has ended."""
        for rank in self._ranks:
            rank.tell(do, **fields)
        return self._answer()

    def close(self) -> None:
        """End them."""
        try:
            for rank in self._ranks:
                rank.end()
            for rank in self._ranks:
                rank.wait()
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill the ranks that still run."""
        for rank in self._ranks:
            rank.kill()

    def _answer(self) -> dict[str, Any]:
        """The answers of all ranks. Raises at once if a rank ends without an answer, as others may wait for it."""
        with selectors.DefaultSelector() as ready:
            for rank in self._ranks:
                ready.register(rank.out, selectors.EVENT_READ, rank)
            answers: dict[_RankProcess, dict[str, Any]] = {}
            while len(answers) < len(self._ranks):
                for key, _ in ready.select():
                    answers[key.data] = key.data.answer()
                    ready.unregister(key.fileobj)
        in_order = [answers[rank] for rank in self._ranks]
        return next((answer for answer in in_order if "error" in answer), in_order[0])


class _RankProcess:
    def __init__(self, order: Order) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(asdict(order))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.out = self._process.stdout

    def tell(self, do: str, **fields: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        line = self.out.readline()
        if not line:
            raise RuntimeError(f"a trainer process ended with status {self._process.wait(30)}; see its lines above")
        return json.loads(line)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def wait(self) -> None:
        self._process.wait(30)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class _Rank:
    def __init__(self, order: Order) -> None:
        self._order = order
        self._device = torch.device(order.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._mesh = self._meet() if order.ranks > 1 else None
        self._tensors = shape_tensors(Path(order.folder), self._device, order.layers, self._part)
        self._visible = False
        self._publishers: dict[str, WeightPublisher] = {}

    def facts(self) -> dict[str, Any]:
        tensors = self._tensors.values()
        own = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        memory = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in own}
        return {
            "bytes": sum(tensor.nbytes for tensor in tensors),  # as they travel: of every name
            "tensors": len(tensors),
            "held_bytes": sum(memory.values()),
        }

    def publish(self, version: int, transport: str) -> dict[str, Any]:
        publisher = self._publisher(transport)
        if self._visible:
            show(self._tensors, version)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        published_at_s, began_s = time.time(), time.perf_counter()
        handle = publisher.publish(self._tensors, version)
        try:
            handle.held(self._order.limit_s)
            held_s = time.perf_counter() - began_s
            report = max(handle.applied(self._order.limit_s), key=lambda report: report.seconds)  # of all workers
        except RolloutError as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"published_at_s": published_at_s, "held_s": held_s, "report": asdict(report)}

    def bandwidth(self) -> dict[str, Any]:
        source = torch.ones(_COPY_BYTES[self._device.type], dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        copy_s = self._best_s(lambda: target.copy_(source))
        found = {"copy_bytes_per_s": 2 * source.numel() / copy_s}  # read and written
        if self._device.type == "cuda":
            host = torch.ones(source.numel(), dtype=torch.uint8, pin_memory=True)
            found["upload_bytes_per_s"] = host.numel() / self._best_s(lambda: target.copy_(host, non_blocking=True))
            del source, target
            torch.cuda.empty_cache()
        return found

    def visible(self) -> dict[str, Any]:
        make_visible(self._tensors)
        self._visible = True
        return {}

    def memory(self) -> dict[str, Any]:
        used = None
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            used = total - free
        return {"resident_mib": resident_mib(os.getpid()), "device_bytes": used}

    def close(self) -> None:
        for publisher in self._publishers.values():
            publisher.close()
        if self._order.ranks > 1:
            dist.destroy_process_group()

    def _meet(self) -> DeviceMesh:
        order = self._order
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo",
            init_method=f"file://{order.store}",
            rank=order.rank,
            world_size=order.ranks,
        )
        return init_device_mesh(self._device.type, (order.ranks,))

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of this rank, in memory of its own: the whole tensor can be freed."""
        order = self._order
        if self._mesh is None:
            return tensor
        parts = tensor.chunk(order.ranks)  # fewer if the tensor has fewer rows than there are ranks
        own = parts[order.rank] if order.rank < len(parts) else tensor[:0]
        return DTensor.from_local(
            own.clone(), self._mesh, [Shard(0)], shape=tensor.shape, stride=tensor.stride(), run_check=False
        )

    def _publisher(self, transport: str) -> WeightPublisher:
        order = self._order
        if transport not in self._publishers:
            self._publishers[transport] = WeightPublisher(
                order.endpoints,
                transport=transport,
                folder=order.disk,
                bucket_bytes=order.bucket_bytes,
                begin_s=order.limit_s,
                stall_s=order.limit_s,
                apply_s=order.limit_s,
                collective=order.ranks > 1,
            )
        return self._publishers[transport]

    def _best_s(self, work: Callable[[], object]) -> float:
        best_s = float("inf")
        for _ in range(_COPIES):
            self._settle()
            began_s = time.perf_counter()
            work()
            self._settle()
            best_s = min(best_s, time.perf_counter() - began_s)
        return best_s

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def main() -> None:
    """Handle orders until the input ends."""
    out, sys.stdout = sys.stdout, sys.stderr  # answers only
    trainer = _Rank(Order(**json.loads(sys.argv[1])))
    print(json.dumps(trainer.facts()), file=out, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        actions = {"bandwidth": trainer.bandwidth, "visible": trainer.visible, "memory": trainer.memory}
        do = order.pop("do")
        answer = trainer.publish(**order) if do == "publish" else actions[do]()
        print(json.dumps(answer), file=out, flush=True)
    trainer.close()


if __name__ == "__main__":
    main()
