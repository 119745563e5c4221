"""Decode attention over caches of codes: as in `triton_decode`, plus a scale for each token and KV head.

The kernel reads four codes at a time, as one word. The bytes j of all words are the elements j, j + 4, j + 8, ... of a
head. One matrix product handles one j; queries and results are split in the same way, so no data has to be permuted.
Six instructions convert two words of e4m3 to eight f16 values, and fourteen two words of int8, which values may be.

    words of keys    [N, D / 4]     scores [N, M]    = sum over j of  byte j x q[j::4]
    words of values  [D / 4, N]     out[j::4] [., M] = byte j x weights [N, M]

Positions and dimensions are the rows of these products, and query heads their columns. A tile may have 8 columns, but
16 rows at least: with the heads in the rows, three of four rows of scores would be padding where a KV head has four
query heads. On an H200, contexts of 80 rows (6,500 positions in the mean, 8 KV heads) take 277 us a layer this way,
and 315 us with 16 heads in the rows.

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

from rollout_kernels.attention.triton_decode_combine import HIDDEN, store_item
from rollout_kernels.common.triton_fp8 import operand
from rollout_kernels.common.triton_math import INTERPRETED, dot, narrow

#: Converts two words to byte j of both, as two f16 values, for j = 0 to 3.
_BYTES = tl.constexpr(
    "{.reg .b32 a, b; .reg .b16 a0, a1, b0, b1; prmt.b32 a, $4, $5, 0x5140; prmt.b32 b, $4, $5, 0x7362; "
    "mov.b32 {a0, a1}, a; mov.b32 {b0, b1}, b; cvt.rn.f16x2.e4m3x2 $0, a0; cvt.rn.f16x2.e4m3x2 $1, a1; "
    "cvt.rn.f16x2.e4m3x2 $2, b0; cvt.rn.f16x2.e4m3x2 $3, b1;}"
)
#: The same for int8: with the sign bit turned, a code is the lowest byte of f16 numbers from 1,024 on.
_INT8_BYTES = tl.constexpr(
    "{.reg .b32 a, b, t; .reg .b32 x; mov.b32 x, 0x64806480; xor.b32 a, $4, 0x80808080; xor.b32 b, $5, 0x80808080; "
    + " ".join(
        f"prmt.b32 t, a, b, 0x{4 + j}{4 + j}{j}{j}; lop3.b32 t, t, 0x00ff00ff, 0x64006400, 0xea; sub.f16x2 ${j}, t, x;"
        for j in range(4)
    )
    + "}"
)
_ROOM = tl.constexpr(2.0**15)  # factor of weights: f16 overflows at twice that
_LEAST_UNIT = tl.constexpr(2.0**-126)  # the device's logarithms and powers flush smaller numbers to zero


@triton.jit
def _code(words, j: tl.constexpr, dtype: tl.constexpr, INT8: tl.constexpr):
    byte = ((words >> (8 * j)) & 0xFF).to(tl.uint8)
    return operand(byte.to(tl.int8, bitcast=True) if INT8 else byte, tl.float16).to(dtype)


@triton.jit
def _bytes(words, dtype: tl.constexpr, INT8: tl.constexpr = False):
    """The four bytes of each word, codes, decoded to f16 or float32."""
    if INTERPRETED:
        return (
            _code(words, 0, dtype, INT8),
            _code(words, 1, dtype, INT8),
            _code(words, 2, dtype, INT8),
            _code(words, 3, dtype, INT8),
        )
    a, b, c, d = tl.inline_asm_elementwise(
        _INT8_BYTES if INT8 else _BYTES,
        "=r,=r,=r,=r,r,r",
        [words],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )
    return a.to(dtype), b.to(dtype), c.to(dtype), d.to(dtype)


@triton.jit
def _unit(at, is_q, BLOCK_M: tl.constexpr):
    """The divisor of each head's queries: the largest power of two that is not above their largest magnitude."""
    most = tl.zeros([BLOCK_M], tl.float32)
    for j in tl.static_range(4):
        most = tl.maximum(most, tl.max(tl.abs(tl.load(at + j, mask=is_q, other=0.0).to(tl.float32)), 0))
    return tl.exp2(tl.floor(tl.log2(tl.where(most >= _LEAST_UNIT, most, 1.0))))


@triton.jit
def _queries(at, is_q, unit_1M, dtype: tl.constexpr):
    q = tl.load(at, mask=is_q, other=0.0).to(tl.float32)
    return narrow(q / unit_1M, dtype)


@triton.jit
def attend_codes(
    given, to, item, sharing, kv_head,
    HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """One item, as `_attend` of `triton_decode`, but `k_base`, `v_base` and their strides count words."""
    H: tl.constexpr = HEADS.H
    D: tl.constexpr = HEADS.D
    GROUP: tl.constexpr = HEADS.GROUP
    BLOCK_D: tl.constexpr = HEADS.BLOCK_D
    BLOCK_G: tl.constexpr = HEADS.BLOCK_G
    W: tl.constexpr = BLOCK_D // 4
    dtype: tl.constexpr = tl.float32 if given.q_ptr.dtype.element_ty == tl.float32 else tl.float16
    # Scales are [P, 2, G, S]: within a page, a head's value scales lie G heads after its key scales.
    page_scales: tl.constexpr = 2 * (H // GROUP) * PAGE_SIZE
    v_scales: tl.constexpr = (H // GROUP) * PAGE_SIZE
    row, length = item.row, item.length
    m = tl.arange(0, BLOCK_M)
    w = tl.arange(0, W)
    head = kv_head * GROUP
    shared_row = m // BLOCK_G
    is_head = (m % BLOCK_G)[None, :] < GROUP
    # Queries lie in the columns [W, M]: the products have positions, or dimensions, in their rows.
    q_row = (row + shared_row)[None, :]
    q_at = q_row.to(tl.int64) * given.stride_q_row + (head + m % BLOCK_G)[None, :] * given.stride_q_head
    q_at = given.q_ptr + q_at + 4 * w[:, None]
    is_q = is_head & (shared_row < sharing)[None, :] & (w[:, None] < D // 4)
    unit = _unit(q_at, is_q, BLOCK_M)
    q_0 = _queries(q_at, is_q, unit[None, :], dtype)
    q_1 = _queries(q_at + 1, is_q, unit[None, :], dtype)
    q_2 = _queries(q_at + 2, is_q, unit[None, :], dtype)
    q_3 = _queries(q_at + 3, is_q, unit[None, :], dtype)
    if given.window is not None:  # a window begins at another position in each row
        context = tl.load(given.lens_ptr + row + shared_row, mask=shared_row < sharing, other=2147483647).to(tl.int32)
        oldest = tl.min(context, 0)
    table = given.table_ptr + row.to(tl.int64) * given.stride_table
    peak = tl.full([BLOCK_M], HIDDEN, tl.float32)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    largest = 0.0  # largest value scale so far; the accumulators are divided by it
    acc_0 = tl.zeros([W, BLOCK_M], tl.float32)
    acc_1 = tl.zeros([W, BLOCK_M], tl.float32)
    acc_2 = tl.zeros([W, BLOCK_M], tl.float32)
    acc_3 = tl.zeros([W, BLOCK_M], tl.float32)
    n = item.begin * BLOCK_N + tl.arange(0, BLOCK_N)
    page = tl.load(table + n // PAGE_SIZE, mask=n < length, other=0)
    for tile in range(item.begin, item.end):
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        at = page.to(tl.int64) * given.stride_page + (n % PAGE_SIZE) * given.stride_slot
        some_see = n < length
        if given.window is not None:
            some_see = some_see & (n >= oldest - given.window)
        live = some_see[:, None]
        if W * 4 != D:
            live = live & (w[None, :] < D // 4)
        k = tl.load(given.k_base + at[:, None] + w[None, :], mask=live, other=0)
        live_v = some_see[None, :]
        if W * 4 != D:
            live_v = live_v & (w[:, None] < D // 4)
        v = tl.load(given.v_base + at[None, :] + w[:, None], mask=live_v, other=0)
        scale_at = given.scale_base + page.to(tl.int64) * page_scales + n % PAGE_SIZE
        k_scale = tl.load(scale_at, mask=some_see, other=0.0)
        v_scale = tl.load(scale_at + v_scales, mask=some_see, other=0.0)
        # Prefetch the next tile's pages while this tile is computed.
        next_n = n + BLOCK_N
        page = tl.load(table + next_n // PAGE_SIZE, mask=next_n < length, other=0)
        k_0, k_1, k_2, k_3 = _bytes(k, dtype)
        score = dot(k_0, q_0, tl.zeros([BLOCK_N, BLOCK_M], tl.float32))
        score = dot(k_1, q_1, score)
        score = dot(k_2, q_2, score)
        score = dot(k_3, q_3, score)
        score = score * (unit * given.scale_log2)[None, :] * k_scale[:, None]
        visible = some_see[:, None]
        if given.window is not None:
            visible = visible & (n[:, None] >= context[None, :] - given.window)
        score = tl.where(visible, score, HIDDEN)
        new_peak = tl.maximum(peak, tl.max(score, 0))
        keep = tl.exp2(peak - new_peak)
        weight = tl.exp2(score - new_peak[None, :])
        total = total * keep[None, :] + weight
        peak = new_peak
        new_largest = tl.maximum(largest, tl.max(v_scale, 0))
        some = tl.where(new_largest > 0.0, new_largest, 1.0)
        weight = narrow(weight * (v_scale / some * _ROOM)[:, None], dtype)
        kept = (keep * (largest / some))[None, :]
        v_0, v_1, v_2, v_3 = _bytes(v, dtype, INT8)
        acc_0 = dot(v_0, weight, acc_0 * kept)
        acc_1 = dot(v_1, weight, acc_1 * kept)
        acc_2 = dot(v_2, weight, acc_2 * kept)
        acc_3 = dot(v_3, weight, acc_3 * kept)
        largest = new_largest
    sum_M = tl.sum(total, 0)
    acc = tl.join(tl.join(acc_0, acc_2), tl.join(acc_1, acc_3)).permute(1, 0, 2, 3).reshape(BLOCK_M, BLOCK_D)
    result = acc * (largest / (sum_M * _ROOM))[:, None]
    store_item(to, item, sharing, kv_head, result, peak + tl.log2(sum_M), HEADS, BLOCK_M)
