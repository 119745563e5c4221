"""What takes long tells how far it is: copies of a swap, and memory that gets its pages."""

from __future__ import annotations

import mmap

import pytest
import torch

from rollout.weights import staging, swap_copies
from rollout.weights.swap_copies import copy_tensors, parts_done


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_copies, "PART_BYTES", 100)


@pytest.mark.usefixtures("small_parts")
def test_a_swap_counts_the_parts_that_are_copied() -> None:
    copies = [(torch.zeros(n), torch.full((n,), float(n))) for n in (10, 10, 10, 200, 1, 1)]  # 4 bytes a number
    before = parts_done()
    copy_tensors(copies)
    assert all(torch.equal(target, source) for target, source in copies)
    assert parts_done() - before == 2  # 120 bytes, 800 bytes; the last 8 are no part


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("small_parts")
def test_a_part_counts_once_the_device_has_copied_it() -> None:
    stream, before = torch.cuda.Stream(), parts_done()
    copies = [(torch.zeros(50, device="cuda"), torch.ones(50, device="cuda")) for _ in range(3)]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)  # about half a second
        copy_tensors(copies)
    assert parts_done() == before
    stream.synchronize()
    assert parts_done() - before == 3 and all(torch.equal(*copy) for copy in copies)


def test_memory_that_gets_its_pages_keeps_its_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_TOUCH_BYTES", 8192)
    memory = torch.frombuffer(mmap.mmap(-1, 30_000), dtype=torch.uint8)
    memory.copy_(torch.arange(30_000) % 251)
    parts: list[int] = []
    staging.touch(memory, lambda: parts.append(1))
    assert len(parts) == 4 and torch.equal(memory, (torch.arange(30_000) % 251).to(torch.uint8))
