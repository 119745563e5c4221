"""A publisher's control messages to workers: the connection to each, and asking several at once.

request socket    status --> weights_endpoint      once, and again after the connection to a worker was lost
weight socket     begin, commit, abort, status     the worker's receiver answers by itself
"""

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zmq

from trainer_bridge.transports.bucket_link import reachable
from trainer_bridge.wire.codec import PROTOCOL_VERSION, REPLY_LIMITS, WireError, decode, encode, split_envelope
from trainer_bridge.wire.errors import (
    BadRequest,
    ConnectionLost,
    ProtocolError,
    RolloutError,
    RolloutTimeout,
    from_reply,
)
from trainer_bridge.wire.keys import ClientCurve
from trainer_bridge.wire.worker_connection import WorkerConnection

_HEARTBEAT_S = 5.0
_MOST_MESSAGES = 64  # taken at a time
_POLL_MS = 50  # how often a waiting publisher looks whether it is closing
_LOOK_UP_AGAIN_S = 5.0  # time without a weight socket before a new look-up: a restarted worker may have another one


class ControlLink:
    """The connection to one worker's weight socket, found through its request socket. Belongs to one thread.

    `endpoint` is the request socket. A worker's last reply before it ends still arrives: see `WorkerConnection`.
    `refused_s`: messages fail once an endpoint has refused every connection for so long; None: never.
    """

    def __init__(
        self, endpoint: str, client: str, curve: ClientCurve | None = None, refused_s: float | None = None
    ) -> None:
        self.endpoint = endpoint
        self._refused_s = refused_s
        self._client = client
        self._curve = curve
        self._found = False  # the connection is to the weight socket, else to the request socket
        self._question = ""  # id of the `status` message that asks for the weight socket
        self._since_s = time.monotonic()
        self._connection = self._open(endpoint)
        self._arrived: list[list[bytes]] = []

    @property
    def sockets(self) -> tuple[zmq.Socket, zmq.Socket]:
        """Readable when there may be something new."""
        return self._connection.socket, self._connection.monitor

    @property
    def trouble(self) -> str:
        """More about the missing connection, for errors."""
        if self._found:
            return f", to its weight socket {self._connection.endpoint}"
        return f": {self._connection.refused}" if self._connection.refused else self._connection.hint

    @property
    def weight_socket(self) -> str:
        """The endpoint of the weight socket, once a message could be sent."""
        return self._connection.endpoint

    def send(self, fields: Mapping[str, Any]) -> str | None:
        """Send a message; its id, or None while there is no connection to the weight socket. Raises `RolloutError`."""
        asking = bool(self._question)
        if self.lost():  # a loss before anything was sent for this message is not one of this message
            self._question = ""
            if asking:
                raise ConnectionLost(f"the connection to {self.endpoint} was lost")
            return None
        if not (self._found or self._find()) or not self._connection.can_send:
            return None
        return self._send("weights", fields)

    def send_unanswered(self, fields: Mapping[str, Any]) -> None:
        """Send a message and ignore its answer. Without a connection to the weight socket nothing is sent."""
        if self._found and self._connection.can_send:
            self._send("weights", fields)

    def lost(self) -> bool:
        """True if the connection went down since the last look. Look first, then receive what came before."""
        messages, lost = self._connection.drain(_MOST_MESSAGES)
        self._arrived += messages
        waited_s = time.monotonic() - self._since_s
        if self._connection.connected:
            self._since_s = time.monotonic()
        elif self._found and (lost or waited_s > _LOOK_UP_AGAIN_S):
            self._move_to(self.endpoint, found=False)  # a worker that returns may have another weight socket
        elif lost:
            self._connection.reopen()
        return lost

    def check_refused(self, tried_s: float) -> None:
        """Raise `ConnectionLost` if the endpoint has refused connections for too long, and again since `tried_s`.

        Before that a worker may be back, and ZeroMQ not have tried again: it does about every second.
        """
        since_s = self._connection.refusing_since_s
        if self._refused_s is None or since_s is None or self._connection.refused_at_s <= tried_s:
            return
        if time.monotonic() - since_s < self._refused_s:
            return
        raise ConnectionLost(
            f"{self.endpoint} cannot be reached: it has refused connections for {self._refused_s:g} s, so no worker "
            "listens there; set begin_s to wait for a worker that is starting"
        )

    def receive(self, message_id: str) -> dict[str, Any] | None:
        """The reply to a message, if it is there. Replies to older messages are passed over."""
        while self._arrived:
            try:
                header = decode(split_envelope(self._arrived.pop(0))[1], REPLY_LIMITS)
            except WireError as error:
                raise ProtocolError(f"{self.endpoint} sent a reply that cannot be read: {error}") from error
            if header.get("id") == message_id:
                return header
        return None

    def close(self) -> None:
        self._connection.close()

    def _find(self) -> bool:
        """Ask the request socket for the weight socket; true once the connection is to that one."""
        if not self._question:
            if self._connection.can_send:
                self._question = self._send("status", {})
            return False
        header = self.receive(self._question)
        if header is None:
            return False
        self._question = ""
        if header.get("op") != "status":
            raise _problem(header, "status", self.endpoint)
        address = header.get("weights_endpoint")
        if address is None:
            raise BadRequest(f"the worker at {self.endpoint} takes no weights")
        if type(address) is not str:
            raise ProtocolError(f"status: {self.endpoint} answered with the weights_endpoint {address!r:.200}")
        self._move_to(reachable(address, self._connection.numeric_endpoint()), found=True)
        return True

    def _send(self, op: str, fields: Mapping[str, Any]) -> str:
        message_id = f"w-{secrets.token_hex(8)}"
        header = {"v": PROTOCOL_VERSION, "op": op, "id": message_id, "client": self._client, **fields}
        self._connection.send(message_id, encode(header))
        return message_id

    def _move_to(self, address: str, found: bool) -> None:
        try:
            connection = self._open(address)
        except ValueError as error:
            raise ProtocolError(f"status: {self.endpoint} named no valid weights_endpoint: {error}") from error
        self._connection.close()
        self._connection, self._found, self._question = connection, found, ""
        self._since_s = time.monotonic()

    def _open(self, address: str) -> WorkerConnection:
        return WorkerConnection(zmq.Context.instance(), address, self._curve, _HEARTBEAT_S)


class _Question:
    """One message and its answer."""

    def __init__(self, link: ControlLink, fields: Mapping[str, Any]) -> None:
        self.link, self.fields = link, fields
        self._tried_s: float | None = None  # time of the first attempt
        self.message_id: str | None = None
        self.answer: dict[str, Any] | RolloutError | None = None

    def step(self, phase: str) -> None:
        try:
            if self.message_id is None:
                self.message_id = self.link.send(self.fields)
            if self.message_id is None:
                self._tried_s = self._tried_s or time.monotonic()
                self.link.check_refused(self._tried_s)
            else:
                lost = self.link.lost()
                header = self.link.receive(self.message_id)
                if header is not None:
                    self.answer = header if header.get("op") == "ok" else _problem(header, phase, self.link.endpoint)
                elif lost:  # a worker that returns does not know the question
                    self.answer = ConnectionLost(f"{phase}: the connection to {self.link.endpoint} was lost")
        except RolloutError as error:
            self.answer = type(error)(f"{phase}: {error}", code=error.code, field=error.field)


def ask_all(
    questions: Sequence[tuple[ControlLink, Mapping[str, Any]]],
    phase: str,
    timeout_s: float,
    closing: threading.Event,
    grace_s: float = 0.0,
    meanwhile: Callable[[Sequence[ControlLink]], None] | None = None,
) -> list[dict[str, Any] | RolloutError]:
    """Send each worker its message; return each one's `ok` reply, or the error, which names `phase`.

    Once `closing` is set nothing more is sent, and answers are waited for at most `grace_s` seconds. `meanwhile` is
    called several times a second with the links whose worker has the message and has not answered.
    """
    asks = [_Question(link, fields) for link, fields in questions]
    deadline_s = time.monotonic() + timeout_s
    closed = False
    while waiting := [ask for ask in asks if ask.answer is None]:
        poller = zmq.Poller()
        for ask in waiting:
            ask.step(phase)
            for socket in ask.link.sockets:
                poller.register(socket, zmq.POLLIN)
        now_s = time.monotonic()
        if closing.is_set() and not closed:
            closed, deadline_s = True, min(deadline_s, now_s + grace_s)
        for ask in waiting:
            if ask.answer is None and (now_s >= deadline_s or (closed and ask.message_id is None)):
                ask.answer = _no_answer(ask, phase, timeout_s, closing)
        if all(ask.answer is None for ask in waiting):
            if meanwhile is not None:
                meanwhile([ask.link for ask in waiting if ask.message_id is not None])
            poller.poll(_POLL_MS)
    return [ask.answer for ask in asks if ask.answer is not None]


def _problem(header: dict[str, Any], phase: str, endpoint: str) -> RolloutError:
    if header.get("op") != "error":
        return ProtocolError(f"{phase}: {endpoint} answered with {header.get('op')!r:.40}, not ok or error")
    message = header.get("message", "the worker gave no reason")
    return from_reply({**header, "message": f"{phase}: {endpoint}: {message}"})


def _no_answer(ask: _Question, phase: str, timeout_s: float, closing: threading.Event) -> RolloutError:
    endpoint = ask.link.endpoint
    if closing.is_set():
        return RolloutError(f"{phase}: the publisher was closed before {endpoint} answered", code="closed")
    if ask.message_id is None:
        return ConnectionLost(
            f"{phase}: no connection to {endpoint} within {timeout_s:g} s{ask.link.trouble}; see whether the worker "
            "lives, and whether its keys (CURVE) and this publisher's match"
        )
    where = "`waits_for` in its status, and its log" if phase == "commit" else "the worker's log"
    return RolloutTimeout(f"{phase}: no answer from {endpoint} within {timeout_s:g} s; see {where}")
