"""Trainers of several ranks: rank 0 publishes, and fetches from the others what they own, piece by piece.

    rank 0, publisher's thread                              ranks 1 to n, publisher's thread
    START version              == broadcast ==>             -- which part of each tensor is here -->
    PIECE tensor, first, last  == broadcast ==>             -- these elements, from the ranks that own some -->
    WHOLE tensor               == broadcast ==>             -- the whole part, where parts are not runs of elements -->
    JOIN store, places         == broadcast ==>             those that own parts send them in a group (`group_ranks`),
                                                            a thread beside this one;  how that ended --> rank 0
    RELEASED                   == broadcast ==>             `held` returns
    DONE                       == broadcast ==>             `applied` returns or raises

The group is of its own (gloo over host memory), so nothing here meets the trainer's collectives. At no time is more
than one bucket, or one tensor that is not cut along its first dimension, gathered.

Supported are DTensors whose placements are Shard and Replicate, as FSDP2 makes them, and plain tensors, of which rank
0's are taken.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from trainer_bridge.publish.handle import PublishHandle, WorkerReport
from trainer_bridge.transports.nccl.group import END_S, BroadcastGroup, GroupError, device_name, local_address
from trainer_bridge.transports.nccl.kept_group import KeptGroup
from trainer_bridge.transports.nccl.ranks import take_part
from trainer_bridge.transports.payload import Payload
from trainer_bridge.transports.shards import HEADER, Shards
from trainer_bridge.wire.errors import RolloutError, from_reply

START, PIECE, WHOLE, RELEASED, DONE, CLOSE, JOIN = range(7)
_ENDING = 1  # tag of a rank's report about its part in a group; commands and pieces have tag 0
_COMMAND_S = 3600.0  # for which a rank waits for rank 0: its last update may still be on its way
_KEY = "rollout-weights"


class TrainerRanks:
    """The place of this process among the trainer's. Making one is collective: every rank of the default group does so.

    Raises RuntimeError when torch.distributed is not initialised, or the others don't come.
    """

    def __init__(self, timeout_s: float) -> None:
        if not dist.is_initialized():
            raise RuntimeError("collective=True is for trainers with torch.distributed; call init_process_group first")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()
        turn = store.add(f"{_KEY}/{self.rank}", 1)  # the n-th publisher of every rank belong together
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._broken: str | None = None
        self._part: threading.Thread | None = None  # in a group
        self._kept = KeptGroup()
        self.address = _address()
        cpu = torch.device("cpu")
        self._group = BroadcastGroup(
            store, f"{_KEY}/group-{turn}", self.rank, self.size, self.address, cpu, timeout_s, op_timeout_s=_COMMAND_S
        )
        self.timeout_s = self._timeout_s = timeout_s

    def tell(self, *command: int) -> None:
        """Rank 0: give all others a command of up to four numbers. Raises `RolloutError` when one is gone."""
        with self._lock:
            self._tell(command)

    def exchange(self, shards: Shards, version: int, device: torch.device) -> None:
        """Rank 0: learn who holds what, and where. Raises `RolloutError` when the ranks don't publish the same."""
        with self._lock:
            self._tell((START, version))
            tables = [shards.table(version, device_name(device))]
            for rank in range(1, self.size):
                tables.append(torch.empty_like(tables[0]))
                self._receive(tables[-1].view(torch.uint8), rank)
            different = [
                rank for rank, table in enumerate(tables) if not torch.equal(table[:HEADER], tables[0][:HEADER])
            ]
            owners = (
                torch.zeros(self.size, len(shards.shapes), dtype=torch.uint8) if different else shards.learn(tables)
            )
            self._broadcast(owners.view(-1))
        if different:
            raise RolloutError(
                f"prepare: rank {different[0]} publishes another version than rank 0, or other tensors; "
                "call publish alike on all ranks"
            )
        shards.ranks = self

    def fetch(self, index: int, first: int, parts: Sequence[tuple[int, torch.Tensor]], last: int) -> None:
        """Rank 0: have `parts` (rank, where its elements go) of elements `first` to `last` of a tensor filled."""
        with self._lock:
            self._tell((PIECE, index, first, last))
            for rank, out in parts:
                self._receive(out, rank)

    def fetch_whole(self, index: int, parts: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Rank 0: have `parts` (rank, a tensor like its part) of a tensor filled."""
        with self._lock:
            self._tell((WHOLE, index))
            for rank, out in parts:
                self._receive(out, rank)

    def finish(self, handle: PublishHandle) -> None:
        """Rank 0: tell how the update ended."""
        error = handle.error
        problem = None if error is None else {"code": error.code, "message": str(error), "field": error.field}
        self._tell_map(DONE, {"error": problem, "reports": [asdict(report) for report in handle.reports.values()]})

    def join(self, order: dict[str, Any]) -> None:
        """Rank 0: have those with a place in a group take part; each will tell its `ending`."""
        self._tell_map(JOIN, order)

    def ending(self, out: torch.Tensor, rank: int, timeout_s: float) -> None:
        """Rank 0: wait for a rank's report about its part in a group. Raises `RolloutError`, which names the rank."""
        data = out.view(torch.uint8)
        self._do(lambda: self._group.receive(data, rank, timeout_s, _ENDING), f"rank {rank}", "transfer")

    def serve(self, payload: Payload, handle: PublishHandle, version: int) -> None:
        """Other ranks: do what rank 0 says until the update is over. Raises the error that it ended with."""
        shards = payload.shards
        assert shards is not None, "a collective publisher's payload knows its shards"
        while True:
            command = self._next_command()
            match command:
                case [op, *_] if op == START:
                    self._send(shards.table(version, device_name(payload.device)).view(torch.uint8))
                    owners = torch.zeros(self.size, len(shards.shapes), dtype=torch.uint8)
                    self._broadcast(owners.view(-1))
                    shards.mine = owners[self.rank].bool().tolist()
                case [op, index, first, last] if op == PIECE:
                    data = shards.local_piece(index, first, last)
                    if data is not None:
                        self._send(data)
                case [op, index, *_] if op == WHOLE:
                    data = shards.local_whole(index)
                    if data is not None:
                        self._send(data)
                case [op, *_] if op == RELEASED:
                    payload.release()
                case [op, length, *_] if op == JOIN:
                    order = self._read_map(length)
                    self._part = take_part(payload, order, self.rank, self._stop, self._kept, self._end_part)
                case [op, length, *_] if op == DONE:
                    handle.learn(*_ending(self._read_map(length)))
                    return
                case _:
                    raise RolloutError("rank 0 closed its publisher", code="closed")

    def close(self) -> None:
        """Leave the group; on rank 0 the others hear of it. Belongs to the publisher's thread."""
        if self.rank == 0 and self._broken is None:
            with contextlib.suppress(RolloutError):  # they are gone
                self.tell(CLOSE)
        self._stop.set()
        if self._part is not None:
            self._part.join(END_S)
        self._kept.close()
        ending = self._group.close(broken=self._broken is not None)
        if ending is not None:
            ending.join(END_S)

    def stop(self) -> None:
        """Any thread: end what is waited for."""
        self._stop.set()

    def _end_part(self, ending: torch.Tensor) -> None:
        self._do(lambda: self._group.send(ending.view(torch.uint8), 0, _ENDING), "rank 0", "transfer")

    def _tell_map(self, op: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        with self._lock:
            self._tell((op, len(data)))
            self._broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _read_map(self, length: int) -> dict[str, Any]:
        data = torch.empty(length, dtype=torch.uint8)
        self._broadcast(data)
        return json.loads(data.numpy().tobytes())

    def _next_command(self) -> list[int]:
        command = torch.zeros(4, dtype=torch.int64)
        self._broadcast(command.view(torch.uint8))
        return command.tolist()

    def _tell(self, command: Sequence[int]) -> None:
        data = torch.zeros(4, dtype=torch.int64)
        data[: len(command)] = torch.tensor(command, dtype=torch.int64)
        self._broadcast(data.view(torch.uint8))

    def _broadcast(self, data: torch.Tensor) -> None:
        timeout_s = None if self.rank else self._timeout_s  # the others are in `serve`, or about to publish
        whom = "rank 0" if self.rank else "another rank"
        self._do(lambda: self._group.broadcast(data).wait(self._stop, timeout_s), whom)

    def _send(self, data: torch.Tensor) -> None:
        self._do(lambda: self._group.send(data, 0), "rank 0")

    def _receive(self, out: torch.Tensor, rank: int) -> None:
        self._do(lambda: self._group.receive(out, rank, self._timeout_s), f"rank {rank}")

    def _do(self, what: Any, whom: str, phase: str = "gather") -> None:
        if self._broken is not None:
            raise RolloutError(f"{phase}: {self._broken}; the group of trainer ranks is gone, make new publishers")
        try:
            what()
        except GroupError as error:
            self._broken = f"{whom} cannot be reached: {error}"
            raise RolloutError(f"{phase}: {self._broken}") from error


def _ending(told: dict[str, Any]) -> tuple[list[WorkerReport], RolloutError | None]:
    reports = [WorkerReport(**report) for report in told["reports"]]
    return reports, None if told["error"] is None else from_reply(told["error"])


def _address() -> str:
    """Address of this host towards the other trainers."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    return local_address(f"tcp://{host}:{port}") if host and port.isdigit() else "127.0.0.1"
