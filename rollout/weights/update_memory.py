"""The memory of an update on a worker: where a transport puts its bytes, until the update is in use or dropped.

Transports write here, in the receiver's thread or in a thread that it waits for. Staged bytes may be wrong: they are
used only after all of them are verified. Bytes that land in place change the served weights at once; `dirty` is true
from then on. `ranks.updates` has the memory of a worker of several ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from rollout.weights.delta_staging import WHOLE, DeltaStaging, UpdateContent, open_staging
from rollout.weights.parameter_map import ManifestFit
from rollout.weights.staged_weights import StagedWeights
from rollout.weights.staging import WeightStaging
from trainer_bridge.transports.base import Destination
from trainer_bridge.transports.sections import RankCuts, Sections
from trainer_bridge.wire.manifest import Manifest


class UpdateMemory(Destination, ABC):
    """The memory of one update, on all ranks of a worker. `taker` keeps this rank's part of what arrives."""

    def __init__(
        self, staging: WeightStaging, manifest: Manifest, taker: WeightStaging | DeltaStaging, content: str = ""
    ) -> None:
        self._staging, self._manifest, self._taker, self._content = staging, manifest, taker, content
        self._arriving = torch.empty(0, dtype=torch.uint8)

    @property
    @abstractmethod
    def dirty(self) -> bool:
        """Whether parameters were written, on some rank."""

    @abstractmethod
    def copied(self) -> bool:
        """Whether all bytes are where the swap reads them. All bytes are verified when this is first called.

        In place, no step may run by then.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Return when this update's memory is neither written nor read."""

    def check(self) -> None:
        """Raise `WeightsRejected` when bytes are missing, or when tensors that are one parameter differ."""
        self._taker.check()

    def update(self) -> StagedWeights:
        """The verified update; no other bytes land until it is released."""
        self._staging.base.verified(self._content)
        update = StagedWeights(self._manifest, self._staging.memory.copies(), self._staging.swap_copies)
        self._staging.lend(update)
        return update


class RankUpdateMemory(UpdateMemory):
    """The memory of one update on a worker of one rank."""

    @property
    def dirty(self) -> bool:
        return self._staging.memory.written

    def wait_for_room(self) -> bool:
        """True: there is always room."""
        return True

    def memory(self, start: int, end: int) -> np.ndarray:
        """Like `Destination.memory`. NumPy and file reads fill it without holding the GIL."""
        self._arriving = self._taker.arriving(start, end)
        return self._arriving.numpy()

    def landed(self, start: int, end: int) -> None:
        read = self._taker.take(start, self._arriving)
        if self._staging.in_place and read is not None:
            read.synchronize()  # the next bytes arrive in the same memory

    def put(self, start: int, data: torch.Tensor) -> torch.Tensor:
        """Like `Destination.put`; `data` may be reused after the call, in stream order."""
        self._taker.take(start, data)
        memory = self._staging.memory
        if self._taker is not self._staging or not memory.layout.is_stream or memory.blocks[0].device != data.device:
            return data
        return memory.blocks[0][start : start + data.numel()]

    def copied(self) -> bool:
        return self._taker.copied()

    def abandon(self) -> None:
        self._staging.abandon()

    @property
    def stream(self) -> torch.Tensor:
        """All bytes, uint8, once `copied`."""
        return self._staging.memory.blocks[0]


class UpdateMemories:
    """Makes the memory of each update of the model. Owned by the receiver's thread."""

    def __init__(self, staging: WeightStaging) -> None:
        self.staging = staging

    @property
    def busy(self) -> bool:
        """Whether the memory for the next update still holds one that may be read."""
        return self.staging.busy

    @property
    def offer_open(self) -> bool:
        """Whether a rank may still have memory open that the publisher of a dropped update has offered."""
        return False

    def cuts(self) -> Sequence[RankCuts] | None:
        """The parts of each tensor that each rank keeps; None if there is one rank, or if that is not known."""
        return None

    def open(
        self,
        manifest: Manifest,
        fit: ManifestFit,
        on_device: bool,
        content: UpdateContent = WHOLE,
        sections: Sections | None = None,
    ) -> UpdateMemory:
        """Begin an update; with `on_device` all bytes arrive on the device, by `put`.

        With `sections`, made from `cuts`, these arrive in the place of the manifest's stream.
        """
        assert sections is None, "one rank takes whole tensors"
        taker = open_staging(self.staging, manifest, fit, on_device, content)
        return RankUpdateMemory(self.staging, manifest, taker, content.name)
