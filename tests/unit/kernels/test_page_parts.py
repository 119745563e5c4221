"""Copies of whole pages: the kernel equals its torch twin, bit for bit, and touches nothing else."""

import pytest
import torch
from rollout_kernels.step import PageParts
from rollout_kernels.step.triton_page_parts import copy_pages

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def words(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("widths", [(8,), (3, 40, 1), (1500, 64, 1500)])
def test_pages_are_gathered_and_scattered_as_torch_does(dtype: torch.dtype, widths: tuple[int, ...]) -> None:
    pools = [words(dtype, 9, width + pad)[:, :width] for pad, width in enumerate(widths)]  # rows with and without gaps
    index = torch.tensor([4, 8, 1])
    twin = PageParts(pools)
    mine = PageParts([torch.empty(0, dtype=dtype, device=DEVICE).new_empty(9, 2 * w)[:, :w].copy_(pool.to(DEVICE))
                      for w, pool in zip(widths, pools, strict=True)])  # fmt: skip
    expected, got = (torch.zeros(4, sum(widths), dtype=dtype, device=device) for device in ("cpu", DEVICE))
    twin.gather(index, expected[:3])
    copy_pages(mine.table_T4, max(widths), index.to(DEVICE), got[:3], gathers=True)
    assert torch.equal(expected[:3], torch.cat([pool[index] for pool in pools], dim=1))
    assert torch.equal(got.cpu(), expected)
    new, to = words(dtype, 2, sum(widths)), torch.tensor([7, 2])
    twin.scatter(new, to)
    copy_pages(mine.table_T4, max(widths), to.to(DEVICE), new.to(DEVICE), gathers=False)
    for pool, its in zip(mine.pools_PW, twin.pools_PW, strict=True):
        assert torch.equal(pool.cpu(), its)
    assert torch.equal(torch.cat([pool[to] for pool in twin.pools_PW], dim=1), new)
