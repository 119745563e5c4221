"""Items of decode attention: reading an item, its running softmax, and combining the partial results of a row.

A row with one part is written directly. Otherwise each item stores its normalised result and the logarithm of its sum
as a part of each of its rows, in the slot that the plan gives. The last program of a row to arrive, or a second kernel,
combines the parts in a fixed order, so results never depend on timing.

Legend: H query heads, D head dimension, M query heads of a KV head, of all rows of an item, padded; N positions of a
tile.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from rollout_kernels.attention.triton_decode_plan import ITEM_WORDS, DecodeWork
from rollout_kernels.common.triton_math import follow, follow_options, narrow

#: Score of a hidden position. It is finite, so what sees no position of a tile stays finite.
HIDDEN = tl.constexpr(-1e30)
LOG2_E = tl.constexpr(math.log2(math.e))
_WORDS = tl.constexpr(ITEM_WORDS)
#: Values of parts that a warp combines at once.
_WARP_VALUES = 2048


class DecodeHeads(NamedTuple):
    """The constants of the kernels that write results. In attention over latents a block of heads is a KV head."""

    H: int  # query heads
    D: int  # dimension of a head's result
    GROUP: int  # query heads of a KV head
    BLOCK_G: int  # powers of two, at least the group and the dimension
    BLOCK_D: int
    BLOCK_I: int  # parts that are combined at once
    FUSED: bool  # the last program of a row combines its parts


class Results(NamedTuple):
    """The output, and memory for parts in L slots."""

    out_BHD: torch.Tensor  # in the dtype of the queries
    part_LHD: torch.Tensor  # float32
    lse_LH: torch.Tensor  # float32
    log_sum_BH: torch.Tensor | None  # float32: the logarithms of rows' sums in base 2, if they are wanted


class ResultPointers(NamedTuple):
    """A kernel's outputs."""

    out_ptr: Any
    part_ptr: Any
    lse_ptr: Any
    log_sum_ptr: Any
    slots_ptr: Any
    arrivals_ptr: Any
    rows: Any


class Item(NamedTuple):
    """The words of an item in a kernel, see `ITEM_WORDS`."""

    row: Any
    begin: Any
    end: Any
    first_slot: Any
    count: Any
    length: Any
    sharing: Any
    part: Any


@triton.jit
def read_item(items_ptr, i):
    """Item `i`."""
    at = items_ptr + i * _WORDS
    return Item(
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5),
        tl.load(at + 6), tl.load(at + 7),
    )  # fmt: skip


def score_factors(scale: float, softcap: float | None) -> tuple[float, float | None]:
    """The factor of products of queries and keys, and the softcap; both for scores in base 2.

    With a softcap the first one is for `softcapped`.
    """
    log2_e = math.log2(math.e)
    return (scale * log2_e, None) if softcap is None else (2.0 * log2_e * scale / softcap, softcap * log2_e)


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
def _combine(out_ptr, part_ptr, lse_ptr, log_sum_ptr, row, head, first_slot, count, HEADS: tl.constexpr):
    """Combine the parts of one row for the query heads of one KV head, weighted by their sums, and write the output.

    Every thread adds up its own elements of all parts, whatever the number of parts.
    """
    H: tl.constexpr = HEADS.H
    D: tl.constexpr = HEADS.D
    GROUP: tl.constexpr = HEADS.GROUP
    BLOCK_G: tl.constexpr = HEADS.BLOCK_G
    BLOCK_D: tl.constexpr = HEADS.BLOCK_D
    BLOCK_I: tl.constexpr = HEADS.BLOCK_I
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
    if log_sum_ptr is not None:
        tl.store(log_sum_ptr + row * H + head + g, peak + tl.log2(total), mask=g < GROUP)


@triton.jit
def store_item(to, item, sharing, kv_head, result_MD, lse_M, HEADS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Write an item's normalised result: to the output, or as a part. The last item of a row combines its parts.

    `to` is a `ResultPointers`. `sharing` is the item's, or 1 where the caller knows this when the kernel is compiled.
    """
    if sharing > 1:
        _store_shared(to, item, sharing, kv_head, result_MD, lse_M, HEADS, BLOCK_M)
    else:
        _store_own(to, item, kv_head, result_MD, lse_M, HEADS, BLOCK_M)


@triton.jit
def _store_shared(to, item, sharing, kv_head, result_MD, lse_M, HEADS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The rows of the item arrive together; their slots and numbers of parts are the plan's."""
    H: tl.constexpr = HEADS.H
    D: tl.constexpr = HEADS.D
    GROUP: tl.constexpr = HEADS.GROUP
    BLOCK_G: tl.constexpr = HEADS.BLOCK_G
    BLOCK_R: tl.constexpr = BLOCK_M // BLOCK_G
    row = item.row
    head = kv_head * GROUP
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, HEADS.BLOCK_D)
    head_M = head + m % BLOCK_G
    live = (m % BLOCK_G < GROUP) & (m // BLOCK_G < sharing)
    slot_M = (tl.load(to.slots_ptr + row + m // BLOCK_G, mask=live, other=0) + item.part).to(tl.int64)
    part_at = slot_M[:, None] * (H * D) + head_M[:, None] * D + d[None, :]
    tl.store(to.part_ptr + part_at, result_MD, mask=live[:, None] & (d[None, :] < D))
    tl.store(to.lse_ptr + slot_M * H + head_M, lse_M, mask=live)
    if HEADS.FUSED:
        r = tl.arange(0, BLOCK_R)
        there = r < sharing
        arrivals = to.arrivals_ptr + (row + r) * (H // GROUP) + kv_head
        counts = tl.load(to.slots_ptr + to.rows + row + r, mask=there, other=0)
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals, 1, mask=there, sem="acq_rel")
        complete = there & (arrived == counts - 1)
        tl.debug_barrier()
        for k in range(sharing):
            if tl.max(((r == k) & complete).to(tl.int32), 0) == 1:
                first_slot, count = tl.load(to.slots_ptr + row + k), tl.load(to.slots_ptr + to.rows + row + k)
                _combine(to.out_ptr, to.part_ptr, to.lse_ptr, to.log_sum_ptr, row + k, head, first_slot, count, HEADS)
        tl.store(arrivals, tl.zeros([BLOCK_R], tl.int32), mask=complete)


@triton.jit
def _store_own(to, item, kv_head, result_MD, lse_M, HEADS: tl.constexpr, BLOCK_M: tl.constexpr):
    """One row: the query heads are the first of the tile."""
    H: tl.constexpr = HEADS.H
    D: tl.constexpr = HEADS.D
    GROUP: tl.constexpr = HEADS.GROUP
    row = item.row
    head = kv_head * GROUP
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, HEADS.BLOCK_D)
    here = (m[:, None] < GROUP) & (d[None, :] < D)
    at = (head + m[:, None]) * D + d[None, :]
    if item.count == 1:
        out = narrow(result_MD, to.out_ptr.dtype.element_ty)
        tl.store(to.out_ptr + row.to(tl.int64) * (H * D) + at, out, mask=here)
        if to.log_sum_ptr is not None:
            tl.store(to.log_sum_ptr + row * H + head + m, lse_M, mask=m < GROUP)
    else:
        slot = tl.cast(item.first_slot + item.part, tl.int64)
        tl.store(to.part_ptr + slot * (H * D) + at, result_MD, mask=here)
        tl.store(to.lse_ptr + slot * H + head + m, lse_M, mask=m < GROUP)
        if HEADS.FUSED:
            arrival = to.arrivals_ptr + row * (H // GROUP) + kv_head
            # All threads have written before one thread counts this part; the counting thread then sees the other
            # programs' parts.
            tl.debug_barrier()
            arrived = tl.atomic_add(arrival, 1, sem="acq_rel")
            if arrived == item.count - 1:
                tl.debug_barrier()
                _combine(
                    to.out_ptr, to.part_ptr, to.lse_ptr, to.log_sum_ptr, row, head, item.first_slot, item.count, HEADS
                )
                tl.store(arrival, 0)


@triton.jit(do_not_specialize=["rows"])
def combine_kernel(part_ptr, lse_ptr, log_sum_ptr, out_ptr, slots_ptr, rows, HEADS: tl.constexpr):
    """One program for each row and `HEADS.GROUP` query heads combines the row's parts, if it has several."""
    row = tl.program_id(1)
    follow()
    count = tl.load(slots_ptr + rows + row)
    if count > 1:
        head = tl.program_id(0) * HEADS.GROUP
        _combine(out_ptr, part_ptr, lse_ptr, log_sum_ptr, row, head, tl.load(slots_ptr + row), count, HEADS)


def empty_results(
    q_BHD: torch.Tensor, heads: DecodeHeads, work: DecodeWork, log_sum_BH: torch.Tensor | None = None
) -> Results:
    """Memory for the results of these queries; that for `log_sum_BH` is given."""
    device = q_BHD.device
    return Results(
        torch.empty(len(q_BHD), heads.H, heads.D, dtype=q_BHD.dtype, device=device),
        torch.empty(work.slots, heads.H, heads.D, dtype=torch.float32, device=device),
        torch.empty(work.slots, heads.H, dtype=torch.float32, device=device),
        log_sum_BH,
    )


def work_arguments(results: Results, work: DecodeWork) -> tuple[torch.Tensor | None, ...]:
    """The decode kernels' arguments for results and plan."""
    return *results, work.items, work.first, work.slots_2B, work.arrivals_BG


def combine_parts(results: Results, heads: DecodeHeads, work: DecodeWork) -> torch.Tensor:
    """The output, after a launch that combines the parts of rows, unless the decode kernel did so."""
    out_BHD, part_LHD, lse_LH, log_sum_BH = results
    if not heads.FUSED:
        rows = len(out_BHD)
        num_warps = 4
        if work.config.heads_combined(heads.GROUP, rows) == 1:
            heads = heads._replace(GROUP=1, BLOCK_G=1, BLOCK_I=max(1, min(16, _WARP_VALUES // heads.BLOCK_D)))
            num_warps = 1
        combine_kernel[(heads.H // heads.GROUP, rows)](
            part_LHD, lse_LH, log_sum_BH, out_BHD, work.slots_2B, rows,
            HEADS=heads, num_warps=num_warps, **follow_options(out_BHD.device),
        )  # fmt: skip
    return out_BHD
