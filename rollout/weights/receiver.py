"""The worker's side of the weight bridge: one thread that takes an update while the engine generates.

    service thread  --control-->           commands --> thread: polls, has the transports receive,
    loop            --applied, failed-->                        and `Reception` decide what becomes of it
    loop            <--take_ready--        ready    <--

`Reception` belongs to the thread. Other threads put commands into a queue (`control`, `applied`, `failed`) or take the
ready update from a deque (`take_ready`).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import zmq

from rollout.config import SecuritySettings, WeightsSettings
from rollout.engine.adapter_table import AdapterUpdate
from rollout.engine.gate import Gate
from rollout.service.access import Access
from rollout.weights.apply_mode import ApplyMode, Update
from rollout.weights.parameter_map import ParameterMap
from rollout.weights.reception import Reception, ended
from rollout.weights.staging import Allocate
from rollout.weights.wake import Wake
from trainer_bridge.transports import make_receivers
from trainer_bridge.wire.errors import InternalError, RolloutError, WeightsRejected
from trainer_bridge.wire.weight_messages import Reply, error_reply

if TYPE_CHECKING:
    from rollout.weights.adapter_target import AdapterTarget

_log = logging.getLogger(__name__)


class WeightReceiver:
    """Receives updates for `views`, a map of Hugging Face names to views of the model's parameters.

    `version` is the version of the weights that `views` hold now. `gate` lets updates in and holds generation while one
    is written in place. The socket is bound on return (`endpoint`); raises
    ValueError when it cannot be, or must not be without CURVE, or when updates have no room where they shall wait.
    `allocate` makes memory of the device for updates that wait there.
    """

    def __init__(
        self,
        views: Mapping[str, torch.Tensor],
        version: int,
        settings: WeightsSettings,
        gate: Gate,
        security: SecuritySettings = SecuritySettings(),  # noqa: B008 -- frozen
        adapters: AdapterTarget | None = None,
        allocate: Allocate | None = None,
    ) -> None:
        parameters = ParameterMap(views)
        self._mode = ApplyMode(settings.apply, views, allocate, settings.staging)
        self._receivers = make_receivers(
            settings.bind,
            max(parameters.max_update_bytes, 0 if adapters is None else adapters.max_bytes),
            Access.from_settings(security),
            next(iter(views.values())).device,
            settings.idle_s,
            wake=lambda: self._post(lambda: None),
        )
        self.endpoint: str = self._receivers["zmq"].endpoint  # type: ignore[attr-defined]
        self._reception = Reception(
            parameters,
            version,
            self._mode,
            gate,
            self._receivers,
            adapters,  # what they must fit, where they are served
            idle_s=settings.idle_s,
            endpoint=self.endpoint,
            post=self._post,
        )
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ended = False
        self._post_lock = threading.Lock()
        self._wake = Wake()
        self._thread = threading.Thread(target=self._run, name="weight-receiver", daemon=True)
        self._thread.start()

    # --- any thread --------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The version of the weights that were applied last."""
        return self._reception.version

    def summary(self) -> dict[str, Any]:
        """How updates apply, and the last one, for a status."""
        last = self._reception.last
        return {"apply": self._mode.name, "staging": self._mode.staging, "last": last and last.summary()}

    @property
    def alive(self) -> bool:
        """True while the thread runs; without it every control message is refused."""
        return self._thread.is_alive()

    def control(self, header: Mapping[str, Any], reply: Reply) -> None:
        """Handle a `weights` message; `reply` gets one `ok` or `error` map, later, from the receiver's thread."""
        if not self._post(lambda: self._reception.control(header, reply)):
            reply(error_reply(ended()))

    def take_ready(self) -> Update | AdapterUpdate | None:
        """The update to apply between this step and the next, or None. Takes no lock and never waits."""
        try:
            return self._reception.ready.popleft()
        except IndexError:
            return None

    def applied(self, update: Update | AdapterUpdate, pause_s: float) -> None:
        """The engine has applied `update` and launches its next step with it, after a pause of `pause_s` seconds."""
        if not isinstance(update, AdapterUpdate):
            self._reception.version = update.version
        update.close(applied=True)
        self._post(lambda: self._reception.applied(update, pause_s))

    def refused(self, update: Update | AdapterUpdate, message: str) -> None:
        """`update` does not fit what the engine serves by now; the publisher gets `message` as `weights_rejected`."""
        self._give_up(update, WeightsRejected(message))

    def failed(self, update: Update | AdapterUpdate, message: str) -> None:
        """The engine could not apply `update`; the publisher gets `message` as an `internal` error."""
        self._give_up(update, InternalError(f"the worker could not apply the update: {message}"))

    def rest(self) -> None:
        """No update can begin: the thread frees what it keeps for the next one."""
        self._post(lambda: None)

    def close(self) -> None:
        """End the thread and answer whoever waits. Idempotent."""
        self._post(self._stop)
        self._thread.join()

    def _give_up(self, update: Update | AdapterUpdate, error: RolloutError) -> None:
        update.close(applied=False)
        self._post(lambda: self._reception.failed(update, error))

    def _post(self, command: Callable[[], None]) -> bool:
        """Give the thread something to do; false when it has ended."""
        with self._post_lock:
            if self._ended:
                return False
            self._commands.put(command)
            self._wake.signal()
            return True

    # --- the receiver's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        finally:  # whatever ended the thread, nobody waits for it in vain
            self._shut_down()

    def _serve(self) -> None:
        reception = self._reception
        held, poller = zmq.Poller(), zmq.Poller()
        for each in (held, poller):
            each.register(self._wake.socket, zmq.POLLIN)
        for receiver in self._receivers.values():
            for sock in receiver.sockets:
                poller.register(sock, zmq.POLLIN)
        busy = False
        while not reception.closing:
            (held if reception.held else poller).poll(0 if busy else reception.poll_ms())
            try:
                self._run_commands()
                busy = reception.advance()
                reception.settle()
            except RolloutError as error:
                reception.reject(error)
            except Exception as error:  # a fault of ours must not end the thread: the old weights serve on
                _log.exception("the weight receiver failed")
                reception.reject(InternalError(f"the worker failed while it received weights: {error!r:.200}"))
            reception.leave_door()

    def _run_commands(self) -> None:
        self._wake.clear()
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _stop(self) -> None:
        self._reception.closing = True

    def _shut_down(self) -> None:
        with self._post_lock:
            self._ended = True
        self._run_commands()
        self._reception.close()
        for receiver in self._receivers.values():
            receiver.close()
        self._wake.close()
