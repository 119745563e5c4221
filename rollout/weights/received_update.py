"""One update on its way into use: its phases from `begin` to the answer to `commit`.

    staged, adapters    receiving ----------------------------> finishing --> committed
    in place            opening --hold--> receiving ----------> finishing --> committed
    in place, changes   receiving --> asking --hold-----------> finishing --> committed

A `commit` may come in any of them; an update goes beyond `receiving` only after it. In place, no byte is written before
the loop has granted the hold.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from rollout.engine.messages.to_engine import FeatureUpdate
from rollout.weights.staged_weights import StagedWeights
from rollout.weights.update_memory import UpdateMemory
from rollout.weights.update_plan import UpdatePlan
from trainer_bridge.transports.base import IncomingUpdate

_log = logging.getLogger(__name__)

#: Takes the one answer to a control message.
Reply = Callable[[dict[str, Any]], None]
#: Asks the loop to hold generation; the argument is called on the receiver's thread once it does.
RequestHold = Callable[[Callable[[], None]], object]


@dataclass
class PendingCommit:
    """An unanswered `commit`: its publisher waits until the update is in use."""

    token: bytes
    options: Mapping[str, Any]
    reply: Reply
    transport: str
    phases: dict[str, float]  # seconds
    since_s: float  # when this phase began, on the monotonic clock


@dataclass(frozen=True, slots=True)
class CommittedUpdate:
    """A whole update: ready for the loop, or being applied."""

    update: StagedWeights | FeatureUpdate
    commit: PendingCommit


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


class UpdatePhase(Enum):
    """The progress of an update that is not whole yet."""

    OPENING = auto()  # no byte may land before generation is held
    RECEIVING = auto()  # bytes land
    ASKING = auto()  # all changes are verified; they are made once generation is held
    FINISHING = auto()  # all bytes are verified; the last ones are copied, and all ranks prepare


class ReceivedUpdate:
    """The update that is being received. Belongs to the receiver's thread.

    `request_hold` is None if its bytes do not change parameters that are served.
    """

    def __init__(
        self,
        plan: UpdatePlan,
        incoming: IncomingUpdate,
        memory: UpdateMemory,
        request_hold: RequestHold | None,
        begun_s: float,
    ) -> None:
        self.plan, self.incoming, self.memory = plan, incoming, memory
        self.in_place = request_hold is not None
        self.phase = UpdatePhase.OPENING
        self._begun_s = begun_s
        self._commit: PendingCommit | None = None
        self._request_hold = request_hold
        if request_hold is None or plan.content.delta is not None:
            self._let_land()
        else:
            request_hold(self._let_land)

    @property
    def adapter(self) -> str | None:
        """The adapter's name; None for an update of the model."""
        return None if self.plan.adapter is None else self.plan.adapter.name

    @property
    def is_committed(self) -> bool:
        """Whether its `commit` has come."""
        return self._commit is not None

    def summary(self) -> dict[str, Any]:
        """The update as `status` reports it."""
        return {**self.incoming.summary(), "committed": self.is_committed}

    def commit(self, options: Mapping[str, Any], reply: Reply) -> None:
        """Take the `commit`, which is answered once the update is in use or rejected."""
        now_s, incoming = time.monotonic(), self.incoming
        phases = {"receive": now_s - self._begun_s}
        self._commit = PendingCommit(incoming.token, options, reply, incoming.transport, phases, now_s)

    def advance(self) -> CommittedUpdate | None:
        """Take the next steps after the `commit`; returns the update once it is whole. Raises `RolloutError`."""
        if self._commit is None:
            return None
        if self.phase is UpdatePhase.RECEIVING and self.plan.receiver.finish(self.incoming, self._commit.options):
            self.phase = UpdatePhase.FINISHING
            if self._request_hold is not None and self.plan.content.delta is not None:
                self.phase = UpdatePhase.ASKING
                self._request_hold(self._let_change)
        update = self._finish() if self.phase is UpdatePhase.FINISHING else None
        if update is None:
            return None
        self.let_go(lambda: self.plan.receiver.drop(self.incoming, None))  # whatever fails, the update is whole
        now_s, commit = time.monotonic(), self._commit
        commit.phases["verify"], commit.since_s = now_s - commit.since_s, now_s
        return CommittedUpdate(update, commit)

    def answer(self, message: dict[str, Any]) -> None:
        """Answer its `commit`, if that has come."""
        if self._commit is not None:
            self._commit.reply(message)

    def let_go(self, drop: Callable[[], None]) -> None:
        """Drop something of a device or a publisher, which may be gone; the publisher still gets its answer."""
        try:
            drop()
        except Exception:
            _log.exception("dropping what held version %d of the weights failed", self.incoming.manifest.version)

    def _finish(self) -> StagedWeights | FeatureUpdate | None:
        """The update, once all of its bytes are where they are used."""
        plan, memory = self.plan, self.memory
        if not memory.copied():
            if plan.content.delta is not None:
                self.incoming.last_data_s = time.monotonic()  # all changes have come; making many takes time
            return None
        memory.check()
        return memory.update() if plan.adapter is None else plan.adapter.update(plan.manifest)

    def _let_land(self) -> None:
        self.incoming.last_data_s = time.monotonic()
        self.incoming.open.set()
        self.phase = UpdatePhase.RECEIVING

    def _let_change(self) -> None:
        self.incoming.last_data_s = time.monotonic()
        self.phase = UpdatePhase.FINISHING
