"""The worker's side of the weight bridge: one thread that takes an update while the engine generates.

    idle --begin--> receiving --commit, all verified--> ready --take_ready--> applying --applied/failed--> idle
                        |                               `------- `_committed` --------'
                        +-- newer begin, abort, damage, idle_s without data --> idle; what is served was never touched
                                                                               (in place, and begun: stale)

Invariants:

- All state below belongs to the receiver's thread. Other threads put commands into a queue (`control`, `applied`,
  `failed`) or take the ready update from a deque (`take_ready`).
- An update becomes ready only when everything that can be refused has been checked: names, shapes, dtypes, cover of
  every parameter, version, checksums, equality of tied tensors. Then the loop copies all of it or none.
- In place, not a byte lands before the loop has granted the hold; once one has, generation goes on only with an
  update that is whole.
- A `begin` that comes while an update is ready or being applied waits: the staging memory holds one update at a time,
  is allocated once, and is not written while it may be read.
- An update begins only while the door is open (`Hold.door`), and is inside until nothing of it is left to be done.
- Every control message gets exactly one reply.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import zmq

from rollout.config import SecuritySettings, WeightsSettings
from rollout.engine.adapters import AdapterUpdate
from rollout.engine.hold import Hold
from trainer_bridge.access import Access
from trainer_bridge.adapter_updates import IncomingAdapter, read_adapter
from trainer_bridge.apply_mode import ApplyMode, Landed, Update
from trainer_bridge.errors import BadRequest, InternalError, NotFound, RolloutError, Unavailable, WeightsRejected
from trainer_bridge.landing import StagedLanding
from trainer_bridge.manifest import Manifest, from_wire
from trainer_bridge.parameter_map import Fit, ParameterMap
from trainer_bridge.staging import Allocate
from trainer_bridge.transports import Incoming, TransportReceiver, make_receivers
from trainer_bridge.wake import Wake
from trainer_bridge.weight_messages import Applied, Commit, Reply, check_fields, error_reply, read_token

if TYPE_CHECKING:
    from rollout.adapter_sources import AdapterTarget

_MOST_WAITING = 16  # begins of different adapters
_BUSY_POLL_MS = 2  # while copies on a device still read the staging memory

_log = logging.getLogger(__name__)


class WeightReceiver:
    """Receives updates for `views`, a map of Hugging Face names to views of the model's parameters.

    `version` is the version of the weights that `views` hold now. The socket is bound on return (`endpoint`); raises
    ValueError when it cannot be, or must not be without CURVE. `allocate` makes memory of the device for updates that
    wait there.
    """

    def __init__(
        self,
        views: Mapping[str, torch.Tensor],
        version: int,
        settings: WeightsSettings,
        security: SecuritySettings = SecuritySettings(),  # noqa: B008 -- frozen
        adapters: AdapterTarget | None = None,
        allocate: Allocate | None = None,
    ) -> None:
        self._adapters = adapters  # what they must fit, where they are served
        self._map = ParameterMap(views)
        self._version = version
        self._idle_s = settings.idle_s
        self._receivers = make_receivers(
            settings.bind,
            max(self._map.max_update_bytes, 0 if adapters is None else adapters.max_bytes),
            Access.from_settings(security),
            next(iter(views.values())).device,
            settings.idle_s,
            wake=lambda: self._post(lambda: None),
        )
        self.endpoint: str = self._receivers["zmq"].endpoint  # type: ignore[attr-defined]
        self._mode = ApplyMode(settings.apply, views, allocate)
        self.hold = Hold()  # asked for while an update is written in place
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ready: deque[Update | AdapterUpdate] = deque()
        self._incoming: Incoming | None = None
        self._fit: Fit | None = None
        self._landing: Landed | None = None
        self._adapter: IncomingAdapter | None = None  # that the incoming update is of, not of the model
        self._commit: Commit | None = None  # asked for; its bytes are not all verified yet
        self._committed: tuple[Update | AdapterUpdate, Commit] | None = None  # ready or being applied
        self._waiting: dict[str | None, tuple[Mapping[str, Any], Reply]] = {}  # begins, by adapter; None: the model's
        self._failure: tuple[bytes, RolloutError] | None = None
        self._begun_s = 0.0
        self._last: Applied | None = None  # replaced as a whole: any thread may look
        self._closing = False
        self._ended = False
        self._post_lock = threading.Lock()
        self._wake = Wake()
        self._thread = threading.Thread(target=self._run, name="weight-receiver", daemon=True)
        self._thread.start()

    # --- any thread --------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The version of the weights that were applied last."""
        return self._version

    def summary(self) -> dict[str, Any]:
        """How updates apply, and the last one, for a status."""
        last = self._last
        return {"apply": self._mode.name, "staging": self._mode.staging, "last": last and last.summary()}

    @property
    def alive(self) -> bool:
        """True while the thread runs; without it every control message is refused."""
        return self._thread.is_alive()

    def control(self, header: Mapping[str, Any], reply: Reply) -> None:
        """Handle a `weights` message; `reply` gets one `ok` or `error` map, later, from the receiver's thread."""
        if not self._post(lambda: self._on_control(header, reply)):
            reply(error_reply(_ended()))

    def take_ready(self) -> Update | AdapterUpdate | None:
        """The update to apply between this step and the next, or None. Takes no lock and never waits."""
        try:
            return self._ready.popleft()
        except IndexError:
            return None

    def applied(self, update: Update | AdapterUpdate, pause_s: float) -> None:
        """The engine has applied `update` and launches its next step with it, after a pause of `pause_s` seconds."""
        if not isinstance(update, AdapterUpdate):
            self._version = update.version
        update.close(applied=True)
        self._post(lambda: self._on_applied(update, pause_s))

    def failed(self, update: Update | AdapterUpdate, message: str) -> None:
        """The engine could not apply `update`; the publisher gets `message` as an `internal` error."""
        update.close(applied=False)
        self._post(lambda: self._on_failed(update, message))

    def close(self) -> None:
        """End the thread and answer whoever waits. Idempotent."""
        self._post(self._stop)
        self._thread.join()

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
        held, poller = zmq.Poller(), zmq.Poller()
        for each in (held, poller):
            each.register(self._wake.socket, zmq.POLLIN)
        for receiver in self._receivers.values():
            for sock in receiver.sockets:
                poller.register(sock, zmq.POLLIN)
        busy = False
        while not self._closing:
            waits = self._incoming is not None and not self._incoming.open.is_set()
            (held if waits else poller).poll(0 if busy else self._poll_ms())
            try:
                self._run_commands()
                busy = self._advance()
                self._try_commit()
                self._retry_begin()
                self._drop_idle()
            except RolloutError as error:
                self._reject(error)
            except Exception as error:  # a fault of ours must not end the thread: the old weights serve on
                _log.exception("the weight receiver failed")
                self._reject(InternalError(f"the worker failed while it received weights: {error!r:.200}"))
            if self._incoming is None and self._committed is None:
                self.hold.door.leave()

    def _poll_ms(self) -> int | None:
        if (self._waiting and self._committed is None and self._incoming is None) or self._commit is not None:
            return _BUSY_POLL_MS
        if self._incoming is None:
            return None
        return int(max(0.0, self._incoming.last_data_s + self._idle_s - time.monotonic()) * 1000) + 1

    def _run_commands(self) -> None:
        self._wake.clear()
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _advance(self) -> bool:
        incoming, busy = self._incoming, False
        for receiver in self._receivers.values():
            mine = incoming is not None and incoming.transport in receiver.carries
            if not mine or incoming.open.is_set():  # type: ignore[union-attr]
                busy |= receiver.advance(incoming if mine else None)
        return busy

    def _on_control(self, header: Mapping[str, Any], reply: Reply) -> None:
        try:
            if self._closing:
                raise _ended()
            action = check_fields(header)
            {"begin": self._begin, "commit": self._on_commit, "abort": self._abort, "status": self._status}[action](
                header, reply
            )
        except RolloutError as error:
            reply(error_reply(error))
        except Exception as error:
            _log.exception("a weights message failed")
            reply(error_reply(InternalError(f"the worker failed on this message: {error!r:.200}")))

    def _begin(self, header: Mapping[str, Any], reply: Reply) -> None:
        adapter = read_adapter(header, self._adapters)
        name = None if adapter is None else adapter.name
        if self._must_wait(name):
            if name in self._waiting:
                self._waiting.pop(name)[1](error_reply(WeightsRejected("a newer begin took the place of this one")))
            elif len(self._waiting) >= _MOST_WAITING:
                raise Unavailable("too many updates wait for their turn; publish this one again later")
            self._waiting[name] = (header, reply)
            return
        if not self.hold.door.enter():
            raise Unavailable("this worker is asleep, or about to be: wake it, then publish")
        begun_s = time.monotonic()
        manifest, receiver, options = self._check_begin(header, adapter)
        fit = Fit((), ())
        if adapter is None:
            fit = self._map.check(manifest)
        else:
            adapter.check(manifest)
        if self._incoming is not None:
            self._reject(WeightsRejected(f"version {manifest.version} was begun before this update was complete"))
        landing = adapter.open(manifest) if adapter else self._mode.open(manifest, fit, receiver.on_device)
        incoming = Incoming(manifest, receiver.name, secrets.token_bytes(16), landing)
        try:
            grant = receiver.begin(incoming, options)
        except RolloutError:
            receiver.drop(incoming, None)
            raise
        self._incoming, self._fit, self._landing, self._begun_s = incoming, fit, landing, begun_s
        self._adapter = adapter
        if self._mode.in_place and adapter is None:
            self.hold.request(lambda: self._post(lambda: self._open(incoming)))
        else:
            self._open(incoming)
        reply({"op": "ok", "version": manifest.version, "token": incoming.token.hex(), "grant": grant})

    def _must_wait(self, name: str | None) -> bool:
        """Whether an update of this adapter (None: of the model) can't begin yet.

        A begin breaks off what comes before it of the same kind. An adapter's breaks off nothing else: of the model
        that could leave the weights half written.
        """
        incoming = None if self._adapter is None else self._adapter.name
        others = name is not None and self._incoming is not None and incoming != name
        return others or self._committed is not None or self._mode.busy

    def _open(self, incoming: Incoming) -> None:
        incoming.last_data_s = time.monotonic()
        incoming.open.set()

    def _check_begin(
        self, header: Mapping[str, Any], adapter: IncomingAdapter | None
    ) -> tuple[Manifest, TransportReceiver, Mapping[str, Any]]:
        # A few too many are read all the same, so that the refusal can name them.
        most = 2 * len(self._map.views) + 64 if adapter is None else adapter.max_tensors
        manifest = from_wire(header["manifest"], max_tensors=most)
        if type(header["version"]) is not int or header["version"] != manifest.version:
            raise WeightsRejected(f"version must be the manifest's, {manifest.version}", field="version")
        served = self._version if adapter is None else adapter.version
        again = adapter is None and self.hold.dropped  # the version that it had is as good as a newer one
        if served is not None and manifest.version <= served - again:
            raise WeightsRejected(
                f"version {manifest.version} is not newer than version {served}, which is served; "
                "publish with a version that grows",
                field="version",
            )
        transport = header["transport"]
        if type(transport) is not str or transport not in self._receivers:
            raise BadRequest(f"transport must be one of {', '.join(self._receivers)}", field="transport")
        return manifest, self._receivers[transport], header["options"]

    def _on_commit(self, header: Mapping[str, Any], reply: Reply) -> None:
        token, options = read_token(header["token"]), header["options"]
        if self._incoming is None or self._incoming.token != token:
            if self._failure is not None and self._failure[0] == token:
                raise self._failure[1]
            raise NotFound("no update with this token is being received; begin one", field="token")
        if self._commit is not None:
            raise BadRequest("this update is committed already", field="token")
        now_s = time.monotonic()
        phases = {"receive": now_s - self._begun_s}
        self._commit = Commit(token, options, reply, self._incoming.transport, phases, now_s)

    def _try_commit(self) -> None:
        if self._commit is None or self._incoming is None:
            return
        incoming, commit = self._incoming, self._commit
        receiver, landing = self._receivers[incoming.transport], self._landing
        assert self._fit is not None and landing is not None
        if not receiver.finish(incoming, commit.options) or not landing.settled():
            return
        landing.check_aliases(incoming.manifest, self._fit, self._map.views)
        if self._adapter is not None:
            assert isinstance(landing, StagedLanding)
            update: Update | AdapterUpdate = self._adapter.update(incoming.manifest, landing)
        else:
            update = self._mode.update(incoming.manifest, self._fit, landing)
        receiver.drop(incoming, None)
        self._incoming = self._commit = self._landing = None
        now_s = time.monotonic()
        commit.phases["verify"], commit.since_s = now_s - commit.since_s, now_s
        self._committed = (update, commit)
        self._ready.append(update)

    def _on_applied(self, update: Update | AdapterUpdate, pause_s: float) -> None:
        commit = self._take_committed(update)
        commit.phases["wait"] = max(0.0, time.monotonic() - commit.since_s - pause_s)
        commit.phases["apply"] = pause_s
        applied = Applied(update.version, commit.transport, update.nbytes, pause_s, commit.phases)
        if not isinstance(update, AdapterUpdate):
            self._last = applied
        commit.reply({"op": "ok", **applied.reply()})

    def _on_failed(self, update: Update | AdapterUpdate, message: str) -> None:
        self._take_committed(update).reply(
            error_reply(InternalError(f"the worker could not apply the update: {message}"))
        )

    def _take_committed(self, update: Update | AdapterUpdate) -> Commit:
        assert self._committed is not None and self._committed[0] is update, "this update is not being applied"
        commit = self._committed[1]
        self._committed = None
        return commit

    def _retry_begin(self) -> None:
        names = sorted(self._waiting, key=lambda name: name is not None)  # the model's first
        name = next((name for name in names if not self._must_wait(name)), "")
        if name in self._waiting:
            self._on_control(*self._waiting.pop(name))

    def _abort(self, header: Mapping[str, Any], reply: Reply) -> None:
        token = read_token(header["token"])
        if self._committed is not None and self._committed[1].token == token:
            raise WeightsRejected("the update is committed and will be applied; it is too late to abort it")
        if self._incoming is None or self._incoming.token != token:
            raise NotFound("no update with this token is being received", field="token")
        self._reject(WeightsRejected("the publisher aborted this update"))
        reply({"op": "ok"})

    def _status(self, header: Mapping[str, Any], reply: Reply) -> None:
        incoming = self._incoming
        state = "asleep" if self.hold.door.closed else "stale" if self.hold.stale else "idle"
        state = "receiving" if incoming else "ready" if self._ready else "applying" if self._committed else state
        reply(
            {
                "op": "ok",
                "version": self._version,
                "state": state,
                "incoming": incoming and incoming.summary(),
                "last": self._last and self._last.reply(),
                "transports": list(self._receivers),
                "apply": self._mode.name,
                "stale": self.hold.stale or None,
                "dropped": self.hold.dropped,
                "endpoint": self.endpoint,
            }
        )

    def _drop_idle(self) -> None:
        incoming = self._incoming
        if incoming is not None and time.monotonic() - incoming.last_data_s > self._idle_s:
            raise WeightsRejected(f"no data came for {self._idle_s:g} s; the update was dropped, publish it again")

    def _reject(self, error: RolloutError) -> None:
        """Drop the incoming update, if there is one, and tell everyone who waits for it."""
        incoming, commit, landing = self._incoming, self._commit, self._landing
        self._incoming = self._commit = self._landing = None
        if incoming is None or landing is None:
            return
        _log.warning("weights version %d rejected: %s", incoming.manifest.version, error)
        # Without its frames, which hold buckets and where they were to land.
        self._failure = (incoming.token, error.with_traceback(None))
        try:
            self._receivers[incoming.transport].drop(incoming, error)
            landing.abandon()
        except Exception:  # of a device or a publisher that is gone; whoever waits must be told all the same
            _log.exception("letting go of weights version %d failed", incoming.manifest.version)
        if landing.dirty:
            self.hold.fail(
                f"version {incoming.manifest.version} of the weights was written in place, in part: {error}. "
                "Publish a whole update"
            )
            _log.error("this worker is stale: %s", self.hold.stale)
        elif self._mode.in_place and self._adapter is None and not self.hold.stale:
            self.hold.clear()
        if commit is not None:
            commit.reply(error_reply(error))

    def _stop(self) -> None:
        self._closing = True

    def _shut_down(self) -> None:
        with self._post_lock:
            self._ended = True
        self._run_commands()
        self._reject(_ended())
        for _, reply in self._waiting.values():
            reply(error_reply(_ended()))
        if self._committed is not None:
            self._committed[1].reply(error_reply(_ended()))
        for receiver in self._receivers.values():
            receiver.close()
        self._wake.close()


def _ended() -> Unavailable:
    return Unavailable("the worker is shutting down")
