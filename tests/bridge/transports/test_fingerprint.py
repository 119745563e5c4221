"""The fingerprint of bytes is the sum that its module defines, for every length."""

import numpy as np
import pytest
import torch

from trainer_bridge.transports.fingerprint import fingerprint

K = 0x1E3779B97F4A7C15
PIECE = 4 << 16  # bytes of a piece on a CPU


def defined(data: torch.Tensor) -> int:
    padded = np.zeros(-(-len(data) // 4) * 4, np.uint8)
    padded[: len(data)] = data.numpy()
    words = padded.view("<i4").astype(np.int64).astype(np.uint64)
    weights = (2 * np.arange(len(words), dtype=np.uint64) + 1) * np.uint64(K)
    return int((words * weights).sum(dtype=np.uint64).astype(np.int64)) + len(data)


@pytest.mark.parametrize("count", [0, 1, 4, 7, 64, PIECE - 2, PIECE, PIECE + 2, PIECE + 4, 3 * PIECE + 6])
def test_it_is_the_weighted_sum_of_words(count: int) -> None:
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    assert (int(fingerprint(data)) - defined(data)) % (1 << 64) == 0


@pytest.mark.parametrize("count", [8, 64, 2 * PIECE + 6])
@pytest.mark.parametrize("size", [4, 20, PIECE + 4])
def test_those_of_parts_add_up(count: int, size: int) -> None:
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    starts = range(0, count, size) if count < PIECE else (0, PIECE + 4)
    ends = [*starts[1:], count]
    parts = [fingerprint(data[start:end], start // 4) for start, end in zip(starts, ends, strict=True)]
    assert int(torch.stack(parts).sum()) == int(fingerprint(data))
