"""Drafts of a verify step on a GPU: before the forward and after the draw, one launch each.

The twins are in torch, in the engine (`verify.set_up`, `verify.accept`), and take dozens of launches. Nothing here is
specialized by the numbers of rows and drafts, so each kernel is compiled once.

Legend: N drafts of all rows, M rows with drafts, W tokens of a path, R rows of the state, I and F columns of its
integers and floats, P columns of its page tables.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Drafts of a row at most, and columns of integers and of floats at most.
MOST_DRAFTS, _MOST_COLUMNS = 16, 64
_PAGES = 1024  # columns of a page table that a program copies


@triton.jit(do_not_specialize=["width", "columns", "stride_pages"])
def _set_up_kernel(
    drafts_ptr, verified_ptr, paths_ptr, ints_ptr, floats_ptr, pages_ptr, tokens_ptr, adapters_ptr, next_ptr,
    width, columns,
    stride_pages,
    INTS: tl.constexpr, FLOATS: tl.constexpr, LAST: tl.constexpr, LENGTH: tl.constexpr, DRAFTS: tl.constexpr,
    MOST_COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    row, owner = tl.load(drafts_ptr + 4 * n), tl.load(drafts_ptr + 4 * n + 1)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pages = tl.load(pages_ptr + owner * stride_pages + c, mask=c < columns, other=0)
    tl.store(pages_ptr + row * stride_pages + c, pages, mask=c < columns)
    if tl.program_id(1) == 0:
        nth, which = tl.load(drafts_ptr + 4 * n + 2), tl.load(drafts_ptr + 4 * n + 3)
        position = tl.load(ints_ptr + owner * INTS + LENGTH) + nth
        begin = tl.load(verified_ptr + 4 * which + 3)
        at = tl.minimum(tl.maximum(position - begin, 0), width - 1)
        token = tl.load(paths_ptr + which * width + at)
        if DRAFTS > 0:
            made = tl.load(next_ptr + owner * DRAFTS + nth - 1, mask=begin < 0, other=0)
            token = tl.where(begin < 0, made, token)
        i = tl.arange(0, MOST_COLUMNS)
        ints = tl.load(ints_ptr + owner * INTS + i, mask=i < INTS, other=0)
        ints = tl.where(i == LENGTH, position, tl.where(i == LAST, token, ints))
        tl.store(ints_ptr + row * INTS + i, ints, mask=i < INTS)
        floats = tl.load(floats_ptr + owner * FLOATS + i, mask=i < FLOATS, other=0.0)
        tl.store(floats_ptr + row * FLOATS + i, floats, mask=i < FLOATS)
        tl.store(tokens_ptr + row, token)
        if adapters_ptr is not None:
            tl.store(adapters_ptr + row, tl.load(adapters_ptr + owner))


@triton.jit
def _accept_kernel(
    verified_ptr, rows_ptr, drawn_ptr, tokens_ptr, ints_ptr, accepted_ptr,
    INTS: tl.constexpr, LAST: tl.constexpr, LENGTH: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    row, draw, count = (
        tl.load(verified_ptr + 4 * m),
        tl.load(verified_ptr + 4 * m + 1),
        tl.load(verified_ptr + 4 * m + 2),
    )
    k = tl.arange(0, MOST)
    there = k < count
    drawn = tl.load(drawn_ptr + draw + k, mask=there, other=0).to(tl.int64)
    draft_row = tl.load(rows_ptr + draw + 1 + k, mask=there, other=0)
    draft = tl.load(tokens_ptr + draft_row, mask=there, other=-1)
    accepted = tl.min(tl.where(there & (drawn == draft), MOST, k), 0)
    tl.store(ints_ptr + row * INTS + LAST, tl.load(drawn_ptr + draw + accepted).to(tl.int64))
    length = ints_ptr + row * INTS + LENGTH
    tl.store(length, tl.load(length) + accepted)
    tl.store(accepted_ptr + draw, accepted)


def set_up_drafts(
    drafts_N4: torch.Tensor,
    verified_M4: torch.Tensor,
    paths_MW: torch.Tensor,
    ints_RI: torch.Tensor,
    floats_RF: torch.Tensor,
    pages_RP: torch.Tensor,
    drafts_R: torch.Tensor,
    adapters_R: torch.Tensor | None,
    next_RG: torch.Tensor,
    *,
    last: int,
    length: int,
) -> None:
    """Make each draft row a copy of its row, some tokens ahead, with its draft as the last token.

    Args:
        drafts_N4: int64: draft row, row, how far ahead (from 1), which of the `verified`.
        verified_M4: int64: row, index of its own draw, number of drafts, first position of its path; less than 0 for
            a row whose drafts the device has made.
        paths_MW: int64 tokens expected from there on; a position beyond takes the last token.
        ints_RI: int64 row state, changed in place as all that follow.
        floats_RF: float32.
        pages_RP: int32 page tables.
        drafts_R: int64, gets the draft of each draft row.
        adapters_R: int32, or None where no adapters are served.
        next_RG: int64 drafts of the device; G is 0 where it makes none.
        last: column of `ints_RI` with the last token.
        length: column of `ints_RI` with the number of tokens whose KV is written.
    """
    assert max(ints_RI.shape[1], floats_RF.shape[1]) <= _MOST_COLUMNS
    assert all(tensor.is_contiguous() for tensor in (drafts_N4, verified_M4, paths_MW, ints_RI, floats_RF))
    columns = pages_RP.shape[1]
    _set_up_kernel[(len(drafts_N4), triton.cdiv(columns, _PAGES))](
        drafts_N4, verified_M4, paths_MW, ints_RI, floats_RF, pages_RP, drafts_R,
        adapters_R, next_RG if next_RG.shape[1] else drafts_R, paths_MW.shape[1],
        columns, pages_RP.stride(0),
        INTS=ints_RI.shape[1], FLOATS=floats_RF.shape[1], LAST=last, LENGTH=length, DRAFTS=next_RG.shape[1],
        MOST_COLUMNS=_MOST_COLUMNS, BLOCK=_PAGES, num_warps=4,
    )  # fmt: skip


def accept_drafts(
    verified_M4: torch.Tensor,
    rows_S: torch.Tensor,
    drawn_S: torch.Tensor,
    drafts_R: torch.Tensor,
    ints_RI: torch.Tensor,
    accepted_S: torch.Tensor,
    *,
    last: int,
    length: int,
) -> None:
    """Accept drafts up to the first that is not the token drawn before it; rows go on after the accepted drafts.

    Args:
        verified_M4: as `set_up_drafts`; a row has at most `MOST_DRAFTS` drafts.
        rows_S: int64 rows of the step; a row's drafts follow it.
        drawn_S: int32 tokens drawn, in the order of `rows_S`; at least as many.
        drafts_R: int64 draft of each draft row.
        ints_RI: int64 row state; last token and length of the rows are changed in place.
        accepted_S: int32, gets the number of accepted drafts at the draw of each row with drafts.
        last: as `set_up_drafts`.
        length: as `set_up_drafts`.
    """
    _accept_kernel[(len(verified_M4),)](
        verified_M4, rows_S, drawn_S, drafts_R, ints_RI, accepted_S,
        INTS=ints_RI.shape[1], LAST=last, LENGTH=length, MOST=MOST_DRAFTS, num_warps=1,
    )  # fmt: skip
