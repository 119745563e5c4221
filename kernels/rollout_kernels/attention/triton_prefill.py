"""Paged prefill attention in Triton: causal attention of chunks of prompts, of any lengths, over their rows' contexts.

A program handles BLOCK_M queries of one chunk and one query head. It loops over the context's visible tiles: first,
without a mask, the tiles that all queries see completely, then, with a mask, the tiles on the diagonal. With a window
all tiles are masked. Blocks at the end of a chunk have the most work and start first. The query heads of a KV head run
at the same time, so the cache is read from memory once. For caches of e4m3 codes, the scale of each token and KV head
is applied to the products, as in decode.

The host reads nothing: the grid follows from the number of chunks and an upper bound on their lengths.

Legend: T tokens, C chunks, H query heads, G KV heads, D head dimension, P pages (of the cache, or of a row of the page
table), S page size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rollout_kernels.attention.triton_decode_combine import HIDDEN, LOG2_E, score_factors, softcapped
from rollout_kernels.common.triton_fp8 import operand
from rollout_kernels.common.triton_math import dot, narrow

#: Up to this many tokens of the longest chunk, small tiles are faster.
SHORT_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Launch configuration of the prefill kernel."""

    block_m: int  # queries of a program
    block_n: int  # positions of a tile
    num_warps: int
    num_stages: int


@triton.jit
def _attend(
    q, peak, total, acc,
    k_base, v_base, scale_base,
    table, begin, end, position, limit, window, scale_log2, softcap_log2,
    stride_page, stride_slot,
    D: tl.constexpr, PAGE_SIZE: tl.constexpr, V_SCALES: tl.constexpr, MASKED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add the tiles begin .. end - 1 to the running softmax of BLOCK_M queries, the first of them at `position`.

    No position from `limit` on is read. V_SCALES is the distance from a key's scale to its value's scale, or 0 if the
    cache has no scales.
    """
    d = tl.arange(0, BLOCK_D)
    query_position = position + tl.arange(0, BLOCK_M)
    n = begin * BLOCK_N + tl.arange(0, BLOCK_N)
    page = tl.load(table + n // PAGE_SIZE, mask=n < limit, other=0)
    for tile in range(begin, end):
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        at = page.to(tl.int64) * stride_page + (n % PAGE_SIZE) * stride_slot
        live = (n < limit)[:, None]
        if window is not None:
            live = live & (n > position - window)[:, None]
        if BLOCK_D != D:
            live = live & (d[None, :] < D)
        k = tl.load(k_base + at[:, None] + d[None, :], mask=live, other=0.0)
        v = tl.load(v_base + at[:, None] + d[None, :], mask=live, other=0.0)
        if V_SCALES > 0:
            k = operand(k, q.dtype)
            # A weight times a value's scale may overflow f16.
            v = operand(v, tl.bfloat16 if q.dtype == tl.float16 else q.dtype)
            scale_at = scale_base + page.to(tl.int64) * (2 * V_SCALES) + n % PAGE_SIZE
            scaled = n < limit
            if window is not None:
                scaled = scaled & (n > position - window)
            k_scale = tl.load(scale_at, mask=scaled, other=0.0)
            v_scale = tl.load(scale_at + V_SCALES, mask=scaled, other=0.0)
        # Prefetch the next tile's pages while this tile is computed.
        next_n = n + BLOCK_N
        page = tl.load(table + next_n // PAGE_SIZE, mask=next_n < limit, other=0)
        score = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)) * scale_log2
        if V_SCALES > 0:
            score = score * k_scale[None, :]
        if softcap_log2 is not None:
            score = softcapped(score, softcap_log2)
        if MASKED:
            visible = n[None, :] <= query_position[:, None]
            if window is not None:
                visible = visible & (n[None, :] > query_position[:, None] - window)
            score = tl.where(visible, score, HIDDEN)
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
    q_ptr, k_ptr, v_ptr, scales_ptr, sinks_ptr, table_ptr, starts_ptr, lens_ptr, out_ptr,
    scale_log2, softcap_log2, window,
    stride_q_token, stride_q_head, stride_page, stride_slot, stride_kv_head, stride_table,
    H: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
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
        # Scales are [P, 2, G, S]: within a page, a head's value scales lie G heads after its key scales.
        v_scales: tl.constexpr = (H // GROUP) * PAGE_SIZE if scales_ptr is not None else 0
        scale_base = scales_ptr + (head // GROUP) * PAGE_SIZE if scales_ptr is not None else scales_ptr
        table = table_ptr + chunk.to(tl.int64) * stride_table
        peak = tl.full([BLOCK_M], HIDDEN, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if sinks_ptr is not None:  # as if a key without a value had been seen
            peak = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
            total += 1.0
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        begin = 0
        if window is not None:
            begin = tl.maximum(position - window + 1, 0) // BLOCK_N
        else:
            # Up to `begin` the first query, and so every query, sees complete tiles.
            begin = (position + 1) // BLOCK_N
            peak, total, acc = _attend(
                q, peak, total, acc, k_base, v_base, scale_base, table, 0, begin, position, limit, window, scale_log2,
                softcap_log2, stride_page, stride_slot, D, PAGE_SIZE, v_scales, False,
                BLOCK_M, BLOCK_N, BLOCK_D,
            )  # fmt: skip
        end = (limit + BLOCK_N - 1) // BLOCK_N
        peak, total, acc = _attend(
            q, peak, total, acc, k_base, v_base, scale_base, table, begin, end, position, limit, window, scale_log2,
            softcap_log2, stride_page, stride_slot, D, PAGE_SIZE, v_scales, True,
            BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        out = narrow(acc / total[:, None], out_ptr.dtype.element_ty)
        tl.store(out_ptr + token[:, None] * (H * D) + head * D + d[None, :], out, mask=here)


def default_prefill_config(dim: int, dtype: torch.dtype, max_query: int) -> PrefillConfig:
    """The configuration for a head dimension, a dtype and the longest chunk; up to 256 dimensions measured on an H200.

    Above, two stages of keys and values must fit into shared memory.
    """
    block_m = min(128, max(16, triton.next_power_of_2(max_query)))
    if dtype == torch.float32:
        return PrefillConfig(16, 32, 4, 2)
    if dim > 256:
        return PrefillConfig(min(block_m, 32), 32, 8 if block_m >= 32 else 4, 2)
    if dim > 128:
        return PrefillConfig(min(block_m, 64), 64, 8 if block_m >= 64 else 4, 2)
    if max_query > SHORT_CHUNK:
        return PrefillConfig(128, 64, 8, 3)
    # Short chunks get many small programs, because each program has little work between its start and its end.
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
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Like `rollout_kernels.paged_prefill_attention`, its twin on a CPU, for at most `max_query` queries of a chunk.

    The queries of chunk c are `q_THD[query_starts_C1[c] : query_starts_C1[c + 1]]`. Caches and page table are
    contiguous in their last dimension, the other tensors contiguous; both caches have the same strides. Returns
    [T, H, D], undefined for tokens that belong to no chunk. The default `config` is the measured one.
    """
    tokens, heads, dim = q_THD.shape
    page_size, kv_heads = k_cache_PSGD.shape[1:3]
    chunks = context_lens_C.shape[0]
    assert query_starts_C1.shape == (chunks + 1,) and page_table_CP.shape[0] == chunks
    assert q_THD.stride(2) == 1 and k_cache_PSGD.stride(3) == 1 and page_table_CP.stride(1) == 1
    assert k_cache_PSGD.stride() == v_cache_PSGD.stride()
    assert k_cache_PSGD.dtype == (q_THD.dtype if scales_P2GS is None else torch.uint8)
    assert v_cache_PSGD.dtype in (k_cache_PSGD.dtype, None if scales_P2GS is None else torch.int8)
    assert scales_P2GS is None or scales_P2GS.is_contiguous()
    assert query_starts_C1.is_contiguous() and context_lens_C.is_contiguous()
    if config is None:
        config = default_prefill_config(dim, q_THD.dtype, max_query)
    out_THD = torch.empty(tokens, heads, dim, dtype=q_THD.dtype, device=q_THD.device)
    _prefill_kernel[(heads, triton.cdiv(max_query, config.block_m), chunks)](
        q_THD, k_cache_PSGD, v_cache_PSGD, scales_P2GS, sinks_H, page_table_CP, query_starts_C1, context_lens_C,
        out_THD, *score_factors(scale, softcap), window, q_THD.stride(0), q_THD.stride(1),
        *k_cache_PSGD.stride()[:3], page_table_CP.stride(0),
        H=heads, D=dim, GROUP=heads // kv_heads, PAGE_SIZE=page_size, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_D=max(16, triton.next_power_of_2(dim)), num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out_THD
