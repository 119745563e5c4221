"""A trainer rank's part in one group: a thread joins and broadcasts every bucket, and a caller watches the thread.

    pack bucket i+1 into one buffer | broadcast bucket i from another (on a GPU: several at a time, the host ahead)

If several ranks own parts of a bucket, each broadcasts its part and receives the others, since all are in one group.

Joining and leaving may hang inside NCCL, which has no deadline for them. `run` still returns when nothing has moved for
too long, when a member has given up, or when the publisher closes.
"""

import logging
import threading
from collections import deque

import torch
import torch.distributed as dist

from trainer_bridge.transports.base import TransferRules
from trainer_bridge.transports.fingerprint import fingerprint
from trainer_bridge.transports.nccl.kept_group import KeptGroup
from trainer_bridge.transports.nccl.nccl_group import BroadcastGroup, GroupError, GroupSeat, Pending, give_up, given_up
from trainer_bridge.transports.nccl.runs import Bucket, Runs
from trainer_bridge.transports.payload import Payload
from trainer_bridge.wire.errors import RolloutError

GRACE_S = 5.0  # beyond `stall_s`: a group that still works reports a more precise reason by then

_log = logging.getLogger(__name__)


class Broadcasts:
    """One rank's part in one group. A thread does the work; `run` waits for it within the bounds of `rules`.

    Rank 0 passes the `runs`, the other ranks receive them in the group. `member` names this rank to the others if it
    gives up. After a run without `error`, `order` lists (bucket, sender) of every broadcast, and `fingerprints` has one
    for each bucket of this rank's parts, int64 [buckets].
    """

    def __init__(
        self,
        payload: Payload,
        store: dist.Store,
        seat: GroupSeat,
        address: str,
        rules: TransferRules,
        kept: KeptGroup,
        runs: Runs | None = None,
        member: str = "the publisher",
    ) -> None:
        assert (seat.rank == 0) == (runs is not None), "rank 0 passes the runs, the other ranks receive them"
        self.error: str | None = None
        self.sent = 0  # buckets that were broadcast
        self.order: list[tuple[int, int]] = []
        self.fingerprints = torch.zeros(payload.manifest.bucket_count, dtype=torch.int64)
        self._payload, self._store, self._seat = payload, store, seat
        self._address, self._rules, self._kept, self._runs, self._member = address, rules, kept, runs, member
        self.ended = threading.Event()
        self._stop = threading.Event()
        self._lock = threading.Lock()  # guards `_stop`: after it the thread keeps no group
        self._moved_s = self._rules.clock()

    def run(self, watch: dist.Store) -> None:
        """Return when everything is sent or `error` is set. `watch` is a client of the store."""
        thread = threading.Thread(target=self._main, name="weights-group", daemon=True)
        thread.start()
        while not self.ended.wait(0.02):
            still_s = self._rules.clock() - self._moved_s
            if self._rules.closing.is_set():
                self.error = "the publisher was closed"
            elif (gone := given_up(watch)) is not None:
                self.error = gone
            elif still_s > self._rules.stall_s + GRACE_S:  # NCCL has no deadline for joining and leaving
                self.error = f"nothing moved in the group for {still_s:.0f} s"
            else:
                continue
            with self._lock:
                self._stop.set()
            return

    def _main(self) -> None:
        try:
            self._send()
        except GroupError as error:
            self.error = self.error or f"the group with the workers broke: {error}"
        except RolloutError as error:  # has its own message: the publisher was closed while it packed
            self.error = self.error or str(error)
        # The workers learn of it and keep their weights.
        except Exception as error:
            _log.exception("sending weights failed")
            self.error = f"the publisher failed in its group: {error!r:.300}"
        self.ended.set()

    def _send(self) -> None:
        seat = self._seat
        group = self._kept.take(seat)
        if group is None:
            device, timeout_s = self._payload.device, self._rules.stall_s
            group = self._kept.join(self._store, seat, self._address, device, timeout_s)
        try:
            runs = self._runs
            if runs is None:
                runs = Runs.learn(self._payload.manifest, group, seat, self._stop)
            elif seat.runs:
                runs.share(group, self._stop)
            self._broadcast(group, runs)
            with self._lock:
                if self._stop.is_set():
                    raise GroupError("the publisher stopped it")
                self._kept.keep(seat, group)
        except Exception as error:
            give_up(self._store, f"{self._member} gave up: {error!s:.200}")
            self._kept.leave_broken(group)
            self._payload.wait_packed()  # wait before the buffers are freed: the trainer may reuse their memory at once
            raise

    def _broadcast(self, group: BroadcastGroup, runs: Runs) -> None:
        payload, buffers = self._payload, [group.buffer(runs.buffer_bytes) for _ in range(group.buffers)]
        kept = payload.kept if self._seat.runs else None  # None if rank 0 sends all: packing fills it
        in_order = group.buffer(0 if kept is None else runs.buffer_bytes)
        on_their_way: deque[tuple[Bucket, list[Pending]]] = deque()
        own: dict[int, torch.Tensor] = {}
        count = payload.manifest.bucket_count
        for index in range(count + len(buffers)):
            buffer = buffers[index % len(buffers)]
            if index >= len(buffers) and on_their_way:
                bucket, pending = on_their_way.popleft()
                self._await(pending)
                if kept is not None:
                    start, end = payload.manifest.bucket_span(index - len(buffers))
                    with group.on_stream():
                        kept[start:end].copy_(bucket.unpack(buffer, in_order))
            if index < count:
                bucket = runs.bucket(index)
                self._pack(bucket, index, buffer, own)
                with payload.on_side_stream():  # runs after the packing
                    pending = [group.broadcast(buffer[part.at : part.end], part.root) for part in bucket.parts]
                on_their_way.append((bucket, pending))
        if own:
            with payload.on_side_stream():
                self.fingerprints[list(own)] = torch.stack(list(own.values())).cpu()

    def _await(self, pending: list[Pending]) -> None:
        for part in pending:
            part.wait(self._stop)
        self.sent += 1
        self._moved_s = self._rules.clock()
        if self._seat.rank:
            self._store.set(f"at/{self._seat.rank}", str(self.sent))

    def _pack(self, bucket: Bucket, index: int, buffer: torch.Tensor, own: dict[int, torch.Tensor]) -> None:
        self._moved_s = self._rules.clock()
        for part in bucket.parts:
            self.order.append((index, part.root))
            if part.root != self._seat.rank:
                continue
            data = buffer[part.at : part.end]
            if self._seat.runs:
                self._payload.pack_pieces(part.pieces, buffer, part.columns)
            else:
                self._payload.start_bucket(index, data)
            self._moved_s = self._rules.clock()
            with self._payload.on_side_stream():
                own[index] = fingerprint(data)
