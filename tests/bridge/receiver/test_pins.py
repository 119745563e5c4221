"""Host memory that is pinned for updates: when CUDA is asked, over a runtime that a test can have refuse."""

from __future__ import annotations

import gc
import logging

import pytest
import torch

from rollout.weights.pinned_memory import PinnedMemory
from trainer_bridge.transports import cuda_ipc


class Runtime:
    """In the place of CUDA's. Pinned memory is refused, as there."""

    def __init__(self) -> None:
        self.pinned: set[int] = set()
        self.asked = self.forgotten = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 -- CUDA's name
        self.asked += 1
        if address in self.pinned:
            return 712
        self.pinned.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 -- CUDA's name
        self.pinned.remove(address)
        return 0

    def forget(self) -> None:
        self.forgotten += 1

    def pins(self) -> PinnedMemory:
        return PinnedMemory(lambda: self, self.forget)


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


def test_memory_is_pinned_once_and_unpinned_when_its_owner_is_gone(runtime: Runtime) -> None:
    memory, pins = torch.zeros(8, dtype=torch.uint8), runtime.pins()
    pins.add(memory)
    pins.add(memory)
    assert runtime.asked == 1 and runtime.pinned == {memory.data_ptr()}
    del pins
    gc.collect()
    assert not runtime.pinned
    pins = runtime.pins()
    pins.add(memory)
    pins.free()
    assert not runtime.pinned
    pins.add(memory)
    assert runtime.pinned


def test_a_refusal_is_told_once_and_leaves_no_error_for_the_next_kernel(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    memory, first, second = torch.zeros(8, dtype=torch.uint8), runtime.pins(), runtime.pins()
    first.add(memory)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            second.add(memory)
    assert runtime.asked == 2 and runtime.forgotten == 1 and len(caplog.records) == 1
    del second
    gc.collect()
    assert runtime.pinned, "it is pinned by its first owner still"


def test_every_runtime_that_is_loaded_is_found_once() -> None:
    """Each one keeps an error of its own, which must be forgotten."""
    ours, theirs = "/opt/torch/libcudart.so.13", "/usr/local/lib/libcudart-1a2b.so.12.8"
    maps = "".join(f"7f00-7f01 r-xp 0 0 0  {path}\n" for path in (theirs, ours, "/lib/libc.so.6", ours))
    assert cuda_ipc.runtimes_in(maps) == [theirs, ours]
