"""The worker's side of the weight bridge: one thread that receives an update while the engine generates.

    publisher       == weight socket ==>   messages --> thread: hands buckets to the transports and control messages
    loop            --applied, failed-->   commands -->         to `UpdateIntake`, which decides about them
    loop            <--take_ready--        ready    <--

`UpdateIntake` belongs to the thread. Other threads put commands into a queue (`control`, `applied`, `failed`) or take
the ready update from a deque (`take_ready`).
"""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import zmq

from rollout.config import SecuritySettings, WeightsSettings
from rollout.engine.gate import Gate
from rollout.engine.messages.to_engine import FeatureUpdate
from rollout.network.access import Access
from rollout.network.router_socket import PolledQueue, bind_router
from rollout.weights.received_update import Reply
from rollout.weights.staged_weights import StagedWeights
from rollout.weights.update_intake import UpdateIntake, UpdateTargets, ended
from trainer_bridge.transports.bucket_link import BUCKET
from trainer_bridge.transports.registry import make_receivers
from trainer_bridge.wire.codec import (
    DEFAULT_LIMITS,
    PROTOCOL_VERSION,
    WireError,
    decode,
    encode,
    header_id,
    join_envelope,
    split_envelope,
)
from trainer_bridge.wire.errors import (
    BadMessage,
    BadRequest,
    InternalError,
    RolloutError,
    WeightsRejected,
    error_reply,
)
from trainer_bridge.wire.manifest import MAX_BUCKET_BYTES

_LINGER_MS = 1000
_MOST_UNREAD = 8  # messages that wait in the socket, for each publisher

_log = logging.getLogger(__name__)


class WeightReceiver:
    """Receives updates of `targets`; the model's weights have `version` now.

    `gate` lets updates in and holds generation while one is written in place. The weight socket is bound on return
    (`endpoint`). Raises ValueError when it cannot be bound, or when it needs CURVE.
    """

    def __init__(
        self,
        targets: UpdateTargets,
        version: int,
        settings: WeightsSettings,
        gate: Gate,
        security: SecuritySettings = SecuritySettings(),  # noqa: B008 -- frozen
    ) -> None:
        parameters, adapters = targets.parameters, targets.adapters
        access = Access.from_settings(security)
        self._commands: PolledQueue[Callable[[], None]] = PolledQueue()
        self._post_lock = threading.Lock()
        self._ended = False
        self._memory = targets.memories.staging.memory
        max_update_bytes = max(parameters.max_update_bytes, 0 if adapters is None else adapters.max_bytes)
        self._socket = WeightSocket(settings.bind, max_update_bytes, access)
        self.endpoint = self._socket.endpoint
        self.receivers = make_receivers(
            self._socket,
            next(iter(parameters.views.values())).device,
            settings.idle_s,
            wake=lambda: self._post(_look),
            groups=access.keys is None,
        )
        self._intake = UpdateIntake(
            targets,
            version,
            gate,
            self.receivers,
            idle_s=settings.idle_s,
            endpoint=self.endpoint,
            post=self._post,
        )
        self._thread = threading.Thread(target=self._run, name="weight-receiver", daemon=True)
        self._thread.start()

    # --- any thread --------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The version of the weights that were applied last."""
        return self._intake.version

    def summary(self) -> dict[str, Any]:
        """The status: how updates apply, what a ready update waits for, and the last update."""
        last = self._intake.last
        return {
            "apply": self._memory.name,
            "staging": self._memory.place,
            "device_bytes": self._memory.device_bytes,
            "waits_for": self._intake.waits_for,
            "last": last and last.summary(),
        }

    @property
    def alive(self) -> bool:
        """True while the thread runs; otherwise every control message is refused."""
        return self._thread.is_alive()

    def control(self, header: Mapping[str, Any], reply: Reply) -> None:
        """Handle a `weights` message; `reply` gets one `ok` or `error` map, later, from the receiver's thread."""
        if not self._post(lambda: self._intake.control(header, reply)):
            reply(error_reply(ended()))

    def take_ready(self) -> StagedWeights | FeatureUpdate | None:
        """The update to apply between this step and the next, or None. Takes no lock and never waits."""
        try:
            return self._intake.ready.popleft()
        except IndexError:
            return None

    def applied(self, update: StagedWeights | FeatureUpdate, pause_s: float) -> None:
        """The engine has applied `update` and launches its next step with it, after a pause of `pause_s` seconds."""
        if not isinstance(update, FeatureUpdate):
            self._intake.version = update.version
        update.close(applied=True)
        self._post(lambda: self._intake.applied(update, pause_s))

    def refused(self, update: StagedWeights | FeatureUpdate, message: str) -> None:
        """`update` no longer fits the engine's state; the publisher gets `message` as `weights_rejected`."""
        self._give_up(update, WeightsRejected(message))

    def failed(self, update: StagedWeights | FeatureUpdate, message: str) -> None:
        """The engine could not apply `update`; the publisher gets `message` as an `internal` error."""
        self._give_up(update, InternalError(f"the worker could not apply the update: {message}"))

    def rest(self) -> None:
        """No update can begin: the thread frees the memory that it keeps for the next update."""
        self._post(_look)

    def close(self) -> None:
        """End the thread and answer all unanswered messages. Idempotent."""
        self._post(self._stop)
        self._thread.join()

    def _give_up(self, update: StagedWeights | FeatureUpdate, error: RolloutError) -> None:
        update.close(applied=False)
        self._post(lambda: self._intake.failed(update, error))

    def _post(self, command: Callable[[], None]) -> bool:
        """Put a command into the thread's queue; false if the thread has ended."""
        with self._post_lock:
            if self._ended:
                return False
            self._commands.post(command)
            return True

    # --- the receiver's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        finally:  # every message gets its answer, however the thread ends
            self._shut_down()

    def _serve(self) -> None:
        intake = self._intake
        poller = zmq.Poller()
        poller.register(self._commands.fileno(), zmq.POLLIN)
        poller.register(self._socket.zmq_socket, zmq.POLLIN)
        busy = False
        while not intake.closing:
            poller.poll(0 if busy else intake.poll_ms())
            busy = True  # a round that fails may have taken messages from the socket that it did not answer
            try:
                self._run_commands()
                busy = intake.advance()
                self._answer_messages()
                intake.follow_up()
            except RolloutError as error:
                intake.reject(error)
            except Exception as error:  # a fault must not end the thread: the old weights stay in use
                _log.exception("the weight receiver failed")
                intake.reject(InternalError(f"the worker failed while it received weights: {error!r:.200}"))
            intake.report_idle()

    def _run_commands(self) -> None:
        for command in self._commands.drain():
            command()

    def _answer_messages(self) -> None:
        """Pass the control messages that arrived between buckets to the intake."""
        while (message := self._socket.next_control()) is not None:
            self._intake.control(*message)

    def _stop(self) -> None:
        self._intake.closing = True

    def _shut_down(self) -> None:
        with self._post_lock:
            self._ended = True
        self._run_commands()
        with contextlib.ExitStack() as closing:
            for close in (self._commands.close, self._socket.close, *(each.close for each in self.receivers.values())):
                closing.callback(close)
            self._intake.close()


class WeightSocket:
    """The worker's socket for updates: it receives buckets and control messages. Belongs to the receiver's thread.

    Raises ValueError when it cannot be bound, or must not be without CURVE.
    """

    def __init__(self, bind: str, max_update_bytes: int, access: Access) -> None:
        options = {
            zmq.LINGER: _LINGER_MS,
            zmq.RCVHWM: _MOST_UNREAD,
            # libzmq drops a connection that announces a larger frame before it allocates memory for it.
            zmq.MAXMSGSIZE: max(min(MAX_BUCKET_BYTES, max_update_bytes) + BUCKET.size, DEFAULT_LIMITS.max_header_bytes),
            zmq.HEARTBEAT_IVL: 10_000,
        }
        self._context = zmq.Context()  # a separate one: a context has one list of allowed clients
        try:
            self.zmq_socket: zmq.Socket = bind_router(self._context, bind, "weights.bind", access, options)
        except ValueError:
            self._context.term()
            raise
        self.endpoint: str = self.zmq_socket.get_string(zmq.LAST_ENDPOINT)
        self._control: deque[tuple[bytes, list[memoryview]]] = deque()

    def receive(self) -> tuple[bytes, list[memoryview]] | None:
        """The next message and its sender, or None. Never waits."""
        try:
            frames = self.zmq_socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return frames[0].bytes, [frame.buffer for frame in frames[1:]]

    def put_aside(self, sender: bytes, frames: list[memoryview]) -> None:
        """Keep a message that is no bucket for `next_control`."""
        self._control.append((sender, frames))

    def next_control(self) -> tuple[dict[str, Any], Reply] | None:
        """The next control message and the function for its answer, or None. Wrong messages are answered here."""
        while self._control:
            sender, frames = self._control.popleft()
            delimiter, frames = split_envelope(frames)
            message_id = header_id(frames)

            def reply(
                answer: dict[str, Any], to: bytes = sender, delimiter: bool = delimiter, about: str | None = message_id
            ) -> None:
                frames = join_envelope(delimiter, encode({**answer, "v": PROTOCOL_VERSION, "id": about}))
                self._send([to, *frames])

            try:
                return _read_control(frames), reply
            except RolloutError as error:
                reply(error_reply(error))
        return None

    def send(self, to: bytes, message: bytes) -> None:
        """Send a message of one frame; it is lost if its receiver is gone."""
        self._send([to, message])

    def close(self) -> None:
        """Close the socket; messages already sent still go out."""
        self.zmq_socket.close()
        self._context.term()

    def _send(self, frames: list[bytes]) -> None:
        try:
            self.zmq_socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:  # the publisher is gone or does not read; its own deadline ends its wait
            _log.warning("cannot answer on the weight socket: %s", error)


def _read_control(frames: list[memoryview]) -> dict[str, Any]:
    """The header of a `weights` message. Raises `BadMessage` and `BadRequest`."""
    try:
        header = decode(frames)
    except WireError as error:
        raise BadMessage(str(error)) from error
    if header.get("v") != PROTOCOL_VERSION:
        raise BadMessage(f"this worker speaks protocol version {PROTOCOL_VERSION}; send 'v': {PROTOCOL_VERSION}")
    if header_id(frames) is None:
        raise BadRequest("a message needs an id of 1 to 128 characters", field="id")
    if header.get("op") != "weights":
        raise BadRequest("this socket takes 'weights' messages only; send others to the request socket", field="op")
    return header


def _look() -> None:
    """No-op: the thread checks everything after each command."""
