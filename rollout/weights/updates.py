"""The worker's side of the weight bridge, as the loop sees it, and an update that the loop has begun."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from rollout.engine.adapter_table import AdapterUpdate
from rollout.engine.device.streams import Event


class StagedUpdate(Protocol):
    """New weights, complete and checked, not yet in use."""

    @property
    def version(self) -> int:
        """The weights version that they are."""

    @property
    def nbytes(self) -> int:
        """What all of them take."""

    def copy_into(self) -> object:
        """Copy every parameter; runs on the compute stream."""


class Receiver(Protocol):
    """The worker's side of the weight bridge, as the loop sees it."""

    def take_ready(self) -> StagedUpdate | AdapterUpdate | None:
        """An update to apply now, or None."""

    def applied(self, update: Any, pause_s: float) -> None:
        """An update that `take_ready` gave is in use; the compute stream was busy with it for `pause_s`."""

    def refused(self, update: Any, message: str) -> None:
        """An update that `take_ready` gave is not in use, since it does not fit what is served by now."""

    def failed(self, update: Any, message: str) -> None:
        """An update that `take_ready` gave is not in use, since the device failed."""


@dataclass(slots=True)
class Swap:
    """A weights update that is enqueued on the compute stream."""

    update: StagedUpdate
    start: Event
    end: Event
    held_since_s: float | None  # `time.perf_counter()`; for an update in place
