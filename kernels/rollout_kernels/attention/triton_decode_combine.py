"""Items of decode attention: reading an item, its running softmax, and combining the partial results of a row.

A row with one part is written directly. Otherwise each item stores its normalised result and the logarithm of its sum
as a part of each of its rows, in the slot that the plan gives. The last program of a row to arrive, or a second kernel,
combines the parts in a fixed order, so results never depend on timing.

Legend: H query heads, D head dimension, M query heads of a KV head, of all rows of an item, padded; N positions of a
tile.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from rollout_kernels.attention.triton_decode_plan import ITEM_WORDS
from rollout_kernels.common.triton_math import follow, narrow

#: Score of a hidden position. It is finite, so what sees no position of a tile stays finite.
HIDDEN = tl.constexpr(-1e30)
LOG2_E = tl.constexpr(math.log2(math.e))
_WORDS = tl.constexpr(ITEM_WORDS)


@triton.jit
def read_item(items_ptr, i):
    """Item `i`: its words, see `ITEM_WORDS`."""
    item = items_ptr + i * _WORDS
    return (
        tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3), tl.load(item + 4), tl.load(item + 5),
        tl.load(item + 6), tl.load(item + 7),
    )  # fmt: skip


def score_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """What a kernel multiplies products of queries and keys by, and the softcap; both for scores in base 2.

    With a softcap the first one is for `softcapped`.
    """
    log2_e = math.log2(math.e)
    return (scale * log2_e, 0.0) if softcap is None else (2.0 * log2_e * scale / softcap, softcap * log2_e)


@triton.jit
def softcapped(twice, softcap_log2):
    """`softcap tanh(s / softcap)` in base 2; `twice` is 2 s / softcap in base 2."""
    return softcap_log2 * (1.0 - 2.0 / (tl.exp2(twice) + 1.0))


@triton.jit
def weigh(score_MN, peak_M, total_MN):
    """One step of the running softmax: the tile's weights [M, N], the factor of earlier sums [M], new sum, new peak.

    The sum stays spread over the tile's columns until the end, so it takes one reduction an item instead of one a tile.
    """
    new_peak_M = tl.maximum(peak_M, tl.max(score_MN, 1))
    keep_M = tl.exp2(peak_M - new_peak_M)
    weight_MN = tl.exp2(score_MN - new_peak_M[:, None])
    return weight_MN, keep_M, total_MN * keep_M[:, None] + weight_MN, new_peak_M


@triton.jit
def _combine(
    part_ptr,
    lse_ptr,
    out_ptr,
    row,
    head,
    first_slot,
    count,
    H: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Combine the parts of one row for the query heads of one KV head, weighted by their sums, and write the output.

    Every thread adds up its own elements of all parts, whatever the number of parts.
    """
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    here = (g[:, None] < GROUP) & (d[None, :] < D)
    at = (head + g[:, None]) * D + d[None, :]
    peak = tl.full([BLOCK_G], HIDDEN, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(0, count, BLOCK_I):
        sums: tl.tuple = ()
        parts: tl.tuple = ()
        # Other programs wrote these while this one ran, so the loads bypass the L1 cache.
        for i in tl.static_range(BLOCK_I):
            slot = tl.cast(first_slot + start + i, tl.int64)
            live = (tl.full([BLOCK_G], i, tl.int32) + start < count) & (g < GROUP)
            sums += (tl.load(lse_ptr + slot * H + head + g, live, HIDDEN, cache_modifier=".cg"),)
            parts += (tl.load(part_ptr + slot * (H * D) + at, live[:, None] & here, 0.0, cache_modifier=".cg"),)
        new_peak = peak
        for i in tl.static_range(BLOCK_I):
            new_peak = tl.maximum(new_peak, sums[i])
        keep = tl.exp2(peak - new_peak)
        total = total * keep
        acc = acc * keep[:, None]
        for i in tl.static_range(BLOCK_I):
            weight = tl.exp2(sums[i] - new_peak)
            total += weight
            acc += weight[:, None] * parts[i]
        peak = new_peak
    out = narrow(acc / total[:, None], out_ptr.dtype.element_ty)
    tl.store(out_ptr + row.to(tl.int64) * (H * D) + at, out, mask=here)


@triton.jit
def store_item(
    out_ptr,
    part_ptr,
    lse_ptr,
    slots_ptr,
    arrivals_ptr,
    rows,
    row,
    kv_head,
    first_slot,
    count,
    sharing,
    place,
    result_MD,
    lse_M,
    H: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    FUSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Write an item's normalised result: to the output, or as a part. The last item of a row combines its parts."""
    if sharing > 1:
        _store_shared(
            out_ptr, part_ptr, lse_ptr, slots_ptr, arrivals_ptr, rows, row, kv_head, sharing, place, result_MD, lse_M,
            H, D, GROUP, FUSED, BLOCK_M, BLOCK_G, BLOCK_D, BLOCK_I,
        )  # fmt: skip
    else:
        _store_own(
            out_ptr, part_ptr, lse_ptr, arrivals_ptr, row, kv_head, first_slot, count, place, result_MD, lse_M,
            H, D, GROUP, FUSED, BLOCK_M, BLOCK_G, BLOCK_D, BLOCK_I,
        )  # fmt: skip


@triton.jit
def _store_shared(
    out_ptr,
    part_ptr,
    lse_ptr,
    slots_ptr,
    arrivals_ptr,
    rows,
    row,
    kv_head,
    sharing,
    place,
    result_MD,
    lse_M,
    H: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    FUSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """The rows of the item arrive together; their slots and numbers of parts are the plan's."""
    BLOCK_R: tl.constexpr = BLOCK_M // BLOCK_G
    head = kv_head * GROUP
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    head_M = head + m % BLOCK_G
    live = (m % BLOCK_G < GROUP) & (m // BLOCK_G < sharing)
    slot_M = (tl.load(slots_ptr + row + m // BLOCK_G, mask=live, other=0) + place).to(tl.int64)
    part_at = slot_M[:, None] * (H * D) + head_M[:, None] * D + d[None, :]
    tl.store(part_ptr + part_at, result_MD, mask=live[:, None] & (d[None, :] < D))
    tl.store(lse_ptr + slot_M * H + head_M, lse_M, mask=live)
    if FUSED:
        r = tl.arange(0, BLOCK_R)
        there = r < sharing
        arrivals = arrivals_ptr + (row + r) * (H // GROUP) + kv_head
        counts = tl.load(slots_ptr + rows + row + r, mask=there, other=0)
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals, 1, mask=there, sem="acq_rel")
        complete = there & (arrived == counts - 1)
        tl.debug_barrier()
        for k in range(sharing):
            if tl.max(((r == k) & complete).to(tl.int32), 0) == 1:
                _combine(
                    part_ptr, lse_ptr, out_ptr, row + k, head,
                    tl.load(slots_ptr + row + k), tl.load(slots_ptr + rows + row + k),
                    H, D, GROUP, BLOCK_G, BLOCK_D, BLOCK_I,
                )  # fmt: skip
        tl.store(arrivals, tl.zeros([BLOCK_R], tl.int32), mask=complete)


@triton.jit
def _store_own(
    out_ptr,
    part_ptr,
    lse_ptr,
    arrivals_ptr,
    row,
    kv_head,
    first_slot,
    count,
    place,
    result_MD,
    lse_M,
    H: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    FUSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """One row: the query heads are the first of the tile."""
    head = kv_head * GROUP
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    here = (m[:, None] < GROUP) & (d[None, :] < D)
    at = (head + m[:, None]) * D + d[None, :]
    if count == 1:
        out = narrow(result_MD, out_ptr.dtype.element_ty)
        tl.store(out_ptr + row.to(tl.int64) * (H * D) + at, out, mask=here)
    else:
        slot = tl.cast(first_slot + place, tl.int64)
        tl.store(part_ptr + slot * (H * D) + at, result_MD, mask=here)
        tl.store(lse_ptr + slot * H + head + m, lse_M, mask=m < GROUP)
        if FUSED:
            arrival = arrivals_ptr + row * (H // GROUP) + kv_head
            # All threads have written before one of them counts this part; it then sees the other programs' parts.
            tl.debug_barrier()
            arrived = tl.atomic_add(arrival, 1, sem="acq_rel")
            if arrived == count - 1:
                tl.debug_barrier()
                _combine(
                    part_ptr, lse_ptr, out_ptr, row, head, first_slot, count,
                    H, D, GROUP, BLOCK_G, BLOCK_D, BLOCK_I,
                )  # fmt: skip
                tl.store(arrival, 0)


@triton.jit(do_not_specialize=["rows"])
def combine_kernel(
    part_ptr,
    lse_ptr,
    out_ptr,
    slots_ptr,
    rows,
    H: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """One program for each row and KV head combines the row's parts, if it has several."""
    row = tl.program_id(1)
    follow()
    count = tl.load(slots_ptr + rows + row)
    if count > 1:
        head = tl.program_id(0) * GROUP
        _combine(
            part_ptr, lse_ptr, out_ptr, row, head, tl.load(slots_ptr + row), count,
            H, D, GROUP, BLOCK_G, BLOCK_D, BLOCK_I,
        )  # fmt: skip
