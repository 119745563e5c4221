"""The control messages of the weight bridge: which fields each action has, and asking several workers at once.

    {op: weights, action: begin,  version, manifest, transport, options [, adapter]}  -> {op: ok, version, token, grant}
    {op: weights, action: commit, token, options}                         -> {op: ok, version, pause_s, bytes, phases}
    {op: weights, action: abort,  token}                                  -> {op: ok}
    {op: weights, action: status}                                         -> {op: ok, version, state, ...}

`commit` is answered once the update is applied. They pass through the worker's request socket, tensors never do.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from trainer_bridge.client.connection import Connection
from trainer_bridge.client.keys import ClientCurve
from trainer_bridge.wire.codec import PROTOCOL_VERSION, REPLY_LIMITS, WireError, decode, encode, split_envelope
from trainer_bridge.wire.errors import (
    BadRequest,
    ConnectionLost,
    ProtocolError,
    RolloutError,
    RolloutTimeout,
    from_reply,
)

_ENVELOPE = {"v", "op", "id", "client", "action"}
_FIELDS: dict[str, set[str]] = {
    "begin": {"version", "manifest", "transport", "options"},
    "commit": {"token", "options"},
    "abort": {"token"},
    "status": set(),
}
_HEARTBEAT_S = 5.0
_MOST_MESSAGES = 64  # that are taken at a time
#: Fields that need not be there.
_OPTIONAL: dict[str, set[str]] = {"begin": {"adapter"}}
_POLL_MS = 50  # how often a waiting publisher looks whether it is closing


# --- worker ----------------------------------------------------------------------------------------------------------


Reply = Callable[[dict[str, Any]], None]


@dataclass
class Commit:
    """A publisher that waits for its update to apply."""

    token: bytes
    options: dict[str, Any]
    reply: Reply
    transport: str
    phases: dict[str, float]  # seconds
    since_s: float  # when this phase began, on the monotonic clock


@dataclass(frozen=True, slots=True)
class Applied:
    """The update that is in use, and how it came to be."""

    version: int
    transport: str
    nbytes: int
    pause_s: float  # for which generation stood still
    phases: Mapping[str, float]  # seconds: receive, verify, wait, apply
    at_s: float = field(default_factory=time.time)  # Unix time

    def reply(self) -> dict[str, Any]:
        """What the publisher gets for its `commit`."""
        return {"version": self.version, "pause_s": self.pause_s, "bytes": self.nbytes, "phases": dict(self.phases)}

    def summary(self) -> dict[str, Any]:
        """What a worker's `status` says of it."""
        return {
            "version": self.version,
            "transport": self.transport,
            "at_s": self.at_s,
            "age_s": max(0.0, time.time() - self.at_s),
            "bytes": self.nbytes,
            "phases_ms": {name: 1e3 * seconds for name, seconds in self.phases.items()},
        }


def check_fields(header: Mapping[str, Any]) -> str:
    """The action of a `weights` message. Raises `BadRequest`, naming the field, when fields are unknown or missing."""
    action = header.get("action")
    if type(action) is not str or action not in _FIELDS:
        raise BadRequest(f"action must be one of {', '.join(_FIELDS)}", field="action")
    for name in sorted(header.keys() - _ENVELOPE - _FIELDS[action] - _OPTIONAL.get(action, set())):
        raise BadRequest(f"{action} takes no field {name!r:.80}", field=name[:80])
    for name in sorted(_FIELDS[action] - header.keys()):
        raise BadRequest(f"{action} needs the field {name}", field=name)
    if "options" in _FIELDS[action] and type(header["options"]) is not dict:
        raise BadRequest("options must be a map", field="options")
    return action


def read_token(value: Any) -> bytes:
    """The bytes of a token. Raises `BadRequest`."""
    try:
        return bytes.fromhex(value)
    except (TypeError, ValueError):
        raise BadRequest("token must be the one that begin was answered with", field="token") from None


def error_reply(error: RolloutError) -> dict[str, Any]:
    """The reply that `trainer_bridge.wire.errors.from_reply` turns into `error` again."""
    header: dict[str, Any] = {"op": "error", "code": error.code, "message": str(error)}
    return header if error.field is None else {**header, "field": error.field}


# --- trainer ---------------------------------------------------------------------------------------------------------


class ControlLink:
    """The connection to one worker's request socket. Belongs to one thread.

    What a worker sends last, before it ends, still arrives: see `Connection`.
    """

    def __init__(self, endpoint: str, client: str, curve: ClientCurve | None = None) -> None:
        self.endpoint = endpoint
        self._client = client
        self._connection = Connection(zmq.Context.instance(), endpoint, curve, _HEARTBEAT_S)
        self._arrived: list[list[bytes]] = []

    @property
    def sockets(self) -> tuple[zmq.Socket, zmq.Socket]:
        """Readable when there may be something new."""
        return self._connection.socket, self._connection.monitor

    def send(self, fields: Mapping[str, Any]) -> str | None:
        """Send a message; its id, or None while there is no connection."""
        if self.lost() or not self._connection.can_send:  # not a loss of this message
            return None
        message_id = f"w-{secrets.token_hex(8)}"
        header = {"v": PROTOCOL_VERSION, "op": "weights", "id": message_id, "client": self._client, **fields}
        self._connection.send(message_id, encode(header))
        return message_id

    def lost(self) -> bool:
        """True if the connection went down since the last look. Look first, then receive what came before."""
        messages, lost = self._connection.drain(_MOST_MESSAGES)
        self._arrived += messages
        if lost:
            self._connection.reopen()  # a worker that comes back knows nothing of what was sent
        return lost

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
        """Close the connection."""
        self._connection.close()


class _Ask:
    """One question that is on its way."""

    def __init__(self, link: ControlLink, fields: Mapping[str, Any]) -> None:
        self.link, self.fields = link, fields
        self.message_id: str | None = None
        self.answer: dict[str, Any] | RolloutError | None = None

    def step(self, phase: str) -> None:
        try:
            if self.message_id is None:
                self.message_id = self.link.send(self.fields)
            if self.message_id is not None:
                lost = self.link.lost()
                header = self.link.receive(self.message_id)
                if header is not None:
                    self.answer = header if header.get("op") == "ok" else _problem(header, phase, self.link.endpoint)
                elif lost:  # a worker that comes back knows nothing of the question
                    self.answer = ConnectionLost(f"{phase}: the connection to {self.link.endpoint} was lost")
        except RolloutError as error:
            self.answer = error


def ask_all(
    questions: Sequence[tuple[ControlLink, Mapping[str, Any]]],
    phase: str,
    timeout_s: float,
    closing: threading.Event,
    grace_s: float = 0.0,
) -> list[dict[str, Any] | RolloutError]:
    """Send each worker its message; each one's `ok` reply, or the error. `phase` is named in errors.

    Once `closing` is set nothing more is sent, and answers to what was sent are waited for `grace_s` seconds at most.
    """
    asks = [_Ask(link, fields) for link, fields in questions]
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
            poller.poll(_POLL_MS)
    return [ask.answer for ask in asks if ask.answer is not None]


def _problem(header: dict[str, Any], phase: str, endpoint: str) -> RolloutError:
    if header.get("op") != "error":
        return ProtocolError(f"{phase}: {endpoint} answered with {header.get('op')!r:.40}, not ok or error")
    message = header.get("message", "the worker gave no reason")
    return from_reply({**header, "message": f"{phase}: {endpoint}: {message}"})


def _no_answer(ask: _Ask, phase: str, timeout_s: float, closing: threading.Event) -> RolloutError:
    endpoint = ask.link.endpoint
    if closing.is_set():
        return RolloutError(f"{phase}: the publisher was closed before {endpoint} answered", code="closed")
    if ask.message_id is None:
        return ConnectionLost(
            f"{phase}: no connection to {endpoint} within {timeout_s:g} s; see whether the worker lives, and whether "
            "its keys (CURVE) and this publisher's match"
        )
    return RolloutTimeout(f"{phase}: no answer from {endpoint} within {timeout_s:g} s; see the worker's log")
