"""The two kinds of memory that keep an update on one rank: staging memory, or the parameters themselves.

Staging memory is on the device, allocated once, or on the host. On the host one rank's memory is pinned when the start
ends; for several ranks it is in blocks, each pinned when its first bytes come. In place, tensors that can only be
copied as a whole, such as quantised tensors, have memory of their own; generation is held, and no step runs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal

import torch

from rollout.weights.kept_layout import Kept, Layout, in_words, is_plain, lay_out_parts, lay_out_stream, values_of
from rollout.weights.parameter_map import ManifestFit
from rollout.weights.pinned_memory import BLOCK_BYTES, HostBlocks, HostBuffer
from rollout.weights.staged_weights import Copy
from trainer_bridge.transports.tensors import TORCH_DTYPES
from trainer_bridge.wire.manifest import Manifest

#: Allocates memory of a device: uint8 [bytes].
Allocate = Callable[[int], torch.Tensor]
#: Share of the memory left by the weights that staging on the device may take: the rest is for KV.
DEVICE_SHARE = 1 / 3


def parameter_bytes(views: Mapping[str, torch.Tensor]) -> int:
    """Bytes of an update in the parameters' own dtypes, with padding; memory with several names counts once."""
    storages = {}
    for view in views.values():
        widened = 2 if view.dtype == torch.uint8 else 1  # each code arrives as a 16-bit number
        storage = view.untyped_storage()
        storages[storage.data_ptr() or storage._cdata] = widened * storage.nbytes()  # on the meta device no address
    return sum(storages.values()) + 64 * len(views)


def takes_device(
    nbytes: int,
    device: torch.device,
    place: Literal["auto", "device", "host"],
    device_share: float = DEVICE_SHARE,
    free_bytes: int | None = None,
) -> bool:
    """Whether updates of `nbytes` are staged on the device; `place` is the setting. Raises ValueError if it is full.

    `free_bytes` of the device are what the driver reports, if they are not given.
    """
    if free_bytes is None:
        free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    if place == "device" and nbytes > free_bytes:
        raise ValueError(
            f"weights.staging = device takes {nbytes / (1 << 30):.1f} GiB of a GPU next to the weights, "
            f"{free_bytes / (1 << 30):.1f} GiB are free; set it to host, or weights.apply to in_place"
        )
    return place == "device" or (place == "auto" and nbytes <= device_share * free_bytes)


class KeptMemory(ABC):
    """The memory of the updates of the model that has these `views`, on one rank. Belongs to one thread at a time."""

    name: ClassVar[Literal["staged", "in_place"]]
    in_place: ClassVar[bool]

    def __init__(self, views: Mapping[str, torch.Tensor]) -> None:
        self.views, self.layout = views, Layout()
        #: The device of the parameters.
        self.device = next((view.device for view in views.values()), torch.device("cpu"))
        cuda = self.device.type == "cuda"
        self.copy_stream = torch.cuda.Stream(self.device) if cuda else None
        self.arrival, self.codes = HostBuffer(pinned=cuda), HostBuffer(pinned=cuda)
        self.blocks: Sequence[torch.Tensor] = ()  # the staging memory
        self.written = False  # some parameters have bytes of this update
        #: The memory that stages updates no larger than the parameters; None: in place.
        self.place: Literal["device", "host"] | None = None
        self.device_bytes = 0  # bytes of the device that are kept for staged updates

    @abstractmethod
    def open(self, manifest: Manifest, fit: ManifestFit, on_device: bool) -> None:
        """Lay an update out; the one before is not used any more. `on_device`: no byte of it arrives on the host."""

    @abstractmethod
    def arriving(self, start: int, end: int) -> torch.Tensor:
        """Host memory where bytes of the stream arrive."""

    @abstractmethod
    def block(self, kept: Kept) -> torch.Tensor:
        """Memory to write to, at whose byte `kept.at` a tensor begins."""

    def convert(self, kept: Kept, lo: int, piece: torch.Tensor) -> bool:
        """Write bytes from `lo` on to a parameter of another type; false if that has to be done by `complete`."""
        return False

    def complete(self, kept: Kept) -> None:  # noqa: B027
        """All bytes of a tensor have come."""

    @abstractmethod
    def values(self, kept: Kept) -> torch.Tensor:
        """The values of a tensor that is complete."""

    @abstractmethod
    def base(self, kept: Kept) -> torch.Tensor:
        """The bytes of a tensor that is complete, uint8, to make changes in."""

    def takes_changes(self, kept: Kept) -> bool:
        """Whether `base` has the bytes that were sent, in words of 16 bits."""
        return in_words(kept.entry, kept.cut)

    @abstractmethod
    def copies(self) -> list[Copy]:
        """The copies of a swap; updates of one layout share them."""

    def end(self) -> None:  # noqa: B027
        """No further byte comes, and none is on its way."""


class StagedMemory(KeptMemory):
    """Staging memory.

    `place` is the setting `weights.staging`: on the device, a swap reads no host memory. An update
    that is larger than the parameters is staged on the host anyway. `allocate`
    makes the memory, by default torch does. A `shard` keeps its part only. `advance` is called for each part of a long
    job. Raises ValueError if the device lacks the memory that was asked for.
    """

    name = "staged"
    in_place = False

    def __init__(
        self,
        views: Mapping[str, torch.Tensor],
        place: Literal["auto", "device", "host"] = "auto",
        allocate: Allocate | None = None,
        shard: bool = False,
        block_bytes: int = BLOCK_BYTES,
        advance: Callable[[], object] = lambda: None,
        device_share: float = DEVICE_SHARE,
    ) -> None:
        super().__init__(views)
        self._shard, self._block_bytes = shard, block_bytes
        self._on_device = torch.empty(0, dtype=torch.uint8)
        self.place, nbytes = "host", parameter_bytes(views)
        if takes_device(nbytes, self.device, place, device_share):
            make = allocate or (lambda size: torch.empty(size, dtype=torch.uint8, device=self.device))
            self._on_device, self.place = make(nbytes), "device"
            self.device_bytes = self._on_device.numel() if self._on_device.is_cuda else 0
        self._host_blocks = HostBlocks(self.copy_stream is not None, advance)
        self._copies: list[Copy] | None = None

    def open(self, manifest: Manifest, fit: ManifestFit, on_device: bool) -> None:
        layout, new = self.layout, self.layout.digest != manifest.layout_digest
        if new:  # drop references to the older memory first: the new memory may need its room
            self.layout, self.blocks, self._copies = Layout(), (), None
            layout = (lay_out_parts if self._shard else lay_out_stream)(self.views, manifest, fit)
        fits = self.place == "device" and layout.sizes[0] <= self._on_device.numel()
        if not self._shard:
            host = [self.arrival.reserve(0 if on_device and fits else layout.sizes[0])]
        elif new and not fits:
            layout = lay_out_parts(self.views, manifest, fit, self._block_bytes)
            host = self._host_blocks.reserve(list(layout.sizes))
        if new:
            self.layout = layout
            self.blocks = [self._on_device[: layout.sizes[0]]] if fits else host

    def arriving(self, start: int, end: int) -> torch.Tensor:
        return self.arrival.reserve(end)[start:]

    def block(self, kept: Kept) -> torch.Tensor:
        self._host_blocks.pin(self.blocks[kept.block])
        return self.blocks[kept.block]

    def values(self, kept: Kept) -> torch.Tensor:
        return values_of(kept, self.blocks[kept.block])

    def base(self, kept: Kept) -> torch.Tensor:
        return self.blocks[kept.block][kept.at : kept.end]

    def copies(self) -> list[Copy]:
        if self._copies is None:
            self._copies = list(self.layout.copies(self.blocks))
        return self._copies


class InPlaceMemory(KeptMemory):
    """The parameters."""

    name = "in_place"
    in_place = True

    def __init__(self, views: Mapping[str, torch.Tensor]) -> None:
        super().__init__(views)
        self._whole: dict[str, torch.Tensor] = {}  # the kept bytes of tensors that are copied as a whole
        self._others: set[str] = set()  # second names of parameters

    def open(self, manifest: Manifest, fit: ManifestFit, on_device: bool) -> None:
        self._whole.clear()
        self.written = False
        if self.layout.digest != manifest.layout_digest:
            layout = lay_out_parts(self.views, manifest, fit)
            self.layout = layout._replace(kept={name: kept._replace(at=0) for name, kept in layout.kept.items()})
            self._others = {other for _, other in fit.aliases}

    def arriving(self, start: int, end: int) -> torch.Tensor:
        """One memory for all, once `take` has read the bytes before."""
        return self.arrival.reserve(end - start)

    def block(self, kept: Kept) -> torch.Tensor:
        name = kept.entry.name
        if self._as_sent(kept):
            self.written = True
            return self.base(kept)
        if name not in self._whole:
            self._whole[name] = torch.empty(kept.nbytes, dtype=torch.uint8, device=kept.target.device)
        return self._whole[name]

    def convert(self, kept: Kept, lo: int, piece: torch.Tensor) -> bool:
        target, sent = kept.target, TORCH_DTYPES[kept.entry.dtype]
        if kept.cut is not None or target.dtype == sent or not self._is_parameter(kept):
            return False
        values, self.written = piece.view(sent), True
        first = lo // sent.itemsize
        # Waits, if the values are on the host: they are converted there, and take no memory of the device.
        target.detach().view(-1)[first : first + values.numel()].copy_(values)
        return True

    def complete(self, kept: Kept) -> None:
        if kept.entry.name in self._whole and kept.entry.name not in self._others:
            self.written = True
            kept.target.copy_(self.values(kept), non_blocking=True)
            del self._whole[kept.entry.name]

    def values(self, kept: Kept) -> torch.Tensor:
        whole = self._whole.get(kept.entry.name)
        return kept.target if whole is None else values_of(kept, whole)

    def base(self, kept: Kept) -> torch.Tensor:
        return kept.target.detach().view(-1).view(torch.uint8)

    def takes_changes(self, kept: Kept) -> bool:
        return super().takes_changes(kept) and self._as_sent(kept)

    def copies(self) -> list[Copy]:
        return []

    def end(self) -> None:
        self._whole.clear()
        self.arrival.free()

    def _is_parameter(self, kept: Kept) -> bool:
        return kept.entry.name not in self._others and is_plain(kept.target)

    def _as_sent(self, kept: Kept) -> bool:
        return kept.target.dtype == TORCH_DTYPES[kept.entry.dtype] and self._is_parameter(kept)
