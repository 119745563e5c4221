"""The transport `zmq`: buckets of the packed stream over a ZeroMQ socket of their own; works between any two hosts.

    publisher, DEALER, connects                       worker, ROUTER, binds
    [WBK1 token index crc32, payload]   ---------->   crc32 checked, copied to its place in the stream
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
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
import zmq

from trainer_bridge.access import OPEN_ON_LOOPBACK, Access
from trainer_bridge.errors import (
    BadRequest,
    ConnectionLost,
    ProtocolError,
    RolloutError,
    RolloutTimeout,
    WeightsRejected,
)
from trainer_bridge.keys import ClientCurve
from trainer_bridge.manifest import MAX_BUCKET_BYTES, checksum, checksums_digest
from trainer_bridge.payload import Payload
from trainer_bridge.transports import Incoming, Peer, TransferRules, TransportReceiver, TransportSender

DEFAULT_WINDOW = 4

_BUCKET = struct.Struct("<4s16sII")  # magic, token, index, crc32
_ACK = struct.Struct("<4s16sI")  # magic, token, index
_REFUSAL = struct.Struct("<4s16s")  # magic, token; the reason follows as UTF-8
_BUCKET_MAGIC, _ACK_MAGIC, _REFUSAL_MAGIC = b"WBK1", b"WAK1", b"WNO1"
_MAX_REFUSAL_BYTES = 1 << 12
_POLL_MS = 50  # how often a waiting sender looks whether its publisher is closing

_log = logging.getLogger(__name__)


# --- worker ----------------------------------------------------------------------------------------------------------


class ZmqReceiver(TransportReceiver):
    """Takes buckets. `endpoint` is where it listens; `ignored_messages` counts what belonged to no update."""

    name = "zmq"

    def __init__(
        self, bind: str, max_update_bytes: int, access: Access = OPEN_ON_LOOPBACK, window: int = DEFAULT_WINDOW
    ) -> None:
        access.check_bind(bind, "weights.bind")
        self._window = window
        self.ignored_messages = 0
        self._checksums: list[int | None] = []
        self._sender: bytes | None = None
        self._context = zmq.Context()  # of its own: the list of allowed clients is one for a context
        self._socket: zmq.Socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RCVHWM, window + 4)
        # libzmq drops a connection that announces a larger frame before it allocates memory for it.
        self._socket.set(zmq.MAXMSGSIZE, min(MAX_BUCKET_BYTES, max_update_bytes) + _BUCKET.size)
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
        self._checksums = [None] * incoming.manifest.bucket_count
        self._sender = None
        return {"endpoint": self.endpoint, "window": self._window}

    def advance(self, incoming: Incoming | None) -> bool:
        """Take one message, if there is one."""
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        sender, parts = frames[0].bytes, [frame.buffer for frame in frames[1:]]
        if len(parts) != 2 or len(parts[0]) != _BUCKET.size or bytes(parts[0][:4]) != _BUCKET_MAGIC:
            self._ignore("is not a bucket")
            return True
        _, token, index, crc = _BUCKET.unpack(parts[0])
        if incoming is None or token != incoming.token:
            self._ignore("is of no update that is being received")
            self._refuse(sender, token, "this update is not being received (any more); publish again")
            return True
        self._sender = sender
        self._take(incoming, index, crc, parts[1])
        self._send(sender, _ACK.pack(_ACK_MAGIC, token, index))
        return True

    def finish(self, incoming: Incoming, options: Mapping[str, Any]) -> bool:
        """Verify that every bucket is here, and that they are the ones that were sent."""
        missing = [i for i, crc in enumerate(self._checksums) if crc is None]
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
        self._checksums, self._sender = [], None

    def close(self) -> None:
        """Close the data socket."""
        self._socket.close(0)
        self._context.term()

    def _take(self, incoming: Incoming, index: int, crc: int, payload: memoryview) -> None:
        manifest = incoming.manifest
        if index >= manifest.bucket_count:
            raise WeightsRejected(f"bucket {index} was sent, but the manifest has {manifest.bucket_count}")
        start, end = manifest.bucket_span(index)
        if len(payload) != end - start:
            raise WeightsRejected(f"bucket {index} has {len(payload)} bytes; the manifest says {end - start}")
        actual = checksum(payload)
        if actual != crc:
            raise WeightsRejected(f"bucket {index} arrived damaged: checksum {actual:08x}, sent as {crc:08x}")
        known = self._checksums[index]
        if known is not None and known != crc:
            raise WeightsRejected(f"bucket {index} was sent twice with different content")
        if known is None:
            np.copyto(incoming.host[start:end], np.frombuffer(payload, np.uint8))
            self._checksums[index] = crc
            incoming.arrived(end - start)

    def _digest(self) -> str:
        return checksums_digest([crc for crc in self._checksums if crc is not None])

    def _ignore(self, why: str) -> None:
        self.ignored_messages += 1
        if self.ignored_messages.bit_count() == 1:  # 1, 2, 4, 8, ...: a flood of messages is not one of log lines
            _log.warning("a message on the weight socket %s; ignored (%d so far)", why, self.ignored_messages)

    def _refuse(self, to: bytes, token: bytes, reason: str) -> None:
        self._send(to, _REFUSAL.pack(_REFUSAL_MAGIC, token) + reason.encode()[:_MAX_REFUSAL_BYTES])

    def _send(self, to: bytes, message: bytes) -> None:
        try:
            self._socket.send_multipart([to, message], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # the sender is gone or does not read: its deadline, not ours
            _log.warning("cannot answer on the weight socket: %s", error)


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
        """Pack each bucket once and send it to every peer; return when all have acknowledged all."""
        links = [_Link(peer, rules, self._curve) for peer in peers]
        checksums = []
        window = min((link.window for link in _alive(links)), default=DEFAULT_WINDOW)
        try:
            for index in range(payload.manifest.bucket_count):
                _wait(links, index - window + 1, rules)
                if rules.closing.is_set() or not _alive(links):
                    return {}
                buffer = self._buffer(index % window, payload)
                data = memoryview(buffer.numpy())[: payload.pack_bucket(index, buffer)]
                checksums.append(checksum(data))
                for link in _alive(links):
                    link.send(index, checksums[-1], data)
            payload.release()
            _wait(links, payload.manifest.bucket_count, rules)
        finally:
            for link in links:
                link.close()
            if any(link.peer.error for link in links) or rules.closing.is_set():
                self._buffers = []  # a closed socket may still be reading them
        return {"checksums": checksums_digest(checksums)}

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


class _Link:
    """The data connection to one worker."""

    def __init__(self, peer: Peer, rules: TransferRules, curve: ClientCurve | None) -> None:
        self.peer = peer
        self.rules = rules
        self.acknowledged = 0
        self.last_progress_s = time.monotonic()
        self.window, address = _read_grant(peer)
        self.socket: zmq.Socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.IMMEDIATE, 1)  # queue nothing for a worker that is not there
        self.socket.set(zmq.SNDHWM, 2 * self.window)
        self.socket.set(zmq.MAXMSGSIZE, _MAX_REFUSAL_BYTES + _REFUSAL.size)
        if "[" in address:
            self.socket.set(zmq.IPV6, 1)
        if curve is not None:
            curve.apply(self.socket)
        if peer.error is None:
            try:
                self.socket.connect(address)
            except zmq.ZMQError as error:
                self.fail(ConnectionLost(f"transfer: cannot connect to {peer.endpoint} at {address!r:.200}: {error}"))

    @property
    def alive(self) -> bool:
        return self.peer.error is None

    def send(self, index: int, crc: int, data: memoryview) -> None:
        """Send a bucket; `data` must stay as it is until the worker has acknowledged it."""
        header = _BUCKET.pack(_BUCKET_MAGIC, self.peer.token, index, crc)
        self.last_progress_s = time.monotonic()
        while self.alive and not self.rules.closing.is_set():
            try:
                self.socket.send_multipart([header, data], zmq.NOBLOCK, copy=False)
                return
            except zmq.Again:
                self.socket.poll(_POLL_MS, zmq.POLLOUT)
                self.check_stall("no connection")

    def read(self) -> None:
        """Take every answer that is there."""
        while self.alive:
            try:
                message = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_answer(message)

    def _on_answer(self, message: bytes) -> None:
        magic, token = message[:4], message[4:20]
        if magic == _REFUSAL_MAGIC and token == self.peer.token:
            reason = message[_REFUSAL.size :].decode(errors="replace")
            self.fail(WeightsRejected(f"transfer: {self.peer.endpoint} refused the update: {reason}"))
        elif len(message) == _ACK.size and magic == _ACK_MAGIC and token == self.peer.token:
            if _ACK.unpack(message)[2] != self.acknowledged:
                self.fail(ProtocolError(f"transfer: {self.peer.endpoint} acknowledged buckets out of order"))
                return
            self.acknowledged += 1
            self.last_progress_s = time.monotonic()
        else:
            self.fail(ProtocolError(f"transfer: {self.peer.endpoint} sent an answer that is none"))

    def check_stall(self, what: str) -> None:
        waited_s = time.monotonic() - self.last_progress_s
        if waited_s > self.rules.stall_s:
            self.fail(
                RolloutTimeout(
                    f"transfer: {what} from {self.peer.endpoint} for {waited_s:.1f} s, after {self.acknowledged} "
                    "acknowledged buckets; see whether the worker lives, or raise stall_s"
                )
            )

    def fail(self, error: RolloutError) -> None:
        self.peer.fail(error)

    def close(self) -> None:
        self.socket.close(0)


def _alive(links: Sequence[_Link]) -> list[_Link]:
    return [link for link in links if link.alive]


def _wait(links: Sequence[_Link], buckets: int, rules: TransferRules) -> None:
    """Read answers until every link that is alive has acknowledged `buckets` of them."""
    while not rules.closing.is_set():
        for link in links:
            link.read()
        waiting = [link for link in _alive(links) if link.acknowledged < buckets]
        if not waiting:
            return
        poller = zmq.Poller()
        for link in waiting:
            poller.register(link.socket, zmq.POLLIN)
        if not poller.poll(_POLL_MS):
            for link in waiting:
                link.check_stall("no acknowledgement")


def _read_grant(peer: Peer) -> tuple[int, str]:
    window, address = peer.grant.get("window"), peer.grant.get("endpoint")
    if type(window) is not int or not 1 <= window <= 64 or type(address) is not str:
        peer.fail(ProtocolError(f"begin: {peer.endpoint} granted {peer.grant!r:.200}, which is no zmq grant"))
        return 1, ""
    return window, reachable(address, peer.endpoint)


def reachable(address: str, endpoint: str) -> str:
    """`address` with the host of `endpoint` where it names no host: a worker bound to all interfaces knows none."""
    at, via = urlsplit(address), urlsplit(endpoint)
    if at.scheme == "tcp" and at.hostname in ("0.0.0.0", "::", "*") and via.scheme == "tcp":
        host = f"[{via.hostname}]" if ":" in (via.hostname or "") else via.hostname
        return f"tcp://{host}:{at.port}"
    return address
