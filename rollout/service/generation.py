"""The requests in flight, from a `generate` message to its result.

    generate --check--> Preparer --build--> Submit ==> engine ==> Delta... RequestDone --> chunks, result

Invariants:

- A client's id names one request in flight; the same message again is one more waiter for its replies.
- The engine's key is never used twice, so events of a request that was given up cannot reach a later one.
- After a stop string nothing more of its completion is sent, whatever deltas still come.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import SimpleQueue

import numpy as np

from rollout.config import ServiceSettings
from rollout.engine.types import (
    Cancel,
    Command,
    Delta,
    EngineStatus,
    Rejected,
    Request,
    RequestDone,
    RequestKey,
    StopAt,
    Submit,
)
from rollout.service import requests
from rollout.service.completion import Completion
from rollout.service.connections import Connections, Peer
from rollout.service.errors import ServiceError
from rollout.service.intake import Intake, prior_columns
from rollout.service.prepare import Preparer
from rollout.service.replies import chunk_reply, error_reply, ok_reply, result_reply
from rollout.service.stop_strings import StopText
from rollout.service.text import TextCodec
from trainer_bridge.wire import encode

logger = logging.getLogger(__name__)

_UNAVAILABLE = {
    "draining": "this worker is draining; send to another one",
    "asleep": "this worker is asleep; wake it first",
    "stale": "this worker waits for weights; publish them first",
    "stalled": "this worker's engine hangs; send to another one",
}
_RETRY_AFTER_S = 1.0


@dataclass(slots=True, eq=False)
class _Waiter:
    peer: Peer
    streaming: bool


@dataclass(slots=True, eq=False)
class _InFlight:
    """One request, from its message to its last event."""

    key: RequestKey
    name: tuple[str, str]  # (client, id)
    message: requests.Generate
    content: bytes
    arrived_s: float
    waiters: list[_Waiter]
    request: Request | None = None  # None while its prompt is prepared
    cancelled: bool = False
    completions: list[Completion] = field(default_factory=list)


class Generation:
    """Owns the requests in flight. Everything here runs on the service thread."""

    def __init__(
        self,
        settings: ServiceSettings,
        intake: Intake,
        text: TextCodec | None,
        *,
        inbox: SimpleQueue[Command],
        status: Callable[[], EngineStatus],
        connections: Connections,
        preparer: Preparer,
        worker: str,
    ) -> None:
        self.draining = False
        self.reclaimed = 0  # completions of vanished clients that were ended
        self._settings = settings
        self._intake = intake
        self._text = text
        self._inbox = inbox
        self._status = status
        self._connections = connections
        self._preparer = preparer
        self._worker = worker
        self._serial = count()
        self._by_name: dict[tuple[str, str], _InFlight] = {}
        self._by_key: dict[RequestKey, _InFlight] = {}
        self._clients: Counter[str] = Counter()

    # --- from clients ------------------------------------------------------------------------------------------------

    def generate(self, peer: Peer, client: str, message: requests.Generate, content: bytes) -> None:
        """Take a request. `content` tells whether two messages are the same. Raises `ServiceError`."""
        name = (client, message.id)
        known = self._by_name.get(name)
        if known is not None:
            self._join(known, peer, content)
            return
        self._check_capacity(client)
        self._intake.check(message)
        key = (client, f"{message.id}#{next(self._serial)}")
        entry = _InFlight(
            key, name, message, content, time.monotonic(), [_Waiter(peer, streaming=bool(message.stream))]
        )
        self._by_name[name] = self._by_key[key] = entry
        self._clients[client] += 1
        self._preparer.run(
            client,
            partial(self._intake.tokenize, message),
            partial(self._submit, entry),
            slow=not isinstance(message.prompt, np.ndarray),
        )

    def cancel(self, peer: Peer, client: str, message: requests.Cancel) -> None:
        """End a request with what it has. Raises `ServiceError` if there is none."""
        entry = self._by_name.get((client, message.target))
        if entry is None:
            raise ServiceError("not_found", f"no request {message.target!r} is in flight; check the id", "target")
        entry.cancelled = True
        if entry.request is not None:
            self._inbox.put(Cancel(entry.key))
        self._connections.send(peer, encode(ok_reply(peer.id)))

    def connection_gone(self, connection: bytes) -> None:
        """Give up the requests that only this connection waits for."""
        for entry in list(self._by_key.values()):
            entry.waiters = [waiter for waiter in entry.waiters if waiter.peer.connection != connection]
            if not entry.waiters:
                self._give_up(entry)

    def fail_all(self, error: ServiceError) -> None:
        """Answer every request in flight with an error."""
        for entry in list(self._by_key.values()):
            self._fail(entry, error)

    # --- from the engine ---------------------------------------------------------------------------------------------

    def handle(self, event: Delta | RequestDone | Rejected) -> None:
        """Take an event. One of a request that was given up is ignored; one that cannot be handled ends its request."""
        entry = self._by_key.get(event.key)
        if entry is None:
            return
        try:
            self._handle(entry, event)
        # Whatever is wrong with one request must not end the service.
        except Exception:
            logger.exception("request %r failed in the service", entry.name[1])
            if entry.key in self._by_key:
                self._inbox.put(Cancel(entry.key))
                self._fail(entry, _internal())

    def _handle(self, entry: _InFlight, event: Delta | RequestDone | Rejected) -> None:
        match event:
            case Delta():
                self._add(entry, event)
            case RequestDone():
                self._finish(entry, event)
            case Rejected():
                error = ServiceError(event.code, event.message, event.field, event.retry_after_s)
                self._fail(entry, error)

    # --- one request -------------------------------------------------------------------------------------------------

    def _join(self, entry: _InFlight, peer: Peer, content: bytes) -> None:
        if entry.content != content:
            raise ServiceError(
                "duplicate", f"the id {peer.id!r} is taken by another request in flight; use a new one", "id"
            )
        streams = any(waiter.peer.connection == peer.connection for waiter in entry.waiters)
        entry.waiters.append(_Waiter(peer, streaming=bool(entry.message.stream) and not streams))

    def check_alive(self) -> None:
        """Raise `ServiceError` if the engine hangs."""
        if self._status().state == "stalled":
            raise ServiceError("unavailable", _UNAVAILABLE["stalled"])

    def _check_capacity(self, client: str) -> None:
        self.check_alive()
        state = "draining" if self.draining else self._status().state
        if state in _UNAVAILABLE:
            raise ServiceError("unavailable", _UNAVAILABLE[state])
        if client not in self._clients and len(self._clients) >= self._settings.max_clients:
            raise ServiceError(
                "overloaded", f"{len(self._clients)} clients are served; come back later", None, _RETRY_AFTER_S
            )
        if self._preparer.waiting >= self._settings.max_queue:
            raise ServiceError("overloaded", "the queue is full; come back later", None, _RETRY_AFTER_S)

    def _submit(self, entry: _InFlight, prepared: Future[np.ndarray]) -> None:
        """Hand a request whose prompt is ready to the engine. Never raises."""
        if entry.key not in self._by_key:
            return
        try:
            prompt = prepared.result()
            elapsed_s = time.monotonic() - entry.arrived_s
            request = self._intake.build(entry.key, entry.message, prompt, elapsed_s)
            entry.completions = [self._new_completion(entry.message, request, index) for index in range(request.n)]
        except ServiceError as error:
            self._fail(entry, error)
            return
        # A fault of ours, in the tokenizer for one, ends this request and nothing else.
        except Exception:
            logger.exception("request %r could not be prepared", entry.name[1])
            self._fail(entry, _internal())
            return
        entry.request = request
        self._inbox.put(Submit(request))
        if entry.cancelled:
            self._inbox.put(Cancel(entry.key))

    def _new_completion(self, message: requests.Generate, request: Request, index: int) -> Completion:
        text = None
        if self._text is not None and (message.return_text or request.stop.strings):
            known = message.continue_from
            prior, taken = (known.token_ids.tolist(), known.text_chars) if known else ((), None)
            text = StopText(self._text.decode, request.stop.strings, request.stop.min_tokens, prior, taken)
        return Completion(index, prior_columns(message.continue_from), text)

    def _add(self, entry: _InFlight, delta: Delta) -> None:
        completion = entry.completions[delta.index]
        match = completion.add(delta)
        if match is not None:
            self._inbox.put(StopAt(entry.key, delta.index, match.tokens, match.string))
        if self._chunk_is_due(entry.message, completion):
            self._send_chunk(entry, completion)

    def _chunk_is_due(self, message: requests.Generate, completion: Completion) -> bool:
        if not message.stream or completion.announced:
            return False
        enough = message.stream == "tokens" and completion.unsent >= message.stream_every
        return enough or completion.finish is not None

    def _send_chunk(self, entry: _InFlight, completion: Completion) -> None:
        fields = completion.take_chunk(with_text=entry.message.return_text)
        streaming = [waiter for waiter in entry.waiters if waiter.streaming]
        if not streaming:
            return
        frames = encode(chunk_reply(entry.name[1], fields))
        for waiter in streaming:
            if not self._connections.send(waiter.peer, frames, stream=entry.key):
                waiter.streaming = False
                self._connections.drop_stream(waiter.peer.connection, entry.key)
                logger.warning("the stream of %r is dropped: its client does not read", entry.name[1])

    def _finish(self, entry: _InFlight, done: RequestDone) -> None:
        assert entry.request is not None, "done before it was submitted"
        with_text = entry.message.return_text
        completions = [completion.result_fields(with_text=with_text) for completion in entry.completions]
        result = result_reply(
            entry.name[1],
            done,
            completions,
            seed=entry.request.sampling.seed,
            worker=self._worker,
            metadata=entry.message.metadata,
        )
        self._answer(entry, encode(result))

    def _fail(self, entry: _InFlight, error: ServiceError) -> None:
        self._answer(entry, encode(error_reply(entry.name[1], error)))

    def _answer(self, entry: _InFlight, frames: list[bytes]) -> None:
        """Send the reply that ends a request, and forget it."""
        self._forget(entry)
        for waiter in entry.waiters:
            if not self._connections.send(waiter.peer, frames):
                logger.error("the reply to %r is lost: its client does not read", entry.name[1])

    def _give_up(self, entry: _InFlight) -> None:
        """End a request that nobody waits for any more."""
        self.reclaimed += entry.message.n - sum(completion.finish is not None for completion in entry.completions)
        if entry.request is not None:
            self._inbox.put(Cancel(entry.key))
        self._forget(entry)

    def _forget(self, entry: _InFlight) -> None:
        del self._by_key[entry.key]
        del self._by_name[entry.name]
        self._clients[entry.name[0]] -= 1
        if not self._clients[entry.name[0]]:
            del self._clients[entry.name[0]]


def _internal() -> ServiceError:
    return ServiceError("internal", "a fault in the worker; its log has the trace under this id")
