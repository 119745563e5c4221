"""Sort the pairs of token and expert by expert, and cut them into tiles, in one launch.

Each expert has one program. Every program counts all pairs by expert, so no program waits for another. Then it writes
the pairs of its expert, in order, and their tiles. Only the device knows the number of tiles. So a consumer launches a
program for every possible tile, and tiles past the end have no rows.

Legend: T tokens, E experts, K experts a token, P = T K pairs, L tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rollout_kernels.common.triton_math import follow, follow_options

#: Pairs that a program of `group_pairs` reads at once: at least and at most.
_LEAST_CHUNK, _MOST_CHUNK = 128, 4096


@dataclass(frozen=True, slots=True)
class Groups:
    """Pairs by expert, and the tiles that cover them.

    `pairs_P` (int32) holds pair numbers t K + k, sorted by expert, then by number. A row of `tiles_L3` (int32) holds an
    expert, the tile's first index in `pairs_P`, and its number of pairs (1 to `tile_rows`; 0: no tile).
    """

    pairs_P: torch.Tensor
    tiles_L3: torch.Tensor
    tile_rows: int


def most_tiles(pairs: int, experts: int, tile_rows: int) -> int:
    """The largest number of tiles that `pairs` pairs can need, for any routing."""
    return min(pairs, min(experts, pairs) + pairs // tile_rows)


def pairs_at_once(pairs: int) -> int:
    """The pairs that a program of `group_pairs` reads at once; another number is another compiled kernel."""
    return min(_MOST_CHUNK, max(_LEAST_CHUNK, triton.next_power_of_2(pairs)))


def last_pairs() -> list[int]:
    """Every number of pairs after which `group_pairs` becomes another compiled kernel, ascending."""
    return [1 << bit for bit in range(_LEAST_CHUNK.bit_length() - 1, _MOST_CHUNK.bit_length() - 1)]


@triton.jit(do_not_specialize=["pairs", "limit"])
def _group_kernel(
    experts_ptr, pairs_ptr, tiles_ptr,
    pairs, limit,
    E: tl.constexpr, E2: tl.constexpr, TILE_ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    mine = tl.program_id(0)
    offset = tl.arange(0, CHUNK)
    bins = tl.arange(0, E2)
    follow()
    counts = tl.zeros([E2], tl.int32)
    for start in range(0, pairs, CHUNK):
        valid = start + offset < pairs
        expert = tl.load(experts_ptr + start + offset, mask=valid, other=0)
        counts += tl.histogram(expert, E2, mask=valid)
    tiles = (counts + TILE_ROWS - 1) // TILE_ROWS
    count = tl.sum(tl.where(bins == mine, counts, 0))
    first_pair = tl.sum(tl.where(bins < mine, counts, 0))
    tile = tl.sum(tl.where(bins < mine, tiles, 0))

    seen = first_pair
    for start in range(0, pairs, CHUNK):
        valid = start + offset < pairs
        expert = tl.load(experts_ptr + start + offset, mask=valid, other=-1)
        is_mine = (expert == mine).to(tl.int32)
        rank = tl.cumsum(is_mine, axis=0) - 1
        tl.store(pairs_ptr + seen + rank, start + offset, mask=is_mine != 0)
        seen += tl.sum(is_mine)

    for start in range(0, count, TILE_ROWS * CHUNK):
        first = start + offset * TILE_ROWS
        at = tiles_ptr + 3 * (tile + first // TILE_ROWS)
        tl.store(at, mine + offset * 0, mask=first < count)
        tl.store(at + 1, first_pair + first, mask=first < count)
        tl.store(at + 2, tl.minimum(count - first, TILE_ROWS), mask=first < count)
    if mine == E - 1:
        for start in range(tl.sum(tiles), limit, CHUNK):
            tl.store(tiles_ptr + 3 * (start + offset) + 2, offset * 0, mask=start + offset < limit)


def group_pairs(experts_TK: torch.Tensor, experts: int, tile_rows: int) -> Groups:
    """Sort the pairs of `experts_TK` (int32, contiguous) and cut each expert's pairs into tiles of `tile_rows`."""
    assert experts_TK.dtype == torch.int32 and experts_TK.is_contiguous()
    pairs = experts_TK.numel()
    tiles = most_tiles(pairs, experts, tile_rows)
    groups = Groups(
        torch.empty(pairs, dtype=torch.int32, device=experts_TK.device),
        torch.empty(tiles, 3, dtype=torch.int32, device=experts_TK.device),
        tile_rows,
    )
    chunk = pairs_at_once(pairs)
    _group_kernel[(experts,)](
        experts_TK, groups.pairs_P, groups.tiles_L3, pairs, tiles,
        E=experts, E2=max(32, triton.next_power_of_2(experts)), TILE_ROWS=tile_rows, CHUNK=chunk,
        num_warps=1 if chunk < 512 else 4, **follow_options(experts_TK.device),
    )  # fmt: skip
    return groups
