"""A relay's memory on rank 0's GPU, which the other ranks read through the driver's handle of it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from rollout.ranks.reports import Reports
from trainer_bridge.transports.cuda_ipc import CudaIpcMemory, IpcMemory

log = logging.getLogger(__name__)

#: Bytes that a follower reads at a time into memory of its own.
READ_BYTES = 64 << 20


def device_memory(device: torch.device) -> IpcMemory | None:
    """Memory of a GPU that other processes can read; None if there is none."""
    if device.type != "cuda":
        return None
    try:
        return CudaIpcMemory(device)
    except OSError as error:  # the CUDA runtime library is missing; pieces go through the host
        log.warning("pieces of updates go through the host: %s", error)
        return None


class DevicePlace:
    """The memory. `tell` gives the followers its number, handle and bytes; they report `mapped` or `unmapped`."""

    def __init__(self, memory: IpcMemory, reports: Reports, tell: Callable[[int, bytes, int], None]) -> None:
        self._memory, self._reports, self._tell = memory, reports, tell
        self._tensor: torch.Tensor | None = None
        self._number = 0
        self._failed = False

    def grow(self, nbytes: int) -> torch.Tensor:
        """Larger memory, without the old one: a follower may have that mapped, but reads no piece of it any more."""
        if self._failed:
            return torch.empty(nbytes, dtype=torch.uint8)  # not used
        try:
            self._tensor = self._memory.allocate(nbytes)
            handle = self._memory.handle(self._tensor)
        except OSError as error:
            log.warning("pieces of updates go through the host: the GPU shares no memory (%s)", error)
            self._failed = True
            return torch.empty(nbytes, dtype=torch.uint8)
        self._number += 1
        self._tell(self._number, handle, nbytes)
        return self._tensor

    @property
    def usable(self) -> bool | None:
        """Whether all followers have mapped it."""
        if self._failed:
            return False
        if max(self._reports.get("unmapped")) >= self._number:
            self._failed = True
            log.warning("pieces of updates go through the host: a rank cannot read the memory of rank 0's GPU")
            return False
        return True if min(self._reports.get("mapped")) >= self._number else None
