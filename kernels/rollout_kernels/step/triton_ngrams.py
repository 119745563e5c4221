"""Guesses by n-grams on a GPU: one launch, a program for each row. The twin is in `ngrams`.

Nothing here is specialized by the number of rows and the lengths of their texts, so the kernel is compiled once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024  # places that a program compares at once


@triton.jit(do_not_specialize=["stride_rows", "stride_pages"])
def _draft_kernel(
    rows_ptr, ints_ptr, pages_ptr, tokens_ptr, drafts_ptr,
    stride_rows, stride_pages,
    INTS: tl.constexpr, LAST: tl.constexpr, LENGTH: tl.constexpr, PAGE: tl.constexpr, DRAFTS: tl.constexpr,
    DRAFTS_2: tl.constexpr, EQUAL: tl.constexpr, REACH_TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.load(rows_ptr + tl.program_id(0) * stride_rows)
    length = tl.load(ints_ptr + row * INTS + LENGTH).to(tl.int32)
    last = tl.load(ints_ptr + row * INTS + LAST).to(tl.int32)
    table_ptr = pages_ptr + row * stride_pages
    best = tl.zeros([BLOCK], tl.int64)  # length of the match in the upper half, the place in the lower one
    for begin in range(tl.maximum(1, length + 1 - REACH_TOKENS), length + 1, BLOCK):
        position = begin + tl.arange(0, BLOCK)
        alive = position <= length
        equal = tl.zeros([BLOCK], tl.int64)
        for j in tl.static_range(EQUAL):
            at = position - 1 - j
            alive = alive & (at >= 0)
            page = tl.load(table_ptr + at // PAGE, mask=alive, other=0).to(tl.int64)
            token = tl.load(tokens_ptr + page * PAGE + at % PAGE, mask=alive, other=-1)
            wanted = last
            if j > 0:
                end = tl.maximum(length - j, 0)
                wanted = tl.load(tokens_ptr + tl.load(table_ptr + end // PAGE).to(tl.int64) * PAGE + end % PAGE)
            alive = alive & (token == wanted)
            equal += alive.to(tl.int64)
        best = tl.maximum(best, tl.where(equal > 0, equal * 4294967296 + position, 0))
    found = tl.max(best, 0)
    position = tl.where(found > 0, found % 4294967296, length).to(tl.int32)  # no match: the last token again and again
    g = tl.arange(0, DRAFTS_2)
    at = position + g % (length + 1 - position)
    there = (at < length) & (g < DRAFTS)
    page = tl.load(table_ptr + at // PAGE, mask=there, other=0).to(tl.int64)
    token = tl.load(tokens_ptr + page * PAGE + at % PAGE, mask=there, other=0)
    draft = tl.where(there, token, last).to(tl.int64)  # the text ends with the last token, after the pages
    tl.store(drafts_ptr + row * DRAFTS + g, draft, mask=g < DRAFTS)


def draft_by_ngrams(
    rows_R: torch.Tensor,
    ints_NI: torch.Tensor,
    pages_NP: torch.Tensor,
    tokens_PS: torch.Tensor,
    drafts_NG: torch.Tensor,
    *,
    last: int,
    length: int,
    most_equal: int,
    reach: int,
) -> None:
    """`ngrams.draft_by_ngrams` on a GPU, with its `MOST_EQUAL` and `REACH`."""
    assert ints_NI.is_contiguous() and tokens_PS.is_contiguous() and drafts_NG.is_contiguous()
    drafts = drafts_NG.shape[1]
    _draft_kernel[(len(rows_R),)](
        rows_R, ints_NI, pages_NP, tokens_PS, drafts_NG, rows_R.stride(0), pages_NP.stride(0),
        INTS=ints_NI.shape[1], LAST=last, LENGTH=length, PAGE=tokens_PS.shape[1], DRAFTS=drafts,
        DRAFTS_2=triton.next_power_of_2(drafts), EQUAL=most_equal, REACH_TOKENS=reach, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
