"""The last update, kept so that the next update can send only changes.

    publish N+1    bucket of the tensors --compare--> kept bucket of N     the codes of changes
                                         --copy-----> kept bucket          now N+1's; then the next bucket

All buckets are compared before anything is sent, so the trainer may change its tensors as soon as that is done. Workers
that have the content of update N get the codes; all others get update N+1 whole, from the kept bytes. Each update has a
random name, its *content*, by which a worker names its bytes. So bytes of another publisher, of an earlier run or of an
update that the worker missed are never taken for the base.

Comparing runs where the tensors are: on a GPU by torch, at the speed of its memory. The kept bytes are on that GPU, or
in host memory, from where each bucket crosses to the GPU and back.
"""

import logging
import secrets
import threading
from collections.abc import Mapping
from typing import Literal

import torch

from trainer_bridge.publish.handle import PublishHandle
from trainer_bridge.publish.kept_update import KeptUpdate, worth_keeping
from trainer_bridge.transports.changed_words import changed_words
from trainer_bridge.transports.fingerprint import fingerprint
from trainer_bridge.transports.payload import Payload
from trainer_bridge.transports.tensors import typed_view
from trainer_bridge.wire.delta import WeightDelta, comes_whole, exceeds_share
from trainer_bridge.wire.errors import RolloutError

DeltaMemory = Literal["host", "device"]

_log = logging.getLogger(__name__)


class KeptDeltas(KeptUpdate):
    """The kept update, the workers that have it, and the newest update's changes. Belongs to the publisher's thread."""

    def __init__(self, memory: DeltaMemory) -> None:
        super().__init__()
        self._where = memory
        self._content = ""  # the random name of the kept bytes
        #: The newest update as changes; None without a base, or if too much has changed.
        self.changes: Payload | None = None
        self._tied: dict[str, str] = {}  # names that the kept update leaves out, and its name of the same tensor
        self.base_holders: set[str] = set()  # endpoints that have the content that the changes are made from
        self._holders: set[str] = set()  # endpoints that have the kept content

    def fill(self, payload: Payload) -> None:
        """No-op: `take` keeps the update."""

    def take(self, payload: Payload, stop: threading.Event) -> None:
        """Keep an update, and find the changes since the last update. Afterwards its tensors are not read.

        Raises `RolloutError` if the memory cannot be had, and once `stop` is set.
        """
        manifest, before = payload.manifest, self._manifest
        comparable = before is not None and before.layout_digest == manifest.layout_digest
        base, self._content, self.changes = self._content, secrets.token_hex(16), None
        self.base_holders, self._holders = self._holders, set()
        device = payload.device if self._where == "device" else torch.device("cpu")
        comparable &= self._buffer.device == device and not comes_whole(manifest)
        try:
            with payload.on_side_stream():  # memory that only this stream uses: the trainer's stream goes on meanwhile
                kept = self._memory(manifest.total_bytes, device, payload.on_gpu and device.type == "cpu")
                scratch = kept.new_empty(min(manifest.bucket_bytes, manifest.total_bytes), device=payload.device)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            raise RolloutError(
                f"prepare: {self._where} memory is too small to keep the last update for deltas "
                f"({str(error).partition(chr(10))[0]:.200}): free some, or make a publisher with other deltas, or none"
            ) from error
        codes: dict[str, torch.Tensor] = {}
        prints: list[torch.Tensor] = []
        code_bytes = 0
        for index in range(manifest.bucket_count):
            if stop.is_set():
                raise RolloutError("prepare: the publisher was closed", code="closed")
            start, end = manifest.bucket_span(index)
            new = scratch[: end - start]
            payload.start_bucket(index, new)
            with payload.on_side_stream():
                if comparable:
                    try:
                        prints.append(fingerprint(new))
                        old = kept[start:end].to(new.device, non_blocking=True)
                        found = {f"{index}.{part}": code for part, code in changed_words(old, new).items()}
                        codes |= found
                        code_bytes += sum(code.nbytes for code in found.values())
                        if why := exceeds_share(manifest, code_bytes):
                            comparable, codes = False, {}
                            _log.info("version %d is sent whole: %s", manifest.version, why)
                    except torch.OutOfMemoryError as error:
                        comparable, codes = False, {}
                        _log.warning("version %d is sent whole: no memory to compare it: %s", manifest.version, error)
                kept[start:end].copy_(new, non_blocking=True)
        payload.wait_packed()
        payload.release()
        self._manifest, self._tied = manifest, dict(payload.tied)
        if comparable:
            self.changes = self._packed(payload, base, codes, [int(each) for each in prints])

    def _packed(self, payload: Payload, base: str, codes: dict[str, torch.Tensor], prints: list[int]) -> Payload:
        manifest = payload.manifest
        if not codes and manifest.total_bytes:  # no transport sends nothing: say the first word again
            word = self._buffer[:2].to(payload.device)
            codes = {f"0.{part}": found for part, found in changed_words(word ^ 1, word).items()}
        total = sum(code.nbytes for code in codes.values())
        _log.info("version %d changes %.2f%% of its bytes", manifest.version, 100 * total / manifest.total_bytes)
        changes = Payload(codes, manifest.version, manifest.bucket_bytes)
        changes.update, changes.content, changes.tied = manifest, self._content, self._tied
        changes.delta = WeightDelta(base, changes.manifest, tuple(prints))
        return changes

    def holds(self, endpoint: str) -> None:
        """Note that a worker has all bytes of the kept update."""
        self._holders.add(endpoint)

    def keep_finished(self, payload: Payload, handle: PublishHandle, stop: threading.Event) -> None:
        """Give up an update that all workers refused: none is to get it again, and no delta is made from it."""
        self.changes = None
        if not worth_keeping(handle):
            self._manifest = None
        self._refusals.clear()

    def payload(self, bucket_bytes: int | None) -> Payload:
        """The update, whole, to be sent again."""
        assert self._manifest is not None
        payload = super().payload(self._manifest.bucket_bytes)
        payload.content, payload.tied = self._content, self._tied
        return payload

    def every_name(self, tied: Mapping[str, str]) -> Payload | None:
        """Like `KeptUpdate.every_name`: the trainer's tensors are free, and their memory is about to be compared."""
        assert self._manifest is not None
        tensors = {entry.name: typed_view(self._buffer, entry).clone() for entry in self._manifest.tensors}
        tensors |= {name: tensors[other] for name, other in tied.items()}
        version, bucket_bytes = self._manifest.version, self._manifest.bucket_bytes
        return Payload(tensors, version, bucket_bytes)
