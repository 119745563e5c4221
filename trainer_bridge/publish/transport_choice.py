"""The transport of an update to each worker: the requested one, or, with `auto`, the first that works.

    cuda_ipc   between GPUs of one host, or on one, for tensors on a GPU
    nccl       from GPU to GPU, for tensors on a GPU
    shm        worker and publisher on one host: no copy passes through a socket
    zmq        anywhere

The order (in `transports.registry`) is by speed, with one exception: between two GPUs of one host nccl sends a large
model in half the time of cuda_ipc. It still comes second, since it opens a port and its kernels must run on both GPUs
at once. For tensors spread over several trainer ranks nccl is tried first: each rank sends its own parts, while for the
others rank 0 collects them.

The choice is made by trying: a worker refuses in `begin`, before anything is sent, and the reason is kept. The next
update starts from this result.

The first workers of a publisher form one group of `nccl`. A worker that joins later forms a group of its own with the
publisher, so the first group stays. Once there are many groups, or once a worker has left a group of several, which
breaks that group, all workers meet in one new group. Each group has its own sender, named by a route: `nccl`,
`nccl/1`, ...
"""

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer_bridge.transports.base import GroupBroken, Recipient, TransferRules, TransportSender
from trainer_bridge.transports.payload import Payload
from trainer_bridge.transports.registry import TRANSPORTS, auto_order, make_sender
from trainer_bridge.wire.errors import RolloutError
from trainer_bridge.wire.keys import ClientCurve

_log = logging.getLogger(__name__)

_MOST_LATE_GROUPS = 4  # the trainer sends each tensor once to each group

#: A sender, and the workers that it serves.
Served = tuple[TransportSender, Sequence[Recipient]]


class TransportChoice:
    """The senders of one publisher, and the refusals of each worker. Belongs to the publisher's thread."""

    def __init__(self, transport: str, folder: str | None, curve: ClientCurve | None, endpoints: Sequence[str]) -> None:
        self._folder, self._curve = folder, curve
        self._endpoints = list(endpoints)  # the senders see it change
        self._asked = transport
        self._late: dict[str, int] = {}  # numbers of the groups of workers that joined, by endpoint
        self.senders: dict[str, TransportSender] = {}  # senders by route
        self.refusals: dict[str, dict[str, str]] = {}  # reasons, by endpoint and transport
        if transport != "auto":
            self._sender(transport)

    def add(self, endpoint: str) -> None:
        """Add a worker, in a group of its own."""
        self._endpoints.append(endpoint)
        self._late[endpoint] = 1 + max(self._late.values(), default=0)
        if len(set(self._late.values())) > _MOST_LATE_GROUPS:
            self._meet_again()

    def remove(self, endpoint: str) -> None:
        """Remove a worker that has left."""
        self._endpoints.remove(endpoint)
        self.refusals.pop(endpoint, None)
        group = self._late.pop(endpoint, 0)
        if any(self._late.get(other, 0) == group for other in self._endpoints):
            self._meet_again()
        else:
            self._close_group(group)

    def _meet_again(self) -> None:
        """Have all workers form one group at the next update."""
        for group in set(self._late.values()):
            self._close_group(group)
        self._late.clear()

    def _close_group(self, group: int) -> None:
        for name, transport in TRANSPORTS.items():
            if transport.in_group and (sender := self.senders.pop(_route(name, group), None)) is not None:
                sender.close()

    @property
    def for_gpus(self) -> bool:
        """Whether updates may go from GPU to GPU."""
        return self._asked == "auto" or TRANSPORTS[self._asked].gpu_to_gpu

    def next_options(self, payload: Payload, recipients: Iterable[Recipient]) -> dict[str, dict[str, Any]]:
        """Give each recipient the next transport to try; the options of `begin` by route."""
        options: dict[str, dict[str, Any]] = {}
        for recipient in recipients:
            refusals = self.refusals.setdefault(recipient.endpoint, {})
            for name in self.candidates(payload):
                if name in refusals:
                    continue
                in_group = TRANSPORTS[name].in_group and not payload.spread  # other ranks join one group
                recipient.route = _route(name, self._late.get(recipient.endpoint, 0) if in_group else 0)
                if recipient.route in options:
                    break
                try:
                    options[recipient.route] = self._sender(recipient.route).prepare(payload)
                    break
                except RolloutError as error:
                    if not self._free(payload):
                        raise
                    refusals[name] = str(error)
            recipient.transport = name
            recipient.why = self._reasons(name, refusals) if self._free(payload) else "it was asked for"
        return options

    def tries_group(self, payload: Payload, recipients: Iterable[Recipient]) -> bool:
        """Whether the next transport for any of these workers needs a group with the trainer."""
        offered = (
            [name for name in self.candidates(payload) if name not in self.refusals.get(recipient.endpoint, {})]
            for recipient in recipients
        )
        return any(TRANSPORTS[name].in_group for names in offered for name in names[:1])

    def refused(self, payload: Payload, recipients: Iterable[Recipient]) -> list[Recipient]:
        """The recipients that refused only the transport; they are tried again with another transport."""
        again = []
        for recipient in recipients:
            error = recipient.error
            at_fault = (error.field or "").partition(".")[0] if error is not None else ""
            if not self._free(payload) or error is None or at_fault not in ("transport", "options"):
                continue
            if recipient.transport == self.candidates(payload)[-1]:
                self.refusals[recipient.endpoint].clear()  # no transport works: try all of them again next time
                continue
            _log.info("%s refuses weights by %s: %s", recipient.endpoint, recipient.transport, error)
            self.refusals[recipient.endpoint][recipient.transport] = str(error)
            recipient.error = None
            again.append(recipient)
        return again

    def avoid(self, recipients: Iterable[Recipient]) -> bool:
        """After broken groups: with `auto`, leave out a transport whose group never formed. True if it did so."""
        other = False
        for recipient in recipients:
            if self._asked == "auto" and isinstance(recipient.error, GroupBroken) and not recipient.error.met:
                self.refusals[recipient.endpoint][recipient.transport] = str(recipient.error)
                other = True
        return other

    def by_transport(self, recipients: Iterable[Recipient]) -> dict[str, Served]:
        """The senders in use by route, each with its workers."""
        groups: dict[str, list[Recipient]] = {}
        for recipient in recipients:
            groups.setdefault(recipient.route, []).append(recipient)
        return {route: (self._sender(route), group) for route, group in groups.items()}

    def release(self, payload: Payload, applied: bool) -> None:
        for sender in self.senders.values():
            sender.release(payload, applied)

    def close(self) -> None:
        for sender in self.senders.values():
            sender.close()

    def _free(self, payload: Payload) -> bool:
        """Whether there is a choice. A kept update is on the host, so it may need another transport than at first."""
        return self._asked == "auto" or (TRANSPORTS[self._asked].gpu_to_gpu and payload.again)

    def candidates(self, payload: Payload) -> list[str]:
        """The transports to offer to a worker, the best first."""
        return auto_order(payload.on_gpu, payload.spread) if self._free(payload) else [self._asked]

    def _sender(self, route: str) -> TransportSender:
        if route not in self.senders:
            name = route.partition("/")[0]
            self.senders[route] = make_sender(name, self._folder, self._curve, self._endpoints)
        return self.senders[route]

    def _reasons(self, name: str, refusals: Mapping[str, str]) -> str:
        reasons = [self._sender(name).why, *(f"not {other}: {why}" for other, why in refusals.items())]
        return "; ".join(filter(None, reasons))


def _route(name: str, group: int) -> str:
    return f"{name}/{group}" if group else name


def transfer_all(payload: Payload, senders: Mapping[str, Served], rules: TransferRules) -> dict[str, dict[str, Any]]:
    """Run the senders side by side, so that slow workers don't hold up others; the options of `commit` by route.

    An error of one sender fails its own workers only.
    """
    if len(senders) > 1:
        payload.expect_readers(len(senders))
    finished: dict[str, dict[str, Any]] = {}

    def transfer(name: str, sender: TransportSender, recipients: Sequence[Recipient]) -> None:
        try:
            finished[name] = sender.transfer(payload, recipients, rules)
        # The other workers still get their update.
        except Exception as error:
            if not isinstance(error, RolloutError):
                _log.exception("the transport %s failed", name)
            for recipient in recipients:
                recipient.fail(error if isinstance(error, RolloutError) else _fault(name, error))

    threads = [
        threading.Thread(target=transfer, args=(name, *served), name=f"weights-{name}")
        for name, served in list(senders.items())[1:]
    ]
    for thread in threads:
        thread.start()
    for name, (sender, recipients) in list(senders.items())[:1]:
        transfer(name, sender, recipients)
    for thread in threads:
        thread.join()
    return finished


def _fault(name: str, error: Exception) -> RolloutError:
    fault = RolloutError(f"transfer: the transport {name} failed in the publisher: {error!r:.300}")
    fault.__cause__ = error
    return fault
