"""How the contexts of a decode step are split over the programs of the grid, computed on the device.

The visible contexts of all rows, in tiles of BLOCK_N positions, are concatenated and cut into equal shares, one for
each program. So one row of 32K and 128 rows of 1K use the chip equally well, and so does any mix of lengths:

    rows     |------------- 0 -------------|---- 1 ----|--- 2 ---|
    shares   |------ 0 ------|------ 1 ------|------ 2 ------|-3-|
    items    |------ 0 ------|----- 1 -----|2|--- 3 ---|--4--|-5-|

An item is the intersection of a share and a row. The items of a row are consecutive, and so are those of a share. If a
row has one item, the item writes the output. If it has several, one program for each KV head combines their results in
order. On an H200, combining takes about 0.03 us for each item and query head, and an item itself 0.02 us a position.
So sqrt(1.5 * query heads of a KV head * context) positions an item are best, if there are enough programs.

The plan depends only on the lengths, so all layers with the same window share it. In deterministic mode, where results
must not depend on the other rows of a step, rows are cut every `chunk` positions and each item is a share.

Legend: B rows, G KV heads, I items, W words of an item, S1 shares + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rollout_kernels.common.triton_math import follow, follow_options

# Words of an item: row, first tile, end of tiles, first item of the row, items of the row, context length, 2 unused.
ITEM_WORDS = 8


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Launch configuration of the decode kernel."""

    block_n: int = 64  # positions of a tile
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 2
    min_tiles: int = 0  # of a share; 0: the best number for the rows' mean length
    fused: bool = True  # True: the last program of a row combines its parts; False: a second kernel does
    max_registers: int | None = None  # of a thread; with fewer, more programs fit on a multiprocessor
    chunk: int | None = None  # positions of an item, instead of equal shares


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """A plan in device memory. The shapes of its tensors depend only on host integers."""

    items: torch.Tensor  # int32 [I, W]; I is an upper bound on the number of items
    first: torch.Tensor  # int32 [S1]: the first item of each share, then the number of items
    arrivals_BG: torch.Tensor  # int32: finished parts of a row; 0 between two launches
    window: int | None
    config: DecodeConfig


@triton.jit(do_not_specialize=["rows", "shares", "window", "min_tiles", "chunk_tiles"])
def _plan_kernel(
    lens_ptr,
    items_ptr,
    first_ptr,
    arrivals_ptr,
    rows,
    shares,
    window,
    min_tiles,
    chunk_tiles,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
):
    b = tl.arange(0, BLOCK_B)
    is_row = b < rows
    follow()
    length = tl.load(lens_ptr + b, mask=is_row, other=0).to(tl.int32)
    begin = tl.zeros([BLOCK_B], tl.int32)
    if HAS_WINDOW:
        begin = tl.maximum(length - window, 0) // BLOCK_N
    # A row without context gets one fully hidden tile, so that its output is written.
    end = tl.maximum((length + BLOCK_N - 1) // BLOCK_N, 1)
    tiles = tl.where(is_row, end - begin, 0)
    if CHUNKED:
        # Chunks start at multiples of their size, even if the window hides a part of the first.
        share_tiles = chunk_tiles
        left = begin
    else:
        total = tl.sum(tiles, 0)
        # The mean over tiles (not rows) of the length of the tile's row: the longest rows dominate the time.
        mean = tl.sum(tiles.to(tl.float32) * tiles, 0) / tl.maximum(total, 1)
        best = (tl.sqrt(1.5 * GROUP * mean / BLOCK_N) + 0.5).to(tl.int32)
        least = tl.where(min_tiles > 0, min_tiles, tl.maximum(best, 1))
        share_tiles = tl.maximum((total + shares - 1) // shares, least)
        left = tl.cumsum(tiles, 0) - tiles
    first_share = left // share_tiles
    count = tl.where(is_row, (left + tiles + share_tiles - 1) // share_tiles - first_share, 0)
    first_item = tl.cumsum(count, 0) - count
    row, row_begin, row_left, row_tiles = b[:, None], begin[:, None], left[:, None], tiles[:, None]
    row_count, row_first, row_share = count[:, None], first_item[:, None], first_share[:, None]
    for start in range(0, tl.max(count, 0), BLOCK_I):
        i = start + tl.arange(0, BLOCK_I)[None, :]
        is_item = i < row_count
        share_left = (row_share + i) * share_tiles
        item_left = tl.maximum(share_left, row_left)
        item_right = tl.minimum(share_left + share_tiles, row_left + row_tiles)
        item = items_ptr + (row_first + i) * 8
        same = tl.zeros([BLOCK_B, BLOCK_I], tl.int32)
        tl.store(item, row + same, mask=is_item)
        tl.store(item + 1, row_begin + item_left - row_left, mask=is_item)
        tl.store(item + 2, row_begin + item_right - row_left, mask=is_item)
        tl.store(item + 3, row_first + same, mask=is_item)
        tl.store(item + 4, row_count + same, mask=is_item)
        tl.store(item + 5, length[:, None] + same, mask=is_item)
        if CHUNKED:
            tl.store(first_ptr + row_first + i, row_first + i, mask=is_item)
        else:
            tl.store(first_ptr + row_share + i, row_first + i, mask=is_item & (item_left == share_left))
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
    """
    assert context_lens_B.is_contiguous()
    rows, device = context_lens_B.shape[0], context_lens_B.device
    if config.chunk is None:
        if multiprocessors is None:
            multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        shares = max(1, multiprocessors * config.programs_per_sm // kv_heads)
        most_items = shares + rows
    else:
        assert max_context is not None and config.chunk % config.block_n == 0
        span = max_context if window is None else min(window, max_context)
        # A window that starts inside a chunk can touch one chunk more than its length fills.
        most_items = shares = rows * (triton.cdiv(max(span, 1), config.chunk) + (window is not None))
    items = torch.empty(most_items, ITEM_WORDS, dtype=torch.int32, device=device)
    first = torch.empty(shares + 1, dtype=torch.int32, device=device)
    arrivals_BG = torch.empty(rows, kv_heads, dtype=torch.int32, device=device)
    block_b = max(32, triton.next_power_of_2(rows))
    _plan_kernel[(1,)](
        context_lens_B,
        items,
        first,
        arrivals_BG,
        rows,
        shares,
        window or 0,
        config.min_tiles,
        (config.chunk or 0) // config.block_n,
        GROUP=group,
        KV_HEADS=kv_heads,
        BLOCK_N=config.block_n,
        BLOCK_B=block_b,
        BLOCK_I=min(max(1024 // block_b, 1), 16),
        BLOCK_S=256,
        HAS_WINDOW=window is not None,
        CHUNKED=config.chunk is not None,
        num_warps=4,
        **follow_options(device),
    )
    return DecodeWork(items, first, arrivals_BG, window, config)
