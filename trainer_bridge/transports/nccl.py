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
- Who waits in a group waits in a thread (`group_member`, `group_broadcasts`): neither a worker's receiver nor a
  publisher hangs with it.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from trainer_bridge.errors import BadRequest, RolloutError, WeightsRejected
from trainer_bridge.payload import Payload
from trainer_bridge.transports import GroupBroken, Incoming, Peer, TransferRules, TransportReceiver, TransportSender
from trainer_bridge.transports.group import GroupError, StoreServer, connect, local_address, reach
from trainer_bridge.transports.group_broadcasts import Broadcasts
from trainer_bridge.transports.group_member import Member

_REACH_S = 2.0
_END_S = 2.0  # for threads at the end: one that is inside of torch while Python ends may abort the process
_MAX_HOSTS = 16
_OPTIONS = {"hosts": list, "port": int, "backend": str, "group": str, "device": str}


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
        self._member: Member | None = None
        self._members: list[Member] = []  # whose threads have not ended

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
        self._member = Member(incoming, (host, port, options["group"]), self._device, self._timeout_s, self._wake)
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
        job = Broadcasts(payload, store, self._name, self._hosts[0], len(peers) + 1, rules)
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


def _progress(store: dist.Store, peers: Sequence[Peer]) -> dict[str, int]:
    """Buckets that each worker said it has."""
    found = {}
    for rank, peer in enumerate(peers, 1):
        key = f"at/{rank}"
        if store.check([key]) and (value := store.get(key)).isdigit():
            found[peer.endpoint] = int(value)
    return found
