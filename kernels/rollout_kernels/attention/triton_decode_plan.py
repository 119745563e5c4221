"""Splits the contexts of a decode step over the programs of the grid, on the device.

The visible contexts of all rows, in tiles of BLOCK_N positions, are concatenated and cut into equal shares, one for
each program. So one row of 32K and 128 rows of 1K use the chip equally well, and so does any mix of lengths:

    rows     |------------- 0 -------------|---- 1 ----|--- 2 ---|
    shares   |------ 0 ------|------ 1 ------|------ 2 ------|-3-|
    items    |------ 0 ------|----- 1 -----|2|--- 3 ---|--4--|-5-|

An item is the intersection of a share and a row. The items of a row are consecutive, and so are a share's items. If a
row has one item, the item writes the output. If it has several, programs combine their results in order, each for some
query heads. On an H200, combining takes about 0.03 us for each item and query head, and an item itself 0.02 us a
position. So sqrt(1.5 * query heads of a program * context) positions an item are best, if there are enough programs.

The plan depends only on the lengths, so all layers with the same window share it. In deterministic mode, where results
must not depend on the other rows of a step, rows are cut every `chunk` positions and each item is a share.

Pages that several rows have in common are read once for all of them. Then what is concatenated are not rows but
segments: a run of positions that some neighbouring rows share, or what a row has alone.

    rows 0 to 2   |- shared by 0, 1, 2 -|- 0 alone -|
                                        |- 1 alone -----|
                                        |- 2 alone --|

What rows have alone are the first segments, the shared ones follow. An item gives each of its rows a part. The parts of
a row lie in its slots, in the order of its positions.

An item takes some time however short it is. A row's own part after a shared segment may be a single tile, and a
share of many such items would take several times as long as the others. So for the cut such a segment has
`_SHORT_TILES` more tiles before its first: shares that begin there begin with the first tile.

Legend: B rows, G KV heads, I items, W words of an item, S1 shares + 1, S segments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rollout_kernels.attention.segments import LEVELS, SEGMENT_WORDS, rows_at_once
from rollout_kernels.common.device import multiprocessors as device_multiprocessors
from rollout_kernels.common.triton_math import follow, follow_options

#: Words of an item: first row, first tile, end of tiles, first slot of the first row, parts of the first row, end of
#: the visible positions, rows, number of the part that each of its rows gets.
ITEM_WORDS = 8
_ITEM = tl.constexpr(ITEM_WORDS)
_SEGMENT = tl.constexpr(SEGMENT_WORDS)
_LEVELS = tl.constexpr(LEVELS)
#: The cost of an item without its tiles, in tiles: about 4 us on an H100, where a tile takes 2.7 us of the bandwidth.
_SHORT_TILES = tl.constexpr(2)
#: Up to this many rows, a second kernel that combines parts has a program for each query head, above for each KV head.
ROWS_BY_HEAD = 32


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Launch configuration of the decode kernel."""

    block_n: int = 64  # positions of a tile
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 2
    min_tiles: int = 0  # tiles of a share; 0: the best number for the rows' mean length
    fused: bool = True  # True: the last program of a row combines its parts; False: a second kernel does
    max_registers: int | None = None  # registers of a thread; with fewer, more programs fit on a multiprocessor
    chunk: int | None = None  # positions of an item, instead of equal shares
    block_m: int = 16  # query heads of a tile: a KV head's, of as many rows as fit
    block_own: int | None = None  # block of a row alone; None: the same, and then its bits depend on no other row
    plan_rows: int = 32  # rows that the kernel of the plan has room for; more take another one, compiled when needed

    def rows_at_once(self, group: int) -> int:
        """Rows that an item may have, if a KV head has `group` query heads."""
        return rows_at_once(group, self.block_m)

    def heads_combined(self, group: int, rows: int) -> int:
        """Query heads of a row whose parts a program combines, if a KV head has `group` query heads."""
        return group if self.fused or rows > ROWS_BY_HEAD else 1


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """A plan in device memory. The shapes of its tensors depend only on host integers."""

    items: torch.Tensor  # int32 [I, W]; I is an upper bound on the number of items
    first: torch.Tensor  # int32 [S1]: the first item of each share, then the number of items
    slots_2B: torch.Tensor  # int32: the first slot of each row, and its number of parts
    slots: int  # upper bound on the parts of all rows
    arrivals_BG: torch.Tensor  # int32: finished parts of a row; 0 between two launches
    window: int | None
    config: DecodeConfig


@triton.jit(do_not_specialize=["rows", "shares", "window", "min_tiles", "chunk_tiles"])
def _plan_kernel(
    lens_ptr, segments_ptr, counts_ptr, items_ptr, first_ptr, slots_ptr, arrivals_ptr,
    rows, shares, window, min_tiles, chunk_tiles,
    COMBINED: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_S: tl.constexpr, CHUNKED: tl.constexpr, ROWS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    b = tl.arange(0, BLOCK_B)
    is_row = b < rows
    follow()
    length = tl.load(lens_ptr + b, mask=is_row, other=0).to(tl.int32)
    first_row = b
    sharing = tl.where(is_row, 1, 0)
    oldest = length  # shortest context of its rows
    extra = tl.zeros([BLOCK_B], tl.int32)  # tiles that a segment counts more than it has
    begin = tl.zeros([BLOCK_B], tl.int32)
    if segments_ptr is not None:
        segment = segments_ptr + b * _SEGMENT
        is_shared = (b >= rows) & (b < 2 * rows)
        is_segment = b < 2 * rows
        first_row = tl.where(is_row, b, tl.load(segment, mask=is_shared, other=0))
        sharing = tl.where(is_row, 1, tl.load(segment + 1, mask=is_shared, other=0))
        is_shared = is_shared & (sharing > 0)
        end_at = tl.load(segment + 3, mask=is_shared, other=0)
        before = tl.load(segment + 4, mask=is_segment, other=0) - 1
        # Segments begin and end with a tile, in deterministic mode with a chunk: what is cut off is the next one's.
        grain = BLOCK_N
        if CHUNKED:
            grain = BLOCK_N * chunk_tiles
        begin = tl.load(segment + 2, mask=is_segment, other=0) // grain * (grain // BLOCK_N)
        length = tl.where(is_row, length, end_at // grain * grain)
        if window is not None:
            for r in tl.static_range(ROWS_AT_ONCE):
                there = is_shared & (r < sharing)
                other = tl.load(lens_ptr + first_row + r, mask=there, other=2147483647).to(tl.int32)
                oldest = tl.where(is_row, oldest, other if r == 0 else tl.minimum(oldest, other))
    if window is not None:
        begin = tl.maximum(begin, tl.maximum(oldest - window, 0) // BLOCK_N)
    # A row without context gets one fully hidden tile, so that its output is written.
    end = tl.where(is_row, tl.maximum((length + BLOCK_N - 1) // BLOCK_N, 1), length // BLOCK_N)
    tiles = tl.where(sharing > 0, tl.maximum(end - begin, 0), 0)
    if segments_ptr is not None:
        extra = tl.where(is_row & (before >= 0) & (tiles > 0), _SHORT_TILES, 0)
    if CHUNKED:
        # Chunks start at multiples of their size, even if the window hides a part of the first.
        share_tiles = chunk_tiles
        left = begin
    else:
        total = tl.sum(tiles + extra, 0)
        # The mean over tiles (not rows) of the length of the tile's row: the longest rows dominate the time.
        mean = tl.sum(tiles.to(tl.float32) * tiles, 0) / tl.maximum(tl.sum(tiles, 0), 1)
        best = (tl.sqrt(1.5 * COMBINED * mean / BLOCK_N) + 0.5).to(tl.int32)
        least = tl.where(min_tiles > 0, min_tiles, tl.maximum(best, 1))
        least = tl.maximum(least, tl.max(extra, 0) + 1)  # a share that begins with these has tiles, too
        share_tiles = tl.maximum((total + shares - 1) // shares, least)
        left = tl.cumsum(tiles + extra, 0) - tiles
    first_share = left // share_tiles
    count = tl.where(tiles > 0, (left + tiles + share_tiles - 1) // share_tiles - first_share, 0)
    first_item = tl.cumsum(count, 0) - count
    # The number of parts that its rows have before a segment.
    earlier_parts = tl.zeros([BLOCK_B], tl.int32)
    if segments_ptr is not None:
        tl.store(counts_ptr + b, count, mask=is_segment)
        tl.debug_barrier()
        for _ in tl.static_range(_LEVELS):
            there = is_segment & (before >= 0)
            earlier_parts += tl.load(counts_ptr + before, mask=there, other=0)
            before = tl.load(segments_ptr + before * _SEGMENT + 4, mask=there, other=0) - 1
    parts = tl.where(is_row, earlier_parts + count, 0)
    first_slot = tl.cumsum(parts, 0) - parts
    tl.store(slots_ptr + b, first_slot, mask=is_row)
    tl.store(slots_ptr + rows + b, parts, mask=is_row)
    row, row_begin, row_left, row_tiles = first_row[:, None], begin[:, None], left[:, None], tiles[:, None]
    row_count, row_first, row_share = count[:, None], first_item[:, None], first_share[:, None]
    row_extra = extra[:, None]
    for start in range(0, tl.max(count, 0), BLOCK_I):
        i = start + tl.arange(0, BLOCK_I)[None, :]
        is_item = i < row_count
        share_left = (row_share + i) * share_tiles
        item_left = tl.maximum(share_left, row_left)
        item_right = tl.minimum(share_left + share_tiles, row_left + row_tiles)
        item = items_ptr + (row_first + i) * _ITEM
        same = tl.zeros([BLOCK_B, BLOCK_I], tl.int32)
        tl.store(item, row + same, mask=is_item)
        tl.store(item + 1, row_begin + item_left - row_left, mask=is_item)
        tl.store(item + 2, row_begin + item_right - row_left, mask=is_item)
        tl.store(item + 3, first_slot[:, None] + same, mask=is_item)
        tl.store(item + 4, parts[:, None] + same, mask=is_item)
        tl.store(item + 5, length[:, None] + same, mask=is_item)
        tl.store(item + 6, sharing[:, None] + same, mask=is_item)
        tl.store(item + 7, earlier_parts[:, None] + i, mask=is_item)
        if CHUNKED:
            tl.store(first_ptr + row_first + i, row_first + i, mask=is_item)
        else:
            # The first item of a share is the one at its begin, or at most `extra` tiles after it.
            is_first = item_left <= share_left + tl.where(i == 0, row_extra, 0)
            tl.store(first_ptr + row_share + i, row_first + i, mask=is_item & is_first)
    items = tl.sum(count, 0)
    if CHUNKED:
        used = items
    else:
        used = (total + share_tiles - 1) // share_tiles
    for start in range(0, shares + 1, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        tl.store(first_ptr + s, items, mask=(s >= used) & (s <= shares))
    for g in range(KV_HEADS):
        tl.store(arrivals_ptr + b * KV_HEADS + g, tl.zeros([BLOCK_B], tl.int32), mask=is_row)


def plan_decode_work(
    context_lens_B: torch.Tensor,
    kv_heads: int,
    *,
    group: int,
    window: int | None,
    config: DecodeConfig,
    max_context: int | None = None,
    multiprocessors: int | None = None,
    segments_SW: torch.Tensor | None = None,
) -> DecodeWork:
    """Split a decode step over the programs of the grid, in one launch; the host reads nothing.

    Args:
        context_lens_B: int32 or int64, contiguous; a length may be 0.
        kv_heads: G.
        group: query heads of a KV head.
        window: how many positions a query sees, or None for all.
        config: configuration of the decode kernel.
        max_context: upper bound on the lengths; required if `config.chunk` is set.
        multiprocessors: of the device; queried if None.
        segments_SW: int32, contiguous, S = 2 B: what rows share, as `SEGMENT_WORDS` says; a shared segment without rows
            is not used. The rows of one have the same pages there, and there are `config.rows_at_once` of them at
            most. None: rows share nothing.
    """
    assert context_lens_B.is_contiguous()
    rows, device = context_lens_B.shape[0], context_lens_B.device
    shared, together = segments_SW is not None, config.rows_at_once(group)
    if config.chunk is None:
        shares = max(1, (multiprocessors or device_multiprocessors(device)) * config.programs_per_sm // kv_heads)
        most_items = shares + rows * (1 + shared)
        slots = (shares * together + rows * (1 + LEVELS)) if shared else most_items
    else:
        assert max_context is not None and config.chunk % config.block_n == 0
        span = max_context if window is None else min(window, max_context)
        # A window that starts inside a chunk can touch one chunk more than its length fills.
        slots = most_items = shares = rows * (triton.cdiv(max(span, 1), config.chunk) + (window is not None))
    items = torch.empty(most_items, ITEM_WORDS, dtype=torch.int32, device=device)
    first = torch.empty(shares + 1, dtype=torch.int32, device=device)
    slots_2B = torch.empty(2, rows, dtype=torch.int32, device=device)
    arrivals_BG = torch.empty(rows, kv_heads, dtype=torch.int32, device=device)
    counts = first
    if segments_SW is not None:
        assert segments_SW.shape == (2 * rows, SEGMENT_WORDS) and segments_SW.is_contiguous()
        counts = torch.empty(2 * rows, dtype=torch.int32, device=device)
    block_b = max(config.plan_rows, triton.next_power_of_2(rows * (1 + shared)))
    _plan_kernel[(1,)](
        context_lens_B, segments_SW, counts, items, first, slots_2B, arrivals_BG,
        rows, shares, window, config.min_tiles, (config.chunk or 0) // config.block_n,
        COMBINED=config.heads_combined(group, rows), KV_HEADS=kv_heads, BLOCK_N=config.block_n, BLOCK_B=block_b,
        BLOCK_I=min(max(1024 // block_b, 1), 16), BLOCK_S=256, CHUNKED=config.chunk is not None, ROWS_AT_ONCE=together,
        num_warps=4, **follow_options(device),
    )  # fmt: skip
    return DecodeWork(items, first, slots_2B, slots, arrivals_BG, window, config)
