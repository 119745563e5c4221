"""Paged decode attention in Triton: one query a row, its context split over programs by a `DecodeWork` plan.

A program handles one KV head and one share of the plan. It loops over the share's items; an item is a row and a range
of tiles of the row's context. The query heads of a KV head are the rows of the matrix products, padded to 16. Where
rows share pages, an item has several rows, whose query heads fill a larger tile. Scores are float32, in base 2.
`triton_decode_combine` says what happens to an item's result; it never depends on timing.

For caches of codes, items are computed in `triton_decode_fp8`.

The host reads nothing, and the grid depends only on the plan's shapes, so a captured graph stays valid while contexts
grow. Hidden positions are never loaded, so data that other sequences left there does not matter.

Legend: B rows, H query heads, G KV heads, D head dimension, P pages (of the cache, or of a row of the page table),
S page size, L slots for parts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from rollout_kernels.attention.segments import SHARED_TILES
from rollout_kernels.attention.triton_decode_combine import (
    HIDDEN,
    LOG2_E,
    DecodeHeads,
    ResultPointers,
    combine_parts,
    empty_results,
    read_item,
    score_factors,
    softcapped,
    store_item,
    weigh,
    work_arguments,
)
from rollout_kernels.attention.triton_decode_fp8 import attend_codes
from rollout_kernels.attention.triton_decode_plan import ROWS_BY_HEAD, DecodeConfig, DecodeWork, plan_decode_work
from rollout_kernels.common.triton_math import dot, follow, follow_options, narrow

#: Numbers of values and parts combined at once. With more, the compiler serialises the loads to save registers.
_COMBINED_VALUES, _COMBINED_PARTS = 3072, 8
#: Up to this many rows, latency dominates the time of attention.
_FEW_ROWS = 4
#: With at least this many query heads to a KV head, a second kernel combines the parts of up to `ROWS_BY_HEAD` rows: a
#: row's last program would combine all its heads, and a group's last program its rows one by one. On an H200, 32 rows
#: of 4K in groups of 8 take 29 us a layer in place of 42 (32 query heads over 4 KV heads), and one row of 16K 19 in
#: place of 25.
_HEADS_APART = 4


class _Inputs(NamedTuple):
    """The inputs of `_attend` in a kernel. The bases point to the KV head in the first page."""

    q_ptr: Any
    k_base: Any
    v_base: Any
    scale_base: Any  # None without codes
    sinks_ptr: Any
    table_ptr: Any
    lens_ptr: Any
    scale_log2: Any
    softcap_log2: Any
    window: Any
    stride_q_row: Any
    stride_q_head: Any
    stride_page: Any
    stride_slot: Any
    stride_table: Any


@triton.jit(do_not_specialize=["rows", "window", "stride_table"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, scales_ptr, sinks_ptr, table_ptr, out_ptr, part_ptr, lse_ptr, log_sum_ptr, items_ptr,
    first_ptr, slots_ptr, arrivals_ptr, lens_ptr,
    rows, scale_log2, softcap_log2, window,
    stride_q_row, stride_q_head, stride_page, stride_slot, stride_kv_head, stride_table,
    HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_OWN: tl.constexpr, BLOCK_N: tl.constexpr,
    INT8: tl.constexpr,
):  # fmt: skip
    """For codes, `k_ptr`, `v_ptr` and their strides count words. INT8: values are int8."""
    kv_head = tl.program_id(0)
    share = tl.program_id(1)
    k_base = k_ptr + kv_head.to(tl.int64) * stride_kv_head
    v_base = v_ptr + kv_head.to(tl.int64) * stride_kv_head
    follow()
    first = tl.load(first_ptr + share)
    last = tl.load(first_ptr + share + 1)
    scale_base = scales_ptr
    if scales_ptr is not None:
        scale_base += kv_head * PAGE_SIZE
    given = _Inputs(
        q_ptr, k_base, v_base, scale_base, sinks_ptr, table_ptr, lens_ptr, scale_log2, softcap_log2, window,
        stride_q_row, stride_q_head, stride_page, stride_slot, stride_table,
    )  # fmt: skip
    to = ResultPointers(out_ptr, part_ptr, lse_ptr, log_sum_ptr, slots_ptr, arrivals_ptr, rows)
    for i in range(first, last):
        item = read_item(items_ptr, i)
        if BLOCK_OWN == BLOCK_M or item.sharing > 1:
            sharing = item.sharing
            _attend(given, to, item, sharing, kv_head, HEADS, PAGE_SIZE, BLOCK_M, BLOCK_N, INT8)
        else:  # one row's heads alone: a smaller tile is faster
            _attend(given, to, item, 1, kv_head, HEADS, PAGE_SIZE, BLOCK_OWN, BLOCK_N, INT8)


@triton.jit
def _attend(
    given, to, item, sharing, kv_head,
    HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """One item, for the `BLOCK_M` query heads of its `sharing` rows. `given` is `_Inputs`, `to` a `ResultPointers`."""
    if given.scale_base is not None:
        attend_codes(given, to, item, sharing, kv_head, HEADS, PAGE_SIZE, BLOCK_M, BLOCK_N, INT8)
    else:
        _attend_plain(given, to, item, sharing, kv_head, HEADS, PAGE_SIZE, BLOCK_M, BLOCK_N)


@triton.jit
def _attend_plain(
    given, to, item, sharing, kv_head,
    HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = HEADS.D
    GROUP: tl.constexpr = HEADS.GROUP
    BLOCK_D: tl.constexpr = HEADS.BLOCK_D
    BLOCK_G: tl.constexpr = HEADS.BLOCK_G
    row, length = item.row, item.length
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP
    shared_row = m // BLOCK_G
    is_head = (m % BLOCK_G)[:, None] < GROUP
    q_row = (row + shared_row)[:, None]
    q_at = q_row.to(tl.int64) * given.stride_q_row + (head + m % BLOCK_G)[:, None] * given.stride_q_head + d[None, :]
    is_q = is_head & (shared_row < sharing)[:, None] & (d[None, :] < D)
    q = tl.load(given.q_ptr + q_at, mask=is_q, other=0.0)
    if given.window is not None:  # a window begins at another position in each row
        context = tl.load(given.lens_ptr + row + shared_row, mask=shared_row < sharing, other=2147483647).to(tl.int32)
        oldest = tl.min(context, 0)
    table = given.table_ptr + row.to(tl.int64) * given.stride_table
    peak = tl.full([BLOCK_M], HIDDEN, tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if given.sinks_ptr is not None:  # only the first part of a row counts the sinks
        sink = tl.load(given.sinks_ptr + head + m % BLOCK_G, mask=m % BLOCK_G < GROUP, other=0.0).to(tl.float32)
        peak = tl.where(item.part == 0, sink * LOG2_E, peak)
        total += tl.where((item.part == 0) & (tl.arange(0, BLOCK_N) == 0)[None, :], 1.0, 0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    n = item.begin * BLOCK_N + tl.arange(0, BLOCK_N)
    page = tl.load(table + n // PAGE_SIZE, mask=n < length, other=0)
    for tile in range(item.begin, item.end):
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        at = page.to(tl.int64) * given.stride_page + (n % PAGE_SIZE) * given.stride_slot
        live = (n < length)[:, None]
        if given.window is not None:
            live = live & (n >= oldest - given.window)[:, None]
        if BLOCK_D != D:
            live = live & (d[None, :] < D)
        k = tl.load(given.k_base + at[:, None] + d[None, :], mask=live, other=0.0)
        v = tl.load(given.v_base + at[:, None] + d[None, :], mask=live, other=0.0)
        # Prefetch the next tile's pages while this tile is computed.
        next_n = n + BLOCK_N
        page = tl.load(table + next_n // PAGE_SIZE, mask=next_n < length, other=0)
        score = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)) * given.scale_log2
        if given.softcap_log2 is not None:
            score = softcapped(score, given.softcap_log2)
        visible = (n < length)[None, :]
        if given.window is not None:
            visible = visible & (n[None, :] >= context[:, None] - given.window)
        score = tl.where(visible, score, HIDDEN)
        weight, keep, total, peak = weigh(score, peak, total)
        acc = dot(narrow(weight, v.dtype), v, acc * keep[:, None])
    sum_M = tl.sum(total, 1)
    result = acc / sum_M[:, None]
    store_item(to, item, sharing, kv_head, result, peak + tl.log2(sum_M), HEADS, BLOCK_M)


def default_decode_config(
    dim: int, dtype: torch.dtype, rows: int, coded: bool = False, shared: bool = False, group: int = 1
) -> DecodeConfig:
    """The configuration for a head dimension, the queries' dtype and a number of rows.

    `coded` is for e4m3 caches, `shared` for plans that say which rows share pages. `group` counts the query heads of a
    KV head.

    Measured on an H200 in whole steps. Many rows get small tiles and many programs, because a program waits at the
    start of each row, which is frequent with short contexts. A few rows get larger tiles: split over many programs,
    they have many parts to combine and each program mostly waits. A tile of 64 codes has as many bytes as one of 32
    bf16 values.
    """
    if dim * dtype.itemsize > 256:
        config = DecodeConfig(block_n=32, num_stages=3 if dim * dtype.itemsize <= 512 else 2)  # as shared memory allows
    elif rows > _FEW_ROWS:
        config = DecodeConfig(block_n=64 if coded else 32, num_warps=2, programs_per_sm=4)
    else:
        config = DecodeConfig(num_warps=2) if coded else DecodeConfig(num_stages=2)
    if coded:  # at 8 query heads to a KV head, a second kernel combines the parts 10% faster (H200, 80 rows of 6.5K)
        config = replace(config, block_m=8, fused=group <= 4)
    if rows <= ROWS_BY_HEAD and group >= _HEADS_APART:
        config = replace(config, fused=False)
    if not shared:
        return config
    tile = SHARED_TILES[coded]
    return replace(config, block_m=tile.heads, block_own=config.block_m, num_warps=tile.num_warps or config.num_warps)


def decode_attention(
    q_BHD: torch.Tensor,
    k_cache_PSGD: torch.Tensor,
    v_cache_PSGD: torch.Tensor,
    page_table_BP: torch.Tensor,
    context_lens_B: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    scales_P2GS: torch.Tensor | None = None,
    work: DecodeWork | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    log_sum_BH: torch.Tensor | None = None,
) -> torch.Tensor:
    """Like `rollout_kernels.paged_decode_attention`, its twin on a CPU. Returns [B, H, D]; zeros for a row of length 0.

    Tensors are contiguous in their last dimension, scales and sinks contiguous; both caches have the same strides.
    `work` is the result of `plan_decode_work` for the same lengths and window; computed here if None. Launches that
    share a plan must follow each other on one stream. With e4m3 codes `softcap` and `sinks_H` are None.
    """
    rows, heads, dim = q_BHD.shape
    page_size, kv_heads = k_cache_PSGD.shape[1:3]
    assert q_BHD.stride(2) == 1 and k_cache_PSGD.stride(3) == 1 and page_table_BP.stride(1) == 1
    assert k_cache_PSGD.stride() == v_cache_PSGD.stride()
    assert k_cache_PSGD.dtype == (q_BHD.dtype if scales_P2GS is None else torch.uint8)
    assert v_cache_PSGD.dtype in (k_cache_PSGD.dtype, None if scales_P2GS is None else torch.int8)
    assert scales_P2GS is None or scales_P2GS.is_contiguous()
    if work is None:
        config = default_decode_config(dim, q_BHD.dtype, rows, coded=scales_P2GS is not None, group=heads // kv_heads)
        work = plan_decode_work(context_lens_B, kv_heads, group=heads // kv_heads, window=window, config=config)
    assert work.window == window and work.arrivals_BG.shape == (rows, kv_heads)
    config, group = work.config, heads // kv_heads
    shares = work.first.shape[0] - 1
    coded = scales_P2GS is not None
    block_g, block_d = triton.next_power_of_2(group), max(64 if coded else 16, triton.next_power_of_2(dim))
    block_i = min(max(_COMBINED_VALUES // (block_g * block_d), 1), _COMBINED_PARTS)
    sizes = DecodeHeads(heads, dim, group, block_g, block_d, block_i, config.fused)
    results = empty_results(q_BHD, sizes, work, log_sum_BH)
    caches, int8 = (k_cache_PSGD, v_cache_PSGD), v_cache_PSGD.dtype == torch.int8
    if coded:
        assert dim % 4 == 0, "e4m3 caches are for head dimensions that are multiples of 4"
        assert softcap is None and sinks_H is None
        caches = (k_cache_PSGD.view(torch.int32), v_cache_PSGD.view(torch.int32))  # four codes a word
    _decode_kernel[(kv_heads, shares)](
        q_BHD, *caches, scales_P2GS, sinks_H, page_table_BP, *work_arguments(results, work), context_lens_B, rows,
        *score_factors(scale, softcap), window, q_BHD.stride(0), q_BHD.stride(1), *caches[0].stride()[:3],
        page_table_BP.stride(0),
        HEADS=sizes, PAGE_SIZE=page_size, BLOCK_M=max(config.block_m, block_g), BLOCK_N=config.block_n, INT8=int8,
        BLOCK_OWN=max(config.block_own or config.block_m, block_g), num_warps=config.num_warps,
        num_stages=config.num_stages, maxnreg=config.max_registers, **follow_options(q_BHD.device),
    )  # fmt: skip
    return combine_parts(results, sizes, work)
