"""The work list of gathered prefill attention, and the steps that run by it."""

import itertools
import random

import pytest
import torch
from rollout_kernels.attention import gathered
from rollout_kernels.attention.gathered import MOST_GATHERED, pays
from rollout_kernels.attention.triton_gather_kv import MOST_CHUNKS
from rollout_kernels.attention.triton_gathered_items import block_count, prefill_items

from tests.support.kernels.attention_cases import DEVICE

#: (queries, context) of each chunk.
UNEVEN = [(777, 1500), (130, 130), (1, 2000), (2048, 3001), (128, 128), (129, 700)]


def many() -> list[tuple[int, int]]:
    dice = random.Random(1)
    return [(count, count + dice.randrange(900)) for count in (dice.randrange(1, 400) for _ in range(MOST_CHUNKS))]


@pytest.mark.parametrize("window", [None, 1, 128, 500])
@pytest.mark.parametrize("chunks", [[(1, 1)], UNEVEN, many()], ids=["one", "uneven", "many"])
def test_blocks_are_listed_once_and_the_longest_first(chunks, window):
    counts, contexts = zip(*chunks, strict=True)
    starts = [0, *itertools.accumulate(counts)]
    blocks = block_count(counts)
    items = prefill_items(
        torch.tensor(starts, dtype=torch.int32, device=DEVICE), torch.tensor(contexts, device=DEVICE), blocks, window
    )
    expected, row = [], 0
    for start, (count, context) in zip(starts, chunks, strict=False):
        for first in range(0, count, 128):
            position = context - count + first
            seen = [p // 128 for p in range(max(0, position - (window or context) + 1), min(position + 128, context))]
            expected.append((start + first, min(128, count - first), position, row, seen[0], seen[-1] + 1))
        row += -(-context // 128) * 128
    expected.sort(key=lambda item: item[4] - item[5])  # a stable sort, as the list's
    assert [tuple(item) for item in items[:, :6].tolist()] == expected


def chunks_of(*sizes: tuple[int, int]) -> tuple[tuple[int, int, int], ...]:
    starts = itertools.accumulate((count for count, _ in sizes), initial=0)
    return tuple((start, *size) for start, size in zip(starts, sizes, strict=False))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([(4096, 4096)], True),
        ([(2048, 18432)], True),
        ([(700, 700)] * 20, True),
        (UNEVEN, True),
        ([(200, 200)] * 80, False),  # each block sees two tiles at most
        ([(1, 9000)] * 32, False),  # the copy is as long as the attention
        ([(600, 600)], False),  # three launches for little
        ([(2048, MOST_GATHERED)], True),
        ([(2048, MOST_GATHERED + 1)], False),  # memory is set aside for no more
        ([(4096, 4096)] * (MOST_CHUNKS + 1), False),
        ([], False),
    ],
)
def test_steps_whose_blocks_see_many_tiles_are_gathered(sizes, expected):
    assert pays(chunks_of(*sizes), 32, 4, None) is expected


def test_a_narrow_window_leaves_too_little_to_gather_for():
    long = chunks_of((2048, 65536))
    assert pays(long, 32, 8, None) and not pays(long, 32, 8, 256)


def test_only_hopper_with_heads_of_128_in_16_bits_is_asked():
    queries = torch.empty(4096, 32, 128, dtype=torch.bfloat16, device="meta")
    chunks = chunks_of((4096, 4096))
    assert not gathered.takes(queries, chunks, 4, None, 0.1), "not on any other device"
    assert gathered.fits(queries, chunks, 4, None, 0.1) and gathered.fits(queries.half(), chunks, 4, None, 0.1)
    assert not gathered.fits(queries.float(), chunks, 4, None, 0.1)
    assert not gathered.fits(queries[..., :64].contiguous(), chunks, 4, None, 0.1)
    assert not gathered.fits(queries.transpose(0, 1).contiguous().transpose(0, 1), chunks, 4, None, 0.1)
    assert not gathered.fits(queries, chunks, 4, None, -0.1)
