"""Attention over a paged KV cache: write keys and values, decode (one query a row), prefill (chunks of prompts).

The page table maps a row's positions to pages: position p lies at offset `p % page_size` of page
`page_table[row, p // page_size]`. With a window of W, a query at position p sees positions p - W + 1 .. p.

```
 context   0 ......................... L - W ........... L - 1
 pages     | 0 | 1 | 2 |     ...      | first | ... | last |      a decode step gathers first .. last only
                                      ^ L - W lies in here
```

A cache has the queries' dtype, or holds codes and one float32 scale for each token and KV head. Codes are e4m3 (uint8);
values may be int8. The scales are one tensor [P, 2, G, S]: index 0 for keys, 1 for values. With a scale for each token
and head, no token limits another token's precision, no calibration is needed, and a page stays self-contained. A head
of 128 takes 132 bytes. Scales are float32, because a rounded scale would add its error to every code. A head's scales
are contiguous within a page, as a tile reads them.

Two variants of the softmax: a softcap bounds the scaled scores s by `softcap tanh(s / softcap)`; a sink is one more
score of a query head: it takes its share of the softmax and adds no value.

The host never reads a tensor's values here. A masked position gets a large negative score instead of minus infinity,
so a row without context (padding) gives a finite result. Page positions after the end of a row's context may hold
another row's data, which may be NaN (a broken adapter): they are not read, or are zeroed before they are multiplied.

Legend: T tokens, B rows, H query heads, G KV heads, D head dimension, P pages (of the cache, or of a row of the page
table), S page size, N gathered pages, C gathered positions of a row, Q queries of a block, R query heads of a KV head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from rollout_kernels.common.fp8 import quantize_heads, quantize_values, values_of

if TYPE_CHECKING:
    from rollout_kernels.attention.triton_decode_plan import DecodeWork

# Query positions that prefill handles at once; bounds the memory of the mask.
_QUERY_BLOCK = 256


class DecodePlan(NamedTuple):
    """The plan that all layers with one window share in a decode step."""

    pages_N: torch.Tensor  # pages to gather, row by row
    bias_B11C: torch.Tensor  # 0 where a position is visible, else large and negative
    hidden_BC11: torch.Tensor  # bool


def write_kv(
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    k_cache_PSGD: torch.Tensor,
    v_cache_PSGD: torch.Tensor,
    slots_T: torch.Tensor,
    scales_P2GS: torch.Tensor | None = None,
) -> None:
    """Store a step's keys and values. Token t goes to page `slots_T[t] // S`, offset `slots_T[t] % S`.

    Args:
        k_TGD: keys.
        v_TGD: values.
        k_cache_PSGD: changed in place; the dtype of the keys, or uint8 with `scales_P2GS`.
        v_cache_PSGD: likewise.
        slots_T: int64, distinct, except on the dump page, where the order of writes is undefined.
        scales_P2GS: float32, changed in place; with it the caches get codes: e4m3, or of values int8 if that is the
            dtype of their cache.
    """
    if scales_P2GS is not None:
        quantize_v = quantize_values if v_cache_PSGD.dtype == torch.int8 else quantize_heads
        (k_TGD, k_scales_TG), (v_TGD, v_scales_TG) = quantize_heads(k_TGD), quantize_v(v_TGD)
        page_size = k_cache_PSGD.shape[1]
        pages_T, offsets_T = slots_T // page_size, slots_T % page_size
        scales_P2GS[pages_T, :, :, offsets_T] = torch.stack((k_scales_TG, v_scales_TG), dim=1)
    k_cache_PSGD.flatten(0, 1).index_copy_(0, slots_T, k_TGD)
    v_cache_PSGD.flatten(0, 1).index_copy_(0, slots_T, v_TGD)


def plan_decode(
    page_table_BP: torch.Tensor,
    context_lens_B: torch.Tensor,
    page_size: int,
    window: int | None,
    max_context: int,
    dtype: torch.dtype,
) -> DecodePlan:
    """Choose the pages that the torch twin gathers in a decode step, and mask their positions.

    Args:
        page_table_BP: int32.
        context_lens_B: int32 or int64; a length may be 0.
        page_size: S.
        window: W, or None for full attention.
        max_context: upper bound on the context lengths, without padding rows.
        dtype: of the queries.
    """
    table_pages = page_table_BP.shape[1]
    pages = min(-(-max_context // page_size), table_pages)
    device = page_table_BP.device
    lens_B1 = context_lens_B[:, None]
    if window is None or pages <= _window_pages(window, page_size):
        pages_BN = page_table_BP[:, :pages]
        positions_BC = torch.arange(pages * page_size, device=device)[None]
    else:
        pages = _window_pages(window, page_size)
        first_B1 = (lens_B1 - window).clamp_(min=0).div_(page_size, rounding_mode="floor")
        columns_BN = (first_B1 + torch.arange(pages, device=device)).clamp_(max=table_pages - 1)
        pages_BN = page_table_BP.gather(1, columns_BN.long())
        positions_BC = first_B1 * page_size + torch.arange(pages * page_size, device=device)
    visible_BC = positions_BC < lens_B1
    if window is not None:
        visible_BC = visible_BC & (positions_BC >= lens_B1 - window)
    bias_B11C, hidden_BC11 = _bias(visible_BC, dtype)[:, None, None], ~visible_BC[:, :, None, None]
    return DecodePlan(pages_BN.reshape(-1), bias_B11C, hidden_BC11)


def plan_paged_decode(
    page_table_BP: torch.Tensor,
    context_lens_B: torch.Tensor,
    k_cache_PSGD: torch.Tensor,
    *,
    heads: int,
    window: int | None,
    max_context: int,
    dtype: torch.dtype | None = None,
    segments_SW: torch.Tensor | None = None,
) -> DecodePlan | DecodeWork:
    """The plan that `paged_decode_attention` needs on this device; all layers with one window share it.

    `heads` is the number of query heads. `dtype` is the queries' dtype; by default the cache's. `segments_SW` says what
    rows share (`segments.make_segments`, for the tiles of `SHARED_TILES`); the torch twin reads all rows on
    their own. For the other arguments see `plan_decode`.
    """
    _, page_size, kv_heads, dim = k_cache_PSGD.shape
    dtype = dtype or k_cache_PSGD.dtype
    if not k_cache_PSGD.is_cuda:
        return plan_decode(page_table_BP, context_lens_B, page_size, window, max_context, dtype)
    from rollout_kernels.attention.triton_decode import default_decode_config
    from rollout_kernels.attention.triton_decode_plan import plan_decode_work

    coded = k_cache_PSGD.dtype == torch.uint8
    group, shared = heads // kv_heads, segments_SW is not None
    config = default_decode_config(dim, dtype, len(context_lens_B), coded, shared, group)
    return plan_decode_work(
        context_lens_B, kv_heads, group=group, window=window, config=config, segments_SW=segments_SW
    )


def paged_decode_attention(
    q_BHD: torch.Tensor,
    k_cache_PSGD: torch.Tensor,
    v_cache_PSGD: torch.Tensor,
    page_table_BP: torch.Tensor,
    context_lens_B: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    max_context: int,
    scales_P2GS: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    plan: DecodePlan | DecodeWork | None = None,
    log_sum_BH: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one query a row over the row's context, whose last position is the query's own. Returns [B, H, V].

    V is the dimension of the values. `kernels_take` says for which of these arguments there are kernels.

    Args:
        q_BHD: H is a multiple of G; query head h reads KV head `h // (H / G)`.
        k_cache_PSGD: the queries' dtype, or uint8 codes with `scales_P2GS`.
        v_cache_PSGD: likewise; its last dimension may be another one.
        page_table_BP: int32.
        context_lens_B: int32 or int64; a length may be 0 (the result is then finite and meaningless).
        scale: factor of the scores.
        window: W, or None for full attention.
        max_context: upper bound on the context lengths.
        scales_P2GS: float32 scales of e4m3 codes, or None.
        softcap: bound of the scores, or None.
        sinks_H: the sink of each query head, or None.
        plan: the result of `plan_paged_decode` for the same rows and window; computed here if None. Without a kernel it
            must be `plan_decode`'s result.
        log_sum_BH: float32, gets the logarithm, in base 2, of the sum of each head's exponentials: by it parts of
            a context are merged. That of a row without context is meaningless.
    """
    if plan is None and not kernels_take(k_cache_PSGD, v_cache_PSGD, softcap, sinks_H):
        plan = plan_decode(page_table_BP, context_lens_B, k_cache_PSGD.shape[1], window, max_context, q_BHD.dtype)
    if plan is None:
        shape: dict[str, Any] = {"heads": q_BHD.shape[1], "window": window, "max_context": max_context}
        plan = plan_paged_decode(page_table_BP, context_lens_B, k_cache_PSGD, dtype=q_BHD.dtype, **shape)
    if not isinstance(plan, DecodePlan):
        from rollout_kernels.attention.triton_decode import decode_attention

        given = q_BHD, k_cache_PSGD, v_cache_PSGD, page_table_BP, context_lens_B
        how: dict[str, Any] = {"scale": scale, "window": window, "scales_P2GS": scales_P2GS, "softcap": softcap}
        return decode_attention(*given, **how, sinks_H=sinks_H, work=plan, log_sum_BH=log_sum_BH)
    rows, heads, dim = q_BHD.shape
    kv_heads = k_cache_PSGD.shape[2]
    k_NSGD, v_NSGD = _pages(k_cache_PSGD, v_cache_PSGD, scales_P2GS, plan.pages_N, q_BHD.dtype)
    k_BGCD, v_BGCD = (
        x.view(rows, -1, kv_heads, x.shape[-1]).masked_fill_(plan.hidden_BC11, 0.0).transpose(1, 2)
        for x in (k_NSGD, v_NSGD)
    )
    # The query heads of one KV head take the place of query positions, since they all see the same context.
    q_BGQD = q_BHD.reshape(rows, kv_heads, heads // kv_heads, dim)
    sinks = _by_group(sinks_H, kv_heads)
    out_BGQD = _attend(q_BGQD, k_BGCD, v_BGCD, plan.bias_B11C, scale, softcap, sinks)
    if log_sum_BH is not None:
        scores = _scores(q_BGQD, k_BGCD, plan.bias_B11C, scale, softcap, sinks)
        log_sum_BH.copy_(scores.logsumexp(-1).flatten(1) * math.log2(math.e))
    return out_BGQD.reshape(rows, heads, -1)


def paged_prefill_attention(
    q_THD: torch.Tensor,
    k_cache_PSGD: torch.Tensor,
    v_cache_PSGD: torch.Tensor,
    page_table_BP: torch.Tensor,
    chunks: Sequence[tuple[int, int, int]],
    *,
    scale: float,
    window: int | None,
    scales_P2GS: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    query_starts_C1: torch.Tensor | None = None,
    context_lens_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of chunks of prompts over their rows' contexts, which include this step's keys.

    Args:
        q_THD: queries of all chunks; H is a multiple of G.
        k_cache_PSGD: the queries' dtype, or uint8 codes with `scales_P2GS`.
        v_cache_PSGD: likewise; its last dimension V may be another one.
        page_table_BP: int32; row i belongs to chunk i.
        chunks: `(query_start, query_len, context_len)` of each chunk, host integers. Its queries are
            `q_THD[query_start : query_start + query_len]`, at the last `query_len` positions of its context.
        scale: factor of the scores.
        window: W, or None for full attention.
        scales_P2GS: float32 scales of e4m3 codes, or None.
        softcap: bound of the scores, or None.
        sinks_H: the sink of each query head, or None.
        query_starts_C1: the starts as int32 on the device, plus the total at the end.
        context_lens_B: the context lengths on the device.

    Returns:
        [T, H, V] in the queries' dtype. The torch twin runs on a CPU, where the two device tensors are missing, and
        where there is no kernel (`kernels_take`).
    """
    cache = k_cache_PSGD, v_cache_PSGD
    has_kernel = kernels_take(*cache, softcap, sinks_H)
    if has_kernel and query_starts_C1 is not None and context_lens_B is not None:
        from rollout_kernels.attention.gathered import attend_gathered, takes
        from rollout_kernels.attention.triton_prefill import prefill_attention

        plain = softcap is None and sinks_H is None
        how: dict[str, Any] = {"scale": scale, "window": window, "scales_P2GS": scales_P2GS}
        if plain and takes(q_THD, chunks, k_cache_PSGD.shape[2], window, scale):
            return attend_gathered(q_THD, *cache, page_table_BP, chunks, query_starts_C1, context_lens_B, **how)
        how |= {"max_query": max(length for _, length, _ in chunks), "softcap": softcap, "sinks_H": sinks_H}
        return prefill_attention(q_THD, *cache, page_table_BP, query_starts_C1, context_lens_B, **how)
    out_THD = q_THD.new_empty(*q_THD.shape[:2], v_cache_PSGD.shape[3])
    for row, (start, length, context) in enumerate(chunks):
        for begin in range(0, length, _QUERY_BLOCK):
            end = min(begin + _QUERY_BLOCK, length)
            block = slice(start + begin, start + end)
            span = (context - length + begin, context - length + end)
            pages = (*cache, scales_P2GS, page_table_BP[row])
            out_THD[block] = _attend_block(q_THD[block], *pages, span, scale, window, softcap, sinks_H)
    return out_THD


def _attend_block(
    q_QHD: torch.Tensor,
    k_cache_PSGD: torch.Tensor,
    v_cache_PSGD: torch.Tensor,
    scales_P2GS: torch.Tensor | None,
    pages_P: torch.Tensor,
    span: tuple[int, int],
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one row's queries at positions span[0] .. span[1] - 1; returns [Q, H, V]."""
    page_size, kv_heads = k_cache_PSGD.shape[1:3]
    queries, heads, dim = q_QHD.shape
    first_page = 0 if window is None else max(0, span[0] - window + 1) // page_size
    pages_N = pages_P[first_page : -(-span[1] // page_size)]
    k_NSGD, v_NSGD = _pages(k_cache_PSGD, v_cache_PSGD, scales_P2GS, pages_N, q_QHD.dtype)
    for x_CGD in (k_NSGD.flatten(0, 1), v_NSGD.flatten(0, 1)):
        x_CGD[span[1] - first_page * page_size :] = 0.0
    k_GCD, v_GCD = (x.flatten(0, 1).transpose(0, 1) for x in (k_NSGD, v_NSGD))
    query_pos_Q1 = torch.arange(span[0], span[1], device=q_QHD.device)[:, None]
    key_pos_C = torch.arange(k_GCD.shape[1], device=q_QHD.device) + first_page * page_size
    visible_QC = key_pos_C <= query_pos_Q1
    if window is not None:
        visible_QC = visible_QC & (key_pos_C > query_pos_Q1 - window)
    group = heads // kv_heads
    q_GRQD = q_QHD.reshape(queries, kv_heads, group, dim).permute(1, 2, 0, 3)
    sinks_GR1 = _by_group(sinks_H, kv_heads)
    k_GRCD, v_GRCD = (x[:, None].expand(-1, group, -1, -1) for x in (k_GCD, v_GCD))
    sinks = None if sinks_GR1 is None else sinks_GR1[..., None]
    out_GRQD = _attend(q_GRQD, k_GRCD, v_GRCD, _bias(visible_QC, q_QHD.dtype), scale, softcap, sinks)
    return out_GRQD.permute(2, 0, 1, 3).reshape(queries, heads, -1)


def kernels_take(
    k_cache_PSGD: torch.Tensor, v_cache_PSGD: torch.Tensor, softcap: float | None, sinks_H: torch.Tensor | None
) -> bool:
    """True if there are kernels for attention over this cache: on a GPU, equal dimensions, codes with plain scores."""
    same_dims = k_cache_PSGD.shape[3] == v_cache_PSGD.shape[3]
    plain = softcap is None and sinks_H is None
    return k_cache_PSGD.is_cuda and same_dims and (plain or k_cache_PSGD.dtype != torch.uint8)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of q [..., Q, D] over k and v [..., C, D]; `bias` and `sinks` fit scores of [..., Q, C]."""
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, bias, scale=scale)
    weights = torch.softmax(_scores(q, k, bias, scale, softcap, sinks), dim=-1)
    return torch.matmul(weights if sinks is None else weights[..., :-1], v.float()).to(q.dtype)


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The scores of `_attend`, float32, with the scores of sinks last."""
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)).mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores = scores + bias.float()
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), dim=-1)
    return scores


def _by_group(sinks_H: torch.Tensor | None, kv_heads: int) -> torch.Tensor | None:
    return None if sinks_H is None else sinks_H.view(kv_heads, -1, 1)


def _pages(
    k_cache_PSGD: torch.Tensor,
    v_cache_PSGD: torch.Tensor,
    scales_P2GS: torch.Tensor | None,
    pages_N: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of the keys and values of some pages, [N, S, G, D]; codes are decoded to `dtype`."""
    k_NSGD, v_NSGD = k_cache_PSGD.index_select(0, pages_N), v_cache_PSGD.index_select(0, pages_N)
    if scales_P2GS is None:
        return k_NSGD, v_NSGD
    k_scales_NSG1, v_scales_NSG1 = scales_P2GS.index_select(0, pages_N).transpose(2, 3)[..., None].unbind(1)
    return (values_of(k_NSGD) * k_scales_NSG1).to(dtype), (values_of(v_NSGD) * v_scales_NSG1).to(dtype)


def _window_pages(window: int, page_size: int) -> int:
    """The largest number of pages that `window` consecutive positions touch."""
    return (window + page_size - 2) // page_size + 1


def _bias(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The addend of scores: 0 where visible, else the most negative round number that fits `dtype`."""
    hidden = -6e4 if dtype == torch.float16 else -1e30
    return torch.where(visible, 0.0, hidden).to(dtype)
