"""What takes long tells how far it is: copies of a swap, and memory that gets its pages."""

import mmap

import pytest
import torch

from rollout.weights.pinned_memory import touch
from rollout.weights.staged_weights import SwapCopies


def test_a_swap_counts_the_parts_that_are_copied() -> None:
    swaps = SwapCopies(part_bytes=100)
    copies = [(torch.zeros(n), torch.full((n,), float(n))) for n in (10, 10, 10, 200, 1, 1)]  # 4 bytes a number
    swaps.enqueue(copies)
    assert all(torch.equal(target, source) for target, source in copies)
    assert swaps.parts_done() == 2  # 120 bytes, 800 bytes; the last 8 are no part


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_part_counts_once_the_device_has_copied_it() -> None:
    stream, swaps = torch.cuda.Stream(), SwapCopies(part_bytes=100)
    copies = [(torch.zeros(50, device="cuda"), torch.ones(50, device="cuda")) for _ in range(3)]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)  # about half a second
        swaps.enqueue(copies)
    assert swaps.parts_done() == 0
    stream.synchronize()
    assert swaps.parts_done() == 3 and all(torch.equal(*copy) for copy in copies)


def test_memory_that_gets_its_pages_keeps_its_content() -> None:
    memory = torch.frombuffer(mmap.mmap(-1, 30_000), dtype=torch.uint8)
    memory.copy_(torch.arange(30_000) % 251)
    parts: list[int] = []
    touch(memory, lambda: parts.append(1), part_bytes=8192)
    assert len(parts) == 4 and torch.equal(memory, (torch.arange(30_000) % 251).to(torch.uint8))
