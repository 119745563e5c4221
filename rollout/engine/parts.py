"""The parts of an engine, which a fault may leave inconsistent, and its links to other threads, which outlive a fault.

    EngineLinks   made first, in the worker: inbox, emit, gate, receiver
    EngineParts   built from settings, model and links (`build.py`); built anew after a fault
    Engine        drives the parts (`loop.py`)

`Swapper`, `Sleeper` and `Commands` act on the parts between two steps. They outlive a fault, as the engine does.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

from rollout.engine.gate import Gate
from rollout.engine.kv.tier import KVTier
from rollout.engine.messages.to_engine import Command, FeatureUpdate
from rollout.engine.messages.to_service import Event
from rollout.engine.schedule.roster import Roster
from rollout.engine.schedule.scheduler import Scheduler
from rollout.engine.step.execute import Executor
from rollout.engine.step.pack import Packer
from rollout.engine.step.pipeline import Pipeline


class StagedUpdate(Protocol):
    """New weights, complete and checked, not yet in use."""

    @property
    def version(self) -> int:
        """The weights version of this update."""

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""

    @property
    def names(self) -> Collection[str]:
        """Names of the parameters that it changes."""

    def copy_into(self) -> object:
        """Copy every parameter; runs on the compute stream."""


class Receiver(Protocol):
    """The weight receiver, as the loop sees it. No method waits."""

    @property
    def alive(self) -> bool:
        """True while its thread runs."""

    def take_ready(self) -> StagedUpdate | FeatureUpdate | None:
        """An update to apply now, or None."""

    def applied(self, update: Any, pause_s: float) -> None:
        """An update from `take_ready` is in use; the compute stream was busy with it for `pause_s` seconds."""

    def refused(self, update: Any, message: str) -> None:
        """An update from `take_ready` is not in use, because it no longer fits what is served."""

    def failed(self, update: Any, message: str) -> None:
        """An update from `take_ready` is not in use, because the device failed."""

    def rest(self) -> None:
        """Free the memory that is kept for the next update: a sleep was ordered, so none can begin."""


class NoReceiver:
    """The receiver of a worker that takes no weights."""

    alive = True

    def take_ready(self) -> None:
        """No update comes."""

    def applied(self, update: Any, pause_s: float) -> None:
        """No-op."""

    def refused(self, update: Any, message: str) -> None:
        """No-op."""

    def failed(self, update: Any, message: str) -> None:
        """No-op."""

    def rest(self) -> None:
        """No-op: it keeps no memory."""


@dataclass(frozen=True, slots=True)
class EngineLinks:
    """The engine's links to other threads. `emit` runs on the loop's thread and must not block."""

    inbox: SimpleQueue[Command]
    emit: Callable[[list[Event]], None]
    gate: Gate
    receiver: Receiver = NoReceiver()


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The books, slots and device state of an engine. After a fault new ones are built."""

    roster: Roster
    scheduler: Scheduler
    pipeline: Pipeline
    packer: Packer
    executor: Executor
    tier: KVTier  # KV on the host
