"""Memory that goes and comes back at the same addresses: all of it or none, what is kept and zeros elsewhere."""

import ctypes
from pathlib import Path

import pytest
import torch
from torch import nn

from rollout.engine.device.cuda_pages import CudaPages, DriverError, _Access, _Properties
from rollout.engine.device.releasable import HostPages, MemoryShortError, ReleasableMemory, pieces_of
from rollout.engine.device.streams import CpuDevice
from tests.support.engine.sleeping import SomeHost
from tests.support.engine.strict_pages import StrictPages

MIB = 1 << 20


def resident() -> int:
    """Bytes of this process without pages of files, which come and go as the machine needs memory."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].removesuffix("kB")) << 10 for name in ("RssAnon", "RssShmem"))


def test_the_system_has_the_memory_while_it_is_given_back():
    memory = ReleasableMemory(CpuDevice(), HostPages())
    before = resident()
    big = memory.zeros((64, MIB // 4), torch.float32)
    assert not big[::7].any()
    big.fill_(1.0)
    there = resident()
    assert there - before >= 0.95 * 64 * MIB and memory.nbytes == 64 * MIB
    memory.release()
    assert there - resident() >= 0.95 * 64 * MIB
    memory.restore()
    assert not big[::7].any()
    big.fill_(2.0)
    assert resident() - before >= 0.95 * 64 * MIB


@pytest.mark.parametrize("saved", [True, False])
def test_tensors_and_views_are_the_same_objects_at_the_same_addresses(saved):
    memory = ReleasableMemory(CpuDevice(), StrictPages(), block_bytes=3000, piece_bytes=1024)
    first, large = nn.Parameter(torch.rand(10, 20), requires_grad=False), torch.rand(1000)
    coded = torch.arange(77, dtype=torch.uint8)
    tensors = [first, large, coded, torch.empty(0)]
    values = [tensor.clone() for tensor in tensors]
    memory.take_over(tensors, kept=True)
    kv = memory.zeros((5, 7), torch.bfloat16)
    kv.fill_(3.0)
    views = [tensor.view(-1) for tensor in tensors]
    places = [tensor.data_ptr() for tensor in tensors]
    assert all(place % 16 == 0 for place in places)
    assert len({tensor.untyped_storage().data_ptr() for tensor in (first, large, coded)}) == 3
    assert first.untyped_storage().nbytes() == first.nbytes
    for _ in range(2):
        assert all(torch.equal(tensor, value) for tensor, value in zip(tensors, values, strict=True))
        if saved:
            memory.save()
        memory.release()
        assert torch.isnan(first).all() and torch.isnan(kv).all() and memory.released
        memory.restore()
        assert [tensor.data_ptr() for tensor in tensors] == places and not kv.any()
        for tensor, value, view in zip(tensors, values, views, strict=True):
            assert torch.equal(tensor, value if saved else torch.zeros_like(value))
            assert torch.equal(view, tensor.view(-1))
            tensor.copy_(value)


def test_dropped_memory_returns_as_zeros():
    memory = ReleasableMemory(CpuDevice(), StrictPages())
    weight = torch.rand(9)
    memory.take_over([weight], kept=True)
    memory.save()
    memory.release()
    memory.forget()
    memory.restore()
    assert not weight.any()


@pytest.mark.parametrize("block", range(4))
def test_memory_that_runs_out_at_any_block_leaves_none_and_can_be_had_later(block):
    pages = StrictPages()
    memory = ReleasableMemory(CpuDevice(), pages)
    weight = torch.rand(100)
    value = weight.clone()
    memory.take_over([weight], kept=True)
    kv = [memory.zeros((1000,), torch.float32) for _ in range(3)]
    memory.save()
    memory.release()
    for _ in range(2):
        pages.short_after = block
        with pytest.raises(MemoryShortError, match=r"waking takes 0.00 GiB .* are missing"):
            memory.restore()
        assert not pages.backed and memory.released and torch.isnan(weight).all()
    pages.short_after = None
    memory.restore()
    assert torch.equal(weight, value) and not any(cache.any() for cache in kv) and len(pages.backed) == 4


class SomePages(StrictPages):
    """Memory of which as much is free as the test says."""

    free = None

    def trim(self) -> int:
        return 2 << 30  # what steps had made the allocator hold

    def free_bytes(self) -> int:
        return super().free_bytes() if self.free is None else self.free

    def back(self, span) -> None:
        assert self.free is None, "there is too little"
        super().back(span)


def test_too_little_is_said_in_gib_before_anything_is_tried():
    pages = SomePages()
    memory = ReleasableMemory(CpuDevice(), pages)
    memory.zeros((3 << 20,), torch.uint8)
    memory.release()
    pages.free = 1 << 30
    with pytest.raises(MemoryShortError, match=r"2.00 GiB and 1.00 GiB are free: 1.00 GiB are missing"):
        memory.restore()
    pages.free = 2 << 31
    with pytest.raises(AssertionError, match="there is too little"):
        memory.restore()  # it is tried where there is enough
    pages.free = None
    memory.restore()


def test_weights_that_the_host_cannot_keep_are_not_given_back():
    device = SomeHost()
    memory = ReleasableMemory(device, StrictPages())
    weight = torch.rand(9)
    memory.take_over([weight], kept=True)
    device.free = 511
    with pytest.raises(MemoryShortError, match="host memory.*level 2"):
        memory.save()
    device.free = 512
    memory.save()
    device.free = 0
    memory.save()  # what it has for this it keeps


@pytest.mark.parametrize("nbytes", [0, 1, 511, MIB, 3 * MIB + 5, 201 * MIB, 256 * MIB, 257 * MIB, 1245 * MIB + 512])
def test_pinned_memory_which_is_rounded_up_to_powers_of_two_is_not_much_more_than_the_weights(nbytes):
    pieces = pieces_of(nbytes)
    pinned = sum(1 << (piece - 1).bit_length() for piece in pieces)
    assert sum(pieces) == nbytes <= pinned <= nbytes + MIB and len(pieces) <= nbytes // (256 * MIB) + 9


def test_host_memory_that_is_not_given_is_too_little_of_it():
    device = SomeHost()
    memory = ReleasableMemory(device, StrictPages())
    weight = torch.rand(9)
    value = weight.clone()
    memory.take_over([weight], kept=True)
    device.refuses = True
    with pytest.raises(MemoryShortError, match=r"pinned memory.*level 2.*out of memory"):
        memory.save()
    device.refuses = False
    memory.save()
    memory.release()
    memory.restore()
    assert torch.equal(weight, value)


# --- the driver's calls, without a driver ----------------------------------------------------------------------------


class Recorded:
    """A driver with one page size that fails on demand."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: dict[str, int] = {}

    def call(self, name: str, *arguments) -> None:
        self.calls.append(name)
        if name in self.fails:
            raise DriverError(name, self.fails[name], "no")
        if name == "cuMemGetAllocationGranularity":
            arguments[0]._obj.value = 1 << 21
        elif name == "cuMemAddressReserve":
            assert arguments[1].value % (1 << 21) == 0
            arguments[0]._obj.value = 1 << 40
        elif name == "cuMemCreate":
            properties = arguments[2]._obj
            assert (properties.type, properties.location.type, properties.location.id) == (1, 1, 3)
            arguments[0]._obj.value = 42
        elif name == "cuMemSetAccess":
            assert (arguments[2]._obj.location.id, arguments[2]._obj.flags) == (3, 3)

    def wait(self) -> None:
        self.calls.append("wait")

    def since(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


def test_the_structures_are_laid_out_as_the_drivers():
    assert ctypes.sizeof(_Properties) == 32 and ctypes.sizeof(_Access) == 12
    assert (_Properties.location.offset, _Properties.win32_metadata.offset, _Properties.flags.offset) == (8, 16, 24)


@pytest.mark.parametrize(
    "failing, undone",
    [
        ("cuMemCreate", ["cuMemCreate"]),
        ("cuMemMap", ["cuMemCreate", "cuMemMap", "cuMemRelease"]),
        ("cuMemSetAccess", ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease"]),
    ],
)
def test_a_call_that_fails_leaves_nothing_mapped(failing, undone):
    class SomeCudaPages(CudaPages):
        def free_bytes(self) -> int:
            return 5 << 30

    driver = Recorded()
    pages = SomeCudaPages(torch.device("cuda", 3), driver)
    span = pages.reserve(5)
    assert driver.since() == ["cuMemGetAllocationGranularity", "cuMemAddressReserve"]
    driver.fails[failing] = 2
    kind = MemoryShortError if failing == "cuMemCreate" else DriverError
    with pytest.raises(kind, match=r"5.00 GiB are free" if failing == "cuMemCreate" else "failed: no"):
        pages.back(span)
    assert driver.since() == undone and span.handle is None
    driver.fails.clear()
    pages.back(span)
    assert driver.since() == ["cuMemCreate", "cuMemMap", "cuMemSetAccess"]
    pages.give_back(span)
    pages.give_back(span)
    assert driver.since() == ["cuMemUnmap", "cuMemRelease"]
    pages.back(span)
    driver.since()
    del span
    assert driver.since() == ["wait", "cuMemUnmap", "cuMemRelease", "cuMemAddressFree"]


def test_an_error_that_is_not_about_room_is_not_called_one():
    driver = Recorded()
    pages = CudaPages(torch.device("cuda", 3), driver)
    driver.fails["cuMemCreate"] = 1
    with pytest.raises(DriverError, match="cuMemCreate failed: no"):
        pages.back(pages.reserve(1))
