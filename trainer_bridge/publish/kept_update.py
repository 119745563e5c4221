"""The last update, kept in the publisher's host memory for workers that restart.

A trainer may change its tensors after `held`, so sending an update again needs a copy. It is made while the update is
packed, into one buffer for all updates: from the first to the last byte of a new update, no update can be sent again.
An update that is refused before its first byte does not change the kept update.
"""

import logging
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from trainer_bridge.publish.handle import PublishHandle
from trainer_bridge.transports.payload import Payload
from trainer_bridge.transports.tensors import typed_view
from trainer_bridge.wire.errors import UNANSWERED, RolloutError
from trainer_bridge.wire.manifest import Manifest

_HOST = torch.device("cpu")
_MOST_REFUSALS = 3  # one refusal may come from a worker that was lost again

_log = logging.getLogger(__name__)


def worth_keeping(handle: PublishHandle) -> bool:
    """Whether a worker took a finished update, or may take it later: not if all workers refused it."""
    lost = any(isinstance(error, UNANSWERED) for error in handle.errors.values())
    return not handle.refused and (handle.begun or lost)


class KeptUpdate:
    """One buffer and the update in it. Used by the publisher's thread and, while an update is sent, by its senders."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._manifest: Manifest | None = None
        self._refusals: Counter[str] = Counter()  # number of refusals, by endpoint

    @property
    def version(self) -> int | None:
        """The version of the update that is kept whole, if any."""
        return None if self._manifest is None else self._manifest.version

    def fill(self, payload: Payload) -> None:
        """Keep this update from its first bytes on."""
        payload.keep_in(lambda: self._memory(payload.manifest.total_bytes))

    def _memory(self, nbytes: int, device: torch.device = _HOST, pinned: bool = False) -> torch.Tensor:
        with self._lock:
            self._manifest = None
            if self._buffer.numel() < nbytes or self._buffer.device != device:
                self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old one first
                self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
            return self._buffer[:nbytes]

    def keep_finished(self, payload: Payload, handle: PublishHandle, stop: threading.Event) -> None:
        """Keep all of a finished update, even if no worker got it, unless the workers refused it."""
        if not worth_keeping(handle):
            return
        try:
            if not handle.reports:
                handle.phase = "keep"
                payload.keep_all(stop)
        except RolloutError as error:
            _log.warning("version %d cannot be kept for workers that restart: %s", handle.version, error)
            return
        self._manifest = payload.manifest
        self._refusals.clear()
        payload.keep_in(None)

    def wanted_by(self, endpoint: str, status: dict[str, Any]) -> bool:
        """Whether a worker has older or incomplete weights, receives no update, and has not refused this one."""
        served, state = status.get("version"), status.get("state")
        if self._manifest is None or type(served) is not int or self._refusals[endpoint] == _MOST_REFUSALS:
            return False
        outdated = served < self._manifest.version
        return (outdated and state == "idle") or (served <= self._manifest.version and state == "stale")

    def forgive(self, endpoint: str) -> None:
        """Forget the refusals of an endpoint: its worker took the update, or may be another worker now."""
        self._refusals.pop(endpoint, None)

    def refused(self, endpoint: str) -> None:
        """Note a refusal; a worker that refused too often is not asked again."""
        self._refusals[endpoint] += 1
        if self._refusals[endpoint] == _MOST_REFUSALS:
            _log.error(
                "%s refused version %s too often: start it with the right model, or publish a newer version",
                endpoint,
                self.version,
            )

    def every_name(self, tied: Mapping[str, str]) -> Payload | None:
        """The update with each tensor under all names; None: the trainer's tensors have them, and are not free yet."""
        return None

    def payload(self, bucket_bytes: int | None) -> Payload:
        """The update, to be sent again."""
        assert self._manifest is not None
        tensors = {entry.name: typed_view(self._buffer, entry) for entry in self._manifest.tensors}
        payload = Payload(tensors, self._manifest.version, bucket_bytes)
        payload.again = True
        return payload
