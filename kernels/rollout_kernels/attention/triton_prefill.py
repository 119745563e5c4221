"""Paged prefill attention in Triton: chunks of prompts of any lengths, causal, over what their rows hold already.

A program takes BLOCK_M queries of one chunk and one query head, and goes through the tiles of the context that they
can see: first those that all of them see whole, then, masked, those on the diagonal. With a window all tiles are
masked. Blocks at a prompt's end have the most to do and start first; the query heads of a KV head run side by side, so
that the cache is read from memory once. Caches of e4m3 codes have a scale for each token and KV head, which is applied
to the products, as in decode.

Nothing is read on the host: the grid follows from the number of chunks and a bound on their lengths.

Legend: T tokens, C chunks, H query heads, G KV heads, D head dimension, P pages (of the cache, or of a row of the page
table), S page size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rollout_kernels.common.triton_fp8 import operand
from rollout_kernels.common.triton_math import dot, narrow

# Score of a hidden position: finite, so that a row that sees nothing of a tile stays finite.
_HIDDEN = tl.constexpr(-1e30)
#: Tokens of the longest chunk up to which small tiles are faster.
_SHORT_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How the prefill kernel is cut up."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@triton.jit
def _attend(
    q,
    peak,
    total,
    acc,
    k_base,
    v_base,
    scale_base,
    table,
    begin,
    end,
    position,
    limit,
    window,
    scale_log2,
    stride_page,
    stride_slot,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    V_SCALES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Add the tiles begin .. end - 1 to the running softmax of the queries at `position` and after it.

    Nothing at `limit` or after it is read. V_SCALES is how far a value's scale is from its key's, 0 where the cache has
    none.
    """
    d = tl.arange(0, BLOCK_D)
    query_position = position + tl.arange(0, BLOCK_M)
    n = begin * BLOCK_N + tl.arange(0, BLOCK_N)
    page = tl.load(table + n // PAGE_SIZE, mask=n < limit, other=0)
    for tile in range(begin, end):
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        at = page.to(tl.int64) * stride_page + (n % PAGE_SIZE) * stride_slot
        live = (n < limit)[:, None]
        if HAS_WINDOW:
            live = live & (n > position - window)[:, None]
        if BLOCK_D != D:
            live = live & (d[None, :] < D)
        k = tl.load(k_base + at[:, None] + d[None, :], mask=live, other=0.0)
        v = tl.load(v_base + at[:, None] + d[None, :], mask=live, other=0.0)
        if V_SCALES > 0:
            k = operand(k, q.dtype)
            # A weight times a value's scale has no room in f16.
            v = operand(v, tl.bfloat16 if q.dtype == tl.float16 else q.dtype)
            scale_at = scale_base + page.to(tl.int64) * (2 * V_SCALES) + n % PAGE_SIZE
            scaled = n < limit
            if HAS_WINDOW:
                scaled = scaled & (n > position - window)
            k_scale = tl.load(scale_at, mask=scaled, other=0.0)
            v_scale = tl.load(scale_at + V_SCALES, mask=scaled, other=0.0)
        # The next tile's pages are under way while this tile is worked on.
        next_n = n + BLOCK_N
        page = tl.load(table + next_n // PAGE_SIZE, mask=next_n < limit, other=0)
        score = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)) * scale_log2
        if V_SCALES > 0:
            score = score * k_scale[None, :]
        if MASKED:
            visible = n[None, :] <= query_position[:, None]
            if HAS_WINDOW:
                visible = visible & (n[None, :] > query_position[:, None] - window)
            score = tl.where(visible, score, _HIDDEN)
        new_peak = tl.maximum(peak, tl.max(score, 1))
        keep = tl.exp2(peak - new_peak)
        weight = tl.exp2(score - new_peak[:, None])
        total = total * keep + tl.sum(weight, 1)
        if V_SCALES > 0:
            weight = weight * v_scale[None, :]
        acc = dot(narrow(weight, v.dtype), v, acc * keep[:, None])
        peak = new_peak
    return peak, total, acc


@triton.jit(do_not_specialize=["window", "stride_table"])
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    scales_ptr,
    table_ptr,
    starts_ptr,
    lens_ptr,
    out_ptr,
    scale_log2,
    window,
    stride_q_token,
    stride_q_head,
    stride_page,
    stride_slot,
    stride_kv_head,
    stride_table,
    H: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    head = tl.program_id(0)
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    chunk = tl.program_id(2)
    start = tl.load(starts_ptr + chunk).to(tl.int32)
    queries = tl.load(starts_ptr + chunk + 1).to(tl.int32) - start
    if first < queries:
        context = tl.load(lens_ptr + chunk).to(tl.int32)
        position = context - queries + first
        limit = tl.minimum(position + BLOCK_M, context)
        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_D)
        here = (first + m[:, None] < queries) & (d[None, :] < D)
        token = (start + first + m).to(tl.int64)
        q_at = token[:, None] * stride_q_token + head * stride_q_head + d[None, :]
        q = tl.load(q_ptr + q_at, mask=here, other=0.0)
        k_base = k_ptr + (head // GROUP).to(tl.int64) * stride_kv_head
        v_base = v_ptr + (head // GROUP).to(tl.int64) * stride_kv_head
        # [P, 2, G, S]: a head's key scales of a page, and its value scales G heads further on.
        v_scales: tl.constexpr = (H // GROUP) * PAGE_SIZE if FP8 else 0
        scale_base = scales_ptr + (head // GROUP) * PAGE_SIZE if FP8 else scales_ptr
        table = table_ptr + chunk.to(tl.int64) * stride_table
        peak = tl.full([BLOCK_M], _HIDDEN, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        begin = 0
        if HAS_WINDOW:
            begin = tl.maximum(position - window + 1, 0) // BLOCK_N
        else:
            # Up to here the first query, and so every query, sees whole tiles.
            begin = (position + 1) // BLOCK_N
            peak, total, acc = _attend(
                q, peak, total, acc, k_base, v_base, scale_base, table, 0, begin, position, limit, window, scale_log2,
                stride_page, stride_slot, D, PAGE_SIZE, v_scales, HAS_WINDOW, False, BLOCK_M, BLOCK_N, BLOCK_D,
            )  # fmt: skip
        end = (limit + BLOCK_N - 1) // BLOCK_N
        peak, total, acc = _attend(
            q, peak, total, acc, k_base, v_base, scale_base, table, begin, end, position, limit, window, scale_log2,
            stride_page, stride_slot, D, PAGE_SIZE, v_scales, HAS_WINDOW, True, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        out = narrow(acc / total[:, None], out_ptr.dtype.element_ty)
        tl.store(out_ptr + token[:, None] * (H * D) + head * D + d[None, :], out, mask=here)


def default_prefill_config(dim: int, dtype: torch.dtype, max_query: int) -> PrefillConfig:
    """The configuration for a head dimension, a dtype and a bound on the chunks' lengths; measured on an H200."""
    block_m = min(128, max(16, triton.next_power_of_2(max_query)))
    if dtype == torch.float32:
        return PrefillConfig(16, 32, 4, 2)
    if dim > 128:
        return PrefillConfig(min(block_m, 64), 64, 8 if block_m >= 64 else 4, 2)
    if max_query > _SHORT_CHUNK:
        return PrefillConfig(128, 64, 8, 3)
    # Many small programs: short chunks leave each of them little to do but to begin and to end.
    return PrefillConfig(64, 32, 4, 3) if block_m >= 64 else PrefillConfig(block_m, 64, 4, 3)


def prefill_attention(
    q_THD: torch.Tensor,
    k_cache_PSGD: torch.Tensor,
    v_cache_PSGD: torch.Tensor,
    page_table_CP: torch.Tensor,
    query_starts_C1: torch.Tensor,
    context_lens_C: torch.Tensor,
    *,
    max_query: int,
    scale: float,
    window: int | None,
    scales_P2GS: torch.Tensor | None = None,
    config: PrefillConfig | None = None,
) -> torch.Tensor:
    """Causal attention of prompt chunks over what their rows hold, this step's keys included; returns out_THD.

    The queries of chunk c are `q_THD[query_starts[c] : query_starts[c + 1]]` and stand at the last positions of its
    context of length `context_lens[c]`; both are int32 or int64 on the device. No chunk has more than `max_query`
    queries. Queries and caches have one dtype: float32, float16 or bfloat16; the last dimension is contiguous, and
    both caches have the same strides. With `scales_P2GS` (float32, contiguous: key scales, then value scales) the
    caches hold e4m3 codes, uint8. Tokens that belong to no chunk are left undefined.
    """
    tokens, heads, dim = q_THD.shape
    page_size, kv_heads = k_cache_PSGD.shape[1:3]
    chunks = context_lens_C.shape[0]
    assert query_starts_C1.shape == (chunks + 1,) and page_table_CP.shape[0] == chunks
    assert q_THD.stride(2) == 1 and k_cache_PSGD.stride(3) == 1 and page_table_CP.stride(1) == 1
    assert k_cache_PSGD.stride() == v_cache_PSGD.stride() and k_cache_PSGD.dtype == v_cache_PSGD.dtype
    assert k_cache_PSGD.dtype == (q_THD.dtype if scales_P2GS is None else torch.uint8)
    assert scales_P2GS is None or scales_P2GS.is_contiguous()
    assert query_starts_C1.is_contiguous() and context_lens_C.is_contiguous()
    if config is None:
        config = default_prefill_config(dim, q_THD.dtype, max_query)
    out_THD = torch.empty(tokens, heads, dim, dtype=q_THD.dtype, device=q_THD.device)
    _prefill_kernel[(heads, triton.cdiv(max_query, config.block_m), chunks)](
        q_THD,
        k_cache_PSGD,
        v_cache_PSGD,
        scales_P2GS,
        page_table_CP,
        query_starts_C1,
        context_lens_C,
        out_THD,
        scale * math.log2(math.e),
        window or 0,
        q_THD.stride(0),
        q_THD.stride(1),
        *k_cache_PSGD.stride()[:3],
        page_table_CP.stride(0),
        H=heads,
        D=dim,
        GROUP=heads // kv_heads,
        PAGE_SIZE=page_size,
        HAS_WINDOW=window is not None,
        FP8=scales_P2GS is not None,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out_THD
