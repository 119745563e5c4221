"""Updates of the weights in a tensor group: all ranks take an update, or none does.

    receiver's thread   all bytes are verified, in memory that all ranks share
                        PREPARE --> each follower: the manifest fits its shard, its copies are planned --> prepared
                        all prepared: the update is ready for the loop
    loop                SWAP, between two steps --> every rank copies its part --> swapped
    receiver's thread   all swapped: the memory may be written again

Followers read the memory in their swap alone. An update that is dropped before its SWAP leaves no trace.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

import msgpack
import torch

from rollout.ranks.orders import Orders
from rollout.ranks.reports import Reports
from rollout.ranks.ring import SharedMemory
from trainer_bridge.wire.errors import Unavailable, WeightsRejected
from trainer_bridge.wire.manifest import Manifest


class RankUpdates:
    """Rank 0's end. Belongs to the receiver's thread."""

    def __init__(
        self,
        staged: SharedMemory,
        manifest: SharedMemory,
        reports: Reports,
        orders: Callable[[], Orders | None],
        device: torch.device,
    ) -> None:
        self._staged, self._manifest, self._reports, self._orders = staged, manifest, reports, orders
        self._view = PinnedView(device)
        self._asked: Manifest | None = None
        self._number = 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Staging memory that all ranks share, uint8 [nbytes]."""
        self._staged.grow(max(nbytes, 1))
        return self._view.of(self._staged.map())[:nbytes]

    def prepared(self, manifest: Manifest) -> bool:
        """Whether all followers are ready to swap this update, whose bytes are verified; asks them at the first call.

        Raises `WeightsRejected` if it does not fit one of them.
        """
        orders = self._orders()
        if orders is None:
            raise Unavailable("this worker is starting; publish again in a moment")
        if self._asked is not manifest:
            packed = msgpack.packb(manifest.to_wire())
            self._manifest.grow(len(packed))
            self._manifest.map()[: len(packed)] = packed
            self._asked, self._number = manifest, orders.prepare(manifest.total_bytes, len(packed))
        for follower, refused in enumerate(self._reports.get("refused")):
            if refused == self._number:
                raise WeightsRejected(f"rank {follower + 1}: {self._reports.text(follower)}", field="manifest")
        return min(self._reports.get("prepared")) >= self._number

    @property
    def copying(self) -> bool:
        """Whether a follower may still read the memory."""
        orders = self._orders()
        return orders is not None and min(self._reports.get("swapped")) < orders.swapped


class PinnedView:
    """Shared memory as a tensor, registered with CUDA so that a GPU copies from it at full speed."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._map: mmap.mmap | None = None
        self._tensor = torch.empty(0, dtype=torch.uint8)

    def of(self, memory: mmap.mmap) -> torch.Tensor:
        """The memory, uint8; the tensor of a smaller map is not used any more."""
        if memory is not self._map:
            if self._cuda and self._map is not None:
                torch.cuda.cudart().cudaHostUnregister(self._tensor.data_ptr())
            self._map, self._tensor = memory, torch.frombuffer(memory, dtype=torch.uint8)
            if self._cuda:  # an error leaves pageable memory, which is slower
                torch.cuda.cudart().cudaHostRegister(self._tensor.data_ptr(), self._tensor.numel(), 0)
        return self._tensor
