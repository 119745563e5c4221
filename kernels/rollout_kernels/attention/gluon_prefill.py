"""Prefill attention on Hopper over gathered keys and values (`triton_gather_kv`), written in Gluon.

    default warps   consumer of queries 0 .. 63 of an item: scores, softmax, sums
    4 warps         consumer of queries 64 .. 127
    1 warp          producer: asks the copy engine for queries, and for tiles of keys and values

An item is 128 queries of a chunk and one query head. A consumer starts the scores of a tile and the sums of the tile
before it, and computes the softmax while the tensor cores work on the sums. The two consumers start their
products in turns: one computes its softmax while the products of the other run. Tiles are taken from the
diagonal down, so only the first tiles need a mask; with a window all of them have one.

Programs are persistent and take the items of `triton_gathered_items`, the longest first, in the order 0 .. P - 1,
P - 1 .. 0 and so on.

Legend: T tokens, B blocks of queries, W words of an item, H query heads, G KV heads, D head dimension, N gathered rows,
P programs.
"""

from __future__ import annotations

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rollout_kernels.attention.triton_gather_kv import TILE
from rollout_kernels.attention.triton_gathered_items import BLOCK, ITEM_WORDS
from rollout_kernels.common.gluon_copy import load_tile

#: The head dimension that the kernel takes.
HEAD_DIM = 128
#: Tiles of keys, and of values, in shared memory.
_STAGES = 2


@gluon.jit
def _item(index, items_ptr, blocks, H: gl.constexpr):
    """Head, first query, queries that are left, first position, first row of the context, and tiles begin .. end - 1.

    Past the last item there are no queries and no tiles.
    """
    live = index < blocks * H
    at = items_ptr + gl.where(live, index // H, 0) * 8
    begin = gl.load(at + 4)
    left = gl.where(live, gl.load(at + 1), 0)
    end = gl.where(live, gl.load(at + 5), begin)
    return index % H, gl.load(at), left, gl.load(at + 2), gl.load(at + 3), begin, end


@gluon.jit
def _snake(step, programs, program):
    return step * programs + gl.where(step % 2 == 0, program, programs - 1 - program)


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, shared, items_ptr, blocks, rows, group, H: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    q_smem, k_smem, v_smem, q_bars, k_bars, v_bars = shared
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    D: gl.constexpr = k_smem.shape[2]
    LOADED: gl.constexpr = 128 * D * 2
    count = 0
    steps = (H * blocks + programs - 1) // programs
    for step in range(steps):
        head, token, left, position, row, begin, end = _item(_snake(step, programs, program), items_ptr, blocks, H)
        mbarrier.wait(q_bars.index(1), (step & 1) ^ 1)
        mbarrier.expect(q_bars.index(0), LOADED)
        load_tile(q_desc, [token, head * D], q_bars.index(0), q_smem.index(0))
        load_tile(q_desc, [token + 64, head * D], q_bars.index(0), q_smem.index(1))
        base = head // group * rows + row
        for back in range(begin, end):
            at = base + (end - 1 - (back - begin)) * 128
            stage = count % STAGES
            phase = ((count // STAGES) & 1) ^ 1
            mbarrier.wait(k_bars.index(STAGES + stage), phase)
            mbarrier.expect(k_bars.index(stage), LOADED)
            load_tile(k_desc, [at, 0], k_bars.index(stage), k_smem.index(stage))
            mbarrier.wait(v_bars.index(STAGES + stage), phase)
            mbarrier.expect(v_bars.index(stage), LOADED)
            load_tile(v_desc, [at, 0], v_bars.index(stage), v_smem.index(stage))
            count += 1


@gluon.jit
def _soften(
    score, peak, total, scale_log2, tile, position, window,
    MASKED: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Weights of a tile in float32, the new peak and total, and the factor of earlier sums."""
    S: gl.constexpr = score.type.layout
    if MASKED:
        n = tile * 128 + gl.arange(0, 128, gl.SliceLayout(0, S))[None, :]
        m = position + 64 * HALF + gl.arange(0, 64, gl.SliceLayout(1, S))[:, None]
        visible = n <= m
        if window is not None:
            visible = visible & (n > m - window)
        # Finite, so a query that sees nothing of a tile stays finite. It is hidden after the scale: a fused product and
        # difference would round the product otherwise than the peak, and such large numbers then differ by infinities.
        score = gl.where(visible, score * scale_log2, -1e30)
        new_peak = gl.maximum(peak, gl.max(score, axis=1))
        weight = gl.exp2(score - gl.expand_dims(new_peak, 1))
    else:
        new_peak = gl.maximum(peak, gl.max(score, axis=1) * scale_log2)
        weight = gl.exp2(score * scale_log2 - gl.expand_dims(new_peak, 1))
    keep = gl.exp2(peak - new_peak)
    return weight, new_peak, total * keep + gl.sum(weight, axis=1), keep


@gluon.jit
def _advance(
    q_tile, shared, pingpong_bars, count, weight, acc, peak, total, scale_log2, tile, position, window,
    MASKED: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Scores of the tile `count`, and meanwhile the sums of the tile before it, whose weights are `weight`."""
    _, k_smem, v_smem, _, k_bars, v_bars = shared
    S: gl.constexpr = acc.type.layout
    stage = count % STAGES
    last = (count + STAGES - 1) % STAGES
    mbarrier.wait(k_bars.index(stage), (count // STAGES) & 1)
    mbarrier.wait(pingpong_bars.index(HALF), (count & 1) ^ (1 - HALF))
    zero = gl.zeros([64, 128], gl.float32, S)
    score = warpgroup_mma(q_tile, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_bars.index(last), ((count - 1) // STAGES) & 1)
    acc = warpgroup_mma(weight, v_smem.index(last), acc, is_async=True)
    mbarrier.arrive(pingpong_bars.index(1 - HALF))
    score = warpgroup_mma_wait(1, deps=(score,))
    mbarrier.arrive(k_bars.index(STAGES + stage))
    soft, peak, total, keep = _soften(score, peak, total, scale_log2, tile, position, window, MASKED, HALF)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_bars.index(STAGES + last))
    acc = acc * gl.expand_dims(keep, 1)
    weight = gl.convert_layout(soft.to(v_smem.dtype), weight.type.layout)
    return weight, acc, peak, total


@gluon.jit
def _consume(
    shared, pingpong_bars,
    out_ptr, items_ptr,
    blocks, window, scale_log2,
    HALF: gl.constexpr, H: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_smem, k_smem, v_smem, q_bars, k_bars, v_bars = shared
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    D: gl.constexpr = k_smem.shape[2]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    q_tile = q_smem.index(HALF)
    count = 0
    steps = (H * blocks + programs - 1) // programs
    for step in range(steps):
        head, token, left, position, row, begin, end = _item(_snake(step, programs, program), items_ptr, blocks, H)
        mbarrier.wait(q_bars.index(0), step & 1)
        if end > begin:
            # The first tile has no sums before it.
            stage = count % STAGES
            mbarrier.wait(k_bars.index(stage), (count // STAGES) & 1)
            mbarrier.wait(pingpong_bars.index(HALF), (count & 1) ^ (1 - HALF))
            acc = gl.zeros([64, D], gl.float32, S)
            score = warpgroup_mma(
                q_tile, k_smem.index(stage).permute((1, 0)), gl.zeros([64, 128], gl.float32, S), use_acc=False,
                is_async=True,
            )  # fmt: skip
            mbarrier.arrive(pingpong_bars.index(1 - HALF))
            score = warpgroup_mma_wait(0, deps=(score,))
            mbarrier.arrive(k_bars.index(STAGES + stage))
            peak = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, S))
            total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, S))
            soft, peak, total, _ = _soften(score, peak, total, scale_log2, end - 1, position, window, True, HALF)
            weight = gl.convert_layout(soft.to(v_smem.dtype), P)
            count += 1
            # Tiles below `seen` are seen completely by every query.
            seen = begin
            if window is None:
                seen = gl.minimum((position + 1) // 128, end - 1)
            for back in range(seen, end - 1):
                tile = end - 2 - (back - seen)
                weight, acc, peak, total = _advance(
                    q_tile, shared, pingpong_bars, count, weight, acc, peak, total, scale_log2, tile, position, window,
                    True, HALF, STAGES,
                )  # fmt: skip
                count += 1
            for back in range(begin, seen):
                tile = seen - 1 - (back - begin)
                weight, acc, peak, total = _advance(
                    q_tile, shared, pingpong_bars, count, weight, acc, peak, total, scale_log2, tile, position, window,
                    False, HALF, STAGES,
                )  # fmt: skip
                count += 1
            last = (count + STAGES - 1) % STAGES
            mbarrier.wait(v_bars.index(last), ((count - 1) // STAGES) & 1)
            acc = warpgroup_mma(weight, v_smem.index(last), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(v_bars.index(STAGES + last))
            # The queries are not needed any more: their memory turns the result into rows.
            q_tile.store((acc / gl.expand_dims(total, 1)).to(q_tile.dtype))
            out = q_tile.load(STORED)
            m = 64 * HALF + gl.arange(0, 64, gl.SliceLayout(1, STORED))[:, None]
            d = gl.arange(0, D, gl.SliceLayout(0, STORED))[None, :]
            at = (token + m).to(gl.int64) * (H * D) + head * D + d
            gl.store(out_ptr + at, out, mask=m < left)
            fence_async_shared()
        mbarrier.arrive(q_bars.index(1))


@gluon.jit(do_not_specialize=["blocks", "rows", "window", "group"])
def _attention_kernel(
    q_desc, k_desc, v_desc, out_ptr, items_ptr,
    blocks, rows, window, scale_log2, group,
    H: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2] + q_desc.block_shape, q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_shape, v_desc.layout)
    # First the barriers of full stages, then the barriers of empty ones.
    q_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    v_bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    pingpong_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_bars.index(0), count=1)
    mbarrier.init(q_bars.index(1), count=2)
    for i in gl.static_range(2):
        mbarrier.init(pingpong_bars.index(i), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_bars.index(stage), count=1)
        mbarrier.init(v_bars.index(stage), count=1)
        mbarrier.init(k_bars.index(STAGES + stage), count=2)
        mbarrier.init(v_bars.index(STAGES + stage), count=2)
    fence_async_shared()
    shared = (q_smem, k_smem, v_smem, q_bars, k_bars, v_bars)
    gl.warp_specialize(
        [
            (_consume, (shared, pingpong_bars, out_ptr, items_ptr, blocks, window, scale_log2, 0, H, STAGES)),
            (_consume, (shared, pingpong_bars, out_ptr, items_ptr, blocks, window, scale_log2, 1, H, STAGES)),
            (_produce, (q_desc, k_desc, v_desc, shared, items_ptr, blocks, rows, group, H, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )


def gathered_attention(
    q_THD: torch.Tensor,
    k_GND: torch.Tensor,
    v_GND: torch.Tensor,
    items_BW: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    programs: int = 132,
) -> torch.Tensor:
    """Causal attention of chunks of prompts over their contexts, [T, H, D]; undefined for tokens of no chunk.

    Args:
        q_THD: bf16 or f16, contiguous, D = 128.
        k_GND: from `gather_kv`, in the same dtype.
        v_GND: likewise.
        items_BW: from `prefill_items`, for the same chunks and window.
        scale: positive factor of the scores.
        window: as for `prefill_items`.
        programs: multiprocessors to use.
    """
    tokens, heads, dim = q_THD.shape
    kv_heads, rows, _ = k_GND.shape
    assert dim == HEAD_DIM and scale > 0 and TILE == BLOCK == 128 and ITEM_WORDS == 8
    assert q_THD.is_contiguous() and k_GND.is_contiguous() and v_GND.is_contiguous()
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    out_THD = torch.empty_like(q_THD)
    _attention_kernel[(programs,)](
        TensorDescriptor.from_tensor(q_THD.view(tokens, heads * dim), [64, dim], layout),
        TensorDescriptor.from_tensor(k_GND.view(kv_heads * rows, dim), [TILE, dim], layout),
        TensorDescriptor.from_tensor(v_GND.view(kv_heads * rows, dim), [TILE, dim], layout), out_THD, items_BW,
        items_BW.shape[0], rows, window, scale * math.log2(math.e), heads // kv_heads,
        H=heads, STAGES=_STAGES, num_warps=4,
    )  # fmt: skip
    return out_THD
