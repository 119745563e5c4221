"""Decode attention over latents in Triton: one absorbed query a row, its context split over programs by a `DecodeWork`.

All query heads of a row read the same latents. A program handles a block of neighbouring heads and one share of the
plan; for the plan and for the results of a row such a block is what a KV head is for other attention. A tile of latents
is loaded once: as keys, together with what turns, and as values. The programs of one share follow each other in the
grid, so where a row has several blocks of heads, they find its latents in the L2 cache.

Scores are float32, in base 2. The host reads nothing, and the grid depends only on the plan's shapes, so a captured
graph stays valid while contexts grow. Hidden positions are never loaded.

Legend: B rows, H query heads, R width of the latent, D dimensions that turn, L = R + D, P pages (of the cache, or of a
row of the page table), S page size, M heads of a block, padded, N positions of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_kernels.attention.triton_decode_combine import (
    HIDDEN,
    DecodeHeads,
    ResultPointers,
    combine_parts,
    empty_results,
    read_item,
    score_factors,
    store_item,
    weigh,
    work_arguments,
)
from rollout_kernels.attention.triton_decode_plan import DecodeConfig, DecodeWork, plan_decode_work
from rollout_kernels.common.triton_math import dot, follow, follow_options, narrow

#: Most query heads of a program: the fewest rows that `tl.dot` takes.
_MOST_HEADS = 16


@triton.jit(do_not_specialize=["rows", "stride_table"])
def _latent_kernel(
    q_ptr, cache_ptr, table_ptr, out_ptr, part_ptr, lse_ptr, log_sum_ptr, items_ptr, first_ptr, slots_ptr, arrivals_ptr,
    rows, scale_log2,
    stride_q_row, stride_q_head, stride_page, stride_slot, stride_table,
    HEADS: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    R: tl.constexpr = HEADS.D
    BLOCK_R: tl.constexpr = HEADS.BLOCK_D
    GROUP: tl.constexpr = HEADS.GROUP
    block = tl.program_id(0)
    share = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    r = tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    is_r = r[None, :] < R
    is_d = d[None, :] < D
    is_head = (m < GROUP)[:, None]
    head_at = (block * GROUP + m)[:, None] * stride_q_head
    follow()
    first = tl.load(first_ptr + share)
    last = tl.load(first_ptr + share + 1)
    to = ResultPointers(out_ptr, part_ptr, lse_ptr, log_sum_ptr, slots_ptr, arrivals_ptr, rows)
    for i in range(first, last):
        item = read_item(items_ptr, i)
        row, length = item.row, item.length
        q_row = q_ptr + row.to(tl.int64) * stride_q_row + head_at
        q_MR = tl.load(q_row + r[None, :], mask=is_head & is_r, other=0.0)
        q_MD = tl.load(q_row + R + d[None, :], mask=is_head & is_d, other=0.0)
        table = table_ptr + row.to(tl.int64) * stride_table
        peak = tl.full([BLOCK_M], HIDDEN, tl.float32)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc_MR = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        n = item.begin * BLOCK_N + tl.arange(0, BLOCK_N)
        page = tl.load(table + n // PAGE_SIZE, mask=n < length, other=0)
        for tile in range(item.begin, item.end):
            n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            at = cache_ptr + (page.to(tl.int64) * stride_page + (n % PAGE_SIZE) * stride_slot)[:, None]
            live = (n < length)[:, None]
            latent_NR = tl.load(at + r[None, :], mask=live & is_r, other=0.0)
            turned_ND = tl.load(at + R + d[None, :], mask=live & is_d, other=0.0)
            # Prefetch the next tile's pages while this tile is computed.
            next_n = n + BLOCK_N
            page = tl.load(table + next_n // PAGE_SIZE, mask=next_n < length, other=0)
            score = dot(q_MD, tl.trans(turned_ND), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            score = dot(q_MR, tl.trans(latent_NR), score) * scale_log2
            score = tl.where((n < length)[None, :], score, HIDDEN)
            weight, keep, total, peak = weigh(score, peak, total)
            acc_MR = dot(narrow(weight, latent_NR.dtype), latent_NR, acc_MR * keep[:, None])
        sum_M = tl.sum(total, 1)
        store_item(to, item, 1, block, acc_MR / sum_M[:, None], peak + tl.log2(sum_M), HEADS, BLOCK_M)


def heads_at_once(heads: int) -> int:
    """Query heads of a program: the most that divide their number and fit in a tile."""
    return max(size for size in range(1, _MOST_HEADS + 1) if heads % size == 0)


def plan_latent_work(
    context_lens_B: torch.Tensor,
    heads: int,
    dtype: torch.dtype,
    *,
    plan_rows: int = 32,
    config: DecodeConfig | None = None,
    multiprocessors: int | None = None,
) -> DecodeWork:
    """Split a decode step over the programs of the grid, in one launch; see `plan_decode_work`."""
    config = config or DecodeConfig(block_n=32 if dtype.itemsize == 2 else 16, num_stages=2, plan_rows=plan_rows)
    group = heads_at_once(heads)
    return plan_decode_work(
        context_lens_B, heads // group, group=group, window=None, config=config, multiprocessors=multiprocessors
    )


def decode_latents(
    q_BHL: torch.Tensor,
    cache_PS1L: torch.Tensor,
    page_table_BP: torch.Tensor,
    context_lens_B: torch.Tensor,
    *,
    rank: int,
    scale: float,
    work: DecodeWork,
    log_sum_BH: torch.Tensor | None = None,
) -> torch.Tensor:
    """Like `latent_decode_attention`, its twin on a CPU. Returns [B, H, R]; zeros for a row of length 0.

    Tensors are contiguous in their last dimension. `work` is the result of `plan_latent_work` for the same lengths;
    launches that share a plan must follow each other on one stream.
    """
    rows, heads, width = q_BHL.shape
    group, config = heads_at_once(heads), work.config
    blocks = heads // group
    assert q_BHL.stride(2) == 1 and cache_PS1L.stride(3) == 1 and page_table_BP.stride(1) == 1
    assert cache_PS1L.dtype == q_BHL.dtype and cache_PS1L.shape[2:] == (1, width)
    assert work.arrivals_BG.shape == (rows, blocks) and len(context_lens_B) == rows
    block_g, block_r = triton.next_power_of_2(group), max(16, triton.next_power_of_2(rank))
    sizes = DecodeHeads(heads, rank, group, block_g, block_r, 1, config.fused)
    results = empty_results(q_BHL, sizes, work, log_sum_BH)
    _latent_kernel[(blocks, work.first.shape[0] - 1)](
        q_BHL, cache_PS1L, page_table_BP, *work_arguments(results, work), rows, score_factors(scale, None)[0],
        q_BHL.stride(0), q_BHL.stride(1), cache_PS1L.stride(0), cache_PS1L.stride(1), page_table_BP.stride(0),
        HEADS=sizes, D=width - rank, PAGE_SIZE=cache_PS1L.shape[1], BLOCK_M=_MOST_HEADS, BLOCK_N=config.block_n,
        BLOCK_D=max(16, triton.next_power_of_2(width - rank)), num_warps=config.num_warps, num_stages=config.num_stages,
        **follow_options(q_BHL.device),
    )  # fmt: skip
    return combine_parts(results, sizes, work)
