"""The handle of an update: when the trainer may change its tensors, and which workers use the new weights."""

import threading
import time
from dataclasses import dataclass
from typing import Any

from trainer_bridge.process_bound import ProcessBound
from trainer_bridge.transports.base import Recipient
from trainer_bridge.transports.payload import Payload
from trainer_bridge.wire.errors import ProtocolError, RolloutError, RolloutTimeout
from trainer_bridge.wire.short_repr import short_fields


@dataclass(frozen=True, slots=True, repr=False)
class WorkerReport:
    """The result of an update on one worker.

    `why`: reason for the transport; `pause_s`: how long generation stood still; `seconds`: from `publish` until use;
    `phases`: its parts.
    """

    endpoint: str
    version: int
    transport: str
    why: str  # why no faster transport was chosen
    nbytes: int
    pause_s: float  # how long generation stood still
    seconds: float  # time from publish() until the worker used the new weights
    phases: dict[str, float]  # seconds on the worker: receive, verify, wait, apply
    sent_nbytes: int = 0  # sent bytes: fewer than `nbytes` for changes, more if several ranks keep a tensor

    def __repr__(self) -> str:
        return f"WorkerReport({short_fields(self)})"


class PublishHandle(ProcessBound):
    """An update in progress, for any thread: `version`, `nbytes`, `phase`, `reports` and `errors` by endpoint."""

    _instead = "wait for the update in its process, and pass its reports"
    _readable_after_fork = frozenset({"version", "nbytes", "phase", "reports", "errors", "error"})

    def __init__(self, payload: Payload) -> None:
        self.version = payload.manifest.version
        self.nbytes = payload.manifest.tensor_bytes
        self.phase = "queued"
        self.begun = False  # a worker has accepted it and waits for its bytes
        self.refused = False  # every worker that received all of it has refused it
        self.reports: dict[str, WorkerReport] = {}  # reports of the workers that use the new weights, by endpoint
        self.errors: dict[str, RolloutError] = {}  # errors of all other workers, by endpoint
        self._payload = payload
        self._published_s = time.monotonic()
        self._held_error: RolloutError | None = None
        self.error: RolloutError | None = None  # error of `applied`, set when it is done
        self._done = threading.Event()

    def __repr__(self) -> str:
        over = f", {len(self.reports)} applied, {len(self.errors)} failed" if self._done.is_set() else ""
        return f"PublishHandle(version={self.version}, nbytes={self.nbytes}, phase={self.phase!r}{over})"

    def held(self, timeout: float | None = None) -> None:
        """Return when the tensors are copied, and the trainer may change them.

        Raises the error that ended the update; the tensors are free then, too.
        """
        if not self._payload.wait_released(timeout):
            raise RolloutTimeout(f"{self.phase}: version {self.version} still reads its tensors after {timeout:g} s")
        if self._held_error is not None:
            raise self._held_error

    def applied(self, timeout: float | None = None) -> list[WorkerReport]:
        """Return when every worker samples from the new weights: a report for each.

        If a worker failed, raises the first error once all have ended. `RolloutTimeout` leaves the update running.
        """
        if not self._done.wait(timeout):
            raise RolloutTimeout(f"{self.phase}: version {self.version} is not applied after {timeout:g} s")
        if self.error is not None:
            raise self.error
        return list(self.reports.values())

    def use_every_name(self, kept: Payload | None) -> Payload:
        """Begin again with each tensor under all of its names, because a worker has several parameters for it.

        `kept` has them if the trainer's tensors are free already. Returns what to publish.
        """
        payload = self._payload if kept is None else kept
        if kept is None:
            payload.use_every_name()
        self.nbytes = payload.manifest.tensor_bytes
        self.errors.clear()
        return payload

    def report(self, recipient: Recipient, reply: dict[str, Any]) -> None:
        """Note that a worker uses the new weights; `reply` is its answer to `commit`."""
        endpoint = recipient.endpoint
        try:
            self.reports[endpoint] = WorkerReport(
                endpoint=endpoint,
                version=int(reply["version"]),
                transport=recipient.transport,
                why=recipient.why,
                nbytes=int(reply["bytes"]),
                pause_s=float(reply["pause_s"]),
                seconds=time.monotonic() - self._published_s,
                phases={str(name): float(seconds) for name, seconds in reply["phases"].items()},
                sent_nbytes=recipient.sent_bytes,
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            self.errors[endpoint] = ProtocolError(f"commit: {endpoint} sent a report that cannot be read: {error!r}")

    def learn(self, reports: list[WorkerReport], error: RolloutError | None) -> None:
        """Ranks other than 0: take the outcome from rank 0."""
        self.reports = {report.endpoint: report for report in reports}
        self.end(error)

    def end(self, error: RolloutError | None) -> None:
        """End the update, with or without an error."""
        if error is None and self.errors:
            error, *others = self.errors.values()
            for other in others:
                error.add_note(str(other))
        self.error = error
        try:
            if not self._payload.wait_released(0):
                self._held_error = error
                self._payload.release()
        finally:
            self._done.set()
