"""The last update, kept in the publisher's host memory: what a worker that comes back is brought up to date with.

A trainer changes its tensors once they are `held`, so what is to be sent again has to be a copy. It is filled as the
update is packed, into one buffer that every update uses: from a new one's first bytes on there is none to be sent
again, until all of it was packed. An update that every worker refuses before that leaves the one before as it is.
"""

from __future__ import annotations

import threading

import torch

from trainer_bridge.manifest import Manifest
from trainer_bridge.payload import Payload
from trainer_bridge.staging import typed_view

_MOST_REFUSALS = 3  # one may be of a worker that was lost once more


class KeptUpdate:
    """One buffer and what lies in it. Belongs to the publisher's thread, and to senders that ask where to keep it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._manifest: Manifest | None = None
        self._refusals = 0

    @property
    def version(self) -> int | None:
        """Of the update that is kept whole, if there is one."""
        return None if self._manifest is None else self._manifest.version

    def fill(self, payload: Payload) -> None:
        """Keep this update from its first bytes on."""
        payload.keep_in(lambda: self._room(payload.manifest.total_bytes))

    def _room(self, nbytes: int) -> torch.Tensor:
        with self._lock:
            self._manifest = None
            if self._buffer.numel() < nbytes:
                self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old one first
                self._buffer = torch.empty(nbytes, dtype=torch.uint8)
            return self._buffer[:nbytes]

    def complete(self, payload: Payload) -> None:
        """All of it was packed."""
        self._manifest, self._refusals = payload.manifest, 0

    def refused(self) -> None:
        """A worker refused it again, though not at once. After a few times that is for what is in it: let it go."""
        self._refusals += 1
        if self._refusals == _MOST_REFUSALS:
            self._manifest = None

    def payload(self, bucket_bytes: int | None) -> Payload:
        """The update, to be sent again."""
        assert self._manifest is not None
        tensors = {entry.name: typed_view(self._buffer, entry) for entry in self._manifest.tensors}
        payload = Payload(tensors, self._manifest.version, bucket_bytes)
        payload.again = True
        return payload
