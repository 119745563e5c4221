"""Host memory that is pinned for updates: when CUDA is asked, over a runtime that a test can have refuse."""

import gc
import itertools
import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from rollout.engine.device.streams import CpuDevice
from rollout.process import host_memory
from rollout.weights import pinned_memory
from rollout.weights.kept_memory import StagedMemory
from rollout.weights.parameter_map import ManifestFit
from rollout.weights.pinned_memory import HostBuffer, PagesBeside, PinnedMemory
from rollout.weights.staging import WeightStaging
from trainer_bridge.transports import cuda_ipc
from trainer_bridge.wire.manifest import Manifest, TensorEntry


class Runtime:
    """In the place of CUDA's. Pinned memory is refused, as there."""

    def __init__(self) -> None:
        self.pinned: set[int] = set()
        self.asked = self.forgotten = 0
        self.refuses = False

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 -- CUDA's name
        self.asked += 1
        if self.refuses:
            return 2
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


def test_host_memory_for_updates_is_pinned_at_the_end_of_a_start(runtime: Runtime) -> None:
    buffer = HostBuffer(pinned=False)
    buffer.begin_pinning(1 << 20, lambda nbytes: PagesBeside(nbytes, runtime.pins()))
    assert not runtime.pinned
    buffer.end_pinning()
    assert runtime.pinned == {buffer.reserve(1 << 20).data_ptr()}
    buffer.end_pinning()
    assert runtime.asked == 1
    assert buffer.reserve(2 << 20).numel() == 2 << 20  # an update that is larger than the parameters
    gc.collect()
    assert not runtime.pinned


def test_an_update_that_comes_before_the_end_of_a_start_waits_for_the_memory(runtime: Runtime) -> None:
    buffer = HostBuffer(pinned=False)
    buffer.begin_pinning(1 << 20, lambda nbytes: PagesBeside(nbytes, runtime.pins()))
    assert runtime.pinned == {buffer.reserve(1 << 10).data_ptr()}


def test_an_update_that_is_larger_than_the_parameters_keeps_its_memory_when_a_start_ends(runtime: Runtime) -> None:
    pinned, go, calls = threading.Event(), threading.Event(), itertools.count()

    class Slow(PagesBeside):
        def pinned(self) -> torch.Tensor:
            memory = super().pinned()
            if next(calls) == 0:
                pinned.set()
                go.wait(20)
            return memory

    buffer = HostBuffer(pinned=False)
    buffer.begin_pinning(1 << 10, lambda nbytes: Slow(nbytes, runtime.pins()))
    start = threading.Thread(target=buffer.end_pinning)
    start.start()
    assert pinned.wait(20)
    update = threading.Thread(target=buffer.reserve, args=(1 << 11,))
    update.start()
    update.join(0.5)  # it waits for the start
    go.set()
    start.join(20), update.join(20)
    assert buffer.reserve(1 << 11).numel() == 1 << 11


def test_memory_whose_pages_are_still_taken_is_not_free_for_others(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """KV on the host would be given the same memory, and the system would end the process."""
    (tmp_path / "meminfo").write_text("MemAvailable:    1024 kB\n")
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    go = threading.Event()
    monkeypatch.setattr(pinned_memory, "touch", lambda *of: go.wait(20))
    pages = PagesBeside(1 << 18, runtime.pins())
    assert host_memory.available_bytes() == CpuDevice().free_bytes() == (1 << 20) - (1 << 18)
    go.set()
    pages.pinned()
    assert host_memory.available_bytes() == 1 << 20


def test_a_start_that_fails_meanwhile_ends_the_process_with_its_own_status() -> None:
    script = "import sys; from rollout.weights.pinned_memory import PagesBeside; a = PagesBeside(2 << 30); sys.exit(7)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (7, "")


def test_memory_that_cuda_does_not_pin_ends_a_start(runtime: Runtime) -> None:
    runtime.refuses = True
    buffer = HostBuffer(pinned=False)
    buffer.begin_pinning(1 << 20, lambda nbytes: PagesBeside(nbytes, runtime.pins()))
    with pytest.raises(ValueError, match="pinned memory.*CUDA does not pin it"):
        buffer.end_pinning()


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


@pytest.mark.parametrize("shard", [False, True])
def test_an_update_for_which_the_host_has_no_memory_leaves_no_second_memory_behind(shard: bool) -> None:
    views = {"w": torch.zeros(64), "huge": torch.empty(1 << 52, device="meta")}
    small = Manifest(1, (TensorEntry("w", "float32", (64,), 0),), 256)
    huge = Manifest(2, (TensorEntry("huge", "float32", (1 << 52,), 0),), 256)
    staging = WeightStaging(memory := StagedMemory(views, "host", shard=shard, block_bytes=64))
    staging.open(small, ManifestFit(("w",), ()))
    with pytest.raises((RuntimeError, OSError, OverflowError)):
        staging.open(huge, ManifestFit(("huge",), ()))
    assert not memory.blocks
    staging.open(small, ManifestFit(("w",), ()))
    (block,) = memory.blocks
    assert shard or block.data_ptr() == staging.arriving(0, 256).data_ptr(), "the bytes arrive where they are staged"
    staging.take(0, torch.arange(64.0).view(torch.uint8))
    staging.check()
    (copy,) = memory.copies()
    assert torch.equal(copy[1].view(-1), torch.arange(64.0))
