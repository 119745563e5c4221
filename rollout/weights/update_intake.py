"""The state of a worker's updates: the update that it receives or applies, and the begins that wait.

    idle --begin--> `ReceivedUpdate` --whole--> `CommittedUpdate`: ready --> applying --applied, failed--> idle
                      |                                              '-- replaced, waiting for recomputation --> idle
                      '-- newer begin, abort, damage, idle_s without data --> idle; the served weights are unchanged
                                                                              (in place, and begun: stale)

`received_update` has the phases of a received update, `update_plan` the checks of a `begin`.

Invariants:

- An update becomes ready only after every check that can refuse it: names, shapes, dtypes, cover of
  every parameter, version, checksums, equality of tied tensors. Then the loop copies all of it or none.
- In place, no byte is written before the loop has granted the hold. After the first byte, generation continues only
  with a whole update.
- A `begin` that comes while an update is ready or being applied waits: the staging memory holds one update at a time,
  is allocated once, and is not written while it may be read. Only an update that waits for recomputation gives way to a
  newer update of its target, if the newer update fits. `ready.popleft` decides a race: exactly one of the loop and this
  thread gets the update.
- An update begins only while the gate admits updates (no sleep is ordered), and counts as active until it is applied or
  dropped.
- Every control message gets exactly one reply.
"""

import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.engine.gate import Gate, UpdateWait
from rollout.engine.messages.to_engine import FeatureUpdate
from rollout.weights.adapter_updates import AdapterTarget, IncomingAdapter, read_adapter
from rollout.weights.parameter_map import ManifestFit, ParameterMap
from rollout.weights.received_update import AppliedUpdate, CommittedUpdate, PendingCommit, ReceivedUpdate, Reply
from rollout.weights.staged_weights import StagedWeights
from rollout.weights.trainer_groups import TrainerGroups
from rollout.weights.update_memory import UpdateMemories, UpdateMemory
from rollout.weights.update_plan import UpdatePlan, UpdatePlanner
from trainer_bridge.transports.base import IncomingUpdate, TransportReceiver
from trainer_bridge.transports.sections import cuts_to_wire
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
from trainer_bridge.wire.weight_messages import check_fields, read_token

_MOST_WAITING = 16  # begins of different adapters
_BUSY_POLL_MS = 2  # while copies on a device still read the staging memory
_READY_POLL_MS = 20  # while an update is ready, which may come to wait for recomputation and then gives way

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UpdateTargets:
    """The parts that updates can change: the model's `parameters`, by way of `memories`, and adapters."""

    parameters: ParameterMap
    memories: UpdateMemories
    adapters: AdapterTarget | None = None  # None: this worker serves no adapters


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
        self.ready: deque[StagedWeights | FeatureUpdate] = deque()  # the loop takes from it
        self.closing = False
        self._update: ReceivedUpdate | CommittedUpdate | None = None
        self._waiting: dict[str | None, tuple[Mapping[str, Any], Reply]] = {}  # begins, by adapter; None: the model's
        self._ended: list[tuple[Reply, dict[str, Any]]] = []  # answers to aborts that wait
        self._failure: tuple[bytes, dict[str, Any]] | None = None  # token and error reply of the last rejected update
        self._memories, self._adapters, self._receivers = targets.memories, targets.adapters, receivers
        self._planner = UpdatePlanner(targets.parameters, targets.memories, receivers)
        self._gate = gate
        self._idle_s = idle_s
        self._endpoint = endpoint
        self._post = post
        self._said_unused = self._said_kept = False
        self._groups = TrainerGroups(targets.parameters, receivers, self._say_unused)
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
        """Why the ready update waits; None if no update is ready, or the loop takes it with its next step."""
        return self._gate.update_waits_for if self.ready else None

    @property
    def _received(self) -> ReceivedUpdate | None:
        return self._update if isinstance(self._update, ReceivedUpdate) else None

    @property
    def _committed(self) -> CommittedUpdate | None:
        """The update that is ready or being applied."""
        return self._update if isinstance(self._update, CommittedUpdate) else None

    def poll_ms(self) -> int | None:
        """Milliseconds that the thread may wait for messages; None: without limit."""
        received = self._received
        if self._ended or (received is not None and received.is_committed):
            return _BUSY_POLL_MS
        if received is not None:
            return int(max(0.0, received.incoming.last_data_s + self._idle_s - time.monotonic()) * 1000) + 1
        if self._waiting and self._update is None:
            return _BUSY_POLL_MS
        return _READY_POLL_MS if self._waiting and self.ready else None

    def advance(self) -> bool:
        """Let each transport do a piece of work; true when there may be more. Raises `RolloutError`."""
        busy, received = False, self._received
        if received is not None and received.incoming.open.is_set():
            received.incoming.room = received.memory.wait_for_room()
            busy = not received.incoming.room
        for receiver in self._receivers.values():
            its = received is not None and received.plan.receiver is receiver
            busy |= receiver.advance(received.incoming if received is not None and its else None)
        return busy

    def follow_up(self) -> None:
        """Make a complete update ready, begin one that waited, drop one without data. Raises `RolloutError`."""
        self._answer_aborts()
        self._try_commit()
        self._retry_begin()
        self._drop_idle()

    def report_idle(self) -> None:
        """Tell the gate when no update is active; if a sleep is ordered, free the memory kept for the next one."""
        if self._update is None:
            if self._gate.sleep.ordered:
                self._memories.staging.base.forget()  # its memory may be given back
                for receiver in self._receivers.values():
                    receiver.rest()
            self._gate.updates_done()

    def reject(self, error: RolloutError) -> None:
        """Drop the update that is being received, if any, and answer its `commit`."""
        update = self._received
        if update is None:
            return
        self._update = None
        incoming, memory = update.incoming, update.memory
        _log.warning("weights version %d rejected: %s", incoming.manifest.version, error)
        # A transport may keep the error. The frames of its tracebacks hold buckets and their destination.
        error.__context__ = error.__cause__ = None
        error.with_traceback(None)
        self._failure = (incoming.token, error_reply(error))  # raised again, the error would collect frames again
        for drop in (lambda: update.plan.receiver.drop(incoming, error), memory.abandon):
            update.let_go(drop)
        if memory.dirty:
            self._gate.fail_hold(
                f"version {incoming.manifest.version} of the weights was written in place, in part: {error}. "
                "Publish a whole update"
            )
            _log.error("this worker is stale: %s", self._gate.stale)
        elif update.in_place and not self._gate.stale:
            self._gate.clear_hold()
        update.answer(error_reply(error))

    def close(self) -> None:
        """Answer all unanswered messages."""
        self.reject(ended())
        self._groups.close(ended())
        for _, reply in self._waiting.values():
            reply(error_reply(ended()))
        if self._committed is not None:
            self._committed.commit.reply(error_reply(ended()))
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
            self._replace(self._plan(header, adapter).manifest.version)  # raises if the newer one does not fit
        if self._must_wait(name):
            if name in self._waiting:
                self._waiting.pop(name)[1](error_reply(WeightsRejected("a newer begin replaced this one")))
            elif len(self._waiting) >= _MOST_WAITING:
                raise Unavailable("too many updates wait for their turn; publish this update again later")
            self._waiting[name] = (header, reply)
            return
        if not self._gate.admit_update():
            raise Unavailable("this worker is asleep, or about to be: wake it, then publish")
        begun_s = time.monotonic()
        plan = self._plan(header, adapter)
        answer: dict[str, Any] = {"op": "ok", "version": plan.manifest.version}
        if adapter is None and header.get("sections") == "" and (cuts := self._memories.cuts()) is not None:
            answer["cuts"] = cuts_to_wire(plan.manifest, cuts)
        self.reject(WeightsRejected(f"version {plan.manifest.version} was begun before this update was complete"))
        reply({**answer, **self._open(plan, begun_s)})

    def _plan(self, header: Mapping[str, Any], adapter: IncomingAdapter | None) -> UpdatePlan:
        served = self.version if adapter is None else adapter.version
        # Half-written or dropped weights may be replaced by the same version.
        return self._planner.plan(header, adapter, served, again=adapter is None and bool(self._gate.stale))

    def _open(self, plan: UpdatePlan, begun_s: float) -> dict[str, Any]:
        """Begin to receive an update; returns its fields of the answer. A failure midway leaves nothing."""
        memory = self._memory_for(plan)
        incoming = IncomingUpdate(plan.arrives, plan.receiver.name, secrets.token_bytes(16), memory)
        with contextlib.ExitStack() as failed:
            failed.callback(memory.abandon)
            failed.callback(plan.receiver.drop, incoming, None)
            grant = plan.receiver.begin(incoming, plan.options)
            failed.pop_all()
        in_place = self._memories.staging.in_place and plan.adapter is None
        self._update = ReceivedUpdate(plan, incoming, memory, self._request_hold if in_place else None, begun_s)
        return {"token": incoming.token.hex(), "grant": grant}

    def _memory_for(self, plan: UpdatePlan) -> UpdateMemory:
        if plan.adapter is not None:
            return plan.adapter.open(plan.manifest)
        self._say_differences(plan.fit)
        return self._memories.open(plan.manifest, plan.fit, plan.receiver.on_device, plan.content, plan.sections)

    def _request_hold(self, granted: Callable[[], None]) -> None:
        self._gate.request_hold(lambda: self._post(granted))

    def _say_differences(self, fit: ManifestFit) -> None:
        """Log once the tensors that updates bring without use, and the tensors that updates leave out."""
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

        A begin replaces an unfinished update of its target; the model's also replaces an adapter's. An adapter's
        never replaces the model's update, which could leave the weights half written.
        """
        received = self._received
        others = adapter is not None and received is not None and received.adapter != adapter
        return others or self._committed is not None or self._memories.busy

    def _gives_way(self, newer: Any) -> bool:
        """Whether the committed update waits for recomputation and is older than the version `newer`."""
        if self._committed is None or self.waits_for != "recompute":
            return False
        return type(newer) is int and self._committed.update.version < newer

    def _gives_way_to(self, adapter: str | None, header: Mapping[str, Any]) -> bool:
        """Whether this `begin` of an adapter (None: of the model) replaces the committed update: same target, newer."""
        if self._committed is None or not self._gives_way(header["version"]):
            return False
        update = self._committed.update
        return adapter == (update.name if isinstance(update, FeatureUpdate) else None)

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
        for name in sorted(self._waiting, key=lambda name: name is not None):  # the model's first
            if not self._must_wait(name) or self._gives_way_to(name, self._waiting[name][0]):
                self.control(*self._waiting.pop(name))
                return

    def _commit(self, header: Mapping[str, Any], reply: Reply) -> None:
        token, options = read_token(header["token"]), header["options"]
        received = self._received
        if received is None or received.incoming.token != token:
            if self._failure is not None and self._failure[0] == token:
                reply(self._failure[1])
                return
            raise NotFound("no update with this token is being received; begin one", field="token")
        if received.is_committed:
            raise BadRequest("this update is committed already", field="token")
        received.commit(options, reply)

    def _abort(self, header: Mapping[str, Any], reply: Reply) -> None:
        """Drop an update. The publisher may free its memory after the answer, so all ranks close that memory first."""
        try:
            self._drop_aborted(header)
            answer: dict[str, Any] = {"op": "ok"}
        except RolloutError as error:
            answer = error_reply(error)
        self._ended.append((reply, answer))
        self._answer_aborts()

    def _answer_aborts(self) -> None:
        if not self._memories.offer_open:
            ended, self._ended = self._ended, []
            for reply, answer in ended:
                reply(answer)

    def _drop_aborted(self, header: Mapping[str, Any]) -> None:
        token, newer = read_token(header["token"]), header.get("newer")
        if newer is not None and type(newer) is not int:
            raise BadRequest("newer must be the version of the update that follows", field="newer")
        if self._committed is not None and self._committed.commit.token == token:
            if newer is not None and self._gives_way(newer) and self._replace(newer):
                return
            raise WeightsRejected("the update is committed and will be applied; it is too late to abort it")
        if newer is not None:
            raise WeightsRejected(
                "this update is not waiting to be applied, so no newer update can replace it", field="newer"
            )
        if self._received is None or self._received.incoming.token != token:
            raise NotFound("no update with this token is being received", field="token")
        self.reject(WeightsRejected("the publisher aborted this update"))

    def _status(self, header: Mapping[str, Any], reply: Reply) -> None:
        gate, received = self._gate, self._received
        state = "asleep" if gate.sleep.ordered else "stale" if gate.stale else "idle"
        state = "receiving" if received else "ready" if self.ready else "applying" if self._committed else state
        reply(
            {
                "op": "ok",
                "version": self.version,
                "state": state,
                "waits_for": self.waits_for,
                "incoming": received and received.summary(),
                "last": self.last and self.last.reply(),
                "transports": list(self._receivers),
                "apply": self._memories.staging.memory.name,
                "stale": gate.stale or None,
                "dropped": gate.dropped,
                "endpoint": self._endpoint,
            }
        )

    # --- from received bytes to weights in use ----------------------------------------------------------------------

    def _try_commit(self) -> None:
        whole = None if self._received is None else self._received.advance()
        if whole is not None:
            self._update = whole
            self.ready.append(whole.update)
            self._gate.notify()

    def applied(self, update: StagedWeights | FeatureUpdate, pause_s: float) -> None:
        """The loop has applied it, after a pause of `pause_s` seconds."""
        commit = self._take_committed(update)
        commit.phases["wait"] = max(0.0, time.monotonic() - commit.since_s - pause_s)
        commit.phases["apply"] = pause_s
        applied = AppliedUpdate(update.version, commit.transport, update.nbytes, pause_s, commit.phases)
        if not isinstance(update, FeatureUpdate):
            self.last = applied
        commit.reply({"op": "ok", **applied.reply()})

    def failed(self, update: StagedWeights | FeatureUpdate, error: RolloutError) -> None:
        self._take_committed(update).reply(error_reply(error))

    def _take_committed(self, update: StagedWeights | FeatureUpdate) -> PendingCommit:
        committed = self._committed
        assert committed is not None and committed.update is update, "this update is not being applied"
        self._update = None
        return committed.commit

    def _drop_idle(self) -> None:
        received = self._received
        if received is not None and time.monotonic() - received.incoming.last_data_s > self._idle_s:
            raise WeightsRejected(f"no data came for {self._idle_s:g} s; the update was dropped, publish it again")


def ended() -> Unavailable:
    """The answer to every message once the worker ends."""
    return Unavailable("the worker is shutting down")


def _first(names: Sequence[str]) -> str:
    more = len(names) - 4
    return ", ".join(f"{name:.200}" for name in names[:4]) + (f" and {more} more" if more > 0 else "")
