"""How a worker applies updates, decided once: staged if memory allows, otherwise in place.

- staged, on the device: a shadow of the weights on the GPU; the swap copies within the device
- staged, on the host: (pinned) host memory; the swap copies from there
- in place: no extra memory; generation is held meanwhile
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Literal

import torch

from rollout.models.cut import whole_shape
from rollout.process.progress import stage
from rollout.weights.destination import InPlaceDestination, StagedDestination
from rollout.weights.parameter_map import Fit
from rollout.weights.staging import (
    Allocate,
    Copy,
    DeviceShadow,
    HostStaging,
    InPlaceWeights,
    Ranks,
    StagedWeights,
    plan_copies,
)
from trainer_bridge.wire.manifest import Manifest

#: Share of the memory left by the weights that a shadow may take: the rest is for KV.
SHADOW_SHARE = 1 / 3
#: Share of the host's free memory that `auto` takes for staging.
HOST_SHARE = 0.8

UpdateDestination = StagedDestination | InPlaceDestination
Update = StagedWeights | InPlaceWeights

_log = logging.getLogger(__name__)


class ApplyMode:
    """Makes the destinations and updates of one mode. Owned by the receiver's thread.

    `asked` and `staging` are the settings `weights.apply` and `weights.staging`; `allocate` makes memory for a shadow.
    With other `ranks` updates are staged in host memory that all of them read. Raises ValueError if the memory for the
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
        if ranks is not None:
            if asked == "in_place" or staging == "device":
                raise ValueError("with tensor_parallel updates are staged on the host: set apply and staging to auto")
            asked, staging = "staged", "host"
        self._views = views
        self._cuda = next((view.device for view in views.values() if view.is_cuda), None)
        nbytes = _parameter_bytes(views)
        if ranks is not None:  # the views are those of a shard, and an update is whole
            nbytes = sum(2 * math.prod(whole_shape(view)) + 64 for view in views.values() if view.is_cuda)
        self.shadow = None if asked == "in_place" else _shadow(nbytes, self._cuda, allocate, staging)
        fits = self.shadow is not None or nbytes <= HOST_SHARE * _free_host_bytes()
        self.in_place = asked == "in_place" or (asked == "auto" and not fits)
        self.name = "in_place" if self.in_place else "staged"
        level = logging.INFO if self.in_place and asked == "auto" else logging.DEBUG  # it costs generation time
        _log.log(level, "updates of the weights apply %s%s", self.name, ", on the device" if self.shadow else "")
        self._staging = HostStaging(self._cuda is not None, ranks)
        if self.staging == "host" and self._cuda is not None:
            _pin(self._staging, nbytes)
        self._copies: tuple[tuple[str, int], list[Copy]] | None = None

    @property
    def staging(self) -> Literal["device", "host"] | None:
        """The memory of staged updates; None in place."""
        return None if self.in_place else "device" if self.shadow is not None else "host"

    @property
    def busy(self) -> bool:
        """Whether the memory for the next update still holds one that may be read."""
        return self._staging.busy

    def open(self, manifest: Manifest, fit: Fit, on_device: bool) -> UpdateDestination:
        """The destination of an update; with `on_device` all bytes arrive on the device, by `put`."""
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
        if isinstance(destination, InPlaceDestination):
            update = InPlaceWeights(manifest)
        else:
            update = StagedWeights(manifest, self._plan(manifest, fit, destination.stream))
        self._staging.lend(update)
        return update

    def _plan(self, manifest: Manifest, fit: Fit, stream: torch.Tensor) -> list[Copy]:
        """The copies of an update; updates of one layout share them."""
        key = (manifest.layout_digest, stream.data_ptr())
        if self._copies is None or self._copies[0] != key:
            self._copies = (key, plan_copies(manifest, fit, self._views, stream))
        return self._copies[1]


def _parameter_bytes(views: Mapping[str, torch.Tensor]) -> int:
    """Bytes of an update in the parameters' own dtypes, with padding; memory with several names counts once."""
    storages = {}
    for view in views.values():
        widened = 2 if view.dtype == torch.uint8 else 1  # codes: each arrives as a 16-bit number
        storages[view.untyped_storage().data_ptr()] = widened * view.untyped_storage().nbytes()
    return sum(storages.values()) + 64 * len(views)


def _shadow(
    nbytes: int, device: torch.device | None, allocate: Allocate | None, staging: Literal["auto", "device", "host"]
) -> DeviceShadow | None:
    free_bytes = 0 if device is None else torch.cuda.mem_get_info(device)[0]
    if staging == "device" and nbytes > free_bytes:
        raise ValueError(
            f"weights.staging = device takes {nbytes / (1 << 30):.1f} GiB of a GPU next to the weights, "
            f"{free_bytes / (1 << 30):.1f} GiB are free; set it to host, or weights.apply to in_place"
        )
    if device is None or staging == "host" or (staging == "auto" and nbytes > SHADOW_SHARE * free_bytes):
        return None
    return DeviceShadow(nbytes, device, allocate)


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


def _free_host_bytes() -> float:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return float("inf")  # not Linux: an allocation that is too large fails with the system's own error
