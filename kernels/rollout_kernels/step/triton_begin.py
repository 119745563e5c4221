"""The begin of a decode step on a GPU, in one launch; the twin is `rollout_kernels.step.begin_step` on a CPU.

It copies only those columns of a row's page table that its context needs.

Legend: B rows of the step, R rows of the state, I columns of its integers, P columns of its page tables.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_kernels.common.triton_math import follow

_TABLE_BLOCK = 1024


@triton.jit(do_not_specialize=["stride_out", "columns", "stride_pages", "stride_table"])
def _begin_kernel(
    rows_ptr, new_pages_ptr, ints_ptr, pages_ptr, table_ptr, out_ptr,
    stride_out,
    columns,
    stride_pages, stride_table,
    INTS: tl.constexpr, LAST: tl.constexpr, LENGTH: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    start = tl.program_id(1) * BLOCK
    follow()
    row = tl.load(rows_ptr + b)
    position = tl.load(ints_ptr + row * INTS + LENGTH)
    column = (position // PAGE_SIZE).to(tl.int32)
    if start <= column:
        opened = tl.load(new_pages_ptr + b)
        c = start + tl.arange(0, BLOCK)
        needed = (c <= column) & (c < columns)
        pages = tl.load(pages_ptr + row * stride_pages + c, mask=needed, other=0)
        # Another program may be writing the opened page to the row's table now, so it is not read from there.
        pages = tl.where((c == column) & (opened > 0), opened, pages)
        tl.store(table_ptr + b.to(tl.int64) * stride_table + c, pages, mask=needed)
        if column < start + BLOCK:
            page = tl.sum(tl.where(c == column, pages, 0), 0).to(tl.int64)
            tl.store(out_ptr + b, tl.load(ints_ptr + row * INTS + LAST))
            tl.store(out_ptr + stride_out + b, position)
            tl.store(out_ptr + 2 * stride_out + b, page * PAGE_SIZE + position % PAGE_SIZE)
            tl.store(out_ptr + 3 * stride_out + b, position + 1)
            if opened > 0:
                tl.store(pages_ptr + row * stride_pages + column, opened)


def begin_step(
    rows_B: torch.Tensor,
    new_pages_B: torch.Tensor,
    ints_RI: torch.Tensor,
    pages_RP: torch.Tensor,
    table_BP: torch.Tensor,
    *,
    last: int,
    length: int,
    page_size: int,
    columns: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The fields of `DecodeInput`, in order; it takes the arguments of `rollout_kernels.step.begin_step`.

    The step's page table is a view of `table_BP`, which has at least B rows and `columns` columns, contiguous in P.
    """
    count = len(rows_B)
    assert rows_B.is_contiguous() and new_pages_B.is_contiguous() and ints_RI.is_contiguous()
    assert pages_RP.stride(1) == table_BP.stride(1) == 1 and len(table_BP) >= count and table_BP.shape[1] >= columns
    # Every output starts at a multiple of 16 bytes. For other addresses Triton compiles its readers once more.
    stride_out = count + count % 2
    out_4B = torch.empty(4, stride_out, dtype=torch.int64, device=rows_B.device)[:, :count]
    _begin_kernel[(count, triton.cdiv(columns, _TABLE_BLOCK))](
        rows_B, new_pages_B, ints_RI, pages_RP, table_BP, out_4B, stride_out, columns, pages_RP.stride(0),
        table_BP.stride(0),
        INTS=ints_RI.shape[1], LAST=last, LENGTH=length, PAGE_SIZE=page_size, BLOCK=_TABLE_BLOCK, num_warps=4,
    )  # fmt: skip
    token_ids_B, positions_B, kv_slots_B, context_lens_B = out_4B.unbind(0)
    return token_ids_B, positions_B, kv_slots_B, context_lens_B, table_BP[:count, :columns]
