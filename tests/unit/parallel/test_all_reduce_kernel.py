"""The kernel that adds rows over ranks, in Triton's interpreter: processes that write to each other's memory."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rollout_kernels import rms_norm
from rollout_kernels.parallel import TensorGroup, triton_all_reduce
from rollout_kernels.parallel.triton_all_reduce import all_reduce_norm, all_reduce_rows

from tests.support.kernels.grids import checkered
from tests.support.parallel.ranks import Ranks
from tests.support.parallel.shared_peers import share_buffers

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
EPS = 1e-5
#: Rows of exchanges that follow each other: a row is not in all of them.
ROWS = (3, 1, 4, 2, 4)


def _parts(rank: int, exchange: int, rows: int, width: int, parts: int = 1) -> torch.Tensor:
    return torch.randn(parts, rows, width, generator=torch.Generator().manual_seed(100 * exchange + rank))


def _sums(group: TensorGroup, folder: Path, width: int, dtype: torch.dtype, flagged: bool) -> list[torch.Tensor]:
    peers = share_buffers(group, folder, 4, width, flagged)
    found = []
    for exchange, rows in enumerate(ROWS):
        parts = _parts(group.rank, exchange, rows, width).to(dtype)
        found.append(all_reduce_rows(parts, peers))
    assert peers.fault.item() == 0
    return found


FORMS = pytest.mark.parametrize("flagged", [False, True], ids=["words", "flagged"])


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.nightly)])
@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_added_in_float32_in_the_order_of_the_ranks(
    dtype: torch.dtype, flagged: bool, size: int, tmp_path: Path, start_ranks: Callable[[int], Ranks]
) -> None:
    width = 44
    results = start_ranks(size).run(_sums, tmp_path, width, dtype, flagged)
    for exchange, rows in enumerate(ROWS):
        total = torch.zeros(rows, width)
        for rank in range(size):
            total += _parts(rank, exchange, rows, width)[0].to(dtype).float()
        for found in results:
            assert found[exchange].dtype == dtype and torch.equal(found[exchange], total.to(dtype))


def _norms(
    group: TensorGroup, folder: Path, width: int, dtype: torch.dtype, parts: int, unit_offset: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    large = share_buffers(group, folder, 4, width, flagged=True)
    small = share_buffers(group, folder, 2, width, beside=large)
    weight = torch.linspace(0.5, 1.5, width).to(dtype)
    found = []
    for exchange, rows in enumerate(ROWS):
        residual = _parts(50, exchange, rows, width)[0].to(dtype)
        product = _parts(group.rank, exchange, rows, width, parts)
        product = product.to(dtype) if parts == 1 else product
        peers = small if small.fits(rows, width, dtype) else large
        normed = all_reduce_norm(residual, product, weight, EPS, peers, unit_offset)
        expected = _parts(50, exchange, rows, width)[0].to(dtype) + group.all_reduce(product.sum(0).to(dtype))
        found.append((residual - expected, normed - rms_norm(expected, weight, EPS, unit_offset)))
    assert small.fault.item() == large.fault.item() == 0
    assert large.exchanges_M.tolist() == [sum(row < rows for rows in ROWS) for row in range(4)]
    return found


@pytest.mark.parametrize(
    ("inputs", "unit_offset"), checkered([(torch.float32, 2), (torch.bfloat16, 1), (torch.bfloat16, 3)], [False, True])
)
def test_the_norm_over_ranks_is_a_sum_and_a_norm_that_follow_each_other(
    inputs: tuple[torch.dtype, int], unit_offset: bool, tmp_path: Path, start_ranks: Callable[[int], Ranks]
) -> None:
    dtype, parts = inputs
    atol = 1e-5 if dtype == torch.float32 else 2e-2  # a sum of three parts may round to another neighbour
    for found in start_ranks(2).run(_norms, tmp_path, 44, dtype, parts, unit_offset):
        for residual, normed in found:
            assert residual.abs().max() <= (0 if parts == 1 else atol)
            assert normed.abs().max() < atol


def _without_a_peer(group: TensorGroup, folder: Path, flagged: bool) -> tuple[int, int, list[int]]:
    peers = share_buffers(group, folder, 4, 16, flagged)
    parts = torch.ones(1, 2, 16)
    before = int(peers.fault)
    if group.rank == 0:  # the other rank does not come
        first = all_reduce_rows(parts, peers, most_spins=50)
        second = all_reduce_rows(parts, peers, most_spins=1 << 40)  # would spin for ever if it waited
        assert first.isnan().all() and second.isnan().all()
    exchanges = [count & 0x7FFFFFFF for count in peers.exchanges_M.tolist()]
    group.all_gather(torch.zeros(1))
    return before, int(peers.fault), exchanges


@FORMS
def test_a_missing_rank_sets_the_flag_and_nothing_waits_any_more(
    flagged: bool, tmp_path: Path, start_ranks: Callable[[int], Ranks]
) -> None:
    first, second = start_ranks(2).run(_without_a_peer, tmp_path, flagged)
    assert first == (0, 2, [2, 2, 0, 0]) and second == (0, 0, [0, 0, 0, 0])


def _with_a_late_rank(group: TensorGroup, folder: Path, first: bool, then: bool) -> list[tuple[int, list[bool]]]:
    large = share_buffers(group, folder, 4, 16, flagged=True)
    small = share_buffers(group, folder, 4, 16, beside=large)
    found = []

    def exchange(rows: int, flagged: bool) -> None:
        peers = large if flagged else small
        total = all_reduce_rows(torch.ones(1, rows, 16), peers, most_spins=1 << 40 if late else 200)
        found.append((int(peers.fault), total.isnan().any(-1).tolist()))

    late = group.rank == 1
    if not late:
        exchange(2, first)
    group.all_gather(torch.zeros(1))  # the other has waited in vain
    if late:
        exchange(2, first)  # with what the other sent before
    group.all_gather(torch.zeros(1))
    exchange(4, then)
    return found


@pytest.mark.parametrize(("first", "then"), [(False, False), (True, True), (False, True), (True, False)])
def test_what_a_rank_knows_to_be_wrong_sets_the_flag_of_its_peer(
    first: bool, then: bool, tmp_path: Path, start_ranks: Callable[[int], Ranks]
) -> None:
    """Also if the next sum goes over buffers of the other form (`flagged` or not)."""
    early, late = start_ranks(2).run(_with_a_late_rank, tmp_path, first, then)
    assert early[0] == (2, [True, True]) and early[1][0] == 2
    # Its first sum is whole, so no flag is set. The second one has rows of the other in it that are not.
    assert late[0] == (0, [False, False])
    assert late[1][0] == 1 and late[1][1][:2] == [True, True]


def _past_the_last_number(group: TensorGroup, folder: Path, flagged: bool) -> list[tuple[int, int, bool]]:
    peers = share_buffers(group, folder, 2, 16, flagged)
    peers.exchanges_M.fill_((1 << 31) - 4)
    group.all_gather(torch.zeros(1))
    found = []
    for exchange in range(8):
        if (exchange + group.rank) % 2:  # one rank waits, then the other
            time.sleep(0.05)
        total = all_reduce_rows(torch.full((1, 2, 16), float(exchange)), peers)
        found.append((int(peers.exchanges_M[0]), int(peers.fault), bool((total == 2 * exchange).all())))
    return found


@FORMS
def test_after_the_last_number_a_row_goes_on(
    flagged: bool, tmp_path: Path, start_ranks: Callable[[int], Ranks]
) -> None:
    numbers = [(1 << 31) - 3, (1 << 31) - 2, (1 << 31) - 1, 2, 3, 4, 5, 6]
    for found in start_ranks(2).run(_past_the_last_number, tmp_path, flagged):
        assert found == [(number, 0, True) for number in numbers]


def _with_half_a_row(group: TensorGroup, folder: Path, flagged: bool) -> tuple[list[float], int]:
    peers = share_buffers(group, folder, 1, 16, flagged)

    def exchange(value: float) -> list[float]:
        return all_reduce_rows(torch.full((1, 1, 16), value), peers, most_spins=50)[0].tolist()

    if group.rank == 1:
        exchange(1.0)  # in vain: it sends no right row any more
        exchange(5.0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton_all_reduce, "TAIL", 1)  # the number does not arrive at its place, whatever else does
            exchange(777.0)
    group.all_gather(torch.zeros(1))
    found = exchange(1.0) if group.rank == 0 else []
    group.all_gather(torch.zeros(1))
    return found, int(peers.fault)


@FORMS
def test_a_late_rank_reads_what_was_right_or_sets_its_flag(
    flagged: bool, tmp_path: Path, start_ranks: Callable[[int], Ranks]
) -> None:
    (late, fault), _ = start_ranks(2).run(_with_half_a_row, tmp_path, flagged)
    assert late == [2.0] * 16 or fault == 2
