"""A tiny fused model, and a worker around a real WeightReceiver: real sockets, real threads, no engine."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
import zmq

from rollout.config import WeightsSettings
from rollout.engine.gate import Gate
from rollout.engine.messages.to_engine import FeatureUpdate
from rollout.weights.adapter_updates import AdapterTarget
from rollout.weights.parameter_map import ParameterMap, UpdateNames
from rollout.weights.receiver import WeightReceiver
from rollout.weights.staged_weights import StagedWeights
from rollout.weights.staging import make_staging
from rollout.weights.update_intake import UpdateTargets
from rollout.weights.update_memory import UpdateMemories
from tests.support.bridge.file_memory import share_with
from tests.support.ports import free_port
from trainer_bridge.wire.address import bracketed, host_port
from trainer_bridge.wire.codec import decode, encode, join_envelope, split_envelope

EXPERTS, HIDDEN, INTER = 3, 6, 4


class TinyModel:
    """Fused parameters with views under checkpoint names: q/k/v, both layouts of experts, tied embeddings."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> None:
        self.parameters = {
            "embed": torch.zeros(11, HIDDEN, device=device, dtype=dtype),
            "norm": torch.zeros(HIDDEN, device=device, dtype=torch.float32),
            "qkv": torch.zeros(16, HIDDEN, device=device, dtype=dtype),
            "gate_up": torch.zeros(EXPERTS, 2 * INTER, HIDDEN, device=device, dtype=dtype),
            "down": torch.zeros(EXPERTS, HIDDEN, INTER, device=device, dtype=dtype),
        }
        p = self.parameters
        self.views = {
            "embed.weight": p["embed"],
            "lm_head.weight": p["embed"],
            "norm.weight": p["norm"],
            "q.weight": p["qkv"][:8],
            "k.weight": p["qkv"][8:12],
            "v.weight": p["qkv"][12:],
        }
        for e in range(EXPERTS):
            self.views[f"experts.{e}.gate.weight"] = p["gate_up"][e, :INTER]
            self.views[f"experts.{e}.up.weight"] = p["gate_up"][e, INTER:]
            self.views[f"experts.{e}.down.weight"] = p["down"][e]
        self.views["experts.gate_up"] = p["gate_up"].transpose(1, 2)
        self.views["experts.down"] = p["down"]

    def names(self, stacked: bool = False) -> list[str]:
        """One complete set of names, without the tied one."""
        return [
            name
            for name in self.views
            if name != "lm_head.weight" and ("experts." not in name or self._in(name, stacked))
        ]

    @staticmethod
    def _in(name: str, stacked: bool) -> bool:
        return (name in ("experts.gate_up", "experts.down")) == stacked

    def snapshot(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.parameters.items()}


def new_tensors(model: TinyModel, seed: int, dtype: torch.dtype | None = None, stacked: bool = False) -> dict:
    """Random tensors for a whole update, exactly representable in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(view.shape, generator=generator).bfloat16().to(dtype or view.dtype)
        for name, view in ((name, model.views[name]) for name in model.names(stacked))
    }


def serves(model: TinyModel, tensors: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(model.views[name], tensor.to(model.views[name].dtype)) for name, tensor in tensors.items())


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    deadline_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"never happened: {what}"
        time.sleep(0.001)
    return found


class Worker:
    """A request socket that only names the weight socket, and a loop that applies updates while `gate` is set.

    As in a worker, the loop also asks the `engine_gate`.
    """

    def __init__(
        self,
        version: int = 0,
        model: TinyModel | None = None,
        port: int = 0,
        adapters: AdapterTarget | None = None,
        shared: Path | None = None,
        names: UpdateNames = UpdateNames(),  # noqa: B008 -- frozen
        memories: UpdateMemories | None = None,
        host: str = "127.0.0.1",
        **settings: Any,
    ) -> None:
        """`shared`: a folder of files by which `cuda_ipc` may come. `memories`: of updates, by default
        those that the settings name.

        `host`: where both sockets are bound.
        """
        self.model = model or TinyModel()
        self.engine_gate = Gate(takes_weights=True)
        weights = WeightsSettings(**{"bind": f"tcp://{bracketed(host)}:0", **settings})
        self.memories = memories or UpdateMemories(make_staging(self.model.views, weights))
        self.staging = self.memories.staging
        targets = UpdateTargets(ParameterMap(self.model.views, names), self.memories, adapters)
        self.receiver = WeightReceiver(targets, version, weights, self.engine_gate)
        if shared is not None:
            share_with(self, shared)
        self.gate = threading.Event()
        self.gate.set()
        self.updates: list[StagedWeights | FeatureUpdate] = []
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.IPV6, ":" in host)
        wait_for(lambda: self._bound(f"tcp://{host_port(host, port or free_port())}"), "a free port")
        self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
        self.port = int(self.endpoint.rpartition(":")[2])
        self.closing = threading.Event()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._serve, self._loop)]
        for thread in self._threads:
            thread.start()

    def control(self, **fields: Any) -> dict[str, Any]:
        """Send a control message and wait for its reply."""
        return self.ask(**fields).get(timeout=20)

    def ask(self, **fields: Any) -> queue.SimpleQueue:
        replies: queue.SimpleQueue = queue.SimpleQueue()
        self.receiver.control({"v": 1, "op": "weights", "id": "x", **fields}, replies.put)
        return replies

    def sleep(self) -> None:
        self.engine_gate.fall_asleep(1, "wait")
        self.receiver.rest()

    def wake(self) -> None:
        self.engine_gate.wake_up()

    def status(self) -> dict[str, Any]:
        return self.control(action="status")

    def apply(self, update: StagedWeights) -> None:
        update.copy_into()

    def close(self) -> None:
        self.receiver.close()
        self.closing.set()
        for thread in self._threads:
            thread.join()
        self._socket.close(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _bound(self, address: str) -> bool:
        """Whether the address could be bound: the socket that had it closes in the background."""
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            return False
        return True

    def _serve(self) -> None:
        while not self.closing.is_set():
            if self._socket.poll(2):
                sender, *frames = self._socket.recv_multipart()
                delimiter, frames = split_envelope(frames)
                header = decode(frames)
                assert header["op"] == "status", "a publisher sends its control messages to the weight socket"
                reply = {"v": 1, "id": header["id"], "op": "status", "weights_endpoint": self.receiver.endpoint}
                self._socket.send_multipart([sender, *join_envelope(delimiter, encode(reply))])

    def _loop(self) -> None:
        while not self.closing.is_set():
            gate = self.engine_gate
            if self.gate.is_set():
                gate.grant_hold()
            update = self.receiver.take_ready() if self.gate.is_set() and gate.may_apply else None
            if update is None:
                time.sleep(0.001)
                continue
            self.updates.append(update)
            if not isinstance(update, FeatureUpdate):
                self.apply(update)
                gate.clear_hold()
            self.receiver.applied(update, 0.001)


class SlowToAnswer:
    """A request and weight socket in front of a worker, which keeps the answers to `begin` until `let_go` is set."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.kept, self.let_go, self.closing = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> SlowToAnswer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.closing.set()
        self._thread.join()
        self._socket.close(0)

    def _serve(self) -> None:
        answers: queue.SimpleQueue = queue.SimpleQueue()
        kept: list[Callable[[], None]] = []
        while not self.closing.is_set():
            if self._socket.poll(2):
                sender, *frames = self._socket.recv_multipart()
                delimiter, frames = split_envelope(frames)
                header = decode(frames)

                def reply(answer: dict, to: Any = sender, cut: bool = delimiter, asked: dict = header) -> None:
                    frames = join_envelope(cut, encode({"v": 1, "id": asked["id"], **answer}))
                    answers.put((asked.get("action"), lambda: self._socket.send_multipart([to, *frames])))

                if header["op"] == "status":
                    reply({"op": "status", "weights_endpoint": self.endpoint})
                else:
                    self._worker.receiver.control(header, reply)
            while not answers.empty():
                action, send = answers.get()
                if action == "begin":
                    kept.append(send)
                    self.kept.set()
                else:
                    send()
            while self.let_go.is_set() and kept:
                kept.pop(0)()
