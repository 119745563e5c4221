"""Memory that processes share by files, in the place of a GPU's: what the driver does for `cuda_ipc`."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from trainer_bridge.transports.cuda_ipc import HANDLE_BYTES, CudaIpcReceiver, CudaIpcSender

if TYPE_CHECKING:
    from tests.support.bridge.harness import Worker
    from trainer_bridge.publish.publisher import WeightPublisher


class Between(NamedTuple):
    """An `OfferedMemory` of functions that stand before another one's."""

    read: Callable[..., None]
    close: Callable[[], None]


class FileMemory:
    """Each allocation is a file in a folder, whose name is the handle."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: dict[int, str] = {}
        self.readers = 0  # that are open

    def allocate(self, nbytes: int) -> torch.Tensor:
        name = secrets.token_hex(HANDLE_BYTES // 2)
        memory = self._map(name, nbytes)
        self._names[memory.data_ptr()] = name
        return memory

    def free(self, memory: torch.Tensor) -> None:
        (self._folder / self._names.pop(memory.data_ptr())).unlink()

    def handle(self, memory: torch.Tensor) -> bytes:
        return self._names[memory.data_ptr()].encode()

    def open(self, handle: bytes, nbytes: int) -> torch.Tensor:
        if not (self._folder / handle.decode()).exists():
            raise OSError(201, "invalid handle")
        return self._map(handle.decode(), nbytes)

    def close(self, memory: torch.Tensor) -> None:
        pass

    def reader(self, handle: bytes, nbytes: int) -> _Reader:
        memory = self.open(handle, nbytes)
        self.readers += 1
        return _Reader(self, memory)

    def _map(self, name: str, nbytes: int) -> torch.Tensor:
        return torch.from_file(str(self._folder / name), shared=True, size=nbytes, dtype=torch.uint8)


class _Reader:
    def __init__(self, owner: FileMemory, memory: torch.Tensor) -> None:
        self._owner, self._memory = owner, memory

    def read(self, at: int, out: torch.Tensor) -> None:
        out.copy_(self._memory[at : at + out.numel()])

    def close(self) -> None:
        self._owner.readers -= 1


def share_with(worker: Worker, folder: Path) -> None:
    """Let a worker take `cuda_ipc` from publishers that share files of the folder."""
    receivers = worker.receiver.receivers
    receivers["cuda_ipc"] = CudaIpcReceiver(receivers["zmq"], FileMemory(folder))


def share_from(publisher: WeightPublisher, folder: Path) -> None:
    """Let a publisher send tensors on the CPU by `cuda_ipc`."""
    publisher.choice.senders["cuda_ipc"] = CudaIpcSender(None, FileMemory(folder))


def lend_from(publisher: WeightPublisher, memory: FileMemory) -> None:
    """Let a trainer's rank lend, or read, memory of files though its tensors are on the CPU."""
    ranks = publisher.ranks
    assert ranks is not None
    ranks._memory_of = lambda device: memory
