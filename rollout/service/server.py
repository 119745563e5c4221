"""The service thread: a ROUTER socket for clients on one side, the engine's inbox and events on the other.

    clients <== ROUTER ==> Server --Command--> inbox          one thread, one poll over two things:
                             ^                                the socket, and the outbox that the
                             +------ Outbox <--Event-- engine engine's loop and other threads fill

The thread parses, checks and answers. It never waits for the engine, a client or the tokenizer. A wrong message is
answered with an error, a fault of ours with `internal`; neither ends the thread. `Generation` handles requests,
`Controls` orders, `Shutdowns` the end, `Reports` the trainer's log-probs, `WorkerStatus` the status.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, Literal

import zmq

from rollout.config import SecuritySettings, ServiceSettings
from rollout.engine.messages import Command, Done, EndSession, EngineStatus, Failed
from rollout.metrics.mismatch import MismatchBox
from rollout.service.access import Access
from rollout.service.adapter_loading import AdapterFolders
from rollout.service.capabilities import Views, WeightControl, default_capabilities
from rollout.service.connections import Connections, ReplyAddress
from rollout.service.controls import Controls
from rollout.service.delivery.mismatch_reports import Reports
from rollout.service.delivery.replies import error_reply, ok_reply
from rollout.service.disconnects import Disconnects
from rollout.service.errors import ServiceError
from rollout.service.generation import Generation
from rollout.service.leases import client_key
from rollout.service.outbox import Outbox
from rollout.service.requests import schema as requests
from rollout.service.requests.background_work import BackgroundWork
from rollout.service.requests.constraint import Constraints
from rollout.service.requests.intake import Intake, PreparedPrompt
from rollout.service.router import open_router, receive_parts
from rollout.service.served_model import ServedModel
from rollout.service.shutdowns import Shutdowns
from rollout.service.status import WorkerStatus
from rollout.service.text.codec import PromptEncoder, PromptSource, TextCodec
from trainer_bridge.wire.codec import WireError, WireLimits, decode, encode, header_id, split_envelope

logger = logging.getLogger(__name__)

_MESSAGES_A_ROUND = 64  # then events get their turn
_BACKLOG_POLL_MS = 5
_LINGER_S = 2.0


class Server:
    """Serves the protocol on a thread of its own between `start` and `stop`.

    The engine's loop takes commands from `inbox` and hands events to `outbox.put`; without an `outbox` the server makes
    one. `status` returns the engine's latest snapshot; it is called on the service thread. `prompts` tokenizes on a
    background thread; without it that thread uses `text`. Without `constraints` only allow lists are offered.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        model: ServedModel,
        *,
        inbox: SimpleQueue[Command],
        outbox: Outbox | None = None,
        status: Callable[[], EngineStatus],
        text: TextCodec | None = None,
        prompts: PromptSource | None = None,
        constraints: Constraints | None = None,
        receiver: WeightControl | None = None,
        views: Views | None = None,
        adapters: AdapterFolders | None = None,
        worker_name: str = "",
        capabilities: Sequence[str] | None = None,
        stop_check_every: int = 4,
        security: SecuritySettings = SecuritySettings(),  # noqa: B008 -- frozen
    ) -> None:
        self.outbox = outbox or Outbox()
        self.endpoint = ""
        self.failed = False  # the thread ended by a fault; the log has the trace
        self._settings = settings
        self._security = security
        self._inbox = inbox
        self._status = status
        self._worker = worker_name
        self._constraints = constraints or Constraints(None, model.vocab_size)
        grammars = self._constraints.grammars
        if capabilities is None:
            routing = model.routing is not None
            capabilities = default_capabilities(
                text, receiver, views, grammars, routing, adapters is not None, model.sleep
            )
        self._worker_status = WorkerStatus(
            status,
            model,
            receiver,
            views,
            worker=worker_name,
            capabilities=capabilities,
            max_queue=settings.max_queue,
        )
        self._intake = Intake(settings, model, text, stop_check_every, grammars)
        self._prompts = PromptEncoder(text, settings.max_prompt_chars) if text and prompts is None else prompts
        self._limits = WireLimits(
            max_message_bytes=settings.max_message_bytes,
            max_header_bytes=settings.max_header_bytes,
            max_blobs=settings.max_blobs,
        )
        self._reports = Reports(self.outbox.post, self._reply)
        self._controls = Controls(
            inbox,
            self.outbox.post,
            self._reply,
            self._send_error,
            sleep=model.sleep,
            adapters=adapters,
            receiver=receiver,
        )
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        """True while the service thread runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def reclaimed(self) -> int:
        """Completions of vanished clients that were ended."""
        return self._generation.reclaimed

    @property
    def mismatch(self) -> MismatchBox:
        """Comparisons with the log-probs that trainers reported; any thread may take them."""
        return self._reports.box

    def start(self) -> None:
        """Bind the socket and serve. Raises ValueError if the endpoint cannot be bound, or needs CURVE."""
        assert self._thread is None, "a server starts once"
        self._context = zmq.Context()
        try:
            self._socket = open_router(self._context, self._settings, Access.from_settings(self._security))
        except ValueError:
            self._context.term()
            raise
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._connections = Connections(self._socket, self._settings.max_stream_buffer_bytes, self._connection_gone)
        self._disconnects = Disconnects(self._socket)
        self._background: BackgroundWork[PreparedPrompt | None] = BackgroundWork(self.outbox.post)
        self._shutdowns = Shutdowns(self._settings.drain_s, self._inbox, self._background)
        self._generation = Generation(
            self._settings,
            self._intake,
            self._prompts,
            inbox=self._inbox,
            status=self._status,
            connections=self._connections,
            background=self._background,
            constraints=self._constraints,
            worker=self._worker,
        )
        self._thread = threading.Thread(target=self._run, name="service", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 2 * _LINGER_S + 1) -> None:
        """Deliver all events, answer the remaining requests with `unavailable`, and end the thread."""
        if self._thread is not None:
            self.outbox.post(self._begin_stop)
            self._thread.join(timeout_s)

    def drain(self) -> None:
        """Drain, as a `shutdown` message without a reply. May be called from any thread."""
        self.outbox.post(lambda: self._shut_down("drain", None))

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self.outbox.fileno(), zmq.POLLIN)
        poller.register(self._disconnects.monitor, zmq.POLLIN)
        try:
            while not self._stopping:
                poller.poll(self._poll_ms())
                self._generation.tick()
                self._shutdowns.tick()
                self._take_events()
                self._take_messages()
                self._end_connections(self._disconnects.take())
                self._connections.flush()
            self._say_goodbye()
        # The worker sees `failed`; the log has the reason.
        except Exception:
            self.failed = True
            logger.critical("the service thread failed", exc_info=True)
        finally:
            self._background.close()
            self._reports.close()
            self._controls.close()
            self._disconnects.close()
            self._socket.close(linger=int(_LINGER_S * 1000))
            self._context.term()
            self.outbox.close()

    def _poll_ms(self) -> int | None:
        if self._connections.has_backlog:
            return _BACKLOG_POLL_MS
        waits_s = [wait_s for wait_s in (self._generation.wait_s(), self._shutdowns.wait_s()) if wait_s is not None]
        return math.ceil(min(waits_s) * 1000) if waits_s else None

    def _take_events(self) -> None:
        for item in self.outbox.drain():
            if callable(item):
                item()
            elif isinstance(item, (Done, Failed)):
                self._controls.done(item)
            else:
                self._generation.handle(item)

    def _take_messages(self) -> None:
        for _ in range(_MESSAGES_A_ROUND):
            try:
                first = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            connection = first.bytes
            ended = self._disconnects.note(connection, first)
            # The kept parts of an oversized message suffice to see its size and to read its id.
            frames = receive_parts(self._socket, self._limits.max_blobs + 3, self._limits.max_message_bytes)
            self._end_connections(ended)
            self._take_events()  # a client may rely on what `status` has shown
            self._receive(connection, frames)

    def _end_connections(self, ended: list[bytes]) -> None:
        for connection in ended:
            self._connections.ended(connection)

    def _begin_stop(self) -> None:
        self._stopping = True

    def _say_goodbye(self) -> None:
        gone = ServiceError("unavailable", "this worker has ended; send to another one")
        self._generation.fail_all(gone)
        for peer in (*self._controls.waiting(), *self._reports.waiting()):
            self._send_error(peer, gone)
        until = time.monotonic() + _LINGER_S
        while self._connections.has_backlog and time.monotonic() < until:
            self._connections.flush()
            time.sleep(_BACKLOG_POLL_MS / 1000)

    def _connection_gone(self, connection: bytes) -> None:
        self._generation.connection_gone(connection)

    # --- one message -------------------------------------------------------------------------------------------------

    def _receive(self, connection: bytes, frames: list[bytes]) -> None:
        """Handle a message; anything wrong with it becomes an error reply."""
        delimiter, frames = split_envelope(frames)
        peer = ReplyAddress(connection, delimiter, header_id(frames) or "")
        try:
            header = decode(frames, self._limits)
            peer = ReplyAddress(connection, delimiter, _valid_id(header))
            self._dispatch(peer, header, frames)
        except WireError as error:
            self._send_error(peer, ServiceError("bad_message", str(error)))
        except ServiceError as error:
            self._send_error(peer, error)
        # A fault of ours must not end the service for other clients.
        except Exception:
            logger.exception("a message failed in the service", extra=peer.about)
            self._send_error(peer, ServiceError("internal", "a fault in the worker; its log has the trace"))

    def _dispatch(self, peer: ReplyAddress, header: dict[str, Any], frames: list[bytes]) -> None:
        message = requests.parse_request(header)
        client = client_key(message.client, peer.connection)
        peer = replace(peer, client=client)
        self._generation.heard(client, peer.connection)
        match message:
            case requests.Generate():
                self._generation.generate(peer, client, message, frames, _fingerprint(frames))
            case requests.EndSession():
                end = EndSession(client, message.session, self._controls.token(peer))
                self._background.after_client(
                    client, None, lambda _: self._inbox.put(end)
                )  # after the turns sent before it
            case requests.Cancel():
                self._generation.cancel(peer, client, message)
            case requests.Attach():
                self._generation.attach(peer, client, message)
            case requests.Ack():
                self._generation.ack(peer, client, message)
            case requests.Report():
                stored = self._generation.result_of(client, message.target)
                self._reports.take(peer, message, stored, self._send_error)
            case requests.Status():
                preparing = self._background.waiting
                self._reply(peer, self._worker_status.reply(peer.id, self._generation, preparing, message.sequences))
            case requests.Trace():
                self._reply(peer, self._worker_status.trace(peer.id, message.steps))
            case requests.Ping():
                self._generation.check_alive()
                self._reply(peer, ok_reply(peer.id))
            case requests.Shutdown():
                self._shut_down(message.mode, self._controls.token(peer))
            case requests.Weights():
                self._controls.weights(peer, header)
            case _:
                self._controls.take(peer, message)

    def _shut_down(self, mode: Literal["drain", "now"], token: int | None) -> None:
        self._generation.draining = True
        self._shutdowns.begin(mode, token)

    def _send_error(self, peer: ReplyAddress, error: ServiceError) -> None:
        self._reply(peer, error_reply(peer.id, error))

    def _reply(self, peer: ReplyAddress, header: dict[str, Any]) -> None:
        try:
            frames = encode(header)
        except ValueError:
            logger.exception("a reply cannot be sent", extra=peer.about)
            frames = encode(error_reply(peer.id, ServiceError("internal", "a fault in the worker; its log has more")))
        if not self._connections.send(peer, frames):
            logger.error("a reply is lost: its client does not read", extra=peer.about)


def _valid_id(header: dict[str, Any]) -> str:
    found = header.get("id")
    return found if isinstance(found, str) and 1 <= len(found) <= requests.MAX_ID_CHARS else ""


def _fingerprint(frames: list[bytes]) -> bytes:
    """Equal for messages with the same bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for frame in frames:
        digest.update(len(frame).to_bytes(8, "little"))
        digest.update(frame)
    return digest.digest()
