"""A worker's part in an update by a group: a thread that joins, receives every bucket, and ends with the update.

    reaches the store --> waits for its seat --> joins, or continues in the kept group
                      --> writes each bucket to its destination --> keeps the group --> `done`

Invariants:

- It writes to the destination, and takes or keeps a group, only while its update is the current one (`_lock`).
- Every wait ends by its deadline.
- A failure is stored in `error` and in the store (`give_up`), so that no member waits for this worker.
"""

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist

from trainer_bridge.transports.base import IncomingUpdate
from trainer_bridge.transports.fingerprint import fingerprint, fingerprints_digest
from trainer_bridge.transports.nccl.kept_group import KeptGroup
from trainer_bridge.transports.nccl.nccl_group import (
    POLL_S,
    BroadcastGroup,
    GroupError,
    GroupSeat,
    Pending,
    connect,
    give_up,
)
from trainer_bridge.transports.nccl.runs import MAX_RUNS, Bucket, Runs
from trainer_bridge.wire.address import address_towards
from trainer_bridge.wire.errors import RolloutError, WeightsRejected

_MAX_MEMBERS = 4096
_MAX_NAME = 64

_log = logging.getLogger(__name__)


class NcclMember:
    """One worker's part in one group. After `done`, `digest` is the digest of all buckets' fingerprints."""

    def __init__(
        self,
        incoming: IncomingUpdate,
        where: tuple[str, int],
        kept: KeptGroup,
        device: torch.device,
        timeout_s: float,
        wake: Callable[[], object],
    ) -> None:
        self.error: RolloutError | None = None
        self.done = threading.Event()
        self.digest = ""
        self._incoming, self._where, self._kept = incoming, where, kept
        self._device, self._timeout_s, self._wake = device, timeout_s, wake
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self.thread = threading.Thread(target=self._run, name="weights-nccl", daemon=True)

    def cancel(self) -> None:
        """Stop writing and keep no group; the thread ends by its deadline."""
        with self._lock:
            self._cancelled.set()

    def _run(self) -> None:
        try:
            self._receive()
        except GroupError as error:
            self.error = WeightsRejected(f"transfer: the group with the publisher broke: {error}")
        # The old weights stay in use, and the publisher gets the error.
        except Exception as error:
            _log.exception("receiving weights failed")
            self.error = WeightsRejected(f"transfer: the worker failed in its group: {error!r:.300}")
        self._wake()

    def _receive(self) -> None:
        host, port = self._where
        store = connect(host, port, self._timeout_s)
        group: BroadcastGroup | None = None
        try:
            seat = self._await_seat(store)
            group = self._take(seat)
            if group is None:
                group = self._kept.join(store, seat, address_towards(*self._where), self._device, self._timeout_s)
            self._await(self._incoming.open.is_set, "the loop to hold generation")
            runs = Runs.learn(self._incoming.manifest, group, seat, self._cancelled)
            self._take_buckets(group, store, seat.rank, runs)
            with self._lock:
                self._check_present()
                self._kept.keep(seat, group)
        except Exception as error:
            give_up(store, f"a worker gave up: {error!s:.200}")
            if group is not None:
                self._kept.leave_broken(group)
            raise
        self.done.set()

    def _take(self, seat: GroupSeat) -> BroadcastGroup | None:
        with self._lock:  # a later update has already granted the kept group
            self._check_present()
            return self._kept.take(seat)

    def _check_present(self) -> None:
        if self._cancelled.is_set():
            raise GroupError("the update was dropped")

    def _take_buckets(self, group: BroadcastGroup, store: dist.Store, rank: int, runs: Runs) -> None:
        manifest = self._incoming.manifest
        buffers = [group.buffer(runs.buffer_bytes) for _ in range(group.buffers)]
        in_order = group.buffer(0 if runs.from_one else runs.buffer_bytes)
        seen, count = [], manifest.bucket_count
        on_their_way: deque[tuple[Bucket, list[Pending]]] = deque()

        def start(index: int) -> None:
            bucket, buffer = runs.bucket(index), buffers[index % len(buffers)]
            with group.on_stream():  # runs after the work that reads the buffer
                pending = [group.broadcast(buffer[part.at : part.end], part.root) for part in bucket.parts]
            on_their_way.append((bucket, pending))

        for index in range(min(count, len(buffers))):
            start(index)
        for index in range(count):
            bucket, pending = on_their_way.popleft()
            for part in pending:
                part.wait(self._cancelled)
            buffer = buffers[index % len(buffers)]
            while not self._incoming.destination.wait_for_room():  # not under the lock, for which the receiver waits
                self._check_present()
            with self._lock, group.on_stream():
                self._check_present()
                seen += [fingerprint(buffer[part.at : part.end]) for part in bucket.parts]
                self._incoming.destination.put(manifest.bucket_span(index)[0], bucket.unpack(buffer, in_order))
                self._incoming.note(bucket.nbytes)
            if index + len(buffers) < count:
                start(index + len(buffers))
            store.set(f"at/{rank}", str(index + 1))
        with group.on_stream():
            self.digest = fingerprints_digest(seen)

    def _await_seat(self, store: dist.Store) -> GroupSeat:
        key = f"member/{self._incoming.token.hex()}"
        try:
            self._await(lambda: store.check([key]), "a seat in the group")
            seat = json.loads(store.get(key))
        except (RuntimeError, ValueError) as error:
            raise (
                error if isinstance(error, GroupError) else GroupError(f"the publisher is gone: {error!s:.200}")
            ) from error
        if type(seat) is not list or [type(part) for part in seat] != [str, *4 * [int]]:
            raise GroupError("the publisher's store holds no seat in the group")
        name, rank, size, runs, columns = seat
        sound = 1 <= len(name) <= _MAX_NAME and 1 <= rank < size <= _MAX_MEMBERS
        if not (sound and 0 <= runs <= MAX_RUNS and 0 <= columns <= MAX_RUNS):
            raise GroupError("the publisher's store holds no seat in the group")
        return GroupSeat(name, rank, size, runs, columns)

    def _await(self, happened: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        while not happened():
            self._check_present()
            if time.monotonic() > deadline_s:
                raise GroupError(f"waited {self._timeout_s:g} s for {what}")
            time.sleep(POLL_S)
