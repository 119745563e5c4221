"""A relay's memory on rank 0's GPU, which the other ranks read through the driver's handle of it.

    grow      allocate --> order: map it, unmap the older memory --> carried out by all: free the older memory
    sleep     order: unmap --> carried out by all, with the rest of the sleep: free it

CUDA does not define what happens to memory that is freed while another process has it mapped. So no memory is freed
before all followers have unmapped it.
"""

import logging
from collections.abc import Callable

import torch

from trainer_bridge.transports.cuda_ipc import CudaIpcMemory, IpcMemory, release_each

log = logging.getLogger(__name__)


def device_memory(device: torch.device) -> IpcMemory | None:
    """Memory of a GPU that other processes can read; None on a CPU."""
    if device.type != "cuda":
        return None
    try:
        return CudaIpcMemory(device)
    except OSError as error:  # the CUDA runtime library is missing; pieces go through the host
        log.warning("pieces of updates go through the host: %s", error)
        return None


class DeviceBacking:
    """The memory.

    `tell` gives the followers its handle and bytes; it returns the number of the order. `answers` says by this number
    which followers have carried the order out: None while an answer is missing.
    """

    def __init__(
        self, memory: IpcMemory, tell: Callable[[bytes, int], int], answers: Callable[[int], list[bool] | None]
    ) -> None:
        self._memory, self._tell, self._answers = memory, tell, answers
        self._tensor: torch.Tensor | None = None
        self._old: list[torch.Tensor] = []  # memory that followers may have mapped, but do not read any more
        self._order = 0
        self._failed = False

    def grow(self, nbytes: int) -> torch.Tensor:
        """Larger memory, without the old one."""
        if self._failed:
            return torch.empty(nbytes, dtype=torch.uint8)  # not used
        self._put_off()
        try:
            self._tensor = self._memory.allocate(nbytes)
            handle = self._memory.handle(self._tensor)
        except OSError as error:
            log.warning("pieces of updates go through the host: the GPU cannot share memory (%s)", error)
            self._failed = True
            self.unmap()
            return torch.empty(nbytes, dtype=torch.uint8)
        self._order = self._tell(handle, nbytes)
        return self._tensor

    def unmap(self) -> None:
        """Have the followers unmap it; no piece is read any more. `free` gives it back."""
        self._put_off()
        if self._old:
            self._order = self._tell(b"", 0)

    def free(self) -> int:
        """Give back the memory that all followers have unmapped; returns its bytes."""
        if not self._old or self._answers(self._order) is None:
            return 0
        old, self._old = self._old, []
        release_each(self._memory.free, old)
        return sum(memory.numel() for memory in old)

    def _put_off(self) -> None:
        if self._tensor is not None:
            self._old.append(self._tensor)
            self._tensor = None

    @property
    def usable(self) -> bool | None:
        """Whether all followers have mapped it."""
        self.free()
        if self._failed:
            return False
        answers = self._answers(self._order)
        if answers is not None and not all(answers):
            self._failed = True
            log.warning("pieces of updates go through the host: a rank cannot read the memory of rank 0's GPU")
            return False
        return None if answers is None else True
