"""The decode attention kernel for caches of e4m3 codes: as in `triton_decode`, plus a scale for each token and KV head.

The kernel reads four codes at a time, as one word. The bytes j of all words are the elements j, j + 4, j + 8, ... of a
head. One matrix product handles one j; queries and results are split in the same way, so no data has to be permuted.
Two instructions convert one byte of two words to two f16 values.

    words of keys    [N, D / 4]     scores       = sum over j of  q[:, j::4] x byte j, transposed
    words of values  [N, D / 4]     out[:, j::4] = weights x byte j

A scale is constant along a head, so it is applied to products: a key's scale to its score, a value's scale to its
weight. Both operands must fit f16. So queries are divided by a power of two for each head, and weights by the largest
value scale so far. These quotients are at most 1; a factor of 2^15 then keeps small weights representable. Otherwise
many small weights would vanish next to a large weight of a small value (an attention sink), or next to a large value
that has hardly any weight.

Legend: N positions of a tile, D head dimension, P pages, G KV heads, S page size, M query heads of a KV head, padded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_kernels.attention.triton_decode_combine import HIDDEN, Destination, read_item, store_item, weigh
from rollout_kernels.common.triton_fp8 import operand
from rollout_kernels.common.triton_math import INTERPRETED, dot, follow, narrow

_TO_HALVES = (
    "{.reg .b32 pair; .reg .b16 codes, none; prmt.b32 pair, $1, $2, %s; mov.b32 {codes, none}, pair; "
    "cvt.rn.f16x2.e4m3x2 $0, codes;}"
)
_BYTE_0 = tl.constexpr(_TO_HALVES % "0x0040")
_BYTE_1 = tl.constexpr(_TO_HALVES % "0x0051")
_BYTE_2 = tl.constexpr(_TO_HALVES % "0x0062")
_BYTE_3 = tl.constexpr(_TO_HALVES % "0x0073")
_ROOM = tl.constexpr(2.0**15)  # factor of weights: f16 overflows at twice that
_LEAST_UNIT = tl.constexpr(2.0**-126)  # the device's logarithms and powers flush smaller numbers to zero


@triton.jit
def _byte(words, j: tl.constexpr, dtype: tl.constexpr):
    """Byte j of each word, an e4m3 code, decoded to f16 or float32."""
    if INTERPRETED:
        half = operand(((words >> (8 * j)) & 0xFF).to(tl.uint8), tl.float16)
    else:
        asm: tl.constexpr = _BYTE_0 if j == 0 else _BYTE_1 if j == 1 else _BYTE_2 if j == 2 else _BYTE_3
        half = tl.inline_asm_elementwise(asm, "=r,r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    return half if dtype == tl.float16 else half.to(tl.float32)


@triton.jit
def _unit(at, is_q, BLOCK_M: tl.constexpr):
    """The divisor of each head's queries: the largest power of two that is not above their largest magnitude."""
    most = tl.zeros([BLOCK_M], tl.float32)
    for j in tl.static_range(4):
        most = tl.maximum(most, tl.max(tl.abs(tl.load(at + j, mask=is_q, other=0.0).to(tl.float32)), 1))
    return tl.exp2(tl.floor(tl.log2(tl.where(most >= _LEAST_UNIT, most, 1.0))))


@triton.jit
def _queries(at, is_q, unit_M1, dtype: tl.constexpr):
    q = tl.load(at, mask=is_q, other=0.0).to(tl.float32)
    return narrow(q / unit_M1, dtype)


@triton.jit(do_not_specialize=["rows", "window", "stride_table"])
def decode_codes_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    scales_ptr,
    table_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    items_ptr,
    first_ptr,
    slots_ptr,
    arrivals_ptr,
    lens_ptr,
    rows,
    scale_log2,
    window,
    stride_q_row,
    stride_q_head,
    stride_page,
    stride_slot,
    stride_kv_head,
    stride_table,
    HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_OWN: tl.constexpr,  # not used: shared tiles are no larger
    BLOCK_N: tl.constexpr,
):
    """As `_decode_kernel`, but `k_ptr`, `v_ptr` and their strides count words."""
    H: tl.constexpr = HEADS.H
    D: tl.constexpr = HEADS.D
    GROUP: tl.constexpr = HEADS.GROUP
    BLOCK_D: tl.constexpr = HEADS.BLOCK_D
    BLOCK_G: tl.constexpr = HEADS.BLOCK_G
    kv_head = tl.program_id(0)
    share = tl.program_id(1)
    W: tl.constexpr = BLOCK_D // 4
    dtype: tl.constexpr = tl.float32 if q_ptr.dtype.element_ty == tl.float32 else tl.float16
    m = tl.arange(0, BLOCK_M)
    w = tl.arange(0, W)
    head = kv_head * GROUP
    shared_row = m // BLOCK_G
    is_head = (m % BLOCK_G)[:, None] < GROUP
    k_base = k_ptr + kv_head.to(tl.int64) * stride_kv_head
    v_base = v_ptr + kv_head.to(tl.int64) * stride_kv_head
    # Scales are [P, 2, G, S]: within a page, a head's value scales lie G heads after its key scales.
    page_scales: tl.constexpr = 2 * (H // GROUP) * PAGE_SIZE
    v_scales: tl.constexpr = (H // GROUP) * PAGE_SIZE
    scale_base = scales_ptr + kv_head * PAGE_SIZE
    follow()
    first = tl.load(first_ptr + share)
    last = tl.load(first_ptr + share + 1)
    to = Destination(out_ptr, part_ptr, lse_ptr, slots_ptr, arrivals_ptr, rows)
    for i in range(first, last):
        item = read_item(items_ptr, i)
        row, length, sharing = item.row, item.length, item.sharing
        q_row = (row + shared_row)[:, None]
        q_at = (
            q_ptr + q_row.to(tl.int64) * stride_q_row + (head + m % BLOCK_G)[:, None] * stride_q_head + 4 * w[None, :]
        )
        is_q = is_head & (shared_row < sharing)[:, None] & (w[None, :] < D // 4)
        unit = _unit(q_at, is_q, BLOCK_M)
        q_0 = _queries(q_at, is_q, unit[:, None], dtype)
        q_1 = _queries(q_at + 1, is_q, unit[:, None], dtype)
        q_2 = _queries(q_at + 2, is_q, unit[:, None], dtype)
        q_3 = _queries(q_at + 3, is_q, unit[:, None], dtype)
        if HAS_WINDOW:  # which begins at another position in each row
            context = tl.load(lens_ptr + row + shared_row, mask=shared_row < sharing, other=2147483647).to(tl.int32)
            oldest = tl.min(context, 0)
        table = table_ptr + row.to(tl.int64) * stride_table
        peak = tl.full([BLOCK_M], HIDDEN, tl.float32)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        largest = 0.0  # largest value scale so far; the accumulators are divided by it
        acc_0 = tl.zeros([BLOCK_M, W], tl.float32)
        acc_1 = tl.zeros([BLOCK_M, W], tl.float32)
        acc_2 = tl.zeros([BLOCK_M, W], tl.float32)
        acc_3 = tl.zeros([BLOCK_M, W], tl.float32)
        n = item.begin * BLOCK_N + tl.arange(0, BLOCK_N)
        page = tl.load(table + n // PAGE_SIZE, mask=n < length, other=0)
        for tile in range(item.begin, item.end):
            n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            at = page.to(tl.int64) * stride_page + (n % PAGE_SIZE) * stride_slot
            some_see = n < length
            if HAS_WINDOW:
                some_see = some_see & (n >= oldest - window)
            live = some_see[:, None]
            if W * 4 != D:
                live = live & (w[None, :] < D // 4)
            k = tl.load(k_base + at[:, None] + w[None, :], mask=live, other=0)
            v = tl.load(v_base + at[:, None] + w[None, :], mask=live, other=0)
            scale_at = scale_base + page.to(tl.int64) * page_scales + n % PAGE_SIZE
            k_scale = tl.load(scale_at, mask=some_see, other=0.0)
            v_scale = tl.load(scale_at + v_scales, mask=some_see, other=0.0)
            # Prefetch the next tile's pages while this tile is computed.
            next_n = n + BLOCK_N
            page = tl.load(table + next_n // PAGE_SIZE, mask=next_n < length, other=0)
            score = dot(q_0, tl.trans(_byte(k, 0, dtype)), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            score = dot(q_1, tl.trans(_byte(k, 1, dtype)), score)
            score = dot(q_2, tl.trans(_byte(k, 2, dtype)), score)
            score = dot(q_3, tl.trans(_byte(k, 3, dtype)), score)
            score = score * (unit * scale_log2)[:, None] * k_scale[None, :]
            visible = some_see[None, :]
            if HAS_WINDOW:
                visible = visible & (n[None, :] >= context[:, None] - window)
            score = tl.where(visible, score, HIDDEN)
            weight, keep, total, peak = weigh(score, peak, total)
            new_largest = tl.maximum(largest, tl.max(v_scale, 0))
            some = tl.where(new_largest > 0.0, new_largest, 1.0)
            weight = narrow(weight * (v_scale / some * _ROOM)[None, :], dtype)
            kept = (keep * (largest / some))[:, None]
            acc_0 = dot(weight, _byte(v, 0, dtype), acc_0 * kept)
            acc_1 = dot(weight, _byte(v, 1, dtype), acc_1 * kept)
            acc_2 = dot(weight, _byte(v, 2, dtype), acc_2 * kept)
            acc_3 = dot(weight, _byte(v, 3, dtype), acc_3 * kept)
            largest = new_largest
        sum_M = tl.sum(total, 1)
        acc = tl.join(tl.join(acc_0, acc_2), tl.join(acc_1, acc_3)).reshape(BLOCK_M, BLOCK_D)
        result = acc * (largest / (sum_M * _ROOM))[:, None]
        store_item(to, item, sharing, kv_head, result, peak + tl.log2(sum_M), HEADS, BLOCK_M)
