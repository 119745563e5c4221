"""The transport `zmq`: buckets of the packed stream over a separate ZeroMQ socket; works between any two hosts.

    publisher, DEALER, connects                       worker, ROUTER, binds
    [WBK1 token index check, payload]   ---------->   checked, copied to its place in the stream
                                        <----------   [WAK1 token index]             bucket is in place
                                        <----------   [WNO1 token, reason]           update refused

Invariants:

- At most `window` buckets to a worker are unacknowledged; the next one goes when one is acknowledged. A bucket is
  packed once and sent to all workers, from a buffer that is reused when all of them have acknowledged it.
- Buckets may arrive in any order. A repeated bucket with the same checksum is acknowledged again and not written; with
  another checksum it ends the update.
- A bucket of another update is never written anywhere. It is refused, so the publisher learns at once of the newer
  update.
- Buckets that arrive before they may land wait in memory: at most `window` of them.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from trainer_bridge.transports.base import (
    IncomingUpdate,
    Recipient,
    TransferRules,
    TransportReceiver,
    TransportSender,
    check_options,
)
from trainer_bridge.transports.bucket_link import (
    ACK,
    ACK_MAGIC,
    BUCKET,
    BUCKET_MAGIC,
    MAX_REFUSAL_BYTES,
    REFUSAL,
    REFUSAL_MAGIC,
    SHARED_MAGIC,
    pack_on_host,
    send_buckets,
)
from trainer_bridge.transports.payload import Payload
from trainer_bridge.wire.errors import RolloutError, WeightsRejected
from trainer_bridge.wire.keys import ClientCurve
from trainer_bridge.wire.manifest import checksum, checksums_digest

DEFAULT_WINDOW = 4

_log = logging.getLogger(__name__)


# --- worker ----------------------------------------------------------------------------------------------------------


class BucketSocket(Protocol):
    """A worker's ROUTER socket, which receives buckets and other messages. No method waits."""

    def receive(self) -> tuple[bytes, list[memoryview]] | None:
        """The next message and its sender, or None."""

    def put_aside(self, sender: bytes, frames: list[memoryview]) -> None:
        """Keep a message that is no bucket for the owner of the socket."""

    def send(self, to: bytes, message: bytes) -> None:
        """Send a message of one frame; it is lost if its receiver is gone."""

    @property
    def endpoint(self) -> str:
        """The address that publishers connect to."""


class ZmqReceiver(TransportReceiver):
    """Receives buckets from a socket; `window` is the maximum number of unacknowledged ones."""

    name = "zmq"

    def __init__(self, socket: BucketSocket, window: int = DEFAULT_WINDOW) -> None:
        self._socket = socket
        self._window = self._most_early = window
        self._refused_buckets = 0
        self._checksums: list[int | None] = []
        self._sender: bytes | None = None
        self._shared: SharedReceiver | None = None
        self._early: deque[tuple[bytes, list[memoryview]]] = deque()  # buckets that may not land yet
        self._unacknowledged: list[int] = []
        self._dropped = (b"", "")  # token of the update that was refused last, and why

    def begin(self, incoming: IncomingUpdate, options: Mapping[str, Any]) -> dict[str, Any]:
        """Expect the buckets of an update; the grant says where to send them and how many at once."""
        check_options(self.name, options, {})
        return self.expect(incoming, None, self._window)

    def expect(self, incoming: IncomingUpdate, shared: SharedReceiver | None, window: int) -> dict[str, Any]:
        """Expect an update's buckets: with their bytes, or in `shared` memory. Returns the grant."""
        self._forget()
        self._shared, self._most_early = shared, window
        self._checksums = [None] * incoming.manifest.bucket_count
        return {"endpoint": self._socket.endpoint, "window": window}

    def advance(self, incoming: IncomingUpdate | None) -> bool:
        """Take one message; without one, acknowledge the buckets that came.

        Called by a transport that expects buckets in shared memory, with its update.
        """
        if incoming is None and self._shared is not None:
            return False
        if incoming is not None and self._early and incoming.may_land:
            self._take_bucket(incoming, *self._early.popleft())
            return True
        message = self._socket.receive()
        if message is None:
            return incoming is not None and incoming.open.is_set() and self._acknowledge(incoming)
        sender, frames = message
        if not is_bucket(frames):
            if incoming is not None:
                self._acknowledge(incoming)  # a flood of other messages must not delay acknowledgements
            self._socket.put_aside(sender, frames)
            return True
        token = BUCKET.unpack(frames[0])[1]
        if incoming is None or token != incoming.token:
            self._refuse_bucket(sender, token, incoming)
        elif incoming.may_land:
            self._take_bucket(incoming, sender, frames)
        elif len(self._early) < self._most_early:
            self._early.append(message)
        else:
            raise WeightsRejected(f"more than {self._most_early} buckets came without waiting for an answer")
        return True

    def finish(self, incoming: IncomingUpdate, options: Mapping[str, Any]) -> bool:
        """Verify that every bucket has arrived and is the one that was sent."""
        self._acknowledge(incoming)
        if self._unacknowledged:
            return False
        missing = [i for i, check in enumerate(self._checksums) if check is None]
        if missing:
            raise WeightsRejected(
                f"{len(missing)} of {len(self._checksums)} buckets are missing at commit, the first is {missing[0]}; "
                "commit after the last acknowledgement"
            )
        if set(options) != {"checksums"} or options["checksums"] != self._digest():
            raise WeightsRejected("the digest of all buckets' checksums differs from what arrived", field="options")
        return True

    def drop(self, incoming: IncomingUpdate, error: RolloutError | None) -> None:
        """Forget the buckets; tell the sender why, when it is known."""
        if error is not None:
            self._dropped = (incoming.token, str(error))
            if self._sender is not None:
                self._refuse(self._sender, *self._dropped)
        self._forget()

    def _forget(self) -> None:
        self._checksums, self._sender, self._shared, self._unacknowledged = [], None, None, []
        self._early.clear()

    def _take_bucket(self, incoming: IncomingUpdate, sender: bytes, frames: list[memoryview]) -> None:
        magic, token, index, check = BUCKET.unpack(frames[0])
        self._sender = sender
        if (magic == SHARED_MAGIC) != (self._shared is not None):
            raise WeightsRejected(f"a bucket came by another transport than {incoming.transport}, which begin named")
        taken = self._take(incoming, index, check, frames[1] if len(frames) == 2 else None)
        if taken and not self._unacknowledged:  # in the order in which they came
            self._socket.send(sender, ACK.pack(ACK_MAGIC, token, index))
        else:
            self._unacknowledged.append(index)

    def _acknowledge(self, incoming: IncomingUpdate) -> bool:
        """Acknowledge buckets from shared memory, if they are copied; False if there are none."""
        if not self._unacknowledged:
            return False
        assert self._shared is not None and self._sender is not None
        done = self._shared.complete(incoming, self._unacknowledged)
        for index in self._unacknowledged[:done]:
            self._socket.send(self._sender, ACK.pack(ACK_MAGIC, incoming.token, index))
        del self._unacknowledged[:done]
        return True

    def _take(self, incoming: IncomingUpdate, index: int, check: int, payload: memoryview | None) -> bool:
        """Take a bucket; false if it is complete only after `_acknowledge`."""
        manifest = incoming.manifest
        if index >= manifest.bucket_count:
            raise WeightsRejected(f"bucket {index} was sent, but the manifest has {manifest.bucket_count}")
        start, end = manifest.bucket_span(index)
        if payload is not None and len(payload) != end - start:
            raise WeightsRejected(f"bucket {index} has {len(payload)} bytes; the manifest says {end - start}")
        known = self._checksums[index]
        if known is not None and known != check:
            raise WeightsRejected(f"bucket {index} was sent twice with different content")
        if payload is not None:
            check_bucket(index, payload, check)
        if known is not None:
            return True
        here = True
        if payload is not None:
            np.copyto(incoming.destination.memory(start, end), np.frombuffer(payload, np.uint8))
            incoming.arrived(start, end)
        else:
            assert self._shared is not None
            here = self._shared.take(incoming, index, check)
        self._checksums[index] = check
        return here

    def _digest(self) -> str:
        return checksums_digest([check for check in self._checksums if check is not None])

    def _refuse_bucket(self, sender: bytes, token: bytes, incoming: IncomingUpdate | None) -> None:
        """Refuse a bucket of another update: its publisher learns at once of the newer update."""
        if incoming is not None:
            self._acknowledge(incoming)
        self._refused_buckets += 1
        if self._refused_buckets.bit_count() == 1:  # 1, 2, 4, 8, ...: a flood of messages is not one of log lines
            _log.warning("refused a bucket that belongs to no current update (%d so far)", self._refused_buckets)
        dropped, why = self._dropped
        known = token == dropped  # the first buckets of a refused update may come late
        self._refuse(sender, token, why if known else "this update is not being received (any more); publish again")

    def _refuse(self, to: bytes, token: bytes, reason: str) -> None:
        self._socket.send(to, REFUSAL.pack(REFUSAL_MAGIC, token) + reason.encode()[:MAX_REFUSAL_BYTES])


def is_bucket(frames: Sequence[memoryview]) -> bool:
    """Whether a message on the weight socket has the form of a bucket."""
    magic = bytes(frames[0][:4]) if frames and len(frames[0]) == BUCKET.size else b""
    return (magic, len(frames)) in ((BUCKET_MAGIC, 2), (SHARED_MAGIC, 1))


def check_bucket(index: int, data: memoryview, check: int) -> None:
    """Raise `WeightsRejected` if a bucket's bytes changed in transfer."""
    actual = checksum(data)
    if actual != check:
        raise WeightsRejected(
            f"bucket {index} arrived damaged: checksum {actual:08x}, sent as {check:08x}; if every update "
            "fails at its first bucket, publisher and worker are of different releases"
        )


class SharedReceiver(TransportReceiver):
    """Receives buckets in memory that the publisher shares; messages on the socket of `zmq` announce them."""

    def __init__(self, buckets: ZmqReceiver) -> None:
        self._buckets = buckets
        self._left: deque[int] = deque()  # buckets that other ranks read, in the order in which they came

    @abstractmethod
    def take(self, incoming: IncomingUpdate, index: int, check: int) -> bool:
        """Copy one bucket; false if `complete` says when it is copied and verified."""

    def leave(self, incoming: IncomingUpdate, index: int, check: int) -> bool:
        """Leave a bucket to the rank that keeps it, if that reads the publisher's memory."""
        left = incoming.destination.leave_to_owner(index, *incoming.manifest.bucket_span(index), check)
        if left:
            self._left.append(index)
        return left

    def complete(self, incoming: IncomingUpdate, taken: Sequence[int]) -> int:
        """How many of the buckets that were taken, from the first one on, are copied and verified."""
        unread = incoming.destination.unread()
        while len(self._left) > unread:
            start, end = incoming.manifest.bucket_span(self._left.popleft())
            incoming.note(end - start)
        return taken.index(self._left[0]) if self._left else len(taken)

    def advance(self, incoming: IncomingUpdate | None) -> bool:
        return incoming is not None and self._buckets.advance(incoming)

    def finish(self, incoming: IncomingUpdate, options: Mapping[str, Any]) -> bool:
        return self._buckets.finish(incoming, options)

    def drop(self, incoming: IncomingUpdate, error: RolloutError | None) -> None:
        self._left.clear()
        self._buckets.drop(incoming, error)
        self.close()


# --- trainer ---------------------------------------------------------------------------------------------------------


class ZmqSender(TransportSender):
    """Sends buckets to any number of workers, at the pace of the slowest one that is alive."""

    name = "zmq"
    why = "it works between any two hosts"

    def __init__(self, curve: ClientCurve | None = None) -> None:
        self._curve = curve
        self._buffers: list[torch.Tensor] = []

    def prepare(self, payload: Payload) -> dict[str, Any]:
        """No options: the worker's grant names the endpoint."""
        return {}

    def transfer(self, payload: Payload, recipients: Sequence[Recipient], rules: TransferRules) -> dict[str, Any]:
        """Send every bucket to every recipient, at the pace of the slowest one that is alive."""
        options: dict[str, Any] = {}
        left = True
        try:
            pack = pack_on_host(payload, lambda slot: self._buffer(slot, payload), travels=True)
            options, left = send_buckets(payload, recipients, rules, self._curve, pack, DEFAULT_WINDOW)
        finally:
            if left:
                self._buffers = []  # a closed socket may still be reading them
        return options

    def close(self) -> None:
        self._buffers = []

    def _buffer(self, slot: int, payload: Payload) -> torch.Tensor:
        nbytes = min(payload.manifest.bucket_bytes, payload.manifest.total_bytes)
        fits = len(self._buffers) > slot and self._buffers[slot].numel() >= nbytes
        if not fits or (payload.on_gpu and not self._buffers[slot].is_pinned()):
            fresh = torch.empty(nbytes, dtype=torch.uint8, pin_memory=payload.on_gpu)
            self._buffers[slot : slot + 1] = [fresh]
        return self._buffers[slot]
