"""The core of both clients: requests in flight, the choice of an endpoint, the reading of replies. It never waits.

A call goes `start -> (chunks) -> done`, with a result or an error. The generators of `calls.py` say how long to wait.
"""

import itertools
import math
import sys
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import zmq

from trainer_bridge.client.assembly import Assembler, join_chunks
from trainer_bridge.client.generate_request import AttachFields, RequestPlan, StreamKind, attach_fields
from trainer_bridge.client.placement import Fleet, SentRequest
from trainer_bridge.client.results import Chunk, Completion, GenerateResult, read_chunk, read_result, split_chunks
from trainer_bridge.expiring_cache import ExpiringCache
from trainer_bridge.process_bound import ProcessBound
from trainer_bridge.wire import codec as wire
from trainer_bridge.wire.address import endpoint_list
from trainer_bridge.wire.errors import (
    AccessRefused,
    ConnectionLost,
    ProtocolError,
    RolloutError,
    RolloutTimeout,
    TooLarge,
    from_reply,
)
from trainer_bridge.wire.keys import ClientCurve
from trainer_bridge.wire.worker_connection import REFUSED_S, WorkerConnection, close_when_dropped

_CONNECT_S = 30.0
_LINGER_S = 1.0
_MESSAGES_A_LOOK = 64
_MOST_UNREAD = 256  # chunks of a stream, and two more for each completion
_MOST_ACKS = 1024  # most acknowledgements in one message
_ASK_AGAIN_S = 1.0  # whether newcomers have current weights
_ENVELOPE_FIELDS = ("v", "id", "op")
_MOST_PIXEL_BYTES = 32 << 20  # most pixel bytes within a request; more pixels go ahead, in messages of their own
_MOST_SENT_AGAIN = 2  # a request with images: first with the missing ones, then with all
#: Advice for errors of a client in a forked process.
MAKE_CLIENTS = "pass its endpoints, and make a client in each process"
_NO_JOURNAL = "this client has no journal; make it with journal="


def check_id(request_id: str, in_flight: Collection[str]) -> None:
    """Raise ValueError for an id that is in flight or has a length that workers refuse."""
    if request_id in in_flight or not 1 <= len(request_id) <= wire.MAX_ID_CHARS:
        raise ValueError(
            f"the id {request_id!r:.40} is in flight already, or does not have 1 to {wire.MAX_ID_CHARS} characters"
        )


class ClientCall:
    """One request in flight, or its outcome: `result`, `reply` or `error`. `ClientCore` makes and changes it.

    `weight` is its part of its endpoint's load, `deadline` of `time.monotonic`. `on_update` is called whenever
    something has come for it.
    """

    def __init__(self, request_id: str, op: str, endpoint: str, weight: int, deadline: float) -> None:
        self.id = request_id
        self.op = op
        self.endpoint = endpoint
        self.weight = weight
        self.deadline = deadline
        self.started = time.monotonic()
        self.target: str | None = None  # the request that `attach` names
        self.earlier: SentRequest | None = None  # place of an earlier request with the same id
        self.ends_session: str | None = None  # the session that its result ends
        self.detached = False  # the worker goes on if this client goes
        self.acknowledged_with_result = True  # false: its owner acknowledges it later
        self.assembler: Assembler | None = None  # set for a stream
        self.chunks: deque[Chunk] = deque()  # chunks of a stream that are not taken yet
        self.result: GenerateResult | None = None  # result of `generate` and `attach`
        self.reply: dict[str, Any] | None = None  # reply to any other op
        self.error: RolloutError | None = None
        self.on_update: Callable[[], object] = lambda: None
        self.fields: dict[str, Any] | None = None  # kept for a request with images, which may have to be sent again
        self.sent_again = 0

    @property
    def done(self) -> bool:
        """True once there is an outcome."""
        return self.result is not None or self.reply is not None or self.error is not None

    def keep(self, chunk: Chunk) -> None:
        """Keep a chunk of a stream until it is taken. If the reader is late, chunks are joined."""
        assert self.assembler is not None, "not a stream"
        self.chunks.append(chunk)
        if len(self.chunks) > _MOST_UNREAD + 2 * self.assembler.n:
            self.chunks = deque(join_chunks(self.chunks))

    def joined(self, index: int) -> Completion:
        """A completion of a stream, with the tokens received so far."""
        assert self.assembler is not None, "not a stream"
        return self.assembler.joined(index)

    def fail(self, error: RolloutError) -> None:
        """End with an error; received chunks stay."""
        error.request_id = self.id
        self.error = error
        self.on_update()


class ClientCore(ProcessBound):
    """Connections to all endpoints and the calls in flight on them. Not thread-safe.

    `on_unread`, `on_closing` and `on_opened` are called with an endpoint: when `read_replies` may find more, before its
    socket is closed, and after another socket was opened. `on_newcomers` is called with the seconds after which to call
    `ask_newcomers` again.

    If `acknowledges` is true, results are acknowledged at their worker once they are here, or in the journal. This is
    the default, except for clients with a name and without a journal, which may come back for their results.
    """

    _called, _instead = "client", MAKE_CLIENTS
    _readable_after_fork = frozenset({"endpoints", "fleet"})
    _idle_after_fork = frozenset({"abandon"})  # generators and tasks call it when they are dropped

    def __init__(
        self,
        endpoints: str | Sequence[str],
        client: str | None,
        timeout_s: float | None,
        connect_timeout_s: float | None,
        curve: ClientCurve | None = None,
        acknowledge: bool | None = None,
        heartbeat_s: float = 10.0,
    ) -> None:
        given = endpoint_list(endpoints)
        self.fleet = Fleet(given)
        self.timeout_s = timeout_s
        self.on_unread: Callable[[str], object] = lambda endpoint: None
        self.on_closing: Callable[[str], object] = lambda endpoint: None
        self.on_opened: Callable[[str], object] = lambda endpoint: None
        self.on_newcomers: Callable[[float], object] = lambda seconds: None
        self.client = client
        self._connect_timeout_s = connect_timeout_s
        self._calls: dict[str, ClientCall] = {}
        self._counter = itertools.count(1)
        self._prefix = uuid.uuid4().hex[:12]
        self._closed = False
        self.acknowledges = client is None if acknowledge is None else acknowledge
        self._to_acknowledge: dict[str, list[str]] = {}  # ids by endpoint
        #: Hashes of the images that each endpoint was sent: requests name them until the worker asks for pixels.
        self._media: defaultdict[str, ExpiringCache[str, bool]] = defaultdict(lambda: ExpiringCache(0))
        self._most_bytes: dict[str, int] = {}  # most bytes of a message by endpoint, if a status had it
        self._questions: list[ClientCall] = []  # status calls to all workers, while there are newcomers
        self._ask_at = 0.0  # time of the next status calls
        self._context = zmq.Context()
        self._connect = partial(WorkerConnection, self._context, curve=curve, heartbeat_s=heartbeat_s)
        self.connections: dict[str, WorkerConnection] = {}
        close_when_dropped(self, self._context, self.connections)
        try:
            for endpoint in given:
                self.connections[endpoint] = self._connect(endpoint)
        except ValueError:
            self.close()
            self.term()
            raise

    # --- starting and ending ------------------------------------------------------------------------------------------

    def generate(self, plan: RequestPlan) -> ClientCall:
        """Send a generate request to the endpoint of its session, or to the least loaded endpoint."""
        self._check_open()
        call = self.launch(plan, plan.timeout_s)
        if plan.stream:
            call.assembler = Assembler(plan.n, plan.prior, whole=plan.stream == "completions")
        return call

    def launch(self, plan: RequestPlan, timeout_s: float | None, avoid: Collection[str] = ()) -> ClientCall:
        """Send a generate request to one worker, outside the endpoints `avoid` if possible."""
        self._absorb_all()  # a loss that is not known yet is not a loss of this call
        self.ask_newcomers()
        if plan.endpoint is not None:
            self.check_known(plan.endpoint)
        gone = {endpoint for endpoint, connection in self.connections.items() if connection.gone}
        fields, home = plan.fields, None
        if "fork" in fields:
            home, fork = self.fleet.locate_fork(fields["fork"])
            fields = fields | {"fork": fork}
        endpoint = self.fleet.choose(plan, gone, avoid, home)
        call = self.start("generate", fields, endpoint, timeout_s, plan.n, plan.request_id)
        call.earlier = self.fleet.note_sent(call.id, endpoint)
        if call.error is not None and call.earlier is not None:
            self.fleet.note_refused(call.id, call.earlier)
        call.ends_session = plan.session if plan.fields.get("end_of_session") else None
        call.detached = bool(plan.fields.get("detached"))
        return call

    def control(self, op: str, endpoint: str | None, timeout_s: float | None = None, **fields: Any) -> list[ClientCall]:
        """Send a control message to one endpoint, or to all."""
        if endpoint is not None:
            self.check_known(endpoint)
        self._absorb_all()  # see `launch`
        asked = self.endpoints if endpoint is None else [endpoint]
        return [self.start(op, fields, each, timeout_s) for each in asked]

    def start(
        self,
        op: str,
        fields: dict[str, Any],
        endpoint: str,
        timeout_s: float | None = None,
        weight: int = 0,
        request_id: str | None = None,
    ) -> ClientCall:
        """Send one request to one endpoint, whose connection was just checked.

        The call has failed already if the worker would cut the connection, because the message is too large.
        """
        self._check_open()
        if self.connections[endpoint].refused is not None:  # ZeroMQ would not try again
            self._reopen(endpoint)
        request_id = self.next_id() if request_id is None else request_id
        check_id(request_id, self._calls)
        call = ClientCall(request_id, op, endpoint, weight, self.deadline(timeout_s))
        call.fields = fields if "media" in fields else None
        try:
            self._send_request(call, fields)
        except TooLarge as error:
            for item in fields.get("media", ()):
                self._media[endpoint].drop(item["hash"])
            call.fail(error)
            return call
        self._calls[request_id] = call
        self.fleet[endpoint].load += weight
        return call

    def deadline(self, timeout_s: float | None) -> float:
        """The monotonic time at which a call that starts now times out. `timeout_s` None: the client's default."""
        seconds = self.timeout_s if timeout_s is None else timeout_s
        return math.inf if seconds is None else time.monotonic() + seconds

    def abandon(self, call: ClientCall) -> None:
        """End a call that its caller gave up and, unless it is detached, cancel it at the worker."""
        if not self._forget(call):
            return
        call.error = RolloutError("the request was abandoned by its client", code="abandoned", request_id=call.id)
        if not self.connections[call.endpoint].withdraw(call.id) and call.op == "generate" and not call.detached:
            self.drop_request(call.endpoint, call.id)

    def acknowledge(self, call: ClientCall) -> None:
        """Acknowledge the result of a call once all messages that have arrived are read."""
        self._to_acknowledge.setdefault(call.endpoint, []).append(call.target or call.id)

    def drop_request(self, endpoint: str, request_id: str) -> None:
        """Cancel a request at a worker, unless it was removed. The answer is ignored."""
        if endpoint in self.connections:
            cancel_id = self.next_id()
            self._send(endpoint, cancel_id, self._header("cancel", cancel_id) | {"target": request_id})

    def prefetch(self, fields: dict[str, Any], endpoint: str | None, timeout_s: float | None) -> list[ClientCall]:
        """Send `prefetch` to the worker that has or may have the KV, or to all if it is unknown."""
        if endpoint is None:
            endpoint = self.fleet.holder(fields)
        if endpoint is not None:
            return self.control("prefetch", endpoint, timeout_s, **fields)
        self._absorb_all()  # see `launch`
        asked = [each for each in self.endpoints if self.serves(each)] or self.endpoints
        return [self.start("prefetch", fields, each, timeout_s) for each in asked]

    def cancel(self, target: str, endpoint: str | None) -> list[ClientCall]:
        """Send `cancel` to the workers that have or may have a request; returns the calls to wait for."""
        self._absorb_all()
        if endpoint is None and target in self._calls:
            endpoint = self._calls[target].endpoint
        return self.control("cancel", endpoint, target=target)

    def attach(self, target: str, stream: Literal[False] | StreamKind, given: AttachFields) -> ClientCall:
        """Attach to an earlier request, of this connection or of another one of the same `client`."""
        fields, partials = attach_fields(target, stream, given)
        (call,) = self.control("attach", self.only_endpoint(given.get("endpoint")), given.get("timeout_s"), **fields)
        call.target = target
        if stream:
            call.assembler = Assembler(given.get("n", 1), whole=stream == "completions")
            call.assembler.begin_with(partials)
        return call

    def end_session(self, session: str) -> None:
        """End a session at its worker, or at all workers if its worker is unknown.

        Lost endpoints are skipped. The call does not wait for answers.
        """
        home = self.fleet.session_home(session)
        self.fleet.end_session(session)
        for endpoint in self.endpoints if home is None else (home,):
            connection = self.connections[endpoint]
            if not connection.gone and not connection.socket.closed:
                self.start("end_session", {"session": session}, endpoint)

    def close(self) -> None:
        """Cancel all calls in flight and close all sockets; call `term` afterwards."""
        if self._closed:
            return
        self._absorb_all(sys.maxsize)
        self.end_requests()
        self._closed = True
        for call in list(self._calls.values()):
            self.abandon(call)
            call.fail(ConnectionLost("the client was closed"))
        for endpoint, connection in self.connections.items():
            self.on_closing(endpoint)
            connection.close(_LINGER_S)

    def end_requests(self) -> None:
        """Called while the client closes: end requests that a subclass keeps."""

    def term(self) -> None:
        """Wait until all messages are sent, 1 s at most."""
        self._context.term()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this client is closed; make another one")

    def next_id(self) -> str:
        """An id that no other request of this client has."""
        return f"{self._prefix}-{next(self._counter)}"

    def _header(self, op: str, request_id: str) -> dict[str, Any]:
        header: dict[str, Any] = {"v": wire.PROTOCOL_VERSION, "op": op, "id": request_id}
        return header if self.client is None else header | {"client": self.client}

    def _send(self, endpoint: str, request_id: str, header: dict[str, Any]) -> None:
        frames, most = wire.encode(header), self._most_bytes.get(endpoint)
        size = sum(memoryview(frame).nbytes for frame in frames)
        if most is not None and size > most:
            raise TooLarge(f"the message has {size} bytes; send at most {most}, or raise service.max_message_bytes")
        self.connections[endpoint].send(request_id, frames)
        self.on_unread(endpoint)

    def _forget(self, call: ClientCall) -> bool:
        if self._calls.get(call.id) is not call:
            return False
        del self._calls[call.id]
        self.fleet[call.endpoint].load -= call.weight
        return True

    # --- journal ------------------------------------------------------------------------------------------------------

    def forget(self, ids: Iterable[str]) -> None:
        """Drop requests from the journal. Raises ValueError for one that is in flight, or if there is no journal."""
        raise ValueError(_NO_JOURNAL)

    def journaled(self) -> dict[str, bool]:
        """The requests in the journal, and whether they are finished. Raises ValueError if there is no journal."""
        raise ValueError(_NO_JOURNAL)

    # --- endpoints ----------------------------------------------------------------------------------------------------

    def only_endpoint(self, endpoint: str | None) -> str:
        """The given endpoint, or the only one."""
        if endpoint is None and len(self.endpoints) > 1:
            raise ValueError("this client has several endpoints; say which one with endpoint=")
        return self.endpoints[0] if endpoint is None else endpoint

    @property
    def endpoints(self) -> list[str]:
        """All endpoints except the ones that are being removed."""
        return self.fleet.endpoints

    def check_known(self, endpoint: str) -> None:
        """Raise ValueError for an endpoint that this client does not have."""
        if endpoint not in self.connections:
            raise ValueError(f"{endpoint!r} is not an endpoint of this client; it has {', '.join(self.endpoints)}")

    def serves(self, endpoint: str) -> bool:
        """True if an endpoint can be reached, was not lost since its last use, and is not being removed."""
        if endpoint not in self.endpoints or self.connections[endpoint].gone:
            return False
        return not self.fleet[endpoint].newcomer

    def reachable(self, plan: RequestPlan) -> bool:
        """False if all endpoints that a request may go to are known to be lost."""
        if plan.endpoint is not None:
            return plan.endpoint in self.connections and not self.connections[plan.endpoint].gone
        return any(not self.connections[endpoint].gone for endpoint in self.endpoints)

    def add(self, endpoint: str) -> None:
        """Add an endpoint, or keep one that is being removed. Raises ValueError for one that is there already."""
        self._check_open()
        connection = None if endpoint in self.connections else self._connect(endpoint)
        if self.fleet.add(endpoint) and connection is not None:
            self.connections[endpoint] = connection
            self.on_opened(endpoint)

    def remove(self, endpoint: str, mode: Literal["drain", "now"]) -> None:
        """Send nothing new to an endpoint; close its connection once nothing is in flight there.

        With `now` calls in flight there fail with `ConnectionLost`, and their requests are cancelled.
        """
        self._check_open()
        if mode not in ("drain", "now"):
            raise ValueError(f"mode is {mode!r}; use 'drain' or 'now'")
        self.check_known(endpoint)
        self.fleet.drain(endpoint)
        for call in self._calls_at(endpoint) if mode == "now" else ():
            self.abandon(call)
            call.fail(ConnectionLost(f"{endpoint} was removed from this client"))
        self.read_replies(endpoint)

    def _calls_at(self, endpoint: str) -> list[ClientCall]:
        return [call for call in self._calls.values() if call.endpoint == endpoint]

    def _drop_if_left(self, endpoint: str) -> None:
        """Close the connection of an endpoint that is being removed, once nothing is in flight there."""
        if self.fleet[endpoint].draining and not self._calls_at(endpoint):
            self.on_closing(endpoint)
            self.connections.pop(endpoint).close(_LINGER_S)
            self.fleet.drop(endpoint)

    def ask_newcomers(self) -> None:
        """While there are newcomers, ask all workers for their weights version: at most once in a second."""
        now = time.monotonic()
        if self._closed or self._questions or now < self._ask_at or not self.fleet.newcomers:
            return
        there = [endpoint for endpoint in self.endpoints if self.connections[endpoint].can_send]
        coming = [endpoint for endpoint in self.endpoints if not self.connections[endpoint].gone]
        newcomers = set(self.fleet.newcomers)
        if not newcomers.intersection(there) or not set(coming) <= newcomers.union(there):
            return  # `read_replies` asks when a worker comes
        self._ask_at = now + _ASK_AGAIN_S
        self._questions = [self.start("status", {}, endpoint, math.inf) for endpoint in there]
        for question in self._questions:
            question.on_update = self._admit

    def _admit(self) -> None:
        """Use the newcomers with current weights, once all workers have answered or are lost."""
        if not all(question.done for question in self._questions):
            return
        replies = {question.endpoint: question.reply for question in self._questions if question.reply is not None}
        self._questions = []
        versions = {endpoint: reply.get("weights_version") for endpoint, reply in replies.items()}
        whole = {
            endpoint: version
            for endpoint, version in versions.items()
            if type(version) is int and replies[endpoint].get("state") != "stale"
        }
        self.fleet.admit_newcomers(whole)
        if self.fleet.newcomers:
            self.on_newcomers(_ASK_AGAIN_S)

    # --- replies ------------------------------------------------------------------------------------------------------

    def read_replies(self, endpoint: str, most: int = _MESSAGES_A_LOOK) -> None:
        """Read at most `most` messages of one connection, so that other connections get their turn.

        If the connection was lost, its calls fail, and unsent messages go over a new connection.
        """
        if self._closed or endpoint not in self.connections:
            return
        connection = self.connections[endpoint]
        was_connected, was_refusing = connection.connected, connection.refusing_since_s is not None
        messages, lost = connection.drain(most)
        for frames in messages:
            self._take(endpoint, frames)
        if connection.refused is not None:
            self._fail_all(endpoint, AccessRefused, connection.refused, unsent=True)
        if lost:
            self._reopen(endpoint)
            self.fleet.mark_lost(endpoint)
            self._fail_all(endpoint, ConnectionLost, f"the connection to {endpoint} was lost")
        elif connection.connected and not was_connected:
            self.endpoint_came()
            self._ask_at = 0.0
            self.ask_newcomers()
        if not was_refusing and connection.refusing_since_s is not None:  # calls have another limit now
            for call in self._calls_at(endpoint):
                call.on_update()
        self._send_acknowledgements(endpoint)
        if len(messages) >= most:
            self.on_unread(endpoint)
        self._drop_if_left(endpoint)

    def _absorb_all(self, most: int = _MESSAGES_A_LOOK) -> None:
        for endpoint in list(self.connections):
            self.read_replies(endpoint, most)

    def endpoint_came(self) -> None:
        """Note that an endpoint can be reached (again)."""

    def _send_acknowledgements(self, endpoint: str) -> None:
        """Send collected acknowledgements, except to lost workers."""
        ids = self._to_acknowledge.pop(endpoint, [])
        if ids and self.connections[endpoint].can_send:
            for start in range(0, len(ids), _MOST_ACKS):
                ack_id = self.next_id()
                self._send(endpoint, ack_id, self._header("ack", ack_id) | {"targets": ids[start : start + _MOST_ACKS]})

    def _reopen(self, endpoint: str) -> None:
        self._media.pop(endpoint, None)
        self._most_bytes.pop(endpoint, None)
        self.on_closing(endpoint)
        self.connections[endpoint].reopen()
        self.on_opened(endpoint)

    def _take(self, endpoint: str, frames: list[bytes]) -> None:
        _, frames = wire.split_envelope(frames)
        try:
            reply = wire.decode(frames, wire.REPLY_LIMITS)
        except wire.WireError as error:
            self._blame(endpoint, wire.header_id(frames), f"a reply cannot be read: {error}")
            return
        if reply.get("op") == "chunks":
            self._take_joined(endpoint, reply)
            return
        request_id = reply.get("id")
        call = self._calls.get(request_id) if isinstance(request_id, str) else None
        if call is not None:
            self._apply(call, reply)
        elif request_id is None:
            self._blame(endpoint, None, f"the worker could not read a request: {reply.get('message')}")
        elif reply.get("op") == "result" and self.acknowledges:  # result of an abandoned call
            self._to_acknowledge.setdefault(endpoint, []).append(str(request_id))

    def _take_joined(self, endpoint: str, reply: dict[str, Any]) -> None:
        """Take the chunks of several streams."""
        try:
            for chunk in split_chunks(reply):
                call = self._calls.get(chunk["id"])
                if call is not None:
                    self._apply(call, chunk)
        except ProtocolError as error:
            self._blame(endpoint, None, str(error))

    def _apply(self, call: ClientCall, reply: dict[str, Any]) -> None:
        try:
            self._interpret(call, reply)
        except ProtocolError as error:
            self.abandon(call)
            call.fail(error)
            return
        if call.done:
            self._forget(call)
        call.on_update()

    def _interpret(self, call: ClientCall, reply: dict[str, Any]) -> None:
        op = reply.get("op")
        if reply.get("v") != wire.PROTOCOL_VERSION:
            raise ProtocolError(
                f"the worker speaks version {reply.get('v')!r:.40}, this client 1; update the older side"
            )
        if op == "error":
            error = from_reply(reply)
            if not (error.need and self._send_again(call, error.need)):
                call.error = error
                if call.earlier is not None:
                    self.fleet.note_refused(call.id, call.earlier)
        elif op == "chunk" and call.assembler is not None:
            chunk = read_chunk(reply)
            call.assembler.add(chunk)
            call.keep(chunk)
        elif op == "result" and call.op in ("generate", "attach"):
            result = read_result(reply, call.endpoint)
            if call.assembler is not None:
                for chunk in call.assembler.missing(result):
                    call.assembler.add(chunk)
                    call.keep(chunk)
            call.result = result if call.target is None else replace(result, id=call.target)
            if call.ends_session is not None:
                self.fleet.end_session(call.ends_session)
            if self.acknowledges and call.acknowledged_with_result:
                self.acknowledge(call)
        elif op in ("ok", "status", "trace") and call.op not in ("generate", "attach"):
            call.reply = {name: value for name, value in reply.items() if name not in _ENVELOPE_FIELDS}
            if type(most := call.reply.get("max_message_bytes")) is int:
                self._most_bytes[call.endpoint] = most
        else:
            raise ProtocolError(f"the worker answered {call.op} with {op!r:.40}")

    def _send_again(self, call: ClientCall, need: list[str]) -> bool:
        """Send a request again, with the pixels that its worker lacks. False if there were too many attempts."""
        if call.fields is None or call.sent_again == _MOST_SENT_AGAIN:
            return False
        call.sent_again += 1
        lacks = need if call.sent_again < _MOST_SENT_AGAIN else [item["hash"] for item in call.fields["media"]]
        for each in lacks:
            self._media[call.endpoint].drop(each)
        try:
            self._send_request(call, call.fields)
        except TooLarge:
            return False
        return True

    def _send_request(self, call: ClientCall, fields: dict[str, Any]) -> None:
        """Send the message of a call. Images that the worker has are named; many large ones are sent ahead."""
        if "media" in fields:
            known, media = self._media[call.endpoint], []
            for item in fields["media"]:
                named = known.get(item["hash"]) is not None
                media.append({name: part for name, part in item.items() if not (named and name == "pixel_values")})
                known.put(item["hash"], True, 0)
            ahead = [item for item in media if "pixel_values" in item]
            if sum(item["pixel_values"].nbytes for item in ahead) > _MOST_PIXEL_BYTES:
                for item in ahead:
                    piece_id = self.next_id()
                    self._send(call.endpoint, piece_id, self._header("media", piece_id) | {"media": [dict(item)]})
                    del item["pixel_values"]
            fields = fields | {"media": media}
        self._send(call.endpoint, call.id, self._header(call.op, call.id) | fields)

    def _blame(self, endpoint: str, request_id: str | None, message: str) -> None:
        """Fail the call that a broken reply belongs to; if the id cannot be read, all calls at that endpoint."""
        call = self._calls.get(request_id) if request_id is not None else None
        if call is None:
            self._fail_all(endpoint, ProtocolError, message)
        else:
            self.abandon(call)
            call.fail(ProtocolError(message))

    def _fail_all(self, endpoint: str, kind: type[RolloutError], message: str, unsent: bool = False) -> None:
        """Fail the calls that were sent to one endpoint; with `unsent` also calls that wait for the connection."""
        connection = self.connections[endpoint]
        for call in self._calls_at(endpoint):
            if connection.waits(call.id) and not (unsent and connection.withdraw(call.id)):
                continue
            self._forget(call)
            call.fail(kind(message))

    def _connect_s(self, connection: WorkerConnection) -> float:
        """Seconds that a call waits for a connection."""
        if self._connect_timeout_s is not None:
            return self._connect_timeout_s
        return _CONNECT_S if connection.refusing_since_s is None else REFUSED_S

    # --- waiting ------------------------------------------------------------------------------------------------------

    def remaining_wait_s(self, call: ClientCall) -> float | None:
        """Seconds that a call may still wait; None: without limit. A call whose time is up ends with an error."""
        if call.done:
            return 0.0
        now, limit = time.monotonic(), call.deadline
        connection = self.connections[call.endpoint]
        connect_s = self._connect_s(connection)
        if not connection.connected:
            limit = min(limit, call.started + connect_s)
        if now < limit:
            return None if limit == math.inf else limit - now
        self.abandon(call)
        if now >= call.deadline:
            waited_s = call.deadline - call.started
            call.fail(RolloutTimeout(f"{call.op} had no answer from {connection.endpoint} within {waited_s:.3g} s"))
        else:
            connection.gone = True
            call.fail(ConnectionLost(_unreachable(connection, connect_s)))
        return 0.0


def _unreachable(connection: WorkerConnection, waited_s: float) -> str:
    if connection.refusing_since_s is None:
        hint = connection.hint or "; is a worker running there?"
        return f"{connection.endpoint} cannot be reached: no connection within {waited_s:g} s{hint}"
    return (
        f"{connection.endpoint} cannot be reached: it has refused connections for {waited_s:g} s, so no worker listens "
        "there; check the address, or start a worker and wait until it says that it is ready"
    )
