"""The trainer of the swap benchmark: a process of its own with the weights of a shape, which publishes when told to.

    python -m rollout.bench.swap_trainer ORDER      ORDER: JSON of `Order`

    a line on its input                    a line on its output
    {"do": "bandwidth"}                    {"copy_bytes_per_s", "upload_bytes_per_s" (pinned host memory to a GPU)}
    {"do": "publish", "version",
     "transport"}                          {"published_at_s" (Unix), "held_s", "report"}  or  {"error"}
    {"do": "visible"}                      {}: from now on the weights show their version in the tokens
    {"do": "memory"}                       {"resident_mib", "device_bytes" (in use on the GPU, by everybody)}

Its input's end is its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rollout.bench.memory import resident_mib
from rollout.bench.swap_weights import make_visible, shape_tensors, show
from trainer_bridge.errors import RolloutError
from trainer_bridge.publisher import WeightPublisher

_COPY_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}
_COPIES = 8


@dataclass(frozen=True, slots=True)
class Order:
    """What to be."""

    folder: str  # of the checkpoint without weights
    endpoint: str  # of the worker
    device: str
    bucket_bytes: int
    disk: str  # folder of the transport disk
    limit_s: float  # of an update


class TrainerProcess:
    """The process, from the outside."""

    def __init__(self, order: Order) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(asdict(order))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.facts = self._answer()  # `bytes`, `tensors`

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """Give it an order; its answer. Raises RuntimeError when it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the trainer process ended with status {self._process.wait(30)}; see its lines above")
        return json.loads(line)


class _Trainer:
    def __init__(self, order: Order) -> None:
        self._order = order
        self._device = torch.device(order.device)
        self._tensors = shape_tensors(Path(order.folder), self._device)
        self._visible = False
        self._publishers: dict[str, WeightPublisher] = {}

    def facts(self) -> dict[str, Any]:
        return {"bytes": sum(tensor.nbytes for tensor in self._tensors.values()), "tensors": len(self._tensors)}

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
            (report,) = handle.applied(self._order.limit_s)
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

    def _publisher(self, transport: str) -> WeightPublisher:
        order = self._order
        if transport not in self._publishers:
            self._publishers[transport] = WeightPublisher(
                order.endpoint,
                transport=transport,
                folder=order.disk,
                bucket_bytes=order.bucket_bytes,
                begin_s=order.limit_s,
                stall_s=order.limit_s,
                apply_s=order.limit_s,
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
    """Obey until the input ends."""
    out, sys.stdout = sys.stdout, sys.stderr  # answers only
    trainer = _Trainer(Order(**json.loads(sys.argv[1])))
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
