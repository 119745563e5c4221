"""A worker's seat in a trainer's process group: a thread that joins it and receives its broadcasts on order.

    trainer, rank 0                                         this member, rank 1 or more
    store on the trainer's port       <-- connects --       waits until all members have done so
    kind torch   keys under NAME/NAME//DEVICE/              joins the backend's group under the same prefix
    kind vllm    broadcast_from/0/0 = id of NCCL   -->      connects by this id, adds up one number with all members
    broadcast of each tensor, or of packed tensors ==>      host memory, one tensor after the other

The prefix is what `torch.distributed` makes of a group's name in `init_process_group`'s helpers, as SGLang, slime and
AReaL call them. The packing is vLLM's: tensors follow each other without padding, and a broadcast ends with the tensor
that exceeds its size.

Invariants:

- torch.distributed's default group is neither used nor changed.
- Every wait has a deadline; calls that have none inside torch or NCCL run in a thread of their own.
"""

from __future__ import annotations

import logging
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from trainer_bridge.transports.nccl.nccl_group import REACH_S, BroadcastGroup, GroupError, Pending, first_line, reach
from trainer_bridge.wire.address import address_towards, bare, host_port, is_loopback
from trainer_bridge.wire.errors import BadRequest, InternalError, RolloutError, WeightsRejected
from trainer_bridge.wire.manifest import TensorEntry
from trainer_bridge.wire.nccl_id import ID_BYTES, read_nccl_id

_IN_FLIGHT = 2  # broadcasts
_AGAIN_S = 0.1  # time between two attempts to reach the trainer's store
_MAX_NAME = 128
_MAX_MEMBERS = 4096
_ID_KEY = "broadcast_from/0/0"  # key of the id that vLLM's trainer side sets
_FIRST_ID = "0"  # key of the id for the nccl backend's first communicator
_DEVICES = {"gloo": "cpu", "nccl": "cuda"}  # names in torch.distributed's prefix

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Meeting:
    """The meeting of a trainer's group. `nccl_id` replaces a store."""

    name: str
    kind: Literal["torch", "vllm"]
    rank: int
    size: int
    backend: Literal["gloo", "nccl"]
    host: str = ""
    port: int = 0
    nccl_id: bytes = b""

    @classmethod
    def read(cls, name: Any, value: Any, on_gpu: bool) -> Meeting:
        """The meeting in a `join` message. Raises `BadRequest`, naming the field."""
        if type(name) is not str or not 1 <= len(name) <= _MAX_NAME:
            raise BadRequest(f"group must be a name of 1 to {_MAX_NAME} characters", field="group")
        fields: Mapping[str, Any] = value if type(value) is dict else {}
        place = {"nccl_id"} if "nccl_id" in fields else {"host", "port"}
        if set(fields) != {"kind", "rank", "size", "backend"} | place:
            raise BadRequest("meeting takes kind, rank, size, backend, and host and port or nccl_id", field="meeting")
        kind, rank, size, backend = (fields[each] for each in ("kind", "rank", "size", "backend"))
        if kind not in ("torch", "vllm") or (kind == "torch" and "nccl_id" in fields):
            raise BadRequest("kind must be torch or vllm; only vllm meets by an id", field="meeting.kind")
        if type(size) is not int or not 2 <= size <= _MAX_MEMBERS:
            raise BadRequest(f"a group has 2 to {_MAX_MEMBERS} members", field="meeting.size")
        if type(rank) is not int or not 1 <= rank < size:
            raise BadRequest(f"rank must be 1 to {size - 1}; the trainer is rank 0", field="meeting.rank")
        if backend not in (("nccl",) if kind == "vllm" else ("gloo", "nccl")):
            raise BadRequest("backend must be gloo or nccl, and nccl for kind vllm", field="meeting.backend")
        if backend == "nccl" and not on_gpu:
            raise BadRequest("NCCL connects GPUs, and this worker runs on a CPU; use gloo", field="meeting.backend")
        if "nccl_id" in fields:
            digits = fields["nccl_id"]
            if type(digits) is not str or not re.fullmatch(f"[0-9a-f]{{{2 * ID_BYTES}}}", digits):
                raise BadRequest(f"nccl_id must be {ID_BYTES} bytes in hexadecimal", field="meeting.nccl_id")
            return cls(name, kind, rank, size, backend, nccl_id=bytes.fromhex(digits))
        host, port = fields["host"], fields["port"]
        host = bare(host) if type(host) is str else host
        if type(host) is not str or not 1 <= len(host) <= 255 or type(port) is not int or not 1 <= port <= 65535:
            raise BadRequest("host and port must name the trainer's store", field="meeting.host")
        return cls(name, kind, rank, size, backend, host, port)


@dataclass
class Task:
    """An order to a member's thread. When the task is `over`, it has a result or an error."""

    work: Callable[[], Any]
    then: Callable[[Any, RolloutError | None], None]  # called in the receiver's thread
    result: Any = None
    error: RolloutError | None = None
    over: threading.Event = field(default_factory=threading.Event)


class GroupMember:
    """One member and its thread."""

    def __init__(self, meeting: Meeting, device: torch.device, timeout_s: float, wake: Callable[[], object]) -> None:
        self.meeting = meeting
        self._device = device if meeting.backend == "nccl" else torch.device("cpu")
        self._timeout_s, self._wake = timeout_s, wake
        self._group: BroadcastGroup | None = None
        self._connected = meeting.backend == "gloo" or meeting.kind == "vllm"  # `_join` connects these groups
        self._stop = threading.Event()
        self._connecting: threading.Thread | None = None
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="weights-torch-group", daemon=True)
        self._thread.start()

    # --- the receiver's thread ---------------------------------------------------------------------------------------

    def join(self, then: Callable[[Any, RolloutError | None], None]) -> Task:
        """Start to meet the other members."""
        return self._order(Task(self._join, then))

    def receive(
        self,
        tensors: Sequence[TensorEntry],
        packed_bytes: int | None,
        then: Callable[[Any, RolloutError | None], None],
    ) -> Task:
        """Start to receive tensors: the result is the bytes of each (uint8, host memory)."""
        return self._order(Task(lambda: self._receive(tensors, packed_bytes), then))

    def leave(self) -> None:
        """End the running task and the thread. The other members get an error if they still use the group."""
        self._stop.set()
        self._tasks.put(None)

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def wait(self, timeout_s: float) -> None:
        """Wait for the thread, and for an abandoned thread."""
        until_s = time.monotonic() + timeout_s
        for thread in (self._thread, self._connecting):
            if thread is not None:
                thread.join(max(0.0, until_s - time.monotonic()))

    def _order(self, task: Task) -> Task:
        self._tasks.put(task)
        return task

    # --- the member's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task.result = task.work()
            except GroupError as error:
                task.error = WeightsRejected(f"the group {self.meeting.name!r} with the trainer broke: {error}")
            except RolloutError as error:
                task.error = error
            # The old weights stay in use, and the trainer gets the error.
            except Exception as error:
                _log.exception("a trainer's group failed")
                task.error = InternalError(f"the worker failed in the group {self.meeting.name!r}: {error!r:.300}")
            task.over.set()
            self._wake()
        if self._group is not None:
            freeing = self._group.close(broken=True)  # does not wait for the other members
            if freeing is not None:
                freeing.join()

    def _join(self) -> None:
        meeting, until_s = self.meeting, time.monotonic() + self._timeout_s
        if meeting.kind == "torch":
            prefix = f"{meeting.name}/{meeting.name}//{_DEVICES[meeting.backend]}/"
            store: dist.Store = self._within(until_s, self._connect)
            self._group = self._meet(store, prefix, until_s)
        else:
            nccl_id = meeting.nccl_id or read_nccl_id(self._within(until_s, lambda: self._value(_ID_KEY)))
            store, prefix = dist.HashStore(), "id"
            dist.PrefixStore(prefix, store).set(_FIRST_ID, nccl_id)  # type: ignore[arg-type]  # bytes, as they are
            self._group = self._within(until_s, lambda: self._meet(store, prefix, until_s))
            self._within(until_s, self._warm_up)

    def _connect(self) -> dist.TCPStore:
        """The trainer's store, once all members are connected to it."""
        meeting, until_s = self.meeting, time.monotonic() + self._timeout_s
        while not self._stop.is_set():  # torch's own attempts cannot be stopped when the worker ends
            try:
                reach([meeting.host], meeting.port, REACH_S)
                break
            except GroupError as error:
                if time.monotonic() > until_s:
                    raise GroupError(f"{error}, within {self._timeout_s:g} s") from error
                self._stop.wait(_AGAIN_S)
        if self._stop.is_set():
            raise GroupError("it was left")
        try:
            return dist.TCPStore(
                meeting.host,
                meeting.port,
                meeting.size,
                is_master=False,
                timeout=timedelta(seconds=self._timeout_s),
                wait_for_workers=True,  # the trainer's side counts the members
            )
        except (RuntimeError, ValueError) as error:
            raise GroupError(
                f"its {meeting.size} members did not meet at {host_port(meeting.host, meeting.port)} within "
                f"{self._timeout_s:g} s: {first_line(error)}"
            ) from error

    def _value(self, key: str) -> bytes:
        store = self._connect()
        try:
            return store.get(key)
        except RuntimeError as error:
            raise GroupError(f"the trainer's store has no {key}: {first_line(error)}") from error

    def _meet(self, store: dist.Store, prefix: str, until_s: float) -> BroadcastGroup:
        meeting = self.meeting
        address = address_towards(meeting.host, meeting.port) if meeting.host else ""
        if is_loopback(address):  # the trainer's gloo is at an address of the host's name, of either family
            address = ""
        left_s = max(1.0, until_s - time.monotonic())
        connect: Literal["late", "now"] = "late" if meeting.kind == "torch" else "now"
        return BroadcastGroup(
            store, prefix, meeting.rank, meeting.size, address, self._device, left_s, self._timeout_s, connect
        )

    def _warm_up(self) -> None:
        assert self._group is not None
        with self._group.on_stream():
            self._group.warm_up()
            torch.cuda.current_stream(self._device).synchronize()

    def _receive(self, tensors: Sequence[TensorEntry], packed_bytes: int | None) -> list[torch.Tensor]:
        assert self._group is not None, "join comes first"
        received: list[torch.Tensor] = []
        in_flight: deque[tuple[Pending, torch.Tensor, list[int]]] = deque()
        for sizes in cut((entry.nbytes for entry in tensors), packed_bytes):
            if len(in_flight) == _IN_FLIGHT:
                received += self._land(*in_flight.popleft())
            pending, buffer = self._start(sum(sizes))
            in_flight.append((pending, buffer, sizes))
        while in_flight:
            received += self._land(*in_flight.popleft())
        return received

    def _start(self, nbytes: int) -> tuple[Pending, torch.Tensor]:
        group = self._group
        assert group is not None

        def start() -> tuple[Pending, torch.Tensor]:
            with group.on_stream():
                buffer = group.buffer(nbytes)
                return group.broadcast(buffer), buffer

        if self._connected:
            return start()
        started = self._within(time.monotonic() + self._timeout_s, start)
        self._connected = True
        return started

    def _land(self, pending: Pending, buffer: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
        assert self._group is not None
        pending.wait(self._stop)
        with self._group.on_stream():
            return list(buffer.cpu().split(sizes))

    def _within(self, until_s: float, work: Callable[[], T]) -> T:
        """The result of `work`, in a thread of its own: torch and NCCL may connect without a deadline.

        Raises `GroupError`.
        """
        results: list[T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                results.append(work())
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="weights-torch-group-connect", daemon=True)
        self._connecting = thread
        thread.start()
        while thread.is_alive() and time.monotonic() < until_s and not self._stop.is_set():
            thread.join(0.05)
        if errors:
            raise errors[0]
        if not results:
            where = f" at {host_port(self.meeting.host, self.meeting.port)}" if self.meeting.host else ""
            raise GroupError(f"its members did not connect{where} within {self._timeout_s:g} s, or it was left")
        return results[0]


def cut(sizes: Iterable[int], packed_bytes: int | None) -> list[list[int]]:
    """The tensors, by their sizes in bytes, of each broadcast: one each, or packed until they exceed `packed_bytes`."""
    if packed_bytes is None:
        return [[size] for size in sizes]
    broadcasts: list[list[int]] = []
    filled = packed_bytes + 1
    for size in sizes:
        if filled > packed_bytes:
            broadcasts.append([])
            filled = 0
        broadcasts[-1].append(size)
        filled += size
    return broadcasts
