"""Trainers of several ranks: rank 0 publishes and fetches the other ranks' parts, piece by piece.

    rank 0, publisher's thread                              ranks 1 to n, publisher's thread
    START version              == broadcast ==>             -- a table of the parts on this rank -->
    LEND, BUCKETS              == broadcast ==>             parts cross over GPU memory of one host (`lent_parts.py`)
    PIECE tensor, first, last  == broadcast ==>             -- these elements, from the ranks that own some -->
    WHOLE tensor               == broadcast ==>             -- the whole part, if parts are not runs of elements -->
    CUT cuts                   == broadcast ==>             the next buckets have the parts of workers' ranks
    JOIN store, places         == broadcast ==>             owners broadcast their parts in a group
                                                            (`nccl/other_ranks.py`), in a second thread
                                                            -- success or failure -->
    RELEASED                   == broadcast ==>             `held` returns
    DONE                       == broadcast ==>             `applied` returns or raises

The ranks have a separate group (gloo over host memory), so nothing here touches the trainer's collectives. Parts come
by PIECE and WHOLE only where ranks cannot lend buffers (tensors on CPUs, several hosts), and for tensors that are cut
in two dimensions after the first. At most one round of buckets, or one such tensor, is gathered at a time.

Supported are DTensors with Shard and Replicate placements, as FSDP2 makes them, and plain tensors, which rank 0 sends.
"""

import contextlib
import functools
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from trainer_bridge.publish.handle import PublishHandle, WorkerReport
from trainer_bridge.publish.lent_parts import (
    ANSWER_BYTES,
    BorrowedParts,
    LentBuffer,
    answer,
    buffer_bytes,
    host_number,
    ipc_memory,
    map_buffers,
    read_answer,
)
from trainer_bridge.transports.nccl.kept_group import KeptGroup
from trainer_bridge.transports.nccl.nccl_group import END_S, BroadcastGroup, GroupError, device_name
from trainer_bridge.transports.nccl.other_ranks import take_part
from trainer_bridge.transports.payload import Payload
from trainer_bridge.transports.sections import Sections, cuts_from_wire, cuts_to_wire, plan_sections
from trainer_bridge.transports.shards import HEADER, LentParts, Shards
from trainer_bridge.wire.address import LOOPBACK, address_towards
from trainer_bridge.wire.errors import RolloutError, from_reply
from trainer_bridge.wire.manifest import Manifest

START, PIECE, WHOLE, RELEASED, DONE, CLOSE, JOIN, LEND, BUCKETS, CUT = range(10)
_ENDING = 1  # tag of a rank's report about its part in a group; commands and pieces have tag 0
_COMMAND_S = 3600.0  # how long a rank waits for rank 0, whose last update may still be in transfer
_KEY = "rollout-weights"

_log = logging.getLogger(__name__)


class TrainerRanks:
    """Connects the trainer's ranks. The constructor is collective: every rank of the default group calls it.

    Raises RuntimeError if torch.distributed is not initialised or not all ranks join within `timeout_s`.
    """

    def __init__(self, timeout_s: float) -> None:
        if not dist.is_initialized():
            raise RuntimeError("collective=True needs torch.distributed; call init_process_group first")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()
        nth = store.add(f"{_KEY}/{self.rank}", 1)  # the n-th publishers of all ranks belong together
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._broken: str | None = None
        self._part: threading.Thread | None = None  # set in a group
        self._kept = KeptGroup()
        self._memory_of = ipc_memory
        self._buffer = LentBuffer()
        self._borrowed: BorrowedParts | None = None  # rank 0, during an update
        self._lenders: Sequence[int] = ()
        self._answers: list[tuple[int, torch.Tensor, Callable[[float], None]]] = []  # answers to the last BUCKETS
        self._packed: list[str] = []  # ranks' answers to the last BUCKETS: a failure, or empty
        self._not_lent = ""  # why ranks did not lend in an earlier update
        self._plan: Sections | None = None  # the last plan that all ranks know
        self.address = _address()
        cpu = torch.device("cpu")
        self._group = BroadcastGroup(
            store, f"{_KEY}/group-{nth}", self.rank, self.size, self.address, cpu, timeout_s, op_timeout_s=_COMMAND_S
        )
        self.timeout_s = self._timeout_s = timeout_s

    def send_to_ranks(self, *command: int) -> None:
        """Rank 0: send the other ranks a command of up to four numbers. Raises `RolloutError` if one is gone."""
        with self._lock:
            self._tell(command)

    def exchange(self, shards: Shards, version: int, device: torch.device) -> None:
        """Rank 0: collect the tables of parts. Raises `RolloutError` if the ranks publish different tensors."""
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
        """Rank 0: fill `parts`, pairs of a rank and the memory for its share of elements `first` to `last`."""
        with self._lock:
            self._tell((PIECE, index, first, last))
            for rank, out in parts:
                self._receive(out, rank)

    def fetch_whole(self, index: int, parts: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Rank 0: fill `parts`, pairs of a rank and memory for its whole part of a tensor."""
        with self._lock:
            self._tell((WHOLE, index))
            for rank, out in parts:
                self._receive(out, rank)

    def borrow(self, lenders: Sequence[int], manifest: Manifest, device: torch.device) -> LentParts | None:
        """Rank 0: have these ranks lend buffers, and map them until `release`; None if one of them cannot."""
        nbytes = buffer_bytes(manifest)
        handles, why_not = {}, ""
        if self._borrowed is not None:
            self._borrowed.close()
        try:
            if (memory := self._memory_of(device)) is None:
                return None
            with self._lock:
                if lenders:
                    self._tell((LEND, nbytes, host_number()))
                for rank in lenders:
                    data = torch.empty(ANSWER_BYTES, dtype=torch.uint8)
                    self._receive(data, rank)
                    handles[rank], reason = read_answer(data)
                    why_not = why_not or (reason and f"rank {rank}: {reason}")
            readers = {} if why_not else map_buffers(memory, handles, nbytes)
        except OSError as error:
            why_not = error.strerror or str(error)
        if not why_not:
            self._lenders = lenders
            self._borrowed = BorrowedParts(self.request, self.wait_packed, readers, manifest)
            return self._borrowed
        if lenders:
            self.send_to_ranks(LEND)
        if why_not != self._not_lent:
            _log.warning("parts of weights come through host memory, many times slower than over GPUs: %s", why_not)
        self._not_lent = why_not
        return None

    def cut(self, sections: Sections | None, whole: Manifest) -> None:
        """Rank 0: have the other ranks pack the parts of a plan for this update; None: whole tensors again."""
        order: dict[str, Any] = {"whole": sections is None}
        if sections is not None and (self._plan is None or self._plan.cuts != sections.cuts):
            order["cuts"], self._plan = cuts_to_wire(whole, sections.ranks), sections
        self._tell_map(CUT, order)

    def request(self, first: int, count: int, at: int) -> None:
        """Rank 0: have the lenders pack `count` buckets from number `first` on, from byte `at` of their buffers on."""
        with self._lock:
            self._tell((BUCKETS, first, count, at))
            self._packed = ["it did not answer"] * len(self._lenders)
            # Receive from now on: so a lender waits only for commands, which `stop` ends, and never in a send.
            for rank in self._lenders:
                self._begin_answer(rank)

    def wait_packed(self) -> None:
        """Rank 0: return when the lenders have packed the last request."""
        with self._lock:
            self._receive_answers()
        for rank, why_not in zip(self._lenders, self._packed, strict=True):
            if why_not:
                raise RolloutError(f"gather: rank {rank} cannot pack its part: {why_not}")

    def release(self) -> None:
        """Rank 0: free the tensors on the other ranks. Their lent memory is no longer read, and is unmapped."""
        with contextlib.suppress(RolloutError):  # the rank's own handle reports it
            self.send_to_ranks(RELEASED)
        borrowed, self._borrowed = self._borrowed, None
        if borrowed is not None:
            borrowed.close()

    def finish(self, handle: PublishHandle) -> None:
        """Rank 0: send the result of the update."""
        error = handle.error
        problem = None if error is None else {"code": error.code, "message": str(error), "field": error.field}
        self._tell_map(DONE, {"error": problem, "reports": [asdict(report) for report in handle.reports.values()]})

    def join(self, order: dict[str, Any]) -> None:
        """Rank 0: make the ranks that have a place in a group join it; each then reports its `ending`."""
        self._tell_map(JOIN, order)

    def ending(self, out: torch.Tensor, rank: int, timeout_s: float) -> None:
        """Rank 0: wait for a rank's report about its part in a group. Raises `RolloutError` that names the rank."""
        data = out.view(torch.uint8)
        self._do(lambda: self._group.receive(data, rank, timeout_s, _ENDING), f"rank {rank}", "transfer")

    def serve(self, payload: Payload, handle: PublishHandle, version: int) -> None:
        """Other ranks: follow rank 0's commands until the update ends. Raises `RolloutError` if rank 0 closes."""
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
                    with payload.on_side_stream():
                        data = shards.local_piece(index, first, last)
                    if data is not None:
                        self._send(data)
                case [op, index, *_] if op == WHOLE:
                    with payload.on_side_stream():
                        data = shards.local_whole(index)
                    if data is not None:
                        self._send(data)
                case [op, nbytes, host, *_] if op == LEND:
                    if not nbytes:
                        self._buffer.end_loan()
                        self._buffer.free()
                    elif any(shards.mine):
                        self._send(_answer_of(self._lend, payload.device, nbytes, host))
                case [op, first, count, at] if op == BUCKETS:
                    if any(shards.mine):
                        self._send(_answer_of(self._buffer.pack, payload, first, count, at))
                case [op, length, *_] if op == CUT:
                    self._use(payload, self._read_map(length))
                case [op, *_] if op == RELEASED:
                    self._buffer.end_loan()
                    payload.release()
                case [op, length, *_] if op == JOIN:
                    order = self._read_map(length)
                    self._part = take_part(payload, order, self.rank, self._stop, self._kept, self._end_part)
                case [op, length, *_] if op == DONE:
                    handle.learn(*_ending(self._read_map(length)))
                    return
                case _:
                    raise RolloutError("rank 0 closed its publisher", code="closed")

    def _use(self, payload: Payload, order: Mapping[str, Any]) -> None:
        """Other ranks: pack whole tensors, or the parts of a plan."""
        payload.use_whole()
        if "cuts" in order:
            self._plan = plan_sections(payload.manifest, cuts_from_wire(order["cuts"], payload.manifest))
        if not order["whole"]:
            assert self._plan is not None, "rank 0 has sent the cuts"
            payload.use_sections(self._plan)

    def close(self) -> None:
        """Leave the group; rank 0 tells the other ranks first. Belongs to the publisher's thread."""
        if self._borrowed is not None:
            self._borrowed.close()
        if self.rank == 0 and self._broken is None:
            with contextlib.suppress(RolloutError):  # they are gone
                self.send_to_ranks(CLOSE)
        self._stop.set()
        if self._part is not None:
            self._part.join(END_S)
        self._kept.close()
        ending = self._group.close(broken=self._broken is not None)
        if ending is not None:
            ending.join(END_S)
        self._buffer.free()

    def stop(self) -> None:
        """End all waits. Any thread may call it."""
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

    def _lend(self, device: torch.device, nbytes: int, host: int) -> bytes:
        return self._buffer.lend(self._memory_of(device), nbytes, host)

    def _receive_answers(self) -> None:
        answers, self._answers = self._answers, []
        for rank, _, wait in answers:
            self._do(functools.partial(wait, self._timeout_s), f"rank {rank}")
        if answers:
            self._packed = [read_answer(data)[1] for _, data, _ in answers]

    def _begin_answer(self, rank: int) -> None:
        data = torch.empty(ANSWER_BYTES, dtype=torch.uint8)
        self._do(lambda: self._answers.append((rank, data, self._group.begin_receive(data, rank))), f"rank {rank}")

    def _tell(self, command: Sequence[int]) -> None:
        self._receive_answers()
        data = torch.zeros(4, dtype=torch.int64)
        data[: len(command)] = torch.tensor(command, dtype=torch.int64)
        self._broadcast(data.view(torch.uint8))

    def _broadcast(self, data: torch.Tensor) -> None:
        timeout_s = None if self.rank else self._timeout_s  # the others are in `serve`, or about to publish
        peer = "rank 0" if self.rank else "another rank"
        self._do(lambda: self._group.broadcast(data).wait(self._stop, timeout_s), peer)

    def _send(self, data: torch.Tensor) -> None:
        self._do(lambda: self._group.send(data, 0), "rank 0")

    def _receive(self, out: torch.Tensor, rank: int) -> None:
        self._do(lambda: self._group.receive(out, rank, self._timeout_s), f"rank {rank}")

    def _do(self, operation: Any, peer: str, phase: str = "gather") -> None:
        if self._broken is not None:
            raise RolloutError(f"{phase}: {self._broken}; the group of trainer ranks is gone, make new publishers")
        try:
            operation()
        except GroupError as error:
            self._broken = f"{peer} cannot be reached: {error}"
            raise RolloutError(f"{phase}: {self._broken}") from error


def _answer_of(work: Callable[..., bytes | None], *given: Any) -> torch.Tensor:
    """Carry out a request of rank 0; the answer has the handle that `work` returns, if any, or the failure."""
    try:
        return answer(work(*given) or b"")
    except (OSError, RolloutError) as error:
        return answer(why_not=getattr(error, "strerror", None) or str(error))
    # Rank 0 waits for an answer in any case.
    except Exception as error:
        _log.exception("a part of the weights cannot be packed")
        return answer(why_not=repr(error))


def _ending(result: dict[str, Any]) -> tuple[list[WorkerReport], RolloutError | None]:
    reports = [WorkerReport(**report) for report in result["reports"]]
    return reports, None if result["error"] is None else from_reply(result["error"])


def _address() -> str:
    """Address of this host towards the other trainers."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    return address_towards(host, int(port)) if host and port.isdigit() else LOOPBACK
