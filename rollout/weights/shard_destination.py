"""The destination of an update in a tensor group: each rank keeps the part of its shard.

transport --> relay memory, which all ranks read --> staging memory of each rank --swap--> its parameters
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch

from rollout.process.observed_time import ObservedTime
from rollout.weights.parameter_map import Fit
from rollout.weights.shard_staging import ShardStaging
from rollout.weights.staging import Copy
from trainer_bridge.wire.errors import InternalError
from trainer_bridge.wire.manifest import Manifest

#: For the other ranks to take a piece, where the watch of the group finds nothing: it may be told not to.
_ROOM_S = 120.0
_POLL_S = 0.0005
#: A look counts twice this at the most: this process may have been stopped meanwhile.
_LOOK_S = 0.5


class Relay(Protocol):
    """Memory by which one update goes to the other ranks, piece by piece. Methods raise `RolloutError`."""

    @property
    def has_room(self) -> bool:
        """Whether there is memory for one more piece."""

    def reserve(self, nbytes: int) -> torch.Tensor:
        """Memory for the next piece, uint8, when there is room; the same again until `pass_on`."""

    def pass_on(self, start: int, written: torch.cuda.Event | None, read: torch.cuda.Event | None) -> None:
        """Give the reserved piece, bytes `start` .. of the stream, to the other ranks once it is `written`.

        The memory is not used again before `read` either: this rank copies from it.
        """

    def prepared(self) -> bool:
        """Whether all other ranks are ready to swap; at the first call all bytes are verified, and they are asked."""

    def drop(self) -> None:
        """The update is not continued."""


class Ranks(Protocol):
    """The other ranks of a tensor group, which take every update together with this one."""

    def open(self, manifest: Manifest, on_device: bool) -> Relay:
        """Begin an update on all of them; with `on_device` its pieces come on the device."""

    @property
    def copying(self) -> bool:
        """Whether one of them may still read its staging memory."""


class ShardDestination:
    """The memory of all ranks: this rank's, and through `relay` that of the others."""

    def __init__(self, staging: ShardStaging, relay: Relay) -> None:
        self.dirty = False  # some of the parameters are written, on some of the ranks
        self._staging, self._relay = staging, relay
        self._reserved = torch.empty(0, dtype=torch.uint8)

    @property
    def has_room(self) -> bool:
        """Whether a piece can be taken."""
        return self._relay.has_room

    def memory(self, start: int, end: int) -> np.ndarray:
        """Memory of the relay, if there is room."""
        self._reserved = self._relay.reserve(end - start)
        return self._reserved.numpy()

    def landed(self, start: int, end: int) -> None:
        """Start to copy the bytes into the memory of every rank."""
        self.dirty |= self._staging.place is None
        self._relay.pass_on(start, None, self._staging.take(start, self._reserved))

    def put(self, start: int, data: torch.Tensor) -> None:
        """Take bytes from any device. Waits for room: transports that put from threads of their own do not look.

        A rank that takes nothing is found by the watch of the group, and then `has_room` raises.
        """
        left_s, observed = _ROOM_S, ObservedTime(_LOOK_S)
        while not self._relay.has_room:
            left_s -= observed.passed_s()
            if left_s < 0:
                raise InternalError(f"a rank took no piece of the update for {_ROOM_S:g} s")
            time.sleep(_POLL_S)
        self.dirty |= self._staging.place is None
        self._relay.reserve(data.numel()).copy_(data, non_blocking=True)
        taken = self._staging.take(start, data)  # on a device: its event is after the copy above
        self._relay.pass_on(start, taken, taken)

    def copied(self) -> bool:
        """Whether every rank has its part, and its copies are planned.

        All bytes are verified when this is first called.
        """
        return self._staging.copied() and self._relay.prepared()

    def check_aliases(self, manifest: Manifest, fit: Fit, views: Mapping[str, torch.Tensor]) -> None:
        """Raise `WeightsRejected` when bytes are missing here, or tensors that are one parameter differ."""
        self._staging.check_whole()

    def copies(self) -> list[Copy]:
        """The copies of this rank's swap."""
        return self._staging.copies()

    def abandon(self) -> None:
        """Return when this rank's memory is neither written nor read."""
        self._relay.drop()
        self._staging.wait()
