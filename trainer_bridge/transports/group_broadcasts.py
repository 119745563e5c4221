"""The publisher's part in one group: a thread that makes it and broadcasts every bucket, watched from outside.

    pack bucket i+1 to one buffer | bucket i on its way from the other

Joining and leaving may hang inside of NCCL, which knows no deadline: `run` returns all the same once nothing has moved
for too long, a worker has given up, or the publisher closes.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import torch.distributed as dist

from trainer_bridge.fingerprint import fingerprint, fingerprints_digest
from trainer_bridge.payload import Payload
from trainer_bridge.transports import TransferRules
from trainer_bridge.transports.group import BUFFERS, GONE, Group, GroupError

_GRACE_S = 5.0  # beyond `stall_s`: a group that still can gives the better reason itself

_log = logging.getLogger(__name__)


class Broadcasts:
    """The publisher's part in one group, in a thread that is waited for with an eye on `rules`."""

    def __init__(
        self, payload: Payload, store: dist.Store, name: str, address: str, size: int, rules: TransferRules
    ) -> None:
        self.error: str | None = None
        self.sent = 0
        self.digest = ""
        self._payload, self._store, self._name = payload, store, name
        self._address, self._size, self._rules = address, size, rules
        self._over = threading.Event()
        self._stop = threading.Event()
        self._moved_s = time.monotonic()

    def run(self, watch: dist.Store) -> None:
        """Return when all is sent, or `error` says why not; `watch` is a client of the store."""
        thread = threading.Thread(target=self._main, name="weights-group", daemon=True)
        thread.start()
        while not self._over.wait(0.02):
            if self._rules.closing.is_set():
                self._stop.set()
                self.error = "the publisher was closed"
                return
            if watch.check([GONE]):
                self._stop.set()
                self.error = watch.get(GONE).decode(errors="replace")[:300]
                return
            still_s = time.monotonic() - self._moved_s
            if still_s > self._rules.stall_s + _GRACE_S:  # inside of NCCL: what joins or leaves there knows no deadline
                self._stop.set()
                self.error = f"nothing moved in the group for {still_s:.0f} s"
                return

    def _main(self) -> None:
        try:
            self._send()
        except GroupError as error:
            self.error = self.error or f"the group with the workers broke: {error}"
        # Workers are told, and keep what they serve.
        except Exception as error:
            _log.exception("sending weights failed")
            self.error = f"the publisher failed in its group: {error!r:.300}"
        self._over.set()

    def _send(self) -> None:
        payload, manifest, stop = self._payload, self._payload.manifest, self._stop
        group = Group(self._store, self._name, 0, self._size, self._address, payload.device, self._rules.stall_s)
        broken = True
        try:
            buffers = [group.buffer(min(manifest.bucket_bytes, manifest.total_bytes)) for _ in range(BUFFERS)]
            pending: list[Any] = [None] * BUFFERS
            seen = []
            for index in range(manifest.bucket_count):
                slot = index % BUFFERS
                if pending[slot] is not None:
                    pending[slot].wait(stop)
                    self.sent += 1
                self._moved_s = time.monotonic()
                data = buffers[slot][: payload.pack_bucket(index, buffers[slot])]
                self._moved_s = time.monotonic()
                with group.on_stream():
                    seen.append(fingerprint(data))
                pending[slot] = group.broadcast(data)
            for slot in range(manifest.bucket_count, manifest.bucket_count + BUFFERS):
                if pending[slot % BUFFERS] is not None:
                    pending[slot % BUFFERS].wait(stop)
                    self.sent += 1
                    self._moved_s = time.monotonic()
            with group.on_stream():
                self.digest = fingerprints_digest(seen)
            broken = False
        finally:
            group.close(broken)
