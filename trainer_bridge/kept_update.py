"""The last update, kept in the publisher's host memory: what a worker that comes back is brought up to date with.

A trainer changes its tensors once they are `held`, so what is to be sent again has to be a copy. It is filled as the
update is packed, into one buffer that every update uses: while a new one is under way there is none to be sent again.
"""

from __future__ import annotations

import torch

from trainer_bridge.manifest import Manifest
from trainer_bridge.payload import Payload
from trainer_bridge.staging import typed_view


class KeptUpdate:
    """One buffer and what lies in it. Belongs to the publisher's thread."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._manifest: Manifest | None = None

    @property
    def version(self) -> int | None:
        """Of the update that is kept whole, if there is one."""
        return None if self._manifest is None else self._manifest.version

    def fill(self, payload: Payload) -> None:
        """Keep what is packed of this update from now on."""
        self._manifest = None
        nbytes = payload.manifest.total_bytes
        if self._buffer.numel() < nbytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old one first
            self._buffer = torch.empty(nbytes, dtype=torch.uint8)
        payload.kept = self._buffer[:nbytes]

    def complete(self, payload: Payload) -> None:
        """All of it was packed."""
        self._manifest = payload.manifest

    def payload(self, bucket_bytes: int | None) -> Payload:
        """The update, to be sent again."""
        assert self._manifest is not None
        tensors = {entry.name: typed_view(self._buffer, entry) for entry in self._manifest.tensors}
        payload = Payload(tensors, self._manifest.version, bucket_bytes)
        payload.again = True
        return payload
