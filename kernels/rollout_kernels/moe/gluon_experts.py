"""Experts for many tokens on Hopper: persistent grouped products, written in Gluon.

    default warps   consumer of rows 0 .. 63 of a tile      wait for a stage, multiply, release it; store the results
    4 warps         consumer of rows 64 .. 127
    1 warp          producer: asks the copy engine for the tiles of a ring of stages in shared memory

A tile has 128 rows of tokens that share an expert (`triton_padded_groups`) and 256 weight rows: for gate/up, 128 gate
rows and their 128 up rows, so that SiLU is applied to the sums in registers. Consumers share the weights of a stage but
run on their own: while one stores its results, the other multiplies. A consumer whose half has no pairs only releases
stages. Programs take tiles in turns; neighbouring programs have the same rows and other columns, so rows and an
expert's weights are read from the L2 cache.

The results of the second product are f16 with a power of two for each row of a tile, which is nearly as good as
float32 (11 bits, relative to the largest of 256 values only for values below 2^-29 of it), and half the bytes.

Legend: R rows with padding, H hidden, I intermediate, E experts, K inputs of a product, N outputs.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rollout_kernels.common.device import is_hopper
from rollout_kernels.common.gluon_copy import load_tile, store_tile
from rollout_kernels.moe.triton_padded_groups import ALIGN, MOST_EXPERTS, TILE, PaddedGroups

_BLOCK_N, _BLOCK_K = 256, 64
_STAGES = 4  # stages of the ring


@gluon.jit
def _tile_of(tiles_ptr, item, tiles, columns, at_once):
    """Expert, first row, number of rows and column of an item; of the last item where there is no such item.

    Items are ordered by block of `at_once` columns, then by tile of rows, then by column.
    """
    item = gl.minimum(item, tiles * columns - 1)
    in_block = item % (tiles * at_once)
    column = item // (tiles * at_once) * at_once + in_block % at_once
    tile = tiles_ptr + 3 * (in_block // at_once)
    return gl.load(tile), gl.load(tile + 1), gl.load(tile + 2), column


@gluon.jit
def _produce(x_desc, w_desc, x_smem, w_smem, work, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, SILU: gl.constexpr):
    full, empty, tiles_ptr, tiles, columns, at_once, steps = work
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    HALF: gl.constexpr = 64 * BLOCK_K * 2
    LOADED: gl.constexpr = 256 * BLOCK_K * 2 + HALF
    expert, row, rows, column = _tile_of(tiles_ptr, program, tiles, columns, at_once)
    count = 0
    for item in range(program, tiles * columns, programs):
        next_expert, next_row, next_rows, next_column = _tile_of(tiles_ptr, item + programs, tiles, columns, at_once)
        both = rows > 64
        for step in range(steps):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            here = full.index(stage)
            mbarrier.expect(here, LOADED + HALF, both)
            mbarrier.expect(here, LOADED, rows <= 64)
            k = step * BLOCK_K
            load_tile(x_desc, [row, k], here, x_smem.index(2 * stage))
            load_tile(x_desc, [row + 64, k], here, x_smem.index(2 * stage + 1), both)
            if SILU:
                load_tile(w_desc, [expert, 0, column * 128, k], here, w_smem.index(stage))
            else:
                load_tile(w_desc, [expert, column * 2, 0, k], here, w_smem.index(stage))
            count += 1
        expert, row, rows, column = next_expert, next_row, next_rows, next_column


@gluon.jit
def _halves(acc):
    """Columns 0 .. 127 and 128 .. 255 of the sums; both of a pair are in one thread."""
    return acc.reshape([acc.shape[0], 2, acc.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _put(out_desc, out_smem, row, column, value):
    """Store a block of 64 rows; the copy engine has read the last one before the buffer is used again."""
    tma.store_wait(0)
    out_smem.store(value.to(out_smem.dtype))
    fence_async_shared()
    store_tile(out_desc, [row, column], out_smem)


@gluon.jit
def _consume(
    out_desc, scales_ptr, x_smem, w_smem, out_smem, work,
    HALF: gl.constexpr, STAGES: gl.constexpr, SILU: gl.constexpr,
):  # fmt: skip
    full, empty, tiles_ptr, tiles, columns, at_once, steps = work
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    _, row, rows, column = _tile_of(tiles_ptr, program, tiles, columns, at_once)
    count = 0
    for item in range(program, tiles * columns, programs):
        _, next_row, next_rows, next_column = _tile_of(tiles_ptr, item + programs, tiles, columns, at_once)
        if rows > 64 * HALF:
            acc = gl.zeros([64, 256], gl.float32, MMA)
            for step in range(steps):
                stage = count % STAGES
                mbarrier.wait(full.index(stage), (count // STAGES) & 1)
                w_tile = w_smem.index(stage).reshape([256, x_smem.shape[2]]).permute((1, 0))
                acc = warpgroup_mma(x_smem.index(2 * stage + HALF), w_tile, acc, use_acc=step > 0, is_async=True)
                # The product of this step may still run; the product before it has ended, so its stage is free.
                acc = warpgroup_mma_wait(1, deps=(acc,))
                mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), pred=step > 0)
                count += 1
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES))
            at = row + 64 * HALF
            if SILU:
                gate, up = _halves(acc)
                _put(out_desc, out_smem, at, column * 128, gate / (1.0 + gl.exp(-gate)) * up)
            else:
                most = gl.max(gl.abs(acc), axis=1)
                # Bits of the power of two below the largest value, at least 2^-112.
                power = gl.maximum(most.to(gl.int32, bitcast=True) & 0x7F800000, 15 << 23)
                factor = ((141 << 23) - power + (127 << 23)).to(gl.float32, bitcast=True)  # 2^14 over it
                acc = acc * gl.expand_dims(factor, 1)
                scale = (power - (14 << 23)).to(gl.float32, bitcast=True)
                m = at + gl.arange(0, 64, gl.SliceLayout(1, MMA))
                gl.store(scales_ptr + m * columns + column, scale)
                low, high = _halves(acc)
                _put(out_desc, out_smem, at, column * 256, low)
                _put(out_desc, out_smem, at, column * 256 + 128, high)
        else:
            for _ in range(steps):
                stage = count % STAGES
                mbarrier.wait(full.index(stage), (count // STAGES) & 1)
                mbarrier.arrive(empty.index(stage))
                count += 1
        row, rows, column = next_row, next_rows, next_column
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["columns", "at_once", "steps"])
def _experts_kernel(
    x_desc, w_desc, out_desc, scales_ptr, tiles_ptr, total_ptr,
    columns, at_once, steps,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, SILU: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, 64, BLOCK_K], x_desc.layout)
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [STAGES] + w_desc.block_shape, w_desc.layout)
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [2, 64, 128], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    tiles = gl.load(total_ptr)
    work = (full, empty, tiles_ptr, tiles, columns, at_once, steps)
    gl.warp_specialize(
        [
            (_consume, (out_desc, scales_ptr, x_smem, w_smem, out_smem.index(0), work, 0, STAGES, SILU)),
            (_consume, (out_desc, scales_ptr, x_smem, w_smem, out_smem.index(1), work, 1, STAGES, SILU)),
            (_produce, (x_desc, w_desc, x_smem, w_smem, work, BLOCK_K, STAGES, SILU)),
        ],
        [4, 1],
        [232, 40],
    )


def _layout(rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


def takes(device: torch.device, dtype: torch.dtype, experts: int, hidden: int, inner: int) -> bool:
    """True if the kernels can run a shape: 16-bit operands on Hopper, experts that fit, widths that tiles divide."""
    return (
        is_hopper(device)
        and dtype in (torch.bfloat16, torch.float16)
        and experts <= MOST_EXPERTS
        and hidden % _BLOCK_N == 0
        and inner % 128 == 0
    )


def padded_gate_up(
    x_RH: torch.Tensor, groups: PaddedGroups, w_EGH: torch.Tensor, *, programs: int = 132, at_once: int | None = None
) -> torch.Tensor:
    """The gated activations of all rows, [R, I].

    Args:
        x_RH: from `spread_rows`.
        groups: from `pad_groups`, or of a dense layer, which is one expert, from `all_rows`.
        w_EGH: gate rows, then up rows, of all experts, contiguous.
        programs: multiprocessors to use.
        at_once: blocks of 256 weight rows that are computed for all rows before the next ones; None: all.
    """
    experts, outputs, hidden = w_EGH.shape
    inner = outputs // 2
    h_RI = x_RH.new_empty(x_RH.shape[0], inner)
    shape, strides = [experts, 2, inner, hidden], [outputs * hidden, inner * hidden, hidden, 1]
    weights = TensorDescriptor(w_EGH, shape, strides, [1, 2, 128, _BLOCK_K], _layout(4))
    _launch(x_RH, weights, h_RI, None, groups, inner // 128, programs, at_once)
    return h_RI


def padded_down(
    h_RI: torch.Tensor, groups: PaddedGroups, w_EHI: torch.Tensor, *, programs: int = 132
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of all rows, f16 [R, H], and factors of 256 neighbouring columns of a row, float32 [R, H / 256].

    For the arguments see `padded_gate_up`.
    """
    experts, hidden, inner = w_EHI.shape
    rows = h_RI.shape[0]
    out_RH = torch.empty(rows, hidden, dtype=torch.float16, device=h_RI.device)
    columns = hidden // _BLOCK_N
    scales = torch.empty(rows, columns, dtype=torch.float32, device=h_RI.device)
    shape, strides = [experts, hidden // 128, 128, inner], [hidden * inner, 128 * inner, inner, 1]
    weights = TensorDescriptor(w_EHI, shape, strides, [1, 2, 128, _BLOCK_K], _layout(4))
    _launch(h_RI, weights, out_RH, scales, groups, columns, programs)
    return out_RH, scales


def _launch(
    x_RK: torch.Tensor,
    weights: TensorDescriptor,
    out_RN: torch.Tensor,
    scales: torch.Tensor | None,
    groups: PaddedGroups,
    columns: int,
    programs: int,
    at_once: int | None = None,
) -> None:
    """Without scales the results are gated."""
    assert TILE == 2 * ALIGN == 128 and columns % (at_once or columns) == 0
    _experts_kernel[(programs,)](
        TensorDescriptor.from_tensor(x_RK, [64, _BLOCK_K], _layout(2)), weights,
        TensorDescriptor.from_tensor(out_RN, [64, 128], _layout(2)), groups.counts_1 if scales is None else scales,
        groups.tiles_L3, groups.counts_1, columns, at_once or columns, -(-x_RK.shape[1] // _BLOCK_K),
        BLOCK_K=_BLOCK_K, STAGES=_STAGES, SILU=scales is None, num_warps=4,
    )  # fmt: skip


def takes_gated(device: torch.device, dtype: torch.dtype, inputs: int, width: int) -> bool:
    """True if `padded_gate_up` can run the gated product of a dense layer, of `width` gate rows and as many up rows."""
    return is_hopper(device) and dtype in (torch.bfloat16, torch.float16) and inputs % _BLOCK_K == width % 1024 == 0


def all_rows(tokens: int, device: torch.device) -> PaddedGroups:
    """Tiles of `tokens` rows of one expert: a dense layer."""
    first = torch.arange(0, tokens, TILE, dtype=torch.int32, device=device)
    tiles = torch.stack((first * 0, first, (tokens - first).clamp(max=TILE)), 1).contiguous()
    count = torch.full((1,), len(first), dtype=torch.int32, device=device)
    return PaddedGroups(first, tiles, count, tokens)
