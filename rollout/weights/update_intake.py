"""The state of a worker's updates: the one it receives, the one that is ready, and the begins that wait.

    idle --begin--> receiving --commit, all verified--> ready --take_ready--> applying --applied/failed--> idle
                        |                               | `------- `committed` --------'
                        |                               +-- replaced, while it waits for recomputation --> idle
                        +-- newer begin, abort, damage, idle_s without data --> idle; the served weights are unchanged
                                                                               (in place, and begun: stale)

Invariants:

- An update becomes ready only after every check that can refuse it: names, shapes, dtypes, cover of
  every parameter, version, checksums, equality of tied tensors. Then the loop copies all of it or none.
- In place, no byte is written before the loop has granted the hold. After the first byte, generation continues only
  with a whole update.
- A `begin` that comes while an update is ready or being applied waits: the staging memory holds one update at a time,
  is allocated once, and is not written while it may be read. Only an update that waits for recomputation gives way, to
  a newer one of its target that fits. Either the loop takes an update out of `ready` or this thread does.
- An update begins only while the gate admits updates (no sleep is ordered), and counts as active until it is applied or
  dropped.
- Every control message gets exactly one reply.
"""

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rollout.engine.adapters import AdapterUpdate
from rollout.engine.gate import Gate, UpdateWait
from rollout.weights.adapter_updates import AdapterTarget, IncomingAdapter, read_adapter
from rollout.weights.delta import WHOLE, UpdateContent, read_update_content
from rollout.weights.destination import UpdateMemories, UpdateMemory
from rollout.weights.parameter_map import ManifestFit, ParameterMap
from rollout.weights.process_groups import ProcessGroups, Reply
from rollout.weights.staged_weights import StagedWeights
from trainer_bridge.transports.base import IncomingUpdate, TransportReceiver
from trainer_bridge.transports.sections import Sections, cuts_to_wire, plan_sections
from trainer_bridge.wire.errors import (
    BadRequest,
    InternalError,
    NotFound,
    RolloutError,
    Unavailable,
    WeightsRejected,
    WeightsReplaced,
    error_reply,
)
from trainer_bridge.wire.manifest import Manifest, from_wire
from trainer_bridge.wire.weight_messages import check_fields, read_tied, read_token

_MOST_WAITING = 16  # begins of different adapters
_BUSY_POLL_MS = 2  # while copies on a device still read the staging memory
_READY_POLL_MS = 20  # while an update is ready, which may come to wait for recomputation and then gives way

_log = logging.getLogger(__name__)


@dataclass
class PendingCommit:
    """An unanswered `commit`: its publisher waits until the update is in use."""

    token: bytes
    options: dict[str, Any]
    reply: Reply
    transport: str
    phases: dict[str, float]  # seconds
    since_s: float  # when this phase began, on the monotonic clock


@dataclass(frozen=True, slots=True)
class AppliedUpdate:
    """The update that is in use, and how long its phases took."""

    version: int
    transport: str
    nbytes: int
    pause_s: float  # time for which generation stood still
    phases: Mapping[str, float]  # seconds: receive, verify, wait, apply
    at_s: float = field(default_factory=time.time)  # Unix time
    _clock_s: float = field(default_factory=time.monotonic, repr=False)  # the same moment: Unix time may jump

    def reply(self) -> dict[str, Any]:
        """The answer to `commit`."""
        return {"version": self.version, "pause_s": self.pause_s, "bytes": self.nbytes, "phases": dict(self.phases)}

    def summary(self) -> dict[str, Any]:
        """The update as a worker's `status` reports it."""
        return {
            "version": self.version,
            "transport": self.transport,
            "at_s": self.at_s,
            "age_s": time.monotonic() - self._clock_s,
            "bytes": self.nbytes,
            "phases_ms": {name: 1e3 * seconds for name, seconds in self.phases.items()},
        }


@dataclass(frozen=True, slots=True)
class UpdateTargets:
    """The parts that updates can change: the model's `parameters`, whose bytes go to `destinations`, and adapters."""

    parameters: ParameterMap
    destinations: UpdateMemories
    adapters: AdapterTarget | None = None  # None: this worker serves no adapters


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """An accepted `begin`: the update fits its target, and its transport is known."""

    manifest: Manifest
    fit: ManifestFit  # empty for an adapter
    receiver: TransportReceiver
    options: Mapping[str, Any]  # options of the transport
    adapter: IncomingAdapter | None  # None: an update of the model
    content: UpdateContent = WHOLE
    sections: Sections | None = None  # not None: these arrive


@dataclass(slots=True)
class ReceivedUpdate:
    """The update that is being received."""

    begin: UpdatePlan
    incoming: IncomingUpdate
    destination: UpdateMemory
    begun_s: float
    commit: PendingCommit | None = None  # came; not all bytes are verified yet
    hold: Literal["early", "late", "asked", "granted"] = "early"  # late: asked for once all bytes are verified

    @property
    def adapter(self) -> str | None:
        """The adapter's name; None for an update of the model."""
        return None if self.begin.adapter is None else self.begin.adapter.name


class UpdateIntake:
    """Decides about updates. Belongs to the receiver's thread, except for `version`, `last` and `ready`.

    `post` calls a function on that thread. `endpoint` is the weight socket's, for the answer to `status`.
    """

    def __init__(
        self,
        targets: UpdateTargets,
        version: int,
        gate: Gate,
        receivers: Mapping[str, TransportReceiver],
        *,
        idle_s: float,
        endpoint: str,
        post: Callable[[Callable[[], None]], object],
    ) -> None:
        self.version = version  # version of the weights that were applied last: the loop writes it
        self.last: AppliedUpdate | None = None  # replaced as a whole, so any thread may read it
        self.ready: deque[StagedWeights | AdapterUpdate] = deque()  # the loop takes from it
        self.closing = False
        self.current: ReceivedUpdate | None = None
        self.committed: tuple[StagedWeights | AdapterUpdate, PendingCommit] | None = None  # ready or being applied
        self.waiting: dict[str | None, tuple[Mapping[str, Any], Reply]] = {}  # begins, by adapter; None: the model's
        self._ended: list[tuple[Reply, dict[str, Any]]] = []  # answers to aborts that wait
        self.failure: tuple[bytes, dict[str, Any]] | None = None  # token and error reply of the last rejected update
        self._parameters = targets.parameters
        self._destinations = targets.destinations
        self._adapters = targets.adapters
        self._gate = gate
        self.receivers = receivers
        self._idle_s = idle_s
        self._endpoint = endpoint
        self._post = post
        self._said_unused = self._said_kept = False
        self._plan: tuple[str, Sections | None] | None = None  # plan of the last layout, by its digest
        self._groups = ProcessGroups(targets.parameters, receivers, self._say_unused)
        self._handlers = {
            "begin": self._begin,
            "commit": self._commit,
            "abort": self._abort,
            "status": self._status,
            "join": self._groups.join,
            "gather": self._groups.gather,
            "leave": self._groups.leave,
        }

    # --- one round of the thread -------------------------------------------------------------------------------------

    @property
    def waits_for(self) -> UpdateWait | None:
        """The reason why the ready update waits; None without one, or if the loop takes it with its next step."""
        return self._gate.update_waits_for if self.ready else None

    def poll_ms(self) -> int | None:
        """How long the thread may wait for messages; None: without limit."""
        current = self.current
        if self._ended:
            return _BUSY_POLL_MS
        if current is None:
            if self.waiting and self.committed is None:
                return _BUSY_POLL_MS
            return _READY_POLL_MS if self.waiting and self.ready else None
        if current.commit is not None:
            return _BUSY_POLL_MS
        return int(max(0.0, current.incoming.last_data_s + self._idle_s - time.monotonic()) * 1000) + 1

    def advance(self) -> bool:
        """Let each transport do a piece of work; true when there may be more. Raises `RolloutError`."""
        incoming, its_receiver, busy = None, None, False
        if self.current is not None:
            incoming, its_receiver = self.current.incoming, self.current.begin.receiver
            if incoming.open.is_set():
                incoming.room = self.current.destination.wait_for_room()
                busy = not incoming.room
        for receiver in self.receivers.values():
            busy |= receiver.advance(incoming if receiver is its_receiver else None)
        return busy

    def follow_up(self) -> None:
        """Make a complete update ready, begin one that waited, drop one without data. Raises `RolloutError`."""
        self._answer_aborts()
        self._try_commit()
        self._retry_begin()
        self._drop_idle()

    def report_idle(self) -> None:
        """Tell the gate when no update is active; if a sleep is ordered, free the memory kept for the next one."""
        if self.current is None and self.committed is None:
            if self._gate.sleep.ordered:
                self._destinations.staging.base.forget()  # its memory may be given back
                for receiver in self.receivers.values():
                    receiver.rest()
            self._gate.updates_done()

    def reject(self, error: RolloutError) -> None:
        """Drop the update that is being received, if any, and answer its `commit`."""
        current, self.current = self.current, None
        if current is None:
            return
        incoming, destination = current.incoming, current.destination
        _log.warning("weights version %d rejected: %s", incoming.manifest.version, error)
        # A transport may keep the error. The frames of its tracebacks hold buckets and their destination.
        error.__context__ = error.__cause__ = None
        error.with_traceback(None)
        self.failure = (incoming.token, error_reply(error))  # raised again, the error would collect frames again
        for drop in (lambda: current.begin.receiver.drop(incoming, error), destination.abandon):
            _try(drop, current)
        if destination.dirty:
            self._gate.fail_hold(
                f"version {incoming.manifest.version} of the weights was written in place, in part: {error}. "
                "Publish a whole update"
            )
            _log.error("this worker is stale: %s", self._gate.stale)
        elif self._destinations.staging.in_place and current.adapter is None and not self._gate.stale:
            self._gate.clear_hold()
        if current.commit is not None:
            current.commit.reply(error_reply(error))

    def close(self) -> None:
        """Answer all unanswered messages."""
        self.reject(ended())
        self._groups.close(ended())
        for _, reply in self.waiting.values():
            reply(error_reply(ended()))
        if self.committed is not None:
            self.committed[1].reply(error_reply(ended()))
        for reply, answer in self._ended:
            reply(answer)

    # --- control messages --------------------------------------------------------------------------------------------

    def control(self, header: Mapping[str, Any], reply: Reply) -> None:
        """Handle a `weights` message; `reply` gets one answer, now or later. Never raises."""
        try:
            if self.closing:
                raise ended()
            action = check_fields(header)
            self._handlers[action](header, reply)
        except RolloutError as error:
            reply(error_reply(error))
        except Exception as error:
            _log.exception("a weights message failed")
            reply(error_reply(InternalError(f"the worker failed on this message: {error!r:.200}")))

    def _begin(self, header: Mapping[str, Any], reply: Reply) -> None:
        adapter = read_adapter(header, self._adapters)
        name = None if adapter is None else adapter.name
        if self._gives_way_to(name, header):
            self._replace(self._read_begin(header, adapter).manifest.version)  # raises if the newer one does not fit
        if self._must_wait(name):
            if name in self.waiting:
                self.waiting.pop(name)[1](error_reply(WeightsRejected("a newer begin replaced this one")))
            elif len(self.waiting) >= _MOST_WAITING:
                raise Unavailable("too many updates wait for their turn; publish this one again later")
            self.waiting[name] = (header, reply)
            return
        if not self._gate.admit_update():
            raise Unavailable("this worker is asleep, or about to be: wake it, then publish")
        begun_s = time.monotonic()
        begin = self._read_begin(header, adapter)
        if self.current is not None:
            self.reject(WeightsRejected(f"version {begin.manifest.version} was begun before this update was complete"))
        incoming, grant = self._open(begin, begun_s)
        if adapter is None and self._destinations.staging.in_place and begin.content.delta is not None:
            assert self.current is not None
            self.current.hold = "late"
            _let_land(incoming)
        elif self._destinations.staging.in_place and adapter is None:
            self._gate.request_hold(lambda: self._post(lambda: _let_land(incoming)))
        else:
            _let_land(incoming)
        answer = {"op": "ok", "version": begin.manifest.version, "token": incoming.token.hex(), "grant": grant}
        if adapter is None and header.get("sections") == "" and (cuts := self._destinations.cuts()) is not None:
            answer["cuts"] = cuts_to_wire(begin.manifest, cuts)
        reply(answer)

    def _read_begin(self, header: Mapping[str, Any], adapter: IncomingAdapter | None) -> UpdatePlan:
        served = self.version if adapter is None else adapter.version
        # Half-written or dropped weights may be replaced by the same version.
        again = adapter is None and bool(self._gate.stale)
        begin = read_begin(header, adapter, self._parameters, self.receivers, served, again)
        asked = header.get("sections")
        if not asked:
            return begin
        if adapter is not None or begin.content.delta is not None or type(asked) is not str:
            raise BadRequest("only a whole update of the model comes in sections, by their digest", field="sections")
        if (sections := self._sections_of(begin.manifest)) is None or sections.digest != asked:
            raise WeightsRejected("these are not the sections of this worker: send whole tensors", field="sections")
        return replace(begin, sections=sections)

    def _sections_of(self, manifest: Manifest) -> Sections | None:
        """The plan for updates of this layout, which is kept."""
        if self._plan is None or self._plan[0] != manifest.layout_digest:
            cuts = self._destinations.cuts()
            self._plan = manifest.layout_digest, None if cuts is None else plan_sections(manifest, cuts)
        return self._plan[1]

    def _open(self, begin: UpdatePlan, begun_s: float) -> tuple[IncomingUpdate, dict[str, Any]]:
        """Make the update the current one; return it and the grant for its sender."""
        manifest, receiver = begin.manifest, begin.receiver
        if begin.adapter is not None:
            destination = begin.adapter.open(manifest)
        else:
            self._say_differences(begin.fit)
            how = (receiver.on_device, begin.content, begin.sections)
            destination = self._destinations.open(manifest, begin.fit, *how)
        delta = begin.content.delta
        arrives = manifest if delta is None else delta.codes
        if begin.sections is not None:
            arrives = begin.sections.of_version(manifest.version)
        incoming = IncomingUpdate(arrives, receiver.name, secrets.token_bytes(16), destination)
        try:
            grant = receiver.begin(incoming, begin.options)
        except Exception:
            receiver.drop(incoming, None)
            raise
        self.current = ReceivedUpdate(begin, incoming, destination, begun_s)
        return incoming, grant

    def _say_differences(self, fit: ManifestFit) -> None:
        """Log once which tensors updates have that are not used, and which ones they leave out."""
        if fit.unused:
            self._say_unused(fit.unused)
        if fit.kept and not self._said_kept:
            self._said_kept = True
            _log.info("updates leave out %d tensors, which keep their values: %s", len(fit.kept), _first(fit.kept))

    def _say_unused(self, names: Sequence[str]) -> None:
        if not self._said_unused:
            self._said_unused = True
            _log.info("updates have %d tensors that are not used: %s", len(names), _first(names))

    def _must_wait(self, adapter: str | None) -> bool:
        """Whether an update of this adapter (None: of the model) can't begin yet.

        A begin replaces an unfinished update of the same target, and of any adapter if it is the model's. An adapter
        never replaces the model's update, which could leave the weights half written.
        """
        others = adapter is not None and self.current is not None and self.current.adapter != adapter
        return others or self.committed is not None or self._destinations.busy

    def _gives_way(self, newer: Any) -> bool:
        """Whether the committed update waits for recomputation and is older than the version `newer`."""
        if self.committed is None or self.waits_for != "recompute":
            return False
        return type(newer) is int and self.committed[0].version < newer

    def _gives_way_to(self, adapter: str | None, header: Mapping[str, Any]) -> bool:
        """Whether the committed update gives way to this begin of the same adapter (None: of the model)."""
        if self.committed is None or not self._gives_way(header["version"]):
            return False
        update = self.committed[0]
        return adapter == (update.name if isinstance(update, AdapterUpdate) else None)

    def _replace(self, newer: int) -> bool:
        """Drop the update that gives way to version `newer`; False if the loop has just taken it."""
        try:
            update = self.ready.popleft()
        except IndexError:
            return False
        update.close(applied=False)
        message = f"version {newer} took the place of version {update.version}, which waited to be applied"
        _log.info("weights %s", message)
        self.failed(update, WeightsReplaced(message))
        return True

    def _retry_begin(self) -> None:
        for name in sorted(self.waiting, key=lambda name: name is not None):  # the model's first
            if not self._must_wait(name) or self._gives_way_to(name, self.waiting[name][0]):
                self.control(*self.waiting.pop(name))
                return

    def _commit(self, header: Mapping[str, Any], reply: Reply) -> None:
        token, options = read_token(header["token"]), header["options"]
        current = self.current
        if current is None or current.incoming.token != token:
            if self.failure is not None and self.failure[0] == token:
                reply(self.failure[1])
                return
            raise NotFound("no update with this token is being received; begin one", field="token")
        if current.commit is not None:
            raise BadRequest("this update is committed already", field="token")
        now_s = time.monotonic()
        phases = {"receive": now_s - current.begun_s}
        current.commit = PendingCommit(token, options, reply, current.incoming.transport, phases, now_s)

    def _abort(self, header: Mapping[str, Any], reply: Reply) -> None:
        """Drop an update. The publisher may free its memory after the answer: so no rank has it open then."""
        try:
            self._drop_aborted(header)
            answer: dict[str, Any] = {"op": "ok"}
        except RolloutError as error:
            answer = error_reply(error)
        self._ended.append((reply, answer))
        self._answer_aborts()

    def _answer_aborts(self) -> None:
        if not self._destinations.offer_open:
            ended, self._ended = self._ended, []
            for reply, answer in ended:
                reply(answer)

    def _drop_aborted(self, header: Mapping[str, Any]) -> None:
        token, newer = read_token(header["token"]), header.get("newer")
        if newer is not None and type(newer) is not int:
            raise BadRequest("newer must be the version of the update that follows", field="newer")
        if self.committed is not None and self.committed[1].token == token:
            if newer is not None and self._gives_way(newer) and self._replace(newer):
                return
            raise WeightsRejected("the update is committed and will be applied; it is too late to abort it")
        if newer is not None:
            raise WeightsRejected(
                "this update is not waiting to be applied, so no newer one can replace it", field="newer"
            )
        if self.current is None or self.current.incoming.token != token:
            raise NotFound("no update with this token is being received", field="token")
        self.reject(WeightsRejected("the publisher aborted this update"))

    def _status(self, header: Mapping[str, Any], reply: Reply) -> None:
        gate, current = self._gate, self.current
        state = "asleep" if gate.sleep.ordered else "stale" if gate.stale else "idle"
        state = "receiving" if current else "ready" if self.ready else "applying" if self.committed else state
        reply(
            {
                "op": "ok",
                "version": self.version,
                "state": state,
                "waits_for": self.waits_for,
                "incoming": current and current.incoming.summary(),
                "last": self.last and self.last.reply(),
                "transports": list(self.receivers),
                "apply": self._destinations.staging.memory.name,
                "stale": gate.stale or None,
                "dropped": gate.dropped,
                "endpoint": self._endpoint,
            }
        )

    # --- from received bytes to weights in use ----------------------------------------------------------------------

    def _try_commit(self) -> None:
        current = self.current
        if current is None or current.commit is None:
            return
        begin, destination, commit = current.begin, current.destination, current.commit
        if not begin.receiver.finish(current.incoming, commit.options) or not self._may_write(current):
            return
        if not destination.copied():
            if begin.content.delta is not None:
                current.incoming.last_data_s = time.monotonic()  # all codes have come; changing much memory takes time
            return
        destination.check()
        if begin.adapter is not None:
            update: StagedWeights | AdapterUpdate | None = begin.adapter.update(begin.manifest, destination)
            if update is None:
                return
        else:
            update = destination.update()
        self.current = None  # whatever fails from now on, the update is whole
        _try(lambda: begin.receiver.drop(current.incoming, None), current)
        now_s = time.monotonic()
        commit.phases["verify"], commit.since_s = now_s - commit.since_s, now_s
        self.committed = (update, commit)
        self.ready.append(update)
        self._gate.notify()

    def _may_write(self, current: ReceivedUpdate) -> bool:
        """Whether verified codes may change parameters in place: no step runs. The first call asks for that."""
        if current.hold == "late":
            current.hold = "asked"
            self._gate.request_hold(lambda: self._post(lambda: _note_hold(current)))
        return current.hold in ("early", "granted")

    def applied(self, update: StagedWeights | AdapterUpdate, pause_s: float) -> None:
        """The loop has applied it, after a pause of `pause_s` seconds."""
        commit = self._take_committed(update)
        commit.phases["wait"] = max(0.0, time.monotonic() - commit.since_s - pause_s)
        commit.phases["apply"] = pause_s
        applied = AppliedUpdate(update.version, commit.transport, update.nbytes, pause_s, commit.phases)
        if not isinstance(update, AdapterUpdate):
            self.last = applied
        commit.reply({"op": "ok", **applied.reply()})

    def failed(self, update: StagedWeights | AdapterUpdate, error: RolloutError) -> None:
        self._take_committed(update).reply(error_reply(error))

    def _take_committed(self, update: StagedWeights | AdapterUpdate) -> PendingCommit:
        assert self.committed is not None and self.committed[0] is update, "this update is not being applied"
        commit = self.committed[1]
        self.committed = None
        return commit

    def _drop_idle(self) -> None:
        current = self.current
        if current is not None and time.monotonic() - current.incoming.last_data_s > self._idle_s:
            raise WeightsRejected(f"no data came for {self._idle_s:g} s; the update was dropped, publish it again")


def _try(drop: Callable[[], None], current: ReceivedUpdate) -> None:
    """Give up what an update held of a device or a publisher, which may be gone; publishers still get their answers."""
    try:
        drop()
    except Exception:
        _log.exception("dropping what held version %d of the weights failed", current.incoming.manifest.version)


def ended() -> Unavailable:
    """The answer to every message once the worker ends."""
    return Unavailable("the worker is shutting down")


def _let_land(incoming: IncomingUpdate) -> None:
    incoming.last_data_s = time.monotonic()
    incoming.open.set()


def _note_hold(current: ReceivedUpdate) -> None:
    current.incoming.last_data_s = time.monotonic()
    current.hold = "granted"


def _first(names: Sequence[str]) -> str:
    more = len(names) - 4
    return ", ".join(f"{name:.200}" for name in names[:4]) + (f" and {more} more" if more > 0 else "")


def read_begin(
    header: Mapping[str, Any],
    adapter: IncomingAdapter | None,
    parameters: ParameterMap,
    receivers: Mapping[str, TransportReceiver],
    served: int | None,
    again: bool,
) -> UpdatePlan:
    """The update that `header` begins. `served` is the version in use.

    With `again` the served weights cannot be used: the same version is accepted, and no tensor may be left out.

    Raises `BadRequest` and `WeightsRejected`, naming the field.
    """
    # More than fit are read: so the refusal can name them, and some may be of no use here.
    most = 2 * len(parameters.views) + 1024 if adapter is None else adapter.max_tensors
    manifest = from_wire(header["manifest"], max_tensors=most)
    if type(header["version"]) is not int or header["version"] != manifest.version:
        raise WeightsRejected(f"version must be the manifest's, {manifest.version}", field="version")
    too_old = served is not None and (manifest.version < served if again else manifest.version <= served)
    if too_old:
        raise WeightsRejected(
            f"version {manifest.version} is not newer than version {served}, which is served; "
            "publish with a version that grows",
            field="version",
        )
    transport = header["transport"]
    if type(transport) is not str or transport not in receivers:
        raise BadRequest(f"transport must be one of {', '.join(receivers)}", field="transport")
    fit, tied = ManifestFit((), ()), read_tied(header.get("tied", {}))
    content = read_update_content(header, manifest)
    if content != WHOLE and adapter is not None:
        raise BadRequest("an adapter has no content and no delta: send it whole", field="delta")
    if content.delta is not None and again:
        raise WeightsRejected("this worker's weights are lost: send the update whole", field="delta")
    if adapter is None:
        parameters.check_tied(tied, manifest)
        fit = parameters.check(manifest, whole=again)
    else:
        adapter.check(manifest)
    return UpdatePlan(manifest, fit, receivers[transport], header["options"], adapter, content)
