"""A worker's part in one group: a thread that joins, takes every bucket, and ends with the update.

    reaches the store --> waits for its place --> joins --> buckets, each to its place --> `done`

Invariants:

- It writes to its landing only while its update is the present one (`_lock`); whatever it waits for, it ends by its
  deadline.
- What goes wrong is in `error`, and in the store (`give_up`), so that nobody waits for this worker.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist

from trainer_bridge.errors import RolloutError, WeightsRejected
from trainer_bridge.fingerprint import fingerprint, fingerprints_digest
from trainer_bridge.transports import Incoming
from trainer_bridge.transports.group import (
    POLL_S,
    Group,
    GroupError,
    Pending,
    Place,
    connect,
    give_up,
    local_address,
)
from trainer_bridge.transports.group_runs import MAX_RUNS, Bucket, Runs

_MAX_MEMBERS = 4096

_log = logging.getLogger(__name__)


class Member:
    """One worker's part in one group."""

    def __init__(
        self,
        incoming: Incoming,
        where: tuple[str, int, str],
        device: torch.device,
        timeout_s: float,
        wake: Callable[[], object],
    ) -> None:
        self.error: RolloutError | None = None
        self.done = threading.Event()
        self.digest = ""
        self._incoming, self._where = incoming, where
        self._device, self._timeout_s, self._wake = device, timeout_s, wake
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="weights-nccl", daemon=True)

    def start(self) -> None:
        """Begin to join."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Wait for its thread."""
        self._thread.join(timeout_s)

    def cancel(self) -> None:
        """After this nothing is written any more; the thread ends by its deadline."""
        with self._lock:
            self._cancelled.set()

    def _run(self) -> None:
        try:
            self._receive()
        except GroupError as error:
            self.error = WeightsRejected(f"transfer: the group with the publisher broke: {error}")
        # The old weights serve on, and the publisher is told.
        except Exception as error:
            _log.exception("receiving weights failed")
            self.error = WeightsRejected(f"transfer: the worker failed in its group: {error!r:.300}")
        self._wake()

    def _receive(self) -> None:
        host, port, _ = self._where
        store = connect(host, port, self._timeout_s)
        try:
            self._take_part(store, host, port)
        except Exception as error:
            give_up(store, f"a worker gave up: {error!s:.200}")
            raise

    def _take_part(self, store: dist.TCPStore, host: str, port: int) -> None:
        place = self._await_place(store)
        address = local_address(f"tcp://{host}:{port}")
        group = Group(store, place.name, place.rank, place.size, address, self._device, self._timeout_s)
        broken = True
        try:
            self._await(self._incoming.open.is_set, "the loop to hold generation")
            runs = Runs.learn(self._incoming.manifest, group, place, self._cancelled)
            self._take_buckets(group, store, place.rank, runs)
            broken = False
        except Exception as error:
            give_up(store, f"a worker gave up: {error!s:.200}")
            raise
        finally:
            group.close(broken)

    def _take_buckets(self, group: Group, store: dist.Store, rank: int, runs: Runs) -> None:
        manifest = self._incoming.manifest
        buffers = [group.buffer(runs.room) for _ in range(group.buffers)]
        in_order = group.buffer(runs.room if len(runs) > 1 else 0)
        seen, count = [], manifest.bucket_count
        on_their_way: deque[tuple[Bucket, list[Pending]]] = deque()

        def start(index: int) -> None:
            bucket, buffer = runs.bucket(index), buffers[index % len(buffers)]
            with group.on_stream():  # behind what reads the buffer
                pending = [group.broadcast(buffer[part.at : part.end], part.root) for part in bucket.parts]
            on_their_way.append((bucket, pending))

        for index in range(min(count, len(buffers))):
            start(index)
        for index in range(count):
            bucket, pending = on_their_way.popleft()
            for part in pending:
                part.wait(self._cancelled)
            buffer = buffers[index % len(buffers)]
            with self._lock, group.on_stream():
                if self._cancelled.is_set():
                    raise GroupError("the update was dropped")
                seen += [fingerprint(buffer[part.at : part.end]) for part in bucket.parts]
                self._incoming.landing.put(manifest.bucket_span(index)[0], bucket.unpack(buffer, in_order))
                self._incoming.note(bucket.nbytes)
            if index + len(buffers) < count:
                start(index + len(buffers))
            store.set(f"at/{rank}", str(index + 1))
        with group.on_stream():
            self.digest = fingerprints_digest(seen)
        self.done.set()

    def _await_place(self, store: dist.Store) -> Place:
        key = f"member/{self._incoming.token.hex()}"
        try:
            self._await(lambda: store.check([key]), "a place in the group")
            place = json.loads(store.get(key))
        except (RuntimeError, ValueError) as error:
            raise (
                error if isinstance(error, GroupError) else GroupError(f"the publisher is gone: {error!s:.200}")
            ) from error
        if type(place) is not list or len(place) != 3 or any(type(part) is not int for part in place):
            raise GroupError("the publisher's store holds no place in the group")
        rank, size, runs = place
        if not 1 <= rank < size <= _MAX_MEMBERS or not 0 <= runs <= MAX_RUNS:
            raise GroupError("the publisher's store holds no place in the group")
        return Place(self._where[2], rank, size, runs)

    def _await(self, happened: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        while not happened():
            if self._cancelled.is_set():
                raise GroupError("the update was dropped")
            if time.monotonic() > deadline_s:
                raise GroupError(f"waited {self._timeout_s:g} s for {what}")
            time.sleep(POLL_S)
