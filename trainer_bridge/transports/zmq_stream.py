"""The transport `zmq`: buckets of the packed stream over a ZeroMQ socket of their own; works between any two hosts.

    publisher, DEALER, connects                       worker, ROUTER, binds
    [WBK1 token index check, payload]   ---------->   checked, copied to its place in the stream
                                        <----------   [WAK1 token index]             bucket is in place
                                        <----------   [WNO1 token, reason]           update refused

Invariants:

- At most `window` buckets are on their way to a worker; the next one goes when an acknowledgement comes back. A bucket
  is packed once and sent to all workers, from a buffer that is used again when all of them have acknowledged it.
- Buckets may arrive in any order. A repeated bucket with the same checksum is acknowledged again and not written; with
  another checksum it ends the update.
- A message that is not a bucket of the present update is never written anywhere: it is counted, and answered with a
  refusal when it at least looks like a bucket, so that a publisher that was overtaken learns it at once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import zmq

from rollout.service.access import OPEN_ON_LOOPBACK, Access
from trainer_bridge.client.keys import ClientCurve
from trainer_bridge.publish.payload import Payload
from trainer_bridge.transports import Incoming, Peer, TransferRules, TransportReceiver, TransportSender
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
from trainer_bridge.wire.errors import BadRequest, RolloutError, WeightsRejected
from trainer_bridge.wire.manifest import MAX_BUCKET_BYTES, checksum, checksums_digest

DEFAULT_WINDOW = 4

_log = logging.getLogger(__name__)


class SharedBuckets(Protocol):
    """Brings buckets from shared memory to their place. Raises `RolloutError` for a damaged one."""

    def take(self, incoming: Incoming, index: int, check: int) -> bool:
        """Take one; false if it is in its place, and found whole, only after `settle`."""

    def settle(self, incoming: Incoming) -> None:
        """Wait for all that were begun to be taken."""


# --- worker ----------------------------------------------------------------------------------------------------------


class ZmqReceiver(TransportReceiver):
    """Takes buckets. `endpoint` is where it listens; `ignored_messages` counts what belonged to no update."""

    name = "zmq"
    carries = ("zmq", "shm", "cuda_ipc")

    def __init__(
        self, bind: str, max_update_bytes: int, access: Access = OPEN_ON_LOOPBACK, window: int = DEFAULT_WINDOW
    ) -> None:
        access.check_bind(bind, "weights.bind")
        self._window = window
        self.ignored_messages = 0
        self._checksums: list[int | None] = []
        self._sender: bytes | None = None
        self._shared: SharedBuckets | None = None
        self._unsettled: list[int] = []  # buckets that are not acknowledged yet
        self._context = zmq.Context()  # of its own: the list of allowed clients is one for a context
        self._socket: zmq.Socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RCVHWM, window + 4)
        # libzmq drops a connection that announces a larger frame before it allocates memory for it.
        self._socket.set(zmq.MAXMSGSIZE, min(MAX_BUCKET_BYTES, max_update_bytes) + BUCKET.size)
        self._socket.set(zmq.HEARTBEAT_IVL, 10_000)
        if "[" in bind:
            self._socket.set(zmq.IPV6, 1)
        access.secure(self._context, self._socket)
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"cannot bind the weight transport to {bind}: {error}; set weights.bind") from error
        self.endpoint: str = self._socket.get_string(zmq.LAST_ENDPOINT)

    @property
    def sockets(self) -> Sequence[zmq.Socket]:
        """The data socket."""
        return (self._socket,)

    def begin(self, incoming: Incoming, options: Mapping[str, Any]) -> dict[str, Any]:
        """Expect the buckets of an update; the grant tells where to send them and how many at once."""
        if options:
            raise BadRequest(f"transport zmq takes no options, not {', '.join(sorted(options))}", field="options")
        return self.expect(incoming, None)

    def expect(self, incoming: Incoming, shared: SharedBuckets | None) -> dict[str, Any]:
        """Expect an update's buckets: with their bytes, or in `shared` memory. Returns the grant."""
        self._shared = shared
        self._checksums = [None] * incoming.manifest.bucket_count
        self._sender, self._unsettled = None, []
        return {"endpoint": self.endpoint, "window": self._window}

    def advance(self, incoming: Incoming | None) -> bool:
        """Take one message, or settle what came when there is none."""
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return incoming is not None and self._settle(incoming)
        sender, parts = frames[0].bytes, [frame.buffer for frame in frames[1:]]
        magic = bytes(parts[0][:4]) if parts and len(parts[0]) == BUCKET.size else b""
        if (magic, len(parts)) not in ((BUCKET_MAGIC, 2), (SHARED_MAGIC, 1)):
            self._ignore("is not a bucket", incoming)
            return True
        _, token, index, check = BUCKET.unpack(parts[0])
        if incoming is None or token != incoming.token:
            self._ignore("is of no update that is being received", incoming)
            self._refuse(sender, token, "this update is not being received (any more); publish again")
            return True
        self._sender = sender
        if (magic == SHARED_MAGIC) != (self._shared is not None):
            raise WeightsRejected(f"a bucket came in another way than {incoming.transport}, as begin agreed on")
        if self._take(incoming, index, check, parts[1] if len(parts) == 2 else None):
            self._send(sender, ACK.pack(ACK_MAGIC, token, index))
        else:
            self._unsettled.append(index)
        return True

    def finish(self, incoming: Incoming, options: Mapping[str, Any]) -> bool:
        """Verify that every bucket is here, and that they are the ones that were sent."""
        self._settle(incoming)
        missing = [i for i, check in enumerate(self._checksums) if check is None]
        if missing:
            raise WeightsRejected(
                f"{len(missing)} of {len(self._checksums)} buckets are not here at commit, the first is {missing[0]}; "
                "commit after the last acknowledgement"
            )
        if set(options) != {"checksums"} or options["checksums"] != self._digest():
            raise WeightsRejected("the digest of all buckets' checksums differs from what arrived", field="options")
        return True

    def drop(self, incoming: Incoming, error: RolloutError | None) -> None:
        """Forget the buckets; tell the sender why, when it is known."""
        if error is not None and self._sender is not None:
            self._refuse(self._sender, incoming.token, str(error))
        self._checksums, self._sender, self._shared, self._unsettled = [], None, None, []

    def close(self) -> None:
        """Close the data socket."""
        self._socket.close(0)
        self._context.term()

    def _settle(self, incoming: Incoming) -> bool:
        """Acknowledge what was taken from shared memory, once it is in its place; false if there is nothing."""
        if not self._unsettled:
            return False
        assert self._shared is not None and self._sender is not None
        self._shared.settle(incoming)
        for index in self._unsettled:
            self._send(self._sender, ACK.pack(ACK_MAGIC, incoming.token, index))
        self._unsettled = []
        return True

    def _take(self, incoming: Incoming, index: int, check: int, payload: memoryview | None) -> bool:
        """Take a bucket; false if it is in its place only after `_settle`."""
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
            return index not in self._unsettled
        here = True
        if payload is not None:
            np.copyto(incoming.room(start, end), np.frombuffer(payload, np.uint8))
            incoming.arrived(start, end)
        else:
            assert self._shared is not None
            here = self._shared.take(incoming, index, check)
        self._checksums[index] = check
        return here

    def _digest(self) -> str:
        return checksums_digest([check for check in self._checksums if check is not None])

    def _ignore(self, why: str, incoming: Incoming | None) -> None:
        if incoming is not None:
            self._settle(incoming)  # not only when nothing comes any more
        self.ignored_messages += 1
        if self.ignored_messages.bit_count() == 1:  # 1, 2, 4, 8, ...: a flood of messages is not one of log lines
            _log.warning("a message on the weight socket %s; ignored (%d so far)", why, self.ignored_messages)

    def _refuse(self, to: bytes, token: bytes, reason: str) -> None:
        self._send(to, REFUSAL.pack(REFUSAL_MAGIC, token) + reason.encode()[:MAX_REFUSAL_BYTES])

    def _send(self, to: bytes, message: bytes) -> None:
        try:
            self._socket.send_multipart([to, message], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # the sender is gone or does not read: its deadline, not ours
            _log.warning("cannot answer on the weight socket: %s", error)


def check_bucket(index: int, data: memoryview, check: int) -> None:
    """Raise `WeightsRejected` if a bucket's bytes are not those that were sent."""
    actual = checksum(data)
    if actual != check:
        raise WeightsRejected(
            f"bucket {index} arrived damaged: checksum {actual:08x}, sent as {check:08x}; where no update "
            "gets past its first bucket, publisher and worker are of different releases"
        )


# --- trainer ---------------------------------------------------------------------------------------------------------


class ZmqSender(TransportSender):
    """Sends buckets to any number of workers, at the pace of the slowest one that is alive."""

    name = "zmq"

    def __init__(self, curve: ClientCurve | None = None) -> None:
        self._curve = curve
        self._buffers: list[torch.Tensor] = []

    def prepare(self, payload: Payload) -> dict[str, Any]:
        """Nothing to tell: the worker's grant names the endpoint."""
        return {}

    def transfer(self, payload: Payload, peers: Sequence[Peer], rules: TransferRules) -> dict[str, Any]:
        """Send every bucket to every peer, at the pace of the slowest one that is alive."""
        options: dict[str, Any] = {}
        left = True
        try:
            pack = pack_on_host(payload, lambda slot: self._buffer(slot, payload), travels=True)
            options, left = send_buckets(payload, peers, rules, self._curve, pack, DEFAULT_WINDOW)
        finally:
            if left:
                self._buffers = []  # a closed socket may still be reading them
        return options

    def close(self) -> None:
        """Free the buffers."""
        self._buffers = []

    def _buffer(self, slot: int, payload: Payload) -> torch.Tensor:
        nbytes = min(payload.manifest.bucket_bytes, payload.manifest.total_bytes)
        fits = len(self._buffers) > slot and self._buffers[slot].numel() >= nbytes
        if not fits or (payload.on_gpu and not self._buffers[slot].is_pinned()):
            fresh = torch.empty(nbytes, dtype=torch.uint8, pin_memory=payload.on_gpu)
            self._buffers[slot : slot + 1] = [fresh]
        return self._buffers[slot]
