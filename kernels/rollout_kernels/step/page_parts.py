"""Copies of whole pages between the tensors of a paged cache and a buffer where each page is one stretch.

A page has a part in each tensor: keys and values of each layer. On a GPU a copy is one launch for all of them, because
each launch waits for room beside the kernels of a step. The tables are made once.

Legend: N pages of a copy, P pages of the cache, W words of a page or of its part in a tensor, T tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class PageParts:
    """The tensors of a cache, [P, W] each, all of one integer type; their memory stays where it is."""

    def __init__(self, pools_PW: Sequence[torch.Tensor]) -> None:
        self.pools_PW = pools_PW
        self.widths = [pool.shape[1] for pool in pools_PW]
        starts = [sum(self.widths[:number]) for number in range(len(pools_PW))]
        facts = [
            (pool.data_ptr(), pool.stride(0), width, start)
            for pool, width, start in zip(pools_PW, self.widths, starts, strict=True)
        ]
        assert all(pool.stride(1) == 1 and pool.dtype == pools_PW[0].dtype for pool in pools_PW)
        self.table_T4 = torch.tensor(facts, dtype=torch.int64, device=pools_PW[0].device)

    def gather(self, index_N: torch.Tensor, staged_NW: torch.Tensor) -> None:
        """Copy the pages with these numbers, int64, to the rows of a contiguous buffer."""
        if staged_NW.is_cuda:
            from rollout_kernels.step.triton_page_parts import copy_pages

            copy_pages(self.table_T4, max(self.widths), index_N, staged_NW, gathers=True)
            return
        for pool_PW, part_NW in zip(self.pools_PW, staged_NW.split(self.widths, dim=1), strict=True):
            torch.index_select(pool_PW, 0, index_N, out=part_NW)

    def scatter(self, staged_NW: torch.Tensor, index_N: torch.Tensor) -> None:
        """Copy the rows of a contiguous buffer to the pages with these numbers, int64."""
        if staged_NW.is_cuda:
            from rollout_kernels.step.triton_page_parts import copy_pages

            copy_pages(self.table_T4, max(self.widths), index_N, staged_NW, gathers=False)
            return
        for pool_PW, part_NW in zip(self.pools_PW, staged_NW.split(self.widths, dim=1), strict=True):
            pool_PW.index_copy_(0, index_N, part_NW)
