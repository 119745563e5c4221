"""Many tokens sorted by the expert that they chose, for experts whose tiles the copy engine loads and stores.

    pad_groups      a place for each pair of token and expert, and the tiles that cover the places: two launches
    spread_rows     the tokens' rows, copied to the places of their pairs
    gather_sum      the weighted sum of each token's rows, in the order of its experts

The rows of an expert begin at a multiple of `ALIGN`, so half a tile belongs to one expert and no store needs a mask.
Rows between the last pair of an expert and the next multiple are never written by `spread_rows` nor read by
`gather_sum`; what the products compute for them has no effect.

Only the device knows the number of tiles: `counts_2[0]`. Legend: T tokens, E experts, K experts a token, P = T K pairs,
R rows with padding, L tiles, C chunks of pairs, H hidden, N columns that share a scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rollout_kernels.common.triton_math import narrow

#: Rows of an expert begin at a multiple of this.
ALIGN = 64
#: Rows of a tile.
TILE = 128
MOST_EXPERTS = 512
_CHUNK = 512
#: Pairs that `pad_groups` places at once: it holds a row with an entry for each expert for each of them in registers.
_AT_ONCE, _ENTRIES = 128, 128 * 256


@dataclass(frozen=True, slots=True)
class PaddedGroups:
    """Places of pairs, and tiles.

    `rows_P` (int32) is the row of pair t K + k. A row of `tiles_L3` (int32) holds an expert, the tile's first row and
    its number of rows with pairs, 1 to `TILE`. `counts_1` is the number of tiles; later rows of `tiles_L3` are
    undefined.
    """

    rows_P: torch.Tensor
    tiles_L3: torch.Tensor
    counts_1: torch.Tensor
    most_rows: int


def most_rows(pairs: int, experts: int) -> int:
    """The largest number of rows that `pairs` pairs need, for any routing."""
    return (pairs + min(experts, pairs) * (ALIGN - 1)) // ALIGN * ALIGN


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(experts_ptr, counts_ptr, pairs, E2: tl.constexpr, CHUNK: tl.constexpr):
    chunk = tl.program_id(0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(experts_ptr + at, mask=at < pairs, other=0)
    tl.store(counts_ptr + chunk * E2 + tl.arange(0, E2), tl.histogram(expert, E2, mask=at < pairs))


@triton.jit(do_not_specialize=["pairs", "chunks"])
def _place_kernel(
    experts_ptr, counts_ptr, rows_ptr, tiles_ptr, total_ptr,
    pairs, chunks,
    E2: tl.constexpr, CHUNK: tl.constexpr, AT_ONCE: tl.constexpr, ALIGN: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    mine = tl.program_id(0)
    expert = tl.arange(0, E2)
    total = tl.zeros([E2], tl.int32)
    before = tl.zeros([E2], tl.int32)
    for first in range(0, chunks, BLOCK):
        chunk = first + tl.arange(0, BLOCK)
        at = counts_ptr + chunk[:, None] * E2 + expert[None, :]
        count = tl.load(at, mask=(chunk < chunks)[:, None], other=0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where((chunk < mine)[:, None], count, 0), 0)
    padded = (total + ALIGN - 1) // ALIGN * ALIGN
    start = tl.cumsum(padded, 0) - padded
    next_row = start + before
    for first in range(0, CHUNK, AT_ONCE):
        at = mine * CHUNK + first + tl.arange(0, AT_ONCE)
        chosen = tl.load(experts_ptr + at, mask=at < pairs, other=-1)
        one_hot = (chosen[:, None] == expert[None, :]).to(tl.int32)
        rank = tl.cumsum(one_hot, 0) - 1 + next_row[None, :]
        tl.store(rows_ptr + at, tl.sum(one_hot * rank, 1), mask=at < pairs)
        next_row += tl.sum(one_hot, 0)
    if mine == 0:
        tiles = (total + TILE - 1) // TILE
        tile = tl.cumsum(tiles, 0) - tiles
        tl.store(total_ptr, tl.sum(tiles))
        for step in range(0, tl.max(tiles)):
            to = tiles_ptr + 3 * (tile + step)
            tl.store(to, expert, mask=step < tiles)
            tl.store(to + 1, start + step * TILE, mask=step < tiles)
            tl.store(to + 2, tl.minimum(total - step * TILE, TILE), mask=step < tiles)


def pad_groups(experts_TK: torch.Tensor, experts: int) -> PaddedGroups:
    """Places and tiles for `experts_TK` (int32, contiguous)."""
    assert experts_TK.dtype == torch.int32 and experts_TK.is_contiguous() and experts <= MOST_EXPERTS
    pairs, device = experts_TK.numel(), experts_TK.device
    chunks, bins = triton.cdiv(pairs, _CHUNK), max(16, triton.next_power_of_2(experts))
    counts_CE = torch.empty(chunks, bins, dtype=torch.int32, device=device)
    most = most_rows(pairs, experts)
    groups = PaddedGroups(
        torch.empty(pairs, dtype=torch.int32, device=device),
        torch.empty(min(pairs, experts) + pairs // TILE, 3, dtype=torch.int32, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
        most,
    )
    _count_kernel[(chunks,)](experts_TK, counts_CE, pairs, E2=bins, CHUNK=_CHUNK, num_warps=4)
    _place_kernel[(chunks,)](
        experts_TK, counts_CE, groups.rows_P, groups.tiles_L3, groups.counts_1, pairs, chunks,
        E2=bins, CHUNK=_CHUNK, AT_ONCE=min(_AT_ONCE, _ENTRIES // bins), ALIGN=ALIGN, TILE=TILE, BLOCK=32, num_warps=8,
    )  # fmt: skip
    return groups


@triton.jit
def _spread_kernel(x_ptr, rows_ptr, out_ptr, H: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * H + h, mask=h < H)
    for slot in tl.static_range(TOP_K):
        row = tl.load(rows_ptr + token * TOP_K + slot).to(tl.int64)
        tl.store(out_ptr + row * H + h, x, mask=h < H)


def spread_rows(x_TH: torch.Tensor, groups: PaddedGroups, top_k: int) -> torch.Tensor:
    """`x_TH` (contiguous) at the places of its pairs, [R, H]."""
    tokens, hidden = x_TH.shape
    out_RH = x_TH.new_empty(groups.most_rows, hidden)
    block = triton.next_power_of_2(hidden)
    _spread_kernel[(tokens,)](
        x_TH, groups.rows_P, out_RH, H=hidden, TOP_K=top_k, BLOCK=block, num_warps=min(8, max(1, block // 256))
    )
    return out_RH


@triton.jit
def _gather_sum_kernel(
    parts_ptr, scales_ptr, rows_ptr, weights_ptr, out_ptr,
    H: tl.constexpr, N: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        row = tl.load(rows_ptr + token * TOP_K + slot).to(tl.int64)
        weight = tl.load(weights_ptr + token * TOP_K + slot)
        part = tl.load(parts_ptr + row * H + h, mask=h < H, other=0.0).to(tl.float32)
        part *= tl.load(scales_ptr + row * (H // N) + h // N, mask=h < H, other=0.0)
        total += part * weight
    tl.store(out_ptr + token * H + h, narrow(total, out_ptr.dtype.element_ty), mask=h < H)


def gather_sum(
    parts_RH: torch.Tensor,
    scales_RS: torch.Tensor,
    groups: PaddedGroups,
    weights_TK: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The weighted sum of each token's rows, [T, H] in `dtype`; added in float32 and in the order of K.

    Args:
        parts_RH: rows at the places of `groups`, contiguous.
        scales_RS: float32 factors of H / S neighbouring columns of a row.
        groups: from `pad_groups`.
        weights_TK: float32.
        dtype: of the result.
    """
    tokens, top_k = weights_TK.shape
    hidden = parts_RH.shape[1]
    out_TH = torch.empty(tokens, hidden, dtype=dtype, device=parts_RH.device)
    block = min(1024, triton.next_power_of_2(hidden))
    _gather_sum_kernel[(tokens, triton.cdiv(hidden, block))](
        parts_RH, scales_RS, groups.rows_P, weights_TK, out_TH,
        H=hidden, N=hidden // scales_RS.shape[1], TOP_K=top_k, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out_TH
