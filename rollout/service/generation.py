"""The requests in flight, from a `generate` message to its result.

    generate --check--> (Preparation) --build--> Submit ==> engine ==> Delta... RequestDone --> chunks, result --> store

Invariants:

- A client's id names one request, in flight or in the store; the same message again is one more waiter for its result.
- A request in flight ends: by itself, by a cancel, or when the lease of its client does. Its result is in the store
  until the client acknowledges it, within the store's limits. Errors are not kept, nor are results
  without a token of clients that stayed away: their ids are free again.
- The engine's key is never used twice, so events of an abandoned request cannot reach a later request.
- After a stop string nothing more of its completion is sent, even if more deltas arrive.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import count
from queue import SimpleQueue

from rollout.config import ServiceSettings
from rollout.engine.messages.prompts import Prompt
from rollout.engine.messages.requests import RequestKey
from rollout.engine.messages.statuses import EngineStatus
from rollout.engine.messages.to_engine import Cancel, Command, EndSession, Flush, Prefetch, StopAt, Submit
from rollout.engine.messages.to_service import Delta, Flushed, Rejected, RequestDone
from rollout.process.logs import request_fields
from rollout.service.connections import Connections, ReplyAddress
from rollout.service.delivery.in_flight import InFlight
from rollout.service.delivery.replies import as_error, error_reply, ok_reply, result_reply
from rollout.service.delivery.store import ResultStore, Stored, StoredCompletion
from rollout.service.delivery.waiters import Delivery, Position, Waiter, received_positions
from rollout.service.fork_sources import ForkSources
from rollout.service.leases import Leases, client_key, may_return
from rollout.service.requests import schema as requests
from rollout.service.requests.intake import Intake, PreparedPrompt
from rollout.service.requests.preparation import Preparation
from rollout.service.requests.request_media import named_only
from trainer_bridge.wire.codec import encode
from trainer_bridge.wire.errors import (
    BadRequest,
    Duplicate,
    InternalError,
    NotFound,
    Overloaded,
    RolloutError,
    Unavailable,
)

logger = logging.getLogger(__name__)

_UNAVAILABLE = {
    "draining": "this worker is draining; send to another one",
    "asleep": "this worker is asleep; wake it first",
    "stale": "this worker waits for weights; publish them first",
    "stalled": "this worker's engine hangs; send to another one",
}
_NO_MEMORY = "the messages of the requests in flight take all memory that they may; try again later"
_MAX_WAITERS = 64  # most waiters of one request
_MAX_WAIT_S = 60.0
_COMPLETION_BYTES = 2048  # rough size of a completion, without message and tokens

_RECENT = 16_384  # requests; rollouts end in waves, and one wave says nothing about the time between waves
_RECENT_S = 60.0
_UNKNOWN_S = 1.0  # retry time if no request ended lately
_LEAST_S, _MOST_S = 0.05, 30.0


class Generation:
    """Owns the requests in flight. Everything here runs on the service thread."""

    def __init__(
        self,
        settings: ServiceSettings,
        intake: Intake,
        preparation: Preparation,
        *,
        inbox: SimpleQueue[Command],
        status: Callable[[], EngineStatus],
        connections: Connections,
        worker: str,
    ) -> None:
        self.store = ResultStore(settings, time.monotonic)
        self.draining = False
        self.reclaimed = 0  # completions of vanished clients that were ended
        self._settings = settings
        self._intake = intake
        self._inbox = inbox
        self._status = status
        self._connections = connections
        self._delivery = Delivery(connections)
        self._leases = Leases(settings.lease_s, time.monotonic)
        self._retry = RetryEstimate(time.monotonic)
        self._preparation = preparation
        self._media = preparation.media
        self._worker = worker
        self._serial = count()
        self._by_name: dict[tuple[str, str], InFlight] = {}
        self._by_key: dict[RequestKey, InFlight] = {}
        self._by_client: dict[str, dict[RequestKey, InFlight]] = {}
        self._sources = ForkSources(settings, self._by_name, self._by_client, self._media)
        self._pending_bytes = 0  # total of all entries
        self._with_sessions: set[str] = set()  # clients whose sessions end with their connection

    # --- from clients ------------------------------------------------------------------------------------------------

    def generate(
        self, peer: ReplyAddress, client: str, message: requests.GenerateMessage, frames: list[bytes], content: bytes
    ) -> None:
        """Take a request. `frames`: its message. `content` is a digest by which equal messages are recognised.

        Raises `RolloutError`.
        """
        name = (client, message.id)
        waiter = Waiter(peer, message.stream, message.stream_every, message.join_chunks)
        known = self._by_name.get(name) or self.store.get(name)
        if known is not None:
            self._join(known, waiter, content)
            return
        self._intake.check(message)
        size = sum(len(frame) for frame in frames) + message.n * _COMPLETION_BYTES
        self._check_capacity(client, size)
        key = (client, f"{message.id}#{next(self._serial)}")
        entry = InFlight(key, name, message, content, time.monotonic(), [waiter], size, frames)
        self._pending_bytes += size
        self._by_name[name] = self._by_key[key] = entry
        self._by_client.setdefault(client, {})[key] = entry
        self._leases.hold(client, peer.connection)
        if self._preparation.needed(entry):
            self._preparation.begin(entry, self._submit, self._ask_source)
        else:
            self._submit(entry)

    def take_media(self, peer: ReplyAddress, client: str, message: requests.MediaMessage, size: int) -> None:
        """Keep images for later requests of any client. `size`: bytes of the message. Raises `RolloutError`."""
        self._intake.check_media(message)
        self._check_capacity(client, size)
        self._pending_bytes += size

        def answer(future: Future[PreparedPrompt | None]) -> None:
            self._pending_bytes -= size
            reply = ok_reply(peer.id)
            if (error := future.exception()) is not None:
                reply = error_reply(peer.id, as_error(error, "images could not be kept", peer.request_fields))
            self._connections.send(peer, encode(reply))

        self._preparation.keep(client, message.media, answer)

    def cancel(self, peer: ReplyAddress, client: str, message: requests.CancelMessage) -> None:
        """End a request with its present tokens. Raises `RolloutError` if it is unknown."""
        entry = self._by_name.get((client if message.owner is None else message.owner, message.target))
        if entry is None:
            raise NotFound(f"no request {message.target!r} is in flight; check the id", field="target")
        if entry.request is not None and not entry.cancelled:
            self._inbox.put(Cancel(entry.key))
        entry.cancelled = True
        self._connections.send(peer, encode(ok_reply(peer.id)))

    def cancel_preparing(self) -> None:
        """End the requests whose prompt is still being prepared, for an order that ends all requests.

        The order reaches the engine before the requests, so it cannot end them there.
        """
        for entry in self._by_key.values():
            if entry.request is None:
                entry.cancelled = True

    def attach(self, peer: ReplyAddress, client: str, message: requests.AttachMessage) -> None:
        """Answer with the result of an earlier request, now or when it ends. Raises `RolloutError`."""
        waiter = Waiter(peer, message.stream, message.stream_every, message.join_chunks)
        name = (client, message.target)
        entry, stored = self._by_name.get(name), self.store.get(name)
        if entry is not None:
            waiter.received = self._received(entry, message)
            self._add_waiter(entry, waiter)
        elif stored is not None:
            completions = stored.completions() if message.stream else []
            waiter.received = received_positions(message.offsets, message.text_chars, completions)
            self._answer_from(stored, completions, waiter)
        else:
            raise NotFound(
                f"there is no request {message.target!r}, or its result was dropped; send the request again",
                field="target",
            )

    def ack(self, peer: ReplyAddress, client: str, message: requests.AckMessage) -> None:
        """Drop results. Raises `RolloutError`, and drops none, if one of the requests is in flight."""
        for i, target in enumerate(message.targets):
            if (client, target) in self._by_name:
                raise BadRequest(
                    f"{target!r} is in flight and has no result yet; cancel it instead", field=f"targets.{i}"
                )
        for target in message.targets:
            self.store.forget((client, target))
        self._connections.send(peer, encode(ok_reply(peer.id)))

    def result_of(self, client: str, target: str) -> Stored:
        """The result of an earlier request, which has ended. Raises `RolloutError` if it is not there."""
        if (client, target) in self._by_name:
            raise BadRequest(f"{target!r} is in flight and has no result yet; wait for it", field="target")
        stored = self.store.get((client, target))
        if stored is None:
            raise NotFound(
                f"the result of {target!r} was dropped, or never was: send the report before 'ack', and before many "
                "later results replace it",
                field="target",
            )
        return stored

    # --- clients ----------------------------------------------------------------------------------------------------

    def renew(self, client: str, connection: bytes) -> None:
        """Note a message of this client: it is connected."""
        self._leases.renew(client, connection)

    def connection_gone(self, connection: bytes) -> None:
        """Note the end of a connection. A client without a name ends with it."""
        for entry in self._by_key.values():
            entry.waiters = [waiter for waiter in entry.waiters if waiter.peer.connection != connection]
        self._leases.connection_closed(connection)
        client = client_key(None, connection)
        if not may_return(client):
            self.store.forget_client(client)
            self._sources.forget_client(client)
        self.tick()
        if client in self._with_sessions:
            self._with_sessions.remove(client)
            self._inbox.put(EndSession(client))

    def tick(self) -> None:
        """End the requests of clients whose lease is over; drop old results."""
        for client in self._leases.take_ended():
            for entry in list(self._by_client.get(client, {}).values()):
                if not entry.message.detached:
                    self._reclaim(entry)
        self.store.expire()
        self._sources.expire()

    def wait_s(self) -> float | None:
        """Seconds until `tick` has something to do, or None."""
        waits = [wait_s for wait_s in (self._leases.wait_s(), self.store.wait_s()) if wait_s is not None]
        return min(*waits, _MAX_WAIT_S) if waits else None

    def flush(self) -> None:
        """Send the chunks that were kept to be joined."""
        self._delivery.flush()

    def fail_all(self, error: RolloutError) -> None:
        """Answer every request in flight with an error."""
        for entry in list(self._by_key.values()):
            self._fail(entry, error)

    # --- from the engine ---------------------------------------------------------------------------------------------

    def handle(self, event: Delta | RequestDone | Rejected | Flushed) -> None:
        """Take an event. An event of an unknown request is ignored; a fault in handling an event ends its request."""
        entry = self._by_key.get(event.key)
        if entry is None:
            return
        try:
            self._handle(entry, event)
        # A fault in one request must not end the service.
        except Exception as error:
            failure = as_error(error, "a request failed in the service", request_fields(*entry.name))
            if entry.key in self._by_key:
                self._inbox.put(Cancel(entry.key))
                self._fail(entry, failure)

    def _handle(self, entry: InFlight, event: Delta | RequestDone | Rejected | Flushed) -> None:
        match event:
            case Flushed():
                self._ask_source(entry)
            case Delta():
                self._add(entry, event)
            case RequestDone():
                self._finish(entry, event)
            case Rejected():
                if event.code == "overloaded":
                    self._fail(entry, self._overloaded(event.message))
                else:
                    self._fail(entry, RolloutError(event.message, code=event.code, field=event.field))

    # --- one request -------------------------------------------------------------------------------------------------

    def _join(self, known: InFlight | Stored, waiter: Waiter, content: bytes) -> None:
        """Answer a request that was sent before."""
        peer = waiter.peer
        if known.content != content:
            raise Duplicate(
                f"the id {peer.id!r} is taken by another request; use a new one, or acknowledge that one's result",
                field="id",
            )
        if isinstance(known, Stored):
            self._answer_from(known, known.completions() if waiter.stream else [], waiter)
            return
        same = [other.peer for other in known.waiters if other.stream and other.peer.id == peer.id]
        if any(other.connection == peer.connection for other in same):
            waiter.stream = False  # a client cannot separate two streams with one id
        self._add_waiter(known, waiter)

    def _add_waiter(self, entry: InFlight, waiter: Waiter) -> None:
        if len(entry.waiters) >= _MAX_WAITERS:
            raise self._overloaded(f"{_MAX_WAITERS} messages already wait for this request; try again later")
        entry.waiters.append(waiter)
        self._delivery.chunks([waiter], entry.completions)

    def _received(self, entry: InFlight, message: requests.AttachMessage) -> dict[int, Position | None]:
        if entry.completions:
            return received_positions(message.offsets, message.text_chars, entry.completions)
        known = entry.message.continue_from
        begin = len(known.token_ids) if known else 0
        if any(tokens != begin for tokens in message.offsets.values()):
            raise BadRequest("no chunk of this request was sent yet; remove the offsets", field="offsets")
        return {}

    def _answer_from(self, stored: Stored, completions: list[StoredCompletion], waiter: Waiter) -> None:
        self._delivery.chunks([waiter], completions)
        self._delivery.last([waiter], stored.frames, None)

    def check_alive(self) -> None:
        """Raise `RolloutError` if the engine hangs."""
        if self._status().state == "stalled":
            raise Unavailable(_UNAVAILABLE["stalled"])

    def _check_capacity(self, client: str, size: int) -> None:
        self.check_alive()
        status = self._status()
        state = "draining" if self.draining else status.state
        # `sleep` is None just after a wake. The engine answers the requests that it refuses.
        waits = state == "asleep" and (status.sleep is None or status.sleep.requests == "wait")
        if state in _UNAVAILABLE and not waits:
            message = _UNAVAILABLE[state]
            raise Unavailable(f"{message} ({status.stale})" if state == "stale" else message)
        if client not in self._by_client and len(self._by_client) >= self._settings.constants.max_clients:
            raise self._overloaded(f"{len(self._by_client)} clients have requests in flight; try again later")
        if self._pending_bytes + size > self._settings.constants.max_pending_bytes:
            raise self._overloaded(_NO_MEMORY)
        if self._preparation.waiting >= self._settings.max_queue:
            raise self._overloaded("the queue is full; try again later")

    def _overloaded(self, message: str) -> RolloutError:
        """The error with `retry_after_s`, estimated from all requests in flight."""
        return Overloaded(message, retry_after_s=self._retry.retry_after_s(len(self._by_key)))

    def _ask_source(self, entry: InFlight) -> None:
        """Have the engine send the drawn tokens of the source that a request continues, if the source is running.

        Called again when they are here. The source may have been refused meanwhile, and then another turn of its
        session is asked.
        """
        client, fork = entry.name[0], entry.message.fork
        assert fork is not None
        source = self._sources.running(client, fork)
        if source is None or source.key == entry.flushed:
            self._preparation.answer(entry, partial(self._sources.prompt, client, fork, entry.flushed))
        else:
            entry.flushed = source.key
            self._inbox.put(Flush(source.key, entry.key))

    def prefetch(
        self, client: str, message: requests.PrefetchMessage, token: Callable[[Callable[[], None]], int]
    ) -> None:
        """Have the engine bring KV to the device. Raises `RolloutError`.

        `token` returns the token of the command; its argument is called after the answer.
        """
        self.check_alive()
        self._intake.check_prefetch(message)
        if message.session is None:
            prompt = self._intake.prefetch_prompt(message)
        else:
            prompt = self._sources.last_turn(client, message.session)
        nbytes = prompt.token_ids.nbytes
        if self._pending_bytes + nbytes > self._settings.constants.max_pending_bytes:
            raise self._overloaded(_NO_MEMORY)

        def answered() -> None:
            self._pending_bytes -= nbytes

        self._inbox.put(Prefetch(prompt, message.adapter, token(answered)))
        self._pending_bytes += nbytes

    def end_session(self, client: str, session: str, token: int | None = None) -> None:
        """End a session; the engine confirms with `token`, if it is given."""
        self._sources.end_session(client, session)
        self._inbox.put(EndSession(client, session, token))

    def _submit(self, entry: InFlight, outcome: Future[PreparedPrompt | None] | None = None) -> None:
        """Hand a request to the engine, or fail it. Never raises.

        `outcome` is the result of its preparation. Without it, or if it is None, the message has all that is needed.
        """
        entry.frames = []
        self._drop_pixels(entry)
        try:
            prepared = (None if outcome is None else outcome.result()) or PreparedPrompt.of_message(entry.message)
            elapsed_s = time.monotonic() - entry.arrived_s
            if entry.message.fork is not None:
                self._count_source(entry, prepared.prompt)
            request = self._intake.build(entry.key, entry.message, prepared, elapsed_s)
            entry.completions = [self._intake.completion(entry.message, request, index) for index in range(request.n)]
        # A fault of ours (in the tokenizer, say) ends this request alone.
        except Exception as error:
            if isinstance(error, InternalError):
                logger.error("a prompt could not be prepared", extra=request_fields(*entry.name) | {"why": str(error)})
            self._fail(entry, as_error(error, "a request could not be prepared", request_fields(*entry.name)))
            return
        entry.request = request
        if request.prompt.media:
            self._media.hold(request.prompt)
        client = entry.name[0]
        if (request.session is not None or request.lease_s) and not may_return(client):
            self._with_sessions.add(client)
        if logger.isEnabledFor(logging.DEBUG):
            facts = {"prompt_tokens": len(prepared.prompt), "n": request.n, "max_tokens": request.max_tokens}
            logger.debug("a request is taken", extra=request_fields(*entry.name) | facts)
        self._inbox.put(Submit(request))
        if entry.cancelled:
            self._inbox.put(Cancel(entry.key))

    def _count_source(self, entry: InFlight, prompt: Prompt) -> None:
        """Count the memory of the tokens that a request continues. Raises `RolloutError`."""
        nbytes = prompt.token_ids.nbytes
        if self._pending_bytes + nbytes > self._settings.constants.max_pending_bytes:
            raise self._overloaded(_NO_MEMORY)
        entry.size += nbytes
        self._pending_bytes += nbytes

    def _drop_pixels(self, entry: InFlight) -> None:
        """Drop the pixels of a message: the store has them now, and counts them."""
        if entry.message.media is None:
            return
        pixels = [item.pixel_values for item in entry.message.media if item.pixel_values is not None]
        nbytes = sum(array.nbytes for array in pixels)
        entry.size -= nbytes
        self._pending_bytes -= nbytes
        entry.message = entry.message.model_copy(update={"media": named_only(entry.message.media)})

    def _add(self, entry: InFlight, delta: Delta) -> None:
        completion = entry.completions[delta.index]
        match = completion.add(delta)
        if match is not None:
            self._inbox.put(StopAt(entry.key, delta.index, match.tokens, match.string))
        self._delivery.chunks(entry.waiters, [completion])

    def _finish(self, entry: InFlight, done: RequestDone) -> None:
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
            media=[item.hash for item in entry.message.media or ()],
            prompt=entry.request.prompt.token_ids if entry.message.return_prompt_ids else None,
        )
        frames = encode(result)
        if logger.isEnabledFor(logging.DEBUG):
            ended = {"took_s": round(time.monotonic() - entry.arrived_s, 3), "bytes": sum(map(len, frames))}
            logger.debug("a request has ended", extra=request_fields(*entry.name) | ended)
        self._forget(entry)
        self._retry.ended(len(self._by_key))
        if not entry.reclaimed or any(completion.end != completion.start for completion in entry.completions):
            self.store.add(entry.name, frames, entry.content, entry.completions[0].start)
            self._sources.add(entry)
        if entry.message.end_of_session and entry.message.session is not None:
            self.end_session(entry.name[0], entry.message.session)
        self._delivery.last(entry.waiters, frames, entry.name[1])

    def _fail(self, entry: InFlight, error: RolloutError) -> None:
        frames = encode(error_reply(entry.name[1], error))
        logger.debug(
            "a request is refused", extra=request_fields(*entry.name) | {"code": error.code, "why": str(error)}
        )
        self._forget(entry)
        self._delivery.last(entry.waiters, frames, entry.name[1])

    def _reclaim(self, entry: InFlight) -> None:
        """End a request whose client is gone. Its tokens are kept if the client may return."""
        entry.reclaimed = True
        if not entry.cancelled:
            self.reclaimed += entry.message.n - sum(completion.ended for completion in entry.completions)
            entry.cancelled = True
            if entry.request is not None:
                self._inbox.put(Cancel(entry.key))
        if not may_return(entry.name[0]) or entry.request is None:  # a prompt in preparation has no tokens to keep
            self._forget(entry)

    def _forget(self, entry: InFlight) -> None:
        client = entry.name[0]
        del self._by_key[entry.key]
        self._preparation.drop(entry.key)
        self._pending_bytes -= entry.size
        if entry.request is not None and entry.request.prompt.media:
            self._media.release(entry.request.prompt)
        del self._by_name[entry.name]
        del self._by_client[client][entry.key]
        if not self._by_client[client]:
            del self._by_client[client]
            self._leases.release(client)


class RetryEstimate:
    """`retry_after_s`: the time in which half of the waiting requests end, at the recent rate of finished requests.

    So refused clients return before the queue is empty, and few of them are refused again. Times are from
    `clock`, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ended_s: deque[float] = deque(maxlen=_RECENT)

    def ended(self, left: int) -> None:
        """Note the end of a request; `left` requests remain."""
        self._ended_s.append(self._clock())
        if not left:
            self._ended_s.clear()  # a rate across a pause would be wrong

    def retry_after_s(self, waiting: int) -> float:
        """Seconds after which to retry while `waiting` requests wait: 0.05 to 30."""
        now_s = self._clock()
        while self._ended_s and self._ended_s[0] < now_s - _RECENT_S:
            self._ended_s.popleft()
        if not self._ended_s:
            return _UNKNOWN_S
        each_s = (now_s - self._ended_s[0]) / len(self._ended_s)
        return min(max(waiting / 2 * each_s, _LEAST_S), _MOST_S)
