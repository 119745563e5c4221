"""Keys and values of rows' contexts, copied from pages into one matrix, so that the copy engine can load tiles of them.

The context of each chunk begins at a multiple of `TILE` rows, and rows past its end are zero: another row's data, which
may be NaN, is never multiplied. Codes are decoded to 16 bits on the way. The copy reads and writes a context once; a
chunk's attention reads it once for each block of its queries.

Legend: C chunks, G KV heads, N rows of all contexts, D head dimension, P pages, S page size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from rollout_kernels.common.triton_fp8 import operand
from rollout_kernels.common.triton_math import narrow

#: A context begins at a multiple of this many rows.
TILE = 128
#: Chunks that a step may have: a program looks at the lengths of all.
MOST_CHUNKS = 128


def gathered_rows(contexts: Sequence[int]) -> int:
    """Rows that contexts of these lengths take."""
    return sum(-(-context // TILE) * TILE for context in contexts)


@triton.jit
def first_row(lens_ptr, chunk, chunks, BLOCK_C: tl.constexpr, TILE: tl.constexpr):
    """The first row of a chunk's context."""
    at = tl.arange(0, BLOCK_C)
    lens = tl.load(lens_ptr + at, mask=at < tl.minimum(chunk, chunks), other=0).to(tl.int32)
    return tl.sum((lens + TILE - 1) // TILE * TILE)


@triton.jit(do_not_specialize=["chunks", "rows", "stride_table"])
def _gather_kernel(
    k_ptr, v_ptr, scales_ptr, table_ptr, lens_ptr, k_out_ptr, v_out_ptr,
    chunks, rows,
    stride_page, stride_slot, stride_kv_head, stride_table,
    G: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * TILE
    head = tl.program_id(1)
    chunk = tl.program_id(2)
    context = tl.load(lens_ptr + chunk).to(tl.int32)
    if first < context:
        start = first_row(lens_ptr, chunk, chunks, BLOCK_C, TILE)
        n = first + tl.arange(0, TILE)
        d = tl.arange(0, BLOCK_D)[None, :]
        live = (n < context)[:, None] & (d < D)
        page = tl.load(table_ptr + chunk.to(tl.int64) * stride_table + n // PAGE_SIZE, mask=n < context, other=0)
        page = page.to(tl.int64)
        at = (page * stride_page + (n % PAGE_SIZE) * stride_slot)[:, None] + head * stride_kv_head + d
        k = tl.load(k_ptr + at, mask=live, other=0)
        v = tl.load(v_ptr + at, mask=live, other=0)
        dtype: tl.constexpr = k_out_ptr.dtype.element_ty
        if scales_ptr is not None:
            scale_at = scales_ptr + (page * (2 * G) + head) * PAGE_SIZE + n % PAGE_SIZE
            k_scale = tl.load(scale_at, mask=n < context, other=0.0)
            v_scale = tl.load(scale_at + G * PAGE_SIZE, mask=n < context, other=0.0)
            k = narrow(operand(k, tl.bfloat16).to(tl.float32) * k_scale[:, None], dtype)
            v = narrow(operand(v, tl.bfloat16).to(tl.float32) * v_scale[:, None], dtype)
        to = (head.to(tl.int64) * rows + start + n)[:, None] * D + d
        tl.store(k_out_ptr + to, k, mask=d < D)
        tl.store(v_out_ptr + to, v, mask=d < D)


def gather_kv(
    k_cache_PSGD: torch.Tensor,
    v_cache_PSGD: torch.Tensor,
    page_table_CP: torch.Tensor,
    context_lens_C: torch.Tensor,
    *,
    rows: int,
    most: int,
    dtype: torch.dtype,
    scales_P2GS: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the chunks' contexts, [G, N, D] each in `dtype`.

    Args:
        k_cache_PSGD: of `dtype`, or uint8 codes with `scales_P2GS`; contiguous in D.
        v_cache_PSGD: likewise, with the same strides.
        page_table_CP: int32, contiguous in P.
        context_lens_C: int32 or int64, contiguous, at most `MOST_CHUNKS` of them.
        rows: N, from `gathered_rows`.
        most: upper bound on the context lengths.
        dtype: of the result.
        scales_P2GS: float32, contiguous: scales of keys, then of values.
    """
    page_size, kv_heads, dim = k_cache_PSGD.shape[1:]
    chunks = context_lens_C.shape[0]
    assert chunks <= MOST_CHUNKS
    assert k_cache_PSGD.stride() == v_cache_PSGD.stride() and k_cache_PSGD.stride(3) == 1
    k_GND, v_GND = (torch.empty(kv_heads, rows, dim, dtype=dtype, device=k_cache_PSGD.device) for _ in "kv")
    _gather_kernel[(triton.cdiv(most, TILE), kv_heads, chunks)](
        k_cache_PSGD, v_cache_PSGD, scales_P2GS, page_table_CP, context_lens_C, k_GND, v_GND, chunks, rows,
        *k_cache_PSGD.stride()[:3], page_table_CP.stride(0),
        G=kv_heads, D=dim, PAGE_SIZE=page_size, TILE=TILE, BLOCK_D=triton.next_power_of_2(dim), BLOCK_C=MOST_CHUNKS,
        num_warps=8,
    )  # fmt: skip
    return k_GND, v_GND
