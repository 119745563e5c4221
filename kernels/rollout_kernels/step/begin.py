"""The begin of a decode step: from the state of its rows to token ids and their places in the paged cache.

A row's next token is at position `length`. If the host has just allocated a page for this position (an opened page),
the token goes there, and the page is added to the row's page table. Otherwise the page table names the page.

Legend: B rows of the step, R rows of the state, I columns of its integers, P columns of its page tables, C columns of
the step's page table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class DecodeInput(NamedTuple):
    """The input of a decode step; int64 unless noted."""

    token_ids_B: torch.Tensor
    positions_B: torch.Tensor
    kv_slots_B: torch.Tensor  # page * page_size + offset
    context_lens_B: torch.Tensor  # this step's token included
    page_table_BC: torch.Tensor  # int32; the last dimension is contiguous


def begin_step(
    rows_B: torch.Tensor,
    new_pages_B: torch.Tensor,
    ints_RI: torch.Tensor,
    pages_RP: torch.Tensor,
    *,
    last: int,
    length: int,
    page_size: int,
    columns: int,
    table_BP: torch.Tensor | None = None,
) -> DecodeInput:
    """The input of a decode step; also adds opened pages to `pages_RP`.

    Args:
        rows_B: int64 row of each token; distinct, except for padding: row 0, which opens no page.
        new_pages_B: int32, the opened page of each row, or 0.
        ints_RI: int64 row state.
        pages_RP: int32 page tables of all rows; changed in place.
        last: column of `ints_RI` with the row's last token.
        length: column of `ints_RI` with the number of the row's tokens whose KV is written.
        page_size: tokens of a page.
        columns: C, enough for the longest context of the step, at most P.
        table_BP: int32 memory for the step's page table on a GPU, at least [B, C], which contains only valid pages.
            Columns past a row's context keep their contents. If None, memory is allocated.
    """
    if rows_B.is_cuda:
        from rollout_kernels.step.triton_begin import begin_step as on_gpu

        if table_BP is None:
            table_BP = torch.zeros(len(rows_B), columns, dtype=torch.int32, device=rows_B.device)
        options = {"last": last, "length": length, "page_size": page_size, "columns": columns}
        return DecodeInput(*on_gpu(rows_B, new_pages_B, ints_RI, pages_RP, table_BP, **options))
    ints_BI = ints_RI.index_select(0, rows_B)
    positions_B = ints_BI[:, length]
    columns_B = positions_B // page_size
    pages_B = torch.where(new_pages_B > 0, new_pages_B, pages_RP[rows_B, columns_B])
    pages_RP[rows_B, columns_B] = pages_B
    return DecodeInput(
        token_ids_B=ints_BI[:, last],
        positions_B=positions_B,
        kv_slots_B=pages_B * page_size + positions_B % page_size,
        context_lens_B=positions_B + 1,
        page_table_BC=pages_RP[:, :columns].index_select(0, rows_B),
    )
