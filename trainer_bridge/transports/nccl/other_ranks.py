"""Trainer ranks in a group: every rank that owns parts of an update is a member, like rank 0, and sends its own parts.

    rank 0, `OtherRanks`                                 ranks that own runs, `take_part`, a thread for each update
    runs: the sender of each byte
    join: the store, the seats      == gloo group ==>   reach the store, join, broadcast and receive every bucket
    endings                          <== gloo group ==   success or failure, fingerprints of the parts

Rank 0 fetches and sends other parts than runs of elements and columns, as for other transports. It sends everything if
ranks share a GPU, which NCCL does not support, or if only some ranks are on a GPU.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from trainer_bridge.transports.base import TransferRules
from trainer_bridge.transports.nccl.broadcasts import GRACE_S, Broadcasts
from trainer_bridge.transports.nccl.kept_group import KeptGroup
from trainer_bridge.transports.nccl.nccl_group import (
    REACH_S,
    GroupError,
    GroupSeat,
    connect,
    device_name,
    give_up,
    reach,
)
from trainer_bridge.transports.nccl.runs import MAX_RUNS, Columns, Runs
from trainer_bridge.transports.payload import Payload
from trainer_bridge.wire.address import address_towards
from trainer_bridge.wire.errors import RolloutError
from trainer_bridge.wire.manifest import DTYPE_BYTES

_log = logging.getLogger(__name__)


class OtherRanks:
    """Rank 0: the other ranks that send their own parts of an update; `numbers` is empty if rank 0 sends everything."""

    def __init__(self, payload: Payload) -> None:
        self.numbers: list[int] = []
        self.devices = [device_name(payload.device)]
        shards = payload.shards
        self._ranks = None if shards is None else shards.ranks
        if shards is None or self._ranks is None:
            return
        firsts_R, owners_R, columns = _runs(payload)
        owners = {*owners_R.tolist(), *(rank for each in columns for rank in each.roots)}
        numbers = sorted(rank for rank in owners if rank > 0)
        devices = [shards.devices[rank] for rank in (0, *numbers)]
        distinct = len(set(devices)) == len(devices) and "" not in devices
        if len(firsts_R) > MAX_RUNS:
            _log.info("rank 0 broadcasts alone: the ranks' parts form %d runs, more than %d", len(firsts_R), MAX_RUNS)
        elif numbers and not distinct and set(devices) != {""}:
            _log.info("rank 0 broadcasts alone: NCCL needs a GPU for each rank, but the ranks are on %s", devices)
        elif numbers:
            self.numbers, self.devices = numbers, [device for device in devices if device]

    @property
    def hosts(self) -> list[str]:
        """Addresses at which these ranks must be able to reach the store."""
        return [self._ranks.address] if self.numbers and self._ranks is not None else []

    def seats(self, peers: int) -> dict[int, int]:
        """Each trainer rank's seat in a group of rank 0, `peers` workers and these ranks, in this order."""
        return {rank: seat for seat, rank in enumerate(self.numbers, 1 + peers)}

    def runs(self, payload: Payload, seats: dict[int, int]) -> Runs:
        """The runs of the update, with the seats of their senders."""
        if not seats:
            return Runs.alone(payload.manifest)
        firsts_R, owners_R, columns = _runs(payload)
        seat_of = np.zeros(max(seats) + 1, np.int64)
        seat_of[list(seats)] = list(seats.values())
        roots_R = np.where(owners_R < 0, owners_R, seat_of[np.maximum(owners_R, 0)])
        placed = [replace(each, roots=tuple(int(seat_of[rank]) for rank in each.roots)) for each in columns]
        return Runs(payload.manifest, firsts_R, roots_R, placed)

    def join(self, hosts: Sequence[str], port: int, seat: GroupSeat, seats: dict[int, int], stall_s: float) -> None:
        """Make these ranks join the group. Raises `RolloutError` if one is gone."""
        if self._ranks is not None and seats:
            where = {"hosts": [*self.hosts, *hosts], "port": port, "group": seat.name, "columns": seat.columns}
            self._ranks.join({**where, "size": seat.size, "runs": seat.runs, "seats": seats, "stall_s": stall_s})

    def endings(self, seats: dict[int, int], buckets: int, stall_s: float) -> dict[int, torch.Tensor]:
        """Fingerprints of the buckets that each seat sent, int64 [buckets]. A rank that did not finish has no entry.

        Raises `RolloutError` if a rank cannot be reached.
        """
        found = {}
        for rank, seat in seats.items():
            assert self._ranks is not None
            ending = torch.zeros(1 + buckets, dtype=torch.int64)
            self._ranks.ending(ending, rank, stall_s + GRACE_S)
            if ending[0]:
                found[seat] = ending[1:]
        return found


def _runs(payload: Payload) -> tuple[np.ndarray, np.ndarray, list[Columns]]:
    """The byte of the stream at which each run begins, and the rank that can send it: int64 [runs] each; the columns.

    A tensor that ranks hold by columns is a run with the rank -1 minus the number of its columns.
    """
    shards = payload.shards
    assert shards is not None
    firsts: list[int] = []
    owners: list[int] = []
    columns: list[Columns] = []
    for index, entry in enumerate(payload.manifest.tensors):
        if not entry.nbytes:
            continue
        itemsize = DTYPE_BYTES[entry.dtype]
        if (cut := shards.columns(index)) is not None:
            row, held = cut
            starts, ranks = zip(*held, strict=True)
            columns.append(Columns(row * itemsize, tuple(itemsize * start for start in starts), ranks))
            # The padding after it is rank 0's: a run of columns has complete rows.
            firsts += [entry.offset, entry.end]
            owners += [-len(columns), 0]
            continue
        for first, rank in shards.senders(index):
            firsts.append(entry.offset + first * itemsize)
            owners.append(rank)
    ends = [*firsts[1:], payload.manifest.total_bytes]
    runs = [(first, owner) for first, end, owner in zip(firsts, ends, owners, strict=True) if first < end]
    return np.array([first for first, _ in runs], np.int64), np.array([owner for _, owner in runs], np.int64), columns


def take_part(
    payload: Payload,
    order: dict[str, Any],
    rank: int,
    closing: threading.Event,
    kept: KeptGroup,
    tell: Callable[[torch.Tensor], None],
) -> threading.Thread | None:
    """On another rank: carry out rank 0's `join` in a thread, then `tell` rank 0 the result.

    Returns the thread, or None if this rank has no seat in the group.
    """
    if str(rank) not in order["seats"]:
        return None

    def run() -> None:
        ending = torch.zeros(1 + payload.manifest.bucket_count, dtype=torch.int64)
        try:
            ending[1:] = _broadcast(payload, order, rank, closing, kept)
            ending[0] = 1
        except GroupError as error:
            _log.warning("rank %d did not send its part of the weights: %s", rank, error)
        # Rank 0 waits for the ending in any case.
        except Exception:
            _log.exception("rank %d failed to send its part of the weights", rank)
        with contextlib.suppress(RolloutError):  # rank 0 is gone; `serve` reports that
            tell(ending)

    thread = threading.Thread(target=run, name="weights-rank", daemon=True)
    thread.start()
    return thread


def _broadcast(
    payload: Payload, order: dict[str, Any], rank: int, closing: threading.Event, kept: KeptGroup
) -> torch.Tensor:
    """Join and broadcast; return the fingerprints of this rank's parts. Raises `GroupError`."""
    stall_s = order["stall_s"]
    host = reach(order["hosts"], order["port"], REACH_S)
    store, watch = (connect(host, order["port"], stall_s) for _ in range(2))
    number = order["seats"][str(rank)]
    seat = GroupSeat(order["group"], number, order["size"], order["runs"], order["columns"])
    address = address_towards(host, order["port"])
    member = f"rank {rank} of the trainer"
    job = Broadcasts(payload, store, seat, address, TransferRules(stall_s, closing), kept, member=member)
    job.run(watch)
    if job.error is not None:
        give_up(watch, f"{member} gave up: {job.error}")  # the job's thread may hang
        raise GroupError(job.error)
    return job.fingerprints
