"""The blocks of queries of a prefill step, the one with most tiles of keys first: the work list of `gluon_prefill`.

A block is `BLOCK` queries of a chunk. Programs take blocks in turns, so blocks of chunks of any lengths are spread
evenly. Equal blocks keep the order of their chunks.

Legend: C chunks, B blocks, W words of an item, N and M blocks that a program looks at.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from rollout_kernels.attention.triton_gather_kv import MOST_CHUNKS, TILE

#: Queries of a block.
BLOCK = 128
#: Words of an item: first token, tokens, position of the first, first row of the context, first tile, end of the tiles.
ITEM_WORDS = 8


def block_count(queries: Sequence[int]) -> int:
    """The number of blocks, given the number of queries of each chunk."""
    return sum(-(-count // BLOCK) for count in queries)


@triton.jit
def _describe(
    block_N,
    starts_ptr, lens_ptr,
    chunks, window,
    BLOCK: tl.constexpr, TILE: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The words of some blocks, counted chunk by chunk; anything for blocks that do not exist."""
    at = tl.arange(0, BLOCK_C)
    live = at < chunks
    queries_C = (tl.load(starts_ptr + at + 1, mask=live, other=0) - tl.load(starts_ptr + at, mask=live, other=0)).to(
        tl.int32
    )
    blocks_C = (queries_C + BLOCK - 1) // BLOCK
    end_C = tl.cumsum(blocks_C, 0)
    rows_C = (tl.load(lens_ptr + at, mask=live, other=0).to(tl.int32) + TILE - 1) // TILE * TILE
    chunk_N = tl.minimum(tl.sum((end_C[None, :] <= block_N[:, None]).to(tl.int32), 1), chunks - 1)
    before_NC = at[None, :] < chunk_N[:, None]
    row_N = tl.sum(tl.where(before_NC, rows_C[None, :], 0), 1)
    first_N = (block_N - tl.sum(tl.where(before_NC, blocks_C[None, :], 0), 1)) * BLOCK
    start_N = tl.load(starts_ptr + chunk_N).to(tl.int32)
    queries_N = tl.load(starts_ptr + chunk_N + 1).to(tl.int32) - start_N
    context_N = tl.load(lens_ptr + chunk_N).to(tl.int32)
    position_N = context_N - queries_N + first_N
    begin_N = tl.zeros_like(position_N)
    if window is not None:
        begin_N = tl.maximum(position_N - window + 1, 0) // TILE
    end_N = (tl.minimum(position_N + BLOCK, context_N) + TILE - 1) // TILE
    return start_N + first_N, tl.minimum(queries_N - first_N, BLOCK), position_N, row_N, begin_N, end_N


@triton.jit(do_not_specialize=["chunks", "blocks", "window"])
def _items_kernel(
    starts_ptr, lens_ptr, items_ptr,
    chunks, blocks, window,
    BLOCK: tl.constexpr, TILE: tl.constexpr, BLOCK_C: tl.constexpr, WORDS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    mine_N = tl.program_id(0) * N + tl.arange(0, N)
    token_N, count_N, position_N, row_N, begin_N, end_N = _describe(
        mine_N, starts_ptr, lens_ptr, chunks, window, BLOCK, TILE, BLOCK_C
    )
    tiles_N = end_N - begin_N
    place_N = tl.zeros([N], tl.int32)
    for first in range(0, blocks, N):
        other_M = first + tl.arange(0, N)
        _token, _count, _position, _row, begin_M, end_M = _describe(
            other_M, starts_ptr, lens_ptr, chunks, window, BLOCK, TILE, BLOCK_C
        )
        tiles_M = tl.where(other_M < blocks, end_M - begin_M, -1)
        longer_NM = tiles_M[None, :] > tiles_N[:, None]
        equal_NM = (tiles_M[None, :] == tiles_N[:, None]) & (other_M[None, :] < mine_N[:, None])
        place_N += tl.sum((longer_NM | equal_NM).to(tl.int32), 1)
    to = items_ptr + place_N * WORDS
    here = mine_N < blocks
    tl.store(to, token_N, mask=here)
    tl.store(to + 1, count_N, mask=here)
    tl.store(to + 2, position_N, mask=here)
    tl.store(to + 3, row_N, mask=here)
    tl.store(to + 4, begin_N, mask=here)
    tl.store(to + 5, end_N, mask=here)


def prefill_items(
    query_starts_C1: torch.Tensor, context_lens_C: torch.Tensor, blocks: int, window: int | None
) -> torch.Tensor:
    """The work list, int32 [B, W]; the last two words are undefined.

    Args:
        query_starts_C1: int32 or int64, C + 1 numbers, contiguous.
        context_lens_C: int32 or int64, contiguous, at most `MOST_CHUNKS` of them.
        blocks: B, from `block_count`.
        window: how many positions a query sees, or None for all.
    """
    chunks = context_lens_C.shape[0]
    assert chunks <= MOST_CHUNKS and query_starts_C1.shape == (chunks + 1,)
    items_BW = torch.empty(blocks, ITEM_WORDS, dtype=torch.int32, device=context_lens_C.device)
    block_n = 32
    _items_kernel[(triton.cdiv(blocks, block_n),)](
        query_starts_C1, context_lens_C, items_BW, chunks, blocks, window,
        BLOCK=BLOCK, TILE=TILE, BLOCK_C=MOST_CHUNKS, WORDS=ITEM_WORDS, N=block_n, num_warps=4,
    )  # fmt: skip
    return items_BW
