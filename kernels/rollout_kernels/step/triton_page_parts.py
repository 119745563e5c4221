"""`PageParts` on a GPU: one launch for all pages and tensors of a copy.

A program copies a block of one page's part in one tensor.

Legend: as in `page_parts`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK_BYTES = 8192


@triton.jit
def _pages_kernel(
    table_ptr, index_ptr, staged_ptr,
    ROW: tl.constexpr, BLOCK: tl.constexpr, GATHERS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    facts = table_ptr + tl.program_id(1) * 4
    address, stride, width, start = tl.load(facts), tl.load(facts + 1), tl.load(facts + 2), tl.load(facts + 3)
    w = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    in_pool = address.to(staged_ptr.dtype) + tl.load(index_ptr + n) * stride + w
    staged = staged_ptr + n * ROW + start + w
    if GATHERS:
        tl.store(staged, tl.load(in_pool, mask=w < width), mask=w < width)
    else:
        tl.store(in_pool, tl.load(staged, mask=w < width), mask=w < width)


def copy_pages(
    table_T4: torch.Tensor, most: int, index_N: torch.Tensor, staged_NW: torch.Tensor, *, gathers: bool
) -> None:
    """Copy pages to the rows of a buffer, or back. `table_T4`: address, stride, width and start of each tensor's part.

    Lengths are in words; `most` is the largest width.
    """
    assert staged_NW.is_contiguous() and index_N.is_contiguous() and index_N.dtype == torch.int64
    block = triton.next_power_of_2(min(most, _BLOCK_BYTES // staged_NW.element_size()))
    _pages_kernel[(len(index_N), len(table_T4), triton.cdiv(most, block))](
        table_T4, index_N, staged_NW, ROW=staged_NW.shape[1], BLOCK=block, GATHERS=gathers
    )
