"""Ranks exchange tensors: sums have the same bits on every rank, and are those of float32."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rollout_kernels.parallel import TensorGroup
from rollout_kernels.parallel.group import HISTOGRAM_WORDS, NcclGroup
from rollout_kernels.parallel.peer_buffers import PeerBuffers, buffer_layout, on_all

from rollout.engine.step.execute import compare_tokens
from tests.support.kernels.grids import nightly
from tests.support.parallel.ranks import Ranks

SIZES = [2, *nightly(4)]


def _values(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(7, 33, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _sum(group: TensorGroup, dtype: torch.dtype) -> torch.Tensor:
    return group.all_reduce(_values(group.rank, dtype))


def _gathered(group: TensorGroup, dtype: torch.dtype) -> torch.Tensor:
    return group.all_gather(_values(group.rank, dtype).t())  # with gaps


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_added_in_float32_in_the_order_of_the_ranks(
    dtype: torch.dtype, size: int, start_ranks: Callable[[int], Ranks]
) -> None:
    total = torch.zeros(7, 33)
    for rank in range(size):
        total += _values(rank, dtype).float()
    for result in start_ranks(size).run(_sum, dtype):
        assert result.dtype == dtype and torch.equal(result, total.to(dtype))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_gathered_tensors_are_in_the_order_of_the_ranks(
    dtype: torch.dtype, size: int, start_ranks: Callable[[int], Ranks]
) -> None:
    expected = torch.stack([_values(rank, dtype).t() for rank in range(size)])
    assert all(torch.equal(result, expected) for result in start_ranks(size).run(_gathered, dtype))


def _compared(group: TensorGroup, drifts: int) -> str:
    tokens = torch.arange(5)
    tokens[3] += group.rank == drifts
    try:
        compare_tokens(group, tokens)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_fails_if_one_has_drawn_another_token(size: int, start_ranks: Callable[[int], Ranks]) -> None:
    assert start_ranks(size).run(_compared, -1) == [""] * size
    for drifts in range(size):
        said = start_ranks(size).run(_compared, drifts)
        assert all("the ranks drew different tokens" in text and "[0, 1, 2, 4, 4]" in text for text in said)


def test_one_rank_gives_back_what_it_is_given() -> None:
    group, x = TensorGroup.single(), torch.randn(3, 5)
    assert group.all_reduce(x) is x
    assert group.all_gather(x).data_ptr() == x.data_ptr() and group.all_gather(x).shape == (1, 3, 5)


def test_a_rank_outside_its_group_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 is not one of 2 ranks"):
        TensorGroup(2, 2)


def _connect_to_a_gpu(group: TensorGroup) -> str:
    with pytest.raises(ValueError, match="need a process group of nccl") as caught:
        TensorGroup.connected(dist.group.WORLD, torch.device("cuda"))
    return str(caught.value)


def test_a_process_group_of_another_device_is_refused(start_ranks: Callable[[int], Ranks]) -> None:
    assert all("gloo" in message for message in start_ranks(2).run(_connect_to_a_gpu))


def _try_on_all(group: TensorGroup, failing: int | None) -> object:
    def work() -> int:
        if group.rank == failing:
            raise RuntimeError("no memory")
        return group.rank

    try:
        return on_all(dist.group.WORLD, group.device, work)
    except RuntimeError as error:
        return str(error)


def test_what_fails_on_one_rank_fails_on_all(start_ranks: Callable[[int], Ranks]) -> None:
    """None waits for the one, and the next exchange finds all ranks."""
    ranks = start_ranks(2)
    other = "1 of the other ranks could not"
    assert ranks.run(_try_on_all, 1) == [other, "no memory"]
    assert ranks.run(_try_on_all, 0) == ["no memory", other]
    assert ranks.run(_try_on_all, None) == [0, 1]


@pytest.mark.parametrize(
    ("ranks", "width", "few", "most"), [(2, 8192, 20, 256), (4, 8192, 20, 170), (4, 2048, 80, 256), (8, 64, 256, 256)]
)
def test_few_bytes_cross_as_words_more_as_rows_and_many_by_nccl(ranks: int, width: int, few: int, most: int) -> None:
    """Rows of bf16, which are halves of words; the buffers that share counters have no more rows than their owner."""
    made = []

    def connect(processes: Any, device: torch.device, rows: int, words: int, **how: Any) -> PeerBuffers:
        made.append((rows, words, how.get("flagged", False)))
        shape, dtype = buffer_layout(ranks, rows, words, made[-1][2])
        return PeerBuffers.of(0, torch.empty(*shape, dtype=dtype, device="meta"), [0] * ranks, beside=how.get("beside"))

    processes: Any = SimpleNamespace(rank=lambda: 0, size=lambda: ranks)
    nccl = NcclGroup(processes, torch.device("cpu"), connect)
    nccl.prepare(width, torch.bfloat16)
    assert made == [(256, HISTOGRAM_WORDS, False), (most, width // 2, True), (few, width // 2, False)]
    for rows, buffers in ((few, nccl.peers), (few + 1, nccl.large_peers), (most + 1, None)):
        assert nccl.peers_for(rows, width, torch.bfloat16) is (None if rows > most else buffers)
