"""The service thread: a ROUTER socket for clients on one side, the engine's inbox and events on the other.

    clients <== ROUTER ==> Server --Command--> inbox          one thread, one poll over two things:
                             ^                                the socket, and the outbox that the
                             +------ Outbox <--Event-- engine engine's loop and other threads fill

The thread parses, checks and answers. It never waits for the engine, a client or the tokenizer. A wrong message is
answered with an error, a fault of ours with `internal`; neither ends the thread. `Generation` handles requests,
`Controls` orders, `Shutdowns` the end, `MismatchReports` the trainer's log-probs, `WorkerStatus` the status.
"""

import hashlib
import logging
import math
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import zmq

from rollout.config import SecuritySettings, ServiceSettings
from rollout.engine.messages.to_service import Done, Failed
from rollout.metrics.logprob_mismatch import MismatchBox
from rollout.network.access import Access
from rollout.network.router_socket import open_router, receive_parts
from rollout.service.capabilities import ServedEngine, ServedModel, WorkerAddress, default_capabilities
from rollout.service.connections import Connections, Disconnects, ReplyAddress
from rollout.service.controls import Controls, Shutdowns
from rollout.service.delivery.mismatch_reports import Compare, MismatchReports, compare_result
from rollout.service.delivery.replies import as_error, error_reply, ok_reply
from rollout.service.generation import Generation
from rollout.service.leases import client_key
from rollout.service.requests import schema as requests
from rollout.service.requests.background_work import BackgroundWork
from rollout.service.requests.constraint import Constraints
from rollout.service.requests.intake import Intake, PreparedPrompt
from rollout.service.requests.preparation import Preparation
from rollout.service.requests.request_media import MediaStore
from rollout.service.status import WorkerStatus
from rollout.text.codec import PromptEncoder, PromptSource, TextCodec
from trainer_bridge.wire.codec import WireError, WireLimits, decode, encode, header_id, split_envelope
from trainer_bridge.wire.errors import BadMessage, InternalError, RolloutError, Unavailable

logger = logging.getLogger(__name__)

_MESSAGES_A_ROUND = 64  # then events get their turn
_BACKLOG_POLL_MS = 5
_LINGER_S = 2.0


@dataclass(frozen=True)
class ServedText:
    """The text services. Without `codec`, requests carry token ids only.

    `prompts` tokenizes on a background thread; without it that thread uses `codec`. Without `constraints` only allow
    lists are offered.
    """

    codec: TextCodec | None = None
    prompts: PromptSource | None = None
    constraints: Constraints | None = None


class Server:
    """Serves the protocol on a thread of its own between `start` and `stop`.

    The constructor binds the socket; messages wait in it until `start`. It raises ValueError if the endpoint cannot be
    bound, or needs CURVE.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        model: ServedModel,
        engine: ServedEngine,
        text: ServedText = ServedText(),  # noqa: B008 -- frozen
        *,
        worker: WorkerAddress = WorkerAddress(),  # noqa: B008 -- frozen
        security: SecuritySettings = SecuritySettings(),  # noqa: B008 -- frozen
        compare: Compare = compare_result,
    ) -> None:
        self.outbox = engine.outbox
        self.failed = False  # the thread ended by a fault; the log has the trace
        self._inbox = engine.inbox
        self._limits = WireLimits(
            max_message_bytes=settings.max_message_bytes,
            max_header_bytes=settings.constants.max_header_bytes,
            max_blobs=settings.constants.max_blobs,
        )
        self._context = zmq.Context()
        try:
            self._socket = open_router(self._context, settings, Access.from_settings(security))
        except ValueError:
            self._context.term()
            raise
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._connections = Connections(self._socket, settings.max_stream_buffer_bytes, self._connection_gone)
        self._disconnects = Disconnects(self._socket)

        constraints = text.constraints or Constraints(None, model.vocab_size, "it has no compiler of others")
        prompts = text.prompts
        if prompts is None and text.codec is not None:
            prompts = PromptEncoder(text.codec, settings.constants.max_prompt_chars)
        self._background: BackgroundWork[PreparedPrompt | None] = BackgroundWork(self.outbox.post)
        intake = Intake(settings, model, text.codec, constraints)
        media = MediaStore(settings.media_store_bytes)
        self._generation = Generation(
            settings,
            intake,
            Preparation(self._background, intake, prompts, constraints, media),
            inbox=engine.inbox,
            status=engine.status,
            connections=self._connections,
            worker=worker.name,
        )
        self._reports = MismatchReports(settings.constants, self.outbox.post, self._reply, self._send_error, compare)
        self._controls = Controls(
            engine.inbox,
            self.outbox.post,
            self._reply,
            self._send_error,
            sleep=model.sleep,
            adapters=engine.adapters,
            receiver=engine.receiver,
        )
        self._shutdowns = Shutdowns(settings.drain_s, engine.inbox, self._background)
        capabilities = default_capabilities(engine, model, text.codec, constraints.grammars)
        self._worker_status = WorkerStatus(settings, engine, model, worker, capabilities)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="service", daemon=True)

    @property
    def alive(self) -> bool:
        """True while the service thread runs."""
        return self._thread.is_alive()

    @property
    def reclaimed(self) -> int:
        """Completions of vanished clients that were ended."""
        return self._generation.reclaimed

    @property
    def mismatch(self) -> MismatchBox:
        """Comparisons with the log-probs that trainers reported; any thread may take them."""
        return self._reports.box

    def start(self) -> None:
        """Begin to serve. A server starts once."""
        self._thread.start()

    def stop(self, timeout_s: float = 2 * _LINGER_S + 1) -> None:
        """Deliver all events, answer the remaining requests with `unavailable`, and end the thread.

        A server that was never started closes its socket.
        """
        if self._thread.ident is None:
            self._close()
            return
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
                self._generation.flush()
                self._connections.flush()
            self._say_goodbye()
        # The worker sees `failed`; the log has the reason.
        except Exception:
            self.failed = True
            logger.critical("the service thread failed", exc_info=True)
        finally:
            self._close()

    def _close(self) -> None:
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
        gone = Unavailable("this worker has ended; send to another one")
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
        """Handle a message. A wrong message gets an error reply."""
        delimiter, frames = split_envelope(frames)
        peer = ReplyAddress(connection, delimiter, header_id(frames) or "")
        try:
            header = decode(frames, self._limits)
            peer = ReplyAddress(connection, delimiter, _valid_id(header))
            self._dispatch(peer, header, frames)
        except WireError as error:
            self._send_error(peer, BadMessage(str(error)))
        # A fault of ours must not end the service for other clients.
        except Exception as error:
            self._send_error(peer, as_error(error, "a message failed in the service", peer.request_fields))

    def _dispatch(self, peer: ReplyAddress, header: dict[str, Any], frames: list[bytes]) -> None:
        message = requests.parse_request(header)
        client = client_key(message.client, peer.connection)
        peer = replace(peer, client=client)
        self._generation.renew(client, peer.connection)
        match message:
            case requests.GenerateMessage():
                self._generation.generate(peer, client, message, frames, _content(message, header, frames))
            case requests.MediaMessage():
                self._generation.take_media(peer, client, message, sum(map(len, frames)))
            case requests.EndSessionMessage():
                name, token = message.session, self._controls.token(peer)
                # The call runs after the turns that were sent before it.
                self._background.after_client(client, None, lambda _: self._generation.end_session(client, name, token))
            case requests.PrefetchMessage():
                self._generation.prefetch(client, message, partial(self._controls.token, peer))
            case requests.CancelMessage():
                self._generation.cancel(peer, client, message)
            case requests.AttachMessage():
                self._generation.attach(peer, client, message)
            case requests.AckMessage():
                self._generation.ack(peer, client, message)
            case requests.ReportMessage():
                self._reports.take(peer, message, self._generation.result_of(client, message.target))
            case requests.StatusMessage():
                preparing = self._background.waiting
                self._reply(peer, self._worker_status.reply(peer.id, self._generation, preparing, message.sequences))
            case requests.TraceMessage():
                self._reply(peer, self._worker_status.trace(peer.id, message.steps))
            case requests.PingMessage():
                self._generation.check_alive()
                self._reply(peer, ok_reply(peer.id))
            case requests.ShutdownMessage():
                self._shut_down(message.mode, self._controls.token(peer))
            case requests.WeightsMessage():
                self._controls.weights(peer, header)
            case _:
                assert isinstance(message, requests.OrderMessage), message.op
                self._controls.take(peer, message)
                if isinstance(message, requests.PauseMessage | requests.SleepMessage) and message.mode == "abort":
                    self._generation.cancel_preparing()

    def _shut_down(self, mode: Literal["drain", "now"], token: int | None) -> None:
        self._generation.draining = True
        self._shutdowns.begin(mode, token)

    def _send_error(self, peer: ReplyAddress, error: RolloutError) -> None:
        self._reply(peer, error_reply(peer.id, error))

    def _reply(self, peer: ReplyAddress, header: dict[str, Any]) -> None:
        try:
            frames = encode(header)
        except ValueError:
            logger.exception("a reply cannot be sent", extra=peer.request_fields)
            frames = encode(error_reply(peer.id, InternalError("a fault in the worker; its log has more")))
        if not self._connections.send(peer, frames):
            logger.error("a reply is lost: its client does not read", extra=peer.request_fields)


def _valid_id(header: dict[str, Any]) -> str:
    found = header.get("id")
    return found if isinstance(found, str) and 1 <= len(found) <= requests.MAX_ID_CHARS else ""


def _content(message: requests.GenerateMessage, header: dict[str, Any], frames: list[bytes]) -> bytes:
    """Equal for messages that ask for the same: whether they bring the pixels of an image or name it."""
    if message.media is None:
        return _digest(frames)
    media = [{name: part for name, part in item.items() if name != "pixel_values"} for item in header["media"]]
    return _digest(encode(header | {"media": media}))


def _digest(frames: list[bytes]) -> bytes:
    """Equal for messages with the same bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for frame in frames:
        digest.update(len(frame).to_bytes(8, "little"))
        digest.update(frame)
    return digest.digest()
