"""The trainer's end of a data connection: buckets announced, acknowledged or refused.

`zmq_stream` shows the messages; `shm` sends the same ones without the bytes of the buckets.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import torch
import zmq

from trainer_bridge.transports.base import Recipient, TransferRules
from trainer_bridge.transports.payload import Payload
from trainer_bridge.wire.address import host_port
from trainer_bridge.wire.errors import ConnectionLost, ProtocolError, RolloutTimeout, WeightsRejected
from trainer_bridge.wire.keys import ClientCurve
from trainer_bridge.wire.manifest import checksum, checksums_digest
from trainer_bridge.wire.worker_connection import socket_events

BUCKET = struct.Struct("<4s16sII")  # magic, token, index, checksum
ACK = struct.Struct("<4s16sI")  # magic, token, index
REFUSAL = struct.Struct("<4s16s")  # magic, token; the reason follows as UTF-8
BUCKET_MAGIC, SHARED_MAGIC = b"WBK1", b"WSB1"  # the bytes follow as a second frame; they lie in shared memory
ACK_MAGIC, REFUSAL_MAGIC = b"WAK1", b"WNO1"
MAX_REFUSAL_BYTES = 1 << 12
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
POLL_MS = 50  # how often a waiting sender looks whether its publisher is closing


class Link:
    """The data connection to one worker."""

    def __init__(self, recipient: Recipient, rules: TransferRules, curve: ClientCurve | None) -> None:
        self.recipient = recipient
        self.rules = rules
        self.sent = self.acknowledged = 0
        self.last_progress_s = self.rules.clock()
        self.window, address = read_grant(recipient)
        self.socket: zmq.Socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        # No IMMEDIATE: it would drop received messages with the connection, and a worker's last message is its refusal.
        # At most a window of buckets waits for a reconnection, and a restarted worker refuses their token.
        self.socket.set(zmq.SNDHWM, 0)
        self.socket.set(zmq.MAXMSGSIZE, MAX_REFUSAL_BYTES + REFUSAL.size)
        self.socket.set(zmq.IPV6, "[" in address)
        if curve is not None:
            curve.apply(self.socket)
        self.monitor: zmq.Socket = self.socket.get_monitor_socket(_EVENTS)
        self._connected = False
        if recipient.error is None:
            try:
                self.socket.connect(address)
            except zmq.ZMQError as error:
                self.recipient.fail(
                    ConnectionLost(f"transfer: cannot connect to {recipient.endpoint} at {address!r:.200}: {error}")
                )

    @property
    def alive(self) -> bool:
        """Whether the worker has not failed."""
        return self.recipient.error is None

    def send(self, index: int, check: int, data: memoryview | None) -> None:
        """Send a bucket, or announce one in shared memory (`data` None). The bytes must stay until acknowledged."""
        magic = SHARED_MAGIC if data is None else BUCKET_MAGIC
        frames = [BUCKET.pack(magic, self.recipient.token, index, check)] + ([] if data is None else [data])
        self.last_progress_s = self.rules.clock()
        self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        self.sent += 1

    def read(self) -> None:
        """Read all answers; give the worker up if the connection was lost with unacknowledged buckets.

        The monitor is read first: ZeroMQ reports a loss only after it has delivered all messages from before.
        """
        lost = self._read_monitor()
        while self.alive:
            try:
                message = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._on_answer(message)
        if lost and self.alive and self.acknowledged < self.sent:
            self.recipient.fail(
                ConnectionLost(
                    f"transfer: the connection to {self.recipient.endpoint} was lost after {self.acknowledged} "
                    "acknowledged buckets; check that the worker is running"
                )
            )

    def _read_monitor(self) -> bool:
        lost = False
        for event in socket_events(self.monitor):
            lost |= self._connected  # a failed attempt to connect is no loss
            self._connected = event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        return lost

    def _on_answer(self, message: bytes) -> None:
        magic, token = message[:4], message[4:20]
        if magic == REFUSAL_MAGIC and token == self.recipient.token:
            reason = message[REFUSAL.size :].decode(errors="replace")
            self.recipient.fail(WeightsRejected(f"transfer: {self.recipient.endpoint} refused the update: {reason}"))
        elif len(message) == ACK.size and magic == ACK_MAGIC and token == self.recipient.token:
            if ACK.unpack(message)[2] != self.acknowledged:
                self.recipient.fail(
                    ProtocolError(f"transfer: {self.recipient.endpoint} acknowledged buckets out of order")
                )
                return
            self.acknowledged += 1
            self.last_progress_s = self.rules.clock()
        else:
            self.recipient.fail(ProtocolError(f"transfer: {self.recipient.endpoint} sent an unknown message"))

    def check_stall(self) -> None:
        """Give the worker up if nothing has moved for too long."""
        waited_s = self.rules.clock() - self.last_progress_s
        if waited_s > self.rules.stall_s:
            self.recipient.fail(
                RolloutTimeout(
                    f"transfer: no acknowledgement from {self.recipient.endpoint} for {waited_s:.1f} s, after "
                    f"{self.acknowledged} acknowledged buckets; check that the worker is running, or raise stall_s"
                )
            )

    def close(self) -> None:
        """Close the connection. ZeroMQ may still read buckets that are not acknowledged."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)


def alive(links: Sequence[Link]) -> list[Link]:
    """The links whose workers still take part."""
    return [link for link in links if link.alive]


def wait_acknowledged(links: Sequence[Link], buckets: int, rules: TransferRules) -> None:
    """Read answers until every link that is alive has acknowledged `buckets` of them."""
    while not rules.closing.is_set():
        for link in links:
            link.read()
        waiting = [link for link in alive(links) if link.acknowledged < buckets]
        if not waiting:
            return
        poller = zmq.Poller()
        for link in waiting:
            poller.register(link.socket, zmq.POLLIN)
            poller.register(link.monitor, zmq.POLLIN)
        if not poller.poll(POLL_MS):
            for link in waiting:
                link.check_stall()


def read_grant(recipient: Recipient) -> tuple[int, str]:
    """The window and the address that a worker granted; the recipient fails if the grant has none."""
    window, address = recipient.grant.get("window"), recipient.grant.get("endpoint")
    if type(window) is not int or not 1 <= window <= 64 or type(address) is not str:
        recipient.fail(
            ProtocolError(
                f"begin: {recipient.endpoint} granted {recipient.grant!r:.200}, without a valid window and endpoint"
            )
        )
        return 1, ""
    return window, reachable(address, recipient.weight_socket or recipient.endpoint)


def reachable(address: str, endpoint: str) -> str:
    """`address`, with the host of `endpoint` if the worker is bound to all interfaces and so names no host."""
    at, via = urlsplit(address), urlsplit(endpoint)
    if at.scheme == "tcp" and at.hostname in ("0.0.0.0", "::", "*") and via.scheme == "tcp":
        return f"tcp://{host_port(via.hostname or '', at.port or 0)}"
    return address


#: Packs buckets into a ring of slots; returns each bucket's checksum, and its bytes if they are sent.
Pack = Callable[[range, int], list[tuple[int, memoryview | None]]]


def pack_on_host(payload: Payload, slot: Callable[[int], torch.Tensor], travels: bool) -> Pack:
    """Pack into host memory. `slot(i)` is the memory of slot `i`; `travels` says whether the bytes are sent."""

    def pack(indices: range, slots: int) -> list[tuple[int, memoryview | None]]:
        packed = []
        for index in indices:
            buffer = slot(index % slots)
            data = memoryview(buffer[: payload.pack_bucket(index, buffer)].numpy())  # type: ignore[arg-type]
            packed.append((checksum(data), data if travels else None))
        return packed

    return pack


def send_buckets(
    payload: Payload,
    recipients: Sequence[Recipient],
    rules: TransferRules,
    curve: ClientCurve | None,
    pack: Pack,
    slots: int,
    together: int = 1,
    link_type: type[Link] = Link,
) -> tuple[dict[str, Any], bool]:
    """Pack each bucket once and announce it to every recipient; return when all buckets are acknowledged.

    A slot is reused when all recipients have acknowledged its bucket. Up to `together` buckets are packed at a time, at
    most half of the slots. Returns the options of `commit`, and whether a worker may still be reading the slots.
    """
    links = [link_type(recipient, rules, curve) for recipient in recipients]
    checksums: list[int] = []
    slots = min([slots, *(link.window for link in alive(links))])
    together = max(1, min(together, slots // 2))
    count = payload.manifest.bucket_count
    try:
        for first in range(0, count, together):
            indices = range(first, min(first + together, count))
            wait_acknowledged(links, indices.stop - slots, rules)
            if rules.closing.is_set() or not alive(links):
                return {}, True
            for index, (check, data) in zip(indices, pack(indices, slots), strict=True):
                checksums.append(check)
                for link in alive(links):
                    link.send(index, check, data)
        payload.read()
        wait_acknowledged(links, count, rules)
    finally:
        for link in links:
            link.close()
    return {"checksums": checksums_digest(checksums)}, rules.closing.is_set() or len(alive(links)) < len(links)
