"""How a worker applies updates, decided once: staged if memory allows, otherwise in place.

- staged, on the device: a shadow of the weights on the GPU; the swap copies within the device
- staged, on the host: (pinned) host memory; the swap copies from there
- in place: no extra memory; generation is held meanwhile

The ranks of a tensor group have a staging memory each, for what their shard keeps (`shard_staging`, `rollout.ranks`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal

import torch

from rollout.process.host_memory import available_bytes
from rollout.process.progress import stage
from rollout.weights.destination import InPlaceDestination, StagedDestination
from rollout.weights.parameter_map import Fit
from rollout.weights.shard_destination import Ranks, ShardDestination
from rollout.weights.shard_staging import ShardInPlace, ShardStaging
from rollout.weights.staging import (
    Allocate,
    Copy,
    DeviceShadow,
    HostStaging,
    InPlaceWeights,
    StagedWeights,
    parameter_bytes,
    plan_copies,
    takes_device,
)
from trainer_bridge.wire.manifest import Manifest

#: Share of the host's free memory that `auto` takes for staging.
HOST_SHARE = 0.8

UpdateDestination = StagedDestination | InPlaceDestination | ShardDestination
Update = StagedWeights | InPlaceWeights

_log = logging.getLogger(__name__)


class ApplyMode:
    """Makes the destinations and updates of one mode. Owned by the receiver's thread.

    `asked` and `staging` are the settings `weights.apply` and `weights.staging`; `allocate` makes memory for a shadow.
    The other `ranks` of a tensor group stage their parts of updates themselves. Raises ValueError if the memory for the
    requested mode cannot be allocated.
    """

    def __init__(
        self,
        asked: Literal["auto", "staged", "in_place"],
        views: Mapping[str, torch.Tensor],
        allocate: Allocate | None = None,
        staging: Literal["auto", "device", "host"] = "auto",
        ranks: Ranks | None = None,
    ) -> None:
        if ranks is not None and asked == "auto":
            asked = "staged"
        self._views, self._ranks = views, ranks
        self._cuda = next((view.device for view in views.values() if view.is_cuda), None)
        nbytes = parameter_bytes(views)
        self._shard: ShardStaging | None = None
        if ranks is not None:
            self._shard = ShardInPlace(views) if asked == "in_place" else ShardStaging(views, staging, allocate)
        self.shadow: DeviceShadow | None = None
        if asked != "in_place" and self._shard is None:
            device = self._cuda or torch.device("cpu")
            if takes_device(nbytes, device, staging):
                self.shadow = DeviceShadow(nbytes, device, allocate)
        fits = self.shadow is not None or nbytes <= HOST_SHARE * available_bytes()
        self.in_place = asked == "in_place" or (asked == "auto" and not fits)
        self.name = "in_place" if self.in_place else "staged"
        level = logging.INFO if self.in_place and asked == "auto" else logging.DEBUG  # it costs generation time
        _log.log(level, "updates of the weights apply %s%s", self.name, ", on the device" if self.shadow else "")
        self._staging = HostStaging(self._cuda is not None)
        if self.staging == "host" and self._cuda is not None and self._shard is None:
            _pin(self._staging, nbytes)
        self._copies: tuple[tuple[str, int], list[Copy]] | None = None

    @property
    def staging(self) -> Literal["device", "host"] | None:
        """The memory of staged updates; None in place."""
        if self._shard is not None:
            return self._shard.place
        return None if self.in_place else "device" if self.shadow is not None else "host"

    @property
    def busy(self) -> bool:
        """Whether the memory for the next update still holds one that may be read."""
        return self._staging.busy or (self._ranks is not None and self._ranks.copying)

    def open(self, manifest: Manifest, fit: Fit, on_device: bool) -> UpdateDestination:
        """The destination of an update; with `on_device` all bytes arrive on the device, by `put`."""
        if self._shard is not None and self._ranks is not None:
            self._shard.open(manifest, fit)
            return ShardDestination(self._shard, self._ranks.open(manifest, on_device))
        if self.in_place:
            return InPlaceDestination(manifest, fit, self._views, pinned=self._cuda is not None)
        nbytes = manifest.total_bytes
        shadow = self.shadow if self.shadow is not None and nbytes <= self.shadow.nbytes else None
        if shadow is not None:
            shadow.reserve(nbytes)
        return StagedDestination(self._staging.reserve(0 if on_device and shadow is not None else nbytes), shadow)

    def update(self, manifest: Manifest, fit: Fit, destination: UpdateDestination) -> Update:
        """The verified update in `destination`; no other bytes land until it is released."""
        update: Update
        if self.in_place:
            update = InPlaceWeights(manifest)
        elif isinstance(destination, ShardDestination):
            update = StagedWeights(manifest, destination.copies())
        else:
            assert isinstance(destination, StagedDestination)
            update = StagedWeights(manifest, self._plan(manifest, fit, destination.stream))
        self._staging.lend(update)
        return update

    def _plan(self, manifest: Manifest, fit: Fit, stream: torch.Tensor) -> list[Copy]:
        """The copies of an update; updates of one layout share them."""
        key = (manifest.layout_digest, stream.data_ptr())
        if self._copies is None or self._copies[0] != key:
            self._copies = (key, plan_copies(manifest, fit, self._views, stream))
        return self._copies[1]


def _pin(staging: HostStaging, nbytes: int) -> None:
    """Allocate the host memory before anything decodes: for 61 GB this takes half a minute. Raises ValueError."""
    try:
        with stage("pinning host memory for updates of the weights"):
            staging.reserve(nbytes)
    except RuntimeError as error:  # of the allocator
        raise ValueError(
            f"the host does not give {nbytes / (1 << 30):.1f} GiB of pinned memory for updates of the weights: set "
            f"weights.staging to device, or weights.apply to in_place ({error!s:.200})"
        ) from error
