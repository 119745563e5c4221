"""The transport `nccl`: buckets broadcast over a process group of publisher and workers, made for each update.

    publisher, rank 0                                       worker, ranks 1 to n, a thread for each update
    store on a free port           -- begin: hosts, port -->  reaches the store, grants
    store: member/TOKEN = rank, size                     -->  joins
    pack bucket i+1 | broadcast i  ========================>  broadcast i+1 | bucket i to its place
                                   store: at/RANK = i   <--   so that a stall can be told of by name
                                   store: gone = why    <--   a worker gives up: nobody waits for it
    fingerprints of all buckets    -- commit -------------->  compared with its own

Tensors on a GPU travel by NCCL from device to device, others by gloo. A group lives as long as its update: when a
member is lost it is dropped, and whoever still lives meets again in a new one.

Invariants:

- torch.distributed's default group is neither used nor changed.
- The worker's thread writes to its landing only while its update is the present one (`_lock`); whatever it waits for,
  it ends by its deadline.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from trainer_bridge.errors import BadRequest, RolloutError, WeightsRejected
from trainer_bridge.fingerprint import fingerprint, fingerprints_digest
from trainer_bridge.payload import Payload
from trainer_bridge.transports import GroupBroken, Incoming, Peer, TransferRules, TransportReceiver, TransportSender
from trainer_bridge.transports.group import (
    POLL_S,
    Group,
    GroupError,
    StoreServer,
    connect,
    local_address,
    reach,
)

_BUFFERS = 2
_GONE = "gone"
_GRACE_S = 5.0  # beyond `stall_s`: a group that still can gives the better reason itself
_REACH_S = 2.0
_END_S = 2.0  # for threads at the end: one that is inside of torch while Python ends may abort the process
_MAX_HOSTS = 16
_MAX_MEMBERS = 4096
_OPTIONS = {"hosts": list, "port": int, "backend": str, "group": str, "device": str}

_log = logging.getLogger(__name__)


def device_name(device: torch.device) -> str:
    """What tells a GPU from all others; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


# --- worker ----------------------------------------------------------------------------------------------------------


class NcclReceiver(TransportReceiver):
    """Joins the publisher's group, in a thread for each update. `device` is where the model is."""

    name = "nccl"
    carries = ("nccl",)

    def __init__(self, device: torch.device, timeout_s: float, wake: Callable[[], object]) -> None:
        self.on_device = device.type == "cuda"
        self._device, self._timeout_s, self._wake = device, timeout_s, wake
        self._member: _Member | None = None
        self._members: list[_Member] = []  # whose threads have not ended

    def begin(self, incoming: Incoming, options: Mapping[str, Any]) -> dict[str, Any]:
        """Look whether the group can be reached, and start to join it. Raises `BadRequest`."""
        hosts, port = _read_options(options)
        backend = "nccl" if self.on_device else "gloo"
        if options["backend"] != backend:
            raise BadRequest(
                f"the publisher's tensors travel by {options['backend']!r:.20}, this worker takes {backend}",
                field="options.backend",
            )
        if options["device"] and options["device"] == device_name(self._device):
            raise BadRequest("publisher and worker are on one GPU, which NCCL does not connect", field="options.device")
        try:
            host = reach(hosts, port, _REACH_S)
        except GroupError as error:
            raise BadRequest(f"this worker does not reach the publisher: {error}", field="options.hosts") from error
        self._member = _Member(incoming, (host, port, options["group"]), self._device, self._timeout_s, self._wake)
        self._member.start()
        self._members = [*(member for member in self._members if member.alive), self._member]
        return {}

    def advance(self, incoming: Incoming | None) -> bool:
        """Raise what went wrong in the thread."""
        if incoming is not None and self._member is not None and self._member.error is not None:
            raise self._member.error
        return False

    def finish(self, incoming: Incoming, options: Mapping[str, Any]) -> bool:
        """True when all buckets are in place and are those that were sent."""
        assert self._member is not None
        self.advance(incoming)
        if not self._member.done.is_set():
            return False
        if set(options) != {"fingerprints"} or options["fingerprints"] != self._member.digest:
            raise WeightsRejected("the digest of all buckets' fingerprints differs from what arrived", field="options")
        return True

    def drop(self, incoming: Incoming, error: RolloutError | None) -> None:
        """Have the thread end, and write nothing more."""
        if self._member is not None:
            self._member.cancel()
            self._member = None

    def close(self) -> None:
        """Have the threads end, and wait a moment for them."""
        if self._member is not None:
            self._member.cancel()
        until_s = time.monotonic() + _END_S
        for member in self._members:
            member.join(max(0.0, until_s - time.monotonic()))
        self._member, self._members = None, []


class _Member:
    """One worker's part in one group."""

    def __init__(
        self,
        incoming: Incoming,
        place: tuple[str, int, str],
        device: torch.device,
        timeout_s: float,
        wake: Callable[[], object],
    ) -> None:
        self.error: RolloutError | None = None
        self.done = threading.Event()
        self.digest = ""
        self._incoming, self._place = incoming, place
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
        host, port, _ = self._place
        store = connect(host, port, self._timeout_s)
        try:
            self._take_part(store, host, port)
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # the publisher is gone, too
                store.set(_GONE, f"a worker gave up: {error!s:.200}")
            raise

    def _take_part(self, store: dist.TCPStore, host: str, port: int) -> None:
        name = self._place[2]
        rank, size = self._await_place(store)
        address = local_address(f"tcp://{host}:{port}")
        group = Group(store, name, rank, size, address, self._device, self._timeout_s)
        broken = True
        try:
            self._await(self._incoming.open.is_set, "the loop to hold generation")
            self._take_buckets(group, store, rank)
            broken = False
        finally:
            group.close(broken)

    def _take_buckets(self, group: Group, store: dist.Store, rank: int) -> None:
        manifest = self._incoming.manifest
        buffers = [group.buffer(min(manifest.bucket_bytes, manifest.total_bytes)) for _ in range(_BUFFERS)]
        seen, count = [], manifest.bucket_count

        def start(index: int) -> Any:
            first, end = manifest.bucket_span(index)
            return group.broadcast(buffers[index % _BUFFERS][: end - first])

        pending = start(0) if count else None
        for index in range(count):
            assert pending is not None
            pending.wait(self._cancelled)
            # The next bucket is on its way to the other buffer while this one is copied to its place.
            pending = start(index + 1) if index + 1 < count else None
            first, end = manifest.bucket_span(index)
            data = buffers[index % _BUFFERS][: end - first]
            with self._lock, group.on_stream():
                if self._cancelled.is_set():
                    raise GroupError("the update was dropped")
                seen.append(fingerprint(data))
                self._incoming.landing.put(first, data)
                self._incoming.note(end - first)
            store.set(f"at/{rank}", str(index + 1))
        with group.on_stream():
            self.digest = fingerprints_digest(seen)
        self.done.set()

    def _await_place(self, store: dist.Store) -> tuple[int, int]:
        key = f"member/{self._incoming.token.hex()}"
        try:
            self._await(lambda: store.check([key]), "a place in the group")
            place = json.loads(store.get(key))
        except (RuntimeError, ValueError) as error:
            raise (
                error if isinstance(error, GroupError) else GroupError(f"the publisher is gone: {error!s:.200}")
            ) from error
        if type(place) is not list or len(place) != 2 or any(type(part) is not int for part in place):
            raise GroupError("the publisher's store holds no place in the group")
        rank, size = place
        if not 1 <= rank < size <= _MAX_MEMBERS:
            raise GroupError("the publisher's store holds no place in the group")
        return rank, size

    def _await(self, happened: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        while not happened():
            if self._cancelled.is_set():
                raise GroupError("the update was dropped")
            if time.monotonic() > deadline_s:
                raise GroupError(f"waited {self._timeout_s:g} s for {what}")
            time.sleep(POLL_S)


def _read_options(options: Mapping[str, Any]) -> tuple[list[str], int]:
    if set(options) != set(_OPTIONS) or any(type(options[name]) is not kind for name, kind in _OPTIONS.items()):
        raise BadRequest(f"transport nccl takes the options {', '.join(_OPTIONS)}", field="options")
    hosts, port = options["hosts"], options["port"]
    if not 1 <= len(hosts) <= _MAX_HOSTS or any(type(host) is not str or not 1 <= len(host) <= 255 for host in hosts):
        raise BadRequest("hosts must be a few addresses of the publisher", field="options.hosts")
    if not 1 <= port <= 65535 or not 1 <= len(options["group"]) <= 64:
        raise BadRequest("port and group must be those of the publisher's store", field="options")
    return hosts, port


# --- trainer ---------------------------------------------------------------------------------------------------------


class NcclSender(TransportSender):
    """Broadcasts each bucket to all workers at once. `endpoints`, the workers', tell which address to listen on."""

    name = "nccl"

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._hosts = [local_address(endpoint) for endpoint in endpoints]
        self._server: StoreServer | None = None
        self._name = ""

    def prepare(self, payload: Payload) -> dict[str, Any]:
        """Open the store of this update; the same one for workers that come to it in a later round of `begin`."""
        device = payload.device
        backend = "nccl" if device.type == "cuda" else "gloo"
        if self._server is not None:
            return self._options(self._server, backend, device)
        try:
            self._server = StoreServer(self._hosts, timeout_s=30.0)
        except (OSError, RuntimeError) as error:
            raise RolloutError(f"prepare: no store can be opened: {error!s:.200}; use the transport zmq") from error
        self._name = secrets.token_hex(8)
        return self._options(self._server, backend, device)

    def transfer(self, payload: Payload, peers: Sequence[Peer], rules: TransferRules) -> dict[str, Any]:
        """Make the group and broadcast every bucket. A group breaks for all: each peer then gets `GroupBroken`."""
        assert self._server is not None
        store = self._server.store
        for rank, peer in enumerate(peers, 1):
            store.set(f"member/{peer.token.hex()}", json.dumps([rank, len(peers) + 1]))
        job = _Broadcasts(payload, store, self._name, self._hosts[0], len(peers) + 1, rules)
        # A client of its own: one that waits for members keeps others from asking.
        watch = connect(self._server.local_host, self._server.port, rules.stall_s)
        job.run(watch)
        if job.error is None:
            payload.read()
            return {"fingerprints": job.digest}
        self._server = None  # those that are tried again meet at a new one; `store` lives until this returns
        slowest = _progress(watch, peers)
        for peer in peers:
            at = f"{peer.endpoint} had {slowest.get(peer.endpoint, 0)} of {payload.manifest.bucket_count} buckets"
            error = GroupBroken(f"transfer: {job.error}, after {job.sent} buckets; {at}")
            error.met = job.sent > 0
            peer.fail(error)
        return {}

    def _options(self, server: StoreServer, backend: str, device: torch.device) -> dict[str, Any]:
        where = {"hosts": server.hosts, "port": server.port, "group": self._name}
        return {**where, "backend": backend, "device": device_name(device)}

    def release(self, payload: Payload, applied: bool) -> None:
        """Close the store."""
        self._server = None

    def close(self) -> None:
        """Close the store."""
        self._server = None


class _Broadcasts:
    """The publisher's part in one group, in a thread that is waited for with an eye on `rules`."""

    def __init__(
        self, payload: Payload, store: dist.Store, name: str, address: str, size: int, rules: TransferRules
    ) -> None:
        self.error: str | None = None
        self.sent = 0
        self.digest = ""
        self._payload, self._store, self._name = payload, store, name
        self._address, self._size, self._rules = address, size, rules
        self._over = threading.Event()
        self._stop = threading.Event()
        self._moved_s = time.monotonic()

    def run(self, watch: dist.Store) -> None:
        """Return when all is sent, or `error` says why not; `watch` is a client of the store."""
        thread = threading.Thread(target=self._main, name="weights-group", daemon=True)
        thread.start()
        while not self._over.wait(0.02):
            if self._rules.closing.is_set():
                self._stop.set()
                self.error = "the publisher was closed"
                return
            if watch.check([_GONE]):
                self._stop.set()
                self.error = watch.get(_GONE).decode(errors="replace")[:300]
                return
            still_s = time.monotonic() - self._moved_s
            if still_s > self._rules.stall_s + _GRACE_S:  # inside of NCCL: what joins or leaves there knows no deadline
                self._stop.set()
                self.error = f"nothing moved in the group for {still_s:.0f} s"
                return

    def _main(self) -> None:
        try:
            self._send()
        except GroupError as error:
            self.error = self.error or f"the group with the workers broke: {error}"
        # Workers are told, and keep what they serve.
        except Exception as error:
            _log.exception("sending weights failed")
            self.error = f"the publisher failed in its group: {error!r:.300}"
        self._over.set()

    def _send(self) -> None:
        payload, manifest, stop = self._payload, self._payload.manifest, self._stop
        group = Group(self._store, self._name, 0, self._size, self._address, payload.device, self._rules.stall_s)
        broken = True
        try:
            buffers = [group.buffer(min(manifest.bucket_bytes, manifest.total_bytes)) for _ in range(_BUFFERS)]
            pending: list[Any] = [None] * _BUFFERS
            seen = []
            for index in range(manifest.bucket_count):
                slot = index % _BUFFERS
                if pending[slot] is not None:
                    pending[slot].wait(stop)
                    self.sent += 1
                self._moved_s = time.monotonic()
                data = buffers[slot][: payload.pack_bucket(index, buffers[slot])]
                self._moved_s = time.monotonic()
                with group.on_stream():
                    seen.append(fingerprint(data))
                pending[slot] = group.broadcast(data)
            for slot in range(manifest.bucket_count, manifest.bucket_count + _BUFFERS):
                if pending[slot % _BUFFERS] is not None:
                    pending[slot % _BUFFERS].wait(stop)
                    self.sent += 1
                    self._moved_s = time.monotonic()
            with group.on_stream():
                self.digest = fingerprints_digest(seen)
            broken = False
        finally:
            group.close(broken)


def _progress(store: dist.Store, peers: Sequence[Peer]) -> dict[str, int]:
    """Buckets that each worker said it has."""
    found = {}
    for rank, peer in enumerate(peers, 1):
        key = f"at/{rank}"
        if store.check([key]) and (value := store.get(key)).isdigit():
            found[peer.endpoint] = int(value)
    return found
