"""The transport `nccl`: buckets broadcast over a process group of publisher and workers, kept from update to update.

    publisher, rank 0                                       worker, ranks 1 to n, a thread for each update
    store on a free port           -- begin: hosts, port -->  connects to the store, grants the name of its kept group
    store: member/TOKEN = group, rank, size, tables      -->  joins, unless all members have kept that group
    pack bucket i+1 | broadcast i  ========================>  receive bucket i+1 | write bucket i to its destination
                    (each of several trainer ranks broadcasts its own parts, see `ranks`)
                                   store: at/RANK = i   <--   so that an error can name the member that stalls
                                   store: gone = why    <--   a worker gives up: no member waits for it
    fingerprints of all buckets    -- commit -------------->  compares them with its own

`begin.options`: `hosts`, `port` of the store, `backend`, `devices` (UUIDs). `grant.kept` names the group that a worker
has kept, or is "". The value of `member/TOKEN` is JSON, `[group, rank, size, runs, columns]`; a worker that is in this
group at this rank stays; others join with `group` as the key prefix. `commit.options.fingerprints` is BLAKE2b (16
bytes, hexadecimal) of all fingerprints as i64.

Tensors on a GPU are sent by NCCL from device to device, others by gloo. When a member is lost, the group is dropped and
the other members meet in a new group.

Invariants:

- torch.distributed's default group is neither used nor changed.
- Waits in a group run in their own threads (`member`, `broadcasts`), so neither a worker's receiver nor a publisher can
  hang with a group.
"""

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from trainer_bridge.transports.base import (
    GroupBroken,
    IncomingUpdate,
    Recipient,
    TransferRules,
    TransportReceiver,
    TransportSender,
    check_options,
)
from trainer_bridge.transports.fingerprint import fingerprints_digest
from trainer_bridge.transports.nccl.broadcasts import Broadcasts
from trainer_bridge.transports.nccl.kept_group import KeptGroup
from trainer_bridge.transports.nccl.member import NcclMember
from trainer_bridge.transports.nccl.nccl_group import (
    END_S,
    REACH_S,
    BroadcastGroup,
    GroupError,
    GroupSeat,
    StoreServer,
    connect,
    device_name,
    give_up,
    given_up,
    local_address,
    reach,
)
from trainer_bridge.transports.nccl.other_ranks import OtherRanks
from trainer_bridge.transports.payload import Payload
from trainer_bridge.wire.errors import BadRequest, ConnectionLost, RolloutError, WeightsRejected

Members = tuple[Any, ...]  # the device of rank 0, endpoints of workers, (trainer rank, seat) of other ranks

_MAX_HOSTS = 16
_OPTIONS = {"hosts": list, "port": int, "backend": str, "devices": list}


# --- worker ----------------------------------------------------------------------------------------------------------


class NcclReceiver(TransportReceiver):
    """Joins the publisher's group, in a thread for each update. `device` is where the model is."""

    name = "nccl"

    def __init__(
        self,
        device: torch.device,
        timeout_s: float,
        wake: Callable[[], object],
        group_type: type[BroadcastGroup] = BroadcastGroup,
    ) -> None:
        self.on_device = device.type == "cuda"
        self._device, self._timeout_s, self._wake = device, timeout_s, wake
        self._member: NcclMember | None = None
        self._members: list[NcclMember] = []  # members with a running thread
        self.kept = KeptGroup(group_type)

    def begin(self, incoming: IncomingUpdate, options: Mapping[str, Any]) -> dict[str, Any]:
        """Check that the publisher's store can be reached and start to join. Raises `BadRequest`."""
        hosts, port = _read_options(options)
        backend = "nccl" if self.on_device else "gloo"
        if options["backend"] != backend:
            raise BadRequest(
                f"the publisher sends by {options['backend']!r:.20}; this worker receives by {backend}",
                field="options.backend",
            )
        if self.on_device and device_name(self._device) in options["devices"]:
            raise BadRequest("trainer and worker are on one GPU, which NCCL does not connect", field="options.devices")
        try:
            host = reach(hosts, port, REACH_S)
        except GroupError as error:
            raise BadRequest(f"this worker does not reach the publisher: {error}", field="options.hosts") from error
        grant = {"kept": self.kept.name}
        self._member = NcclMember(incoming, (host, port), self.kept, self._device, self._timeout_s, self._wake)
        self._member.thread.start()
        self._members = [*(member for member in self._members if member.thread.is_alive()), self._member]
        return grant

    def advance(self, incoming: IncomingUpdate | None) -> bool:
        """Raise the error of the thread, if any."""
        if incoming is not None and self._member is not None and self._member.error is not None:
            raise self._member.error
        return False

    def finish(self, incoming: IncomingUpdate, options: Mapping[str, Any]) -> bool:
        """True when all buckets are in place and their fingerprints match."""
        assert self._member is not None
        self.advance(incoming)
        if not self._member.done.is_set():
            return False
        if set(options) != {"fingerprints"} or options["fingerprints"] != self._member.digest:
            raise WeightsRejected("the digest of all buckets' fingerprints differs from what arrived", field="options")
        return True

    def drop(self, incoming: IncomingUpdate, error: RolloutError | None) -> None:
        """End the thread; it writes nothing more."""
        if self._member is not None:
            self._member.cancel()
            self._member = None

    def rest(self) -> None:
        """Leave the kept group, which takes memory of the device."""
        self.kept.leave()

    def close(self) -> None:
        """End the threads and wait at most 2 s for them."""
        if self._member is not None:
            self._member.cancel()
        until_s = time.monotonic() + END_S
        for member in self._members:
            member.thread.join(max(0.0, until_s - time.monotonic()))
        self._member, self._members = None, []
        self.kept.close()


def _read_options(options: Mapping[str, Any]) -> tuple[list[str], int]:
    check_options("nccl", options, _OPTIONS)
    hosts, port = options["hosts"], options["port"]
    if not 1 <= len(hosts) <= _MAX_HOSTS or any(type(host) is not str or not 1 <= len(host) <= 255 for host in hosts):
        raise BadRequest("hosts must be a few addresses of the publisher", field="options.hosts")
    if not 1 <= port <= 65535:
        raise BadRequest("port must be the port of the publisher's store", field="options.port")
    return hosts, port


# --- trainer ---------------------------------------------------------------------------------------------------------


class NcclSender(TransportSender):
    """Broadcasts each bucket to all workers at once. The workers' `endpoints` determine the address to listen on."""

    name = "nccl"
    why = "from device to device"

    def __init__(self, endpoints: Sequence[str], group_type: type[BroadcastGroup] = BroadcastGroup) -> None:
        self._endpoints = endpoints
        self._server: StoreServer | None = None
        self.kept = KeptGroup(group_type)
        self._kept_with: Members = ()
        self._others: OtherRanks | None = None

    def prepare(self, payload: Payload) -> dict[str, Any]:
        """Open the store of this update; a later round of `begin` uses the same one."""
        backend = "nccl" if payload.device.type == "cuda" else "gloo"
        if backend == "nccl" and not dist.is_nccl_available():
            raise RolloutError("prepare: this trainer's torch has no NCCL; use auto or zmq")
        if self._server is None or self._others is None:
            self._others = OtherRanks(payload)
            try:
                hosts = [local_address(endpoint) for endpoint in self._endpoints]
                self._server = StoreServer([*hosts, *self._others.hosts], timeout_s=30.0)
            except (OSError, RuntimeError) as error:
                raise RolloutError(f"prepare: no store can be opened: {error!s:.200}; use the transport zmq") from error
        where = {"hosts": self._server.hosts, "port": self._server.port}
        return {**where, "backend": backend, "devices": self._others.devices}

    def transfer(self, payload: Payload, recipients: Sequence[Recipient], rules: TransferRules) -> dict[str, Any]:
        """Make the group and broadcast every bucket. If the group breaks, each recipient gets `GroupBroken`."""
        server, others = self._server, self._others
        assert server is not None and others is not None
        seats = others.seats(len(recipients))
        runs = others.runs(payload, seats)
        size = 1 + len(recipients) + len(seats)
        before = self.kept.name
        name = self._group_of(payload, recipients, seats)
        seat = GroupSeat(name, 0, size, len(runs) if seats else 0, runs.column_count)
        for rank, recipient in enumerate(recipients, 1):
            other = json.dumps([seat.name, rank, size, seat.runs, seat.columns])
            server.store.set(f"member/{recipient.token.hex()}", other)
        # A second client: while a client waits for members, its other calls block.
        watch = connect(server.local_host, server.port, rules.stall_s)
        others.join(server.hosts, server.port, seat, seats, rules.stall_s)
        job = Broadcasts(payload, server.store, seat, server.hosts[0], rules, self.kept, runs)
        job.run(watch)
        if job.error is not None:
            give_up(watch, job.error)  # all members end at once
            job.error = given_up(watch) or job.error  # the reason of the first member that gave up
        try:
            parts = {0: job.fingerprints, **others.endings(seats, payload.manifest.bucket_count, rules.stall_s)}
        except RolloutError as error:
            self._server = None
            self.kept.leave()
            raise ConnectionLost(f"{error}; {job.error or 'all buckets were sent'}") from error
        missing = [f"rank {rank} of the trainer did not finish" for rank, at in seats.items() if at not in parts]
        if job.error is None and not missing:
            payload.read()
            return {"fingerprints": fingerprints_digest([parts[root][index] for index, root in job.order])}
        self._server = None  # a retry uses a new store; `server` keeps this one alive until the return
        self.kept.leave()
        why = job.error or missing[0]
        _fail(recipients, seats, watch, why, job.sent, payload.manifest.bucket_count, kept=seat.name == before)
        return {}

    def release(self, payload: Payload, applied: bool) -> None:
        """Drop the store; a kept group holds its own reference."""
        self._server = None

    def close(self) -> None:
        """Close the store, and leave the group."""
        self._server = None
        self.kept.close()

    def _group_of(self, payload: Payload, recipients: Sequence[Recipient], seats: Mapping[int, int]) -> str:
        """The name of the kept group if all members still have it, in the same seats; otherwise a new name."""
        members: Members = (payload.device, *(recipient.endpoint for recipient in recipients), *seats.items())
        name, before, self._kept_with = self.kept.name, self._kept_with, members
        same = name and members == before and all(recipient.grant.get("kept") == name for recipient in recipients)
        return name if same else secrets.token_hex(8)


def _fail(
    recipients: Sequence[Recipient], seats: dict[int, int], store: dist.Store, why: str, sent: int, of: int, kept: bool
) -> None:
    """Fail every recipient with the reason and the progress of each member."""
    ranks = "".join(f", rank {rank} {_progress(store, at)}" for rank, at in seats.items())
    for at, recipient in enumerate(recipients, 1):
        had = f"{recipient.endpoint} had {_progress(store, at)} of {of} buckets"
        broken = GroupBroken(f"transfer: {why}, after {sent} buckets; {had}{ranks}")
        broken.met, broken.kept = sent > 0 or kept, kept
        recipient.fail(broken)


def _progress(store: dist.Store, rank: int) -> int:
    """The number of buckets that a member has reported."""
    key = f"at/{rank}"
    return int(value) if store.check([key]) and (value := store.get(key)).isdigit() else 0
