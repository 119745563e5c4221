"""Matrix products with few rows on Hopper: weights are streamed, and prefetched while the previous kernel still runs.

The same products and items as in `triton_linear`, written in Gluon, where copies are explicit. The copy engine (TMA)
loads tiles of weights and of x into a ring of stages in shared memory; the tensor cores read both from there. Gate and
up rows are loaded alternately, eight of each, so that both sums of an output end in one thread.

Before the kernel waits for its predecessor, which makes x, the ring is filled with weights: no kernel writes weights.
So the memory stays busy while the predecessor ends. The kernel allows its successor to start before its own wait; so
the successor may read only weights before its own wait. The exception is BESIDE: the successor reads x and runs next to
this kernel, so it may start only when x is complete.

Weights may be e4m3 codes with scales of rows or of blocks. A tile of codes goes to registers. It is decoded without
loss, and the tensor cores read it from the registers. Their sums of a tile are multiplied by the scales and added in
float32. Several programs of a multiprocessor take turns: one decodes while another multiplies. Activations are f16 in
the places of `half_rows`, so that a thread loads 16 codes at once, and decodes two with one instruction.

With CODES activations are codes, too (`code_rows`): for many rows the tensor cores multiply e4m3 at twice the rate of
f16, and x takes half the place in shared memory. The sums of 128 inputs, which they keep with 14 bits, are multiplied
by both scales and added in float32.

Legend: M tokens, N outputs, K inputs.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rollout_kernels.common.device import is_hopper
from rollout_kernels.common.gluon_copy import load_tile, meet
from rollout_kernels.common.triton_math import Activation, follow_options
from rollout_kernels.linear.coded import CodedMatrix, Weights, scale_block, stored
from rollout_kernels.linear.triton_code_rows import code_rows
from rollout_kernels.linear.triton_half_rows import BLOCK, half_rows

#: Weight rows of a block where activations are codes: while the sums of one are added, the next products run.
_CODES_BLOCK = 64


@gluon.jit
def _column(step, program, programs, tiles, STEPS: gl.constexpr, BLOCK_K: gl.constexpr, STAGGER: gl.constexpr):
    """Tile and first input of a program's step. With STAGGER, every item starts one step later in K."""
    item = program + step // STEPS * programs
    part = step % STEPS
    if STAGGER:
        part = (part + item) % STEPS
    return item % tiles, (item // tiles * STEPS + part) * BLOCK_K


@gluon.jit
def _coded_column(
    step, program, programs, SPLIT: gl.constexpr, STEPS: gl.constexpr, BLOCK_K: gl.constexpr, STAGGER: gl.constexpr
):
    """Like `_column`, but parts of a tile are neighbours: this saves divisions by numbers that the compiler lacks."""
    item = program + step // STEPS * programs
    part = step % STEPS
    if STAGGER:
        part = (part + item) % STEPS
    return item // SPLIT, (item % SPLIT * STEPS + part) * BLOCK_K


@gluon.jit
def _ask(
    w_desc, full, w_smem, at_stage, tile, k, here, BLOCK_N: gl.constexpr, BLOCKS: gl.constexpr, GATED: gl.constexpr
):
    """Start the copies of a tile's weights to a stage of the ring; gate and up rows alternate, eight of each."""
    for block in gl.static_range(BLOCKS):
        to = w_smem.index(at_stage * BLOCKS + block)
        if GATED:
            load_tile(w_desc, [(tile * BLOCKS + block) * (BLOCK_N // 16), 0, 0, k], full.index(at_stage), to, here)
        else:
            load_tile(w_desc, [(tile * BLOCKS + block) * BLOCK_N, k], full.index(at_stage), to, here)


@gluon.jit
def _store(out_ptr, acc, block, part, first_row, rows, N, ACTIVATION: gl.constexpr):
    """Write the sums of a block of weight rows, [BLOCK_N, BLOCK_M]."""
    if ACTIVATION is not None:  # a thread holds the sums of gate row r and of up row r, which is row r + 8 of the tile
        gate, up = acc.reshape([acc.shape[0] // 16, 2, 8, acc.shape[1]]).permute((0, 2, 3, 1)).split()
        power = gate
        if ACTIVATION == "gelu_tanh":  # as `triton_math.activated`: a function of Triton has no place in Gluon
            power = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        acc = (gate / (1.0 + gl.exp(-power)) * up).reshape([acc.shape[0] // 2, acc.shape[1]])
    LAYOUT: gl.constexpr = acc.type.layout
    n = block * acc.shape[0] + gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
    m = first_row + gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    at = (part.to(gl.int64) * rows + m) * N + n
    gl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(m < rows) & (n < N))


@gluon.jit
def _multiply(w_smem, x_tile, sums, at_stage):
    """Start the product of a tile, block by block, without waiting for the results."""
    added = sums[:0]
    for block in gl.static_range(len(sums)):
        w_tile = w_smem.index(at_stage * len(sums) + block).reshape([sums[block].shape[0], x_tile.shape[0]])
        added = added + (warpgroup_mma(w_tile, x_tile, sums[block], is_async=True),)
    return added


@gluon.jit
def _wait(sums, pending: gl.constexpr):
    """The sums, once at most `pending` products are still running."""
    if len(sums) == 1:
        sums = (warpgroup_mma_wait(pending, deps=sums),)
    else:
        sums = warpgroup_mma_wait(pending, deps=sums)
    return sums


@gluon.constexpr_function
def _code_layout(block_n, num_warps):
    """Codes [block_n, 128] in threads: each has 32 columns of the rows that the tensor cores take from it."""
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0]]
    registers += [[row, 0] for row in (64, 128, 256) if 16 * num_warps <= row < block_n]
    warps = [[row, 0] for row in (16, 32, 64, 128) if row < 16 * num_warps]
    threads = [[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, threads, warps, [], [block_n, 128])


@gluon.jit
def _decoded(w_tile, MMA: gl.constexpr, num_warps: gl.constexpr):
    """A tile of codes as an operand of the tensor cores, in registers; columns have the places of `half_rows`."""
    ROWS: gl.constexpr = w_tile.shape[0]
    CODES: gl.constexpr = _code_layout(ROWS, num_warps)
    half = w_tile.load(CODES).to(gl.float8e4nv, bitcast=True).to(gl.float16)
    placed = half.reshape([ROWS, 4, 8, 2, 2]).permute((0, 2, 3, 1, 4)).reshape([ROWS, 128])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    return gl.convert_layout(placed, OPERAND, assert_trivial=True)


@gluon.jit
def _scales(
    scale_ptr,
    tile, k, N,
    BLOCK_N: gl.constexpr, GATED: gl.constexpr, SCALE_ROWS: gl.constexpr, SCALE_COLUMNS: gl.constexpr, K: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """The scales of a tile's weight rows from column `k`, [BLOCK_N]."""
    r = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
    if GATED:
        row = gl.minimum(tile * (BLOCK_N // 2) + r // 16 * 8 + r % 8, N - 1) + r // 8 % 2 * N
    else:
        row = gl.minimum(tile * BLOCK_N + r, N - 1)
    return gl.load(scale_ptr + row // SCALE_ROWS * ((K + SCALE_COLUMNS - 1) // SCALE_COLUMNS) + k // SCALE_COLUMNS)


@gluon.jit(do_not_specialize=["rows", "items"])
def _coded_kernel(
    w_desc, scale_ptr, x_desc, x_scale_ptr, out_ptr,
    rows, N, items,
    K: gl.constexpr, SCALE_ROWS: gl.constexpr, SCALE_COLUMNS: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, SPLIT: gl.constexpr, ACTIVATION: gl.constexpr, STAGES: gl.constexpr,
    BESIDE: gl.constexpr, STAGGER: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Like `_stream_kernel`, for codes."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    first_row = gl.program_id(1) * BLOCK_M
    GATED: gl.constexpr = ACTIVATION is not None
    STEPS: gl.constexpr = K // (BLOCK_K * SPLIT)
    LOADED: gl.constexpr = BLOCK_N * BLOCK_K + BLOCK_M * BLOCK_K * x_desc.dtype.primitive_bitwidth // 8
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_M, 16])
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [STAGES] + w_desc.block_shape, w_desc.layout)
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    if not BESIDE:
        gdc_launch_dependents()
    steps = (items - program + programs - 1) // programs * STEPS
    for stage in gl.static_range(STAGES - 1):
        tile, k = _coded_column(stage, program, programs, SPLIT, STEPS, BLOCK_K, STAGGER)
        mbarrier.expect(full.index(stage), LOADED, stage < steps)
        _ask(w_desc, full, w_smem, stage, tile, k, stage < steps, BLOCK_N, 1, GATED)
    gdc_wait()
    if BESIDE:
        gdc_launch_dependents()
    for stage in gl.static_range(STAGES - 1):
        tile, k = _coded_column(stage, program, programs, SPLIT, STEPS, BLOCK_K, STAGGER)
        load_tile(x_desc, [first_row, k], full.index(stage), x_smem.index(stage), stage < steps)
    zero = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)
    for lap in range(steps // STEPS):
        total = zero
        product = warpgroup_mma_init(zero)
        scale = gl.zeros([BLOCK_N], gl.float32, gl.SliceLayout(1, MMA))
        for step in range(lap * STEPS, lap * STEPS + STEPS):
            at_stage = step % STAGES
            tile, k = _coded_column(step, program, programs, SPLIT, STEPS, BLOCK_K, STAGGER)
            next_scale = _scales(scale_ptr, tile, k, N, BLOCK_N, GATED, SCALE_ROWS, SCALE_COLUMNS, K, MMA)
            mbarrier.wait(full.index(at_stage), step // STAGES & 1)
            total = total + warpgroup_mma_wait(0, deps=(product,)) * scale[:, None]
            # The product of step - 1 has ended in all warps, so refill its stage. The product read the registers of
            # `w_tile` while it ran, and the barrier keeps later loads below it.
            meet()
            ahead = step + STAGES - 1
            free = ahead % STAGES
            tile, k = _coded_column(ahead, program, programs, SPLIT, STEPS, BLOCK_K, STAGGER)
            mbarrier.expect(full.index(free), LOADED, ahead < steps)
            _ask(w_desc, full, w_smem, free, tile, k, ahead < steps, BLOCK_N, 1, GATED)
            load_tile(x_desc, [first_row, k], full.index(free), x_smem.index(free), ahead < steps)
            w_tile = _decoded(w_smem.index(at_stage).reshape([BLOCK_N, BLOCK_K]), MMA, num_warps)
            product = warpgroup_mma(w_tile, x_smem.index(at_stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            scale = next_scale
        total = total + warpgroup_mma_wait(0, deps=(product,)) * scale[:, None]
        m = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(0, MMA))
        total = total * gl.load(x_scale_ptr + gl.minimum(m, rows - 1))[None, :]
        item = program + lap * programs
        _store(out_ptr, total, item // SPLIT, item % SPLIT, first_row, rows, N, ACTIVATION)


@gluon.jit
def _both_scales(totals, scale_ptr, x_scale_ptr, m, tile, k, padded, N, K: gl.constexpr, GATED: gl.constexpr):
    """The scales of rows `m` of activations, and of each block of weights, with gates also of up rows."""
    OUT: gl.constexpr = totals[0].shape[1] // 2 if GATED else totals[0].shape[1]
    x_scale = gl.load(x_scale_ptr + k // 128 * padded + m)
    found = totals[:0]
    for block in gl.static_range(len(totals)):
        row = gl.minimum((tile * len(totals) + block) * OUT, N - 1)
        at = scale_ptr + row // 128 * (K // 128) + k // 128
        scale = gl.load(at)
        found = found + ((scale, gl.load(at + N // 128 * (K // 128)) if GATED else scale),)
    return x_scale, found


@gluon.jit
def _add_products(totals, scales, w_smem, x_tile, at_stage, zero, up, GATED: gl.constexpr):
    """Add the products of a step to the totals of each block of weights: while one is added, the next ones run."""
    products = totals[:0]
    for block in gl.static_range(len(totals)):
        w_tile = w_smem.index(at_stage * len(totals) + block).reshape([zero.shape[1], x_tile.shape[1]]).permute((1, 0))
        products = products + (warpgroup_mma(x_tile, w_tile, zero, use_acc=False, is_async=True),)
    added = totals[:0]
    for block in gl.static_range(len(totals)):
        product = warpgroup_mma_wait(len(totals) - 1 - block, deps=(products[block],))
        x_scale = scales[0]
        scale, up_scale = scales[1][block]
        if GATED:
            factor = gl.expand_dims(x_scale, 1) * gl.expand_dims(gl.where(up, up_scale, scale), 0)
        else:
            factor = gl.expand_dims(x_scale * scale, 1)
        added = added + (totals[block] + product * factor,)
    return added


@gluon.jit(do_not_specialize=["rows", "items"])
def _block_kernel(
    w_desc, scale_ptr, x_desc, x_scale_ptr, out_ptr,
    rows, padded, N, items,
    K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCKS: gl.constexpr, BLOCK_K: gl.constexpr,
    SPLIT: gl.constexpr, ACTIVATION: gl.constexpr, STAGES: gl.constexpr, BESIDE: gl.constexpr, STAGGER: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Like `_coded_kernel`, but activations are codes too, and tokens are the rows of the sums."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    first_row = gl.program_id(1) * BLOCK_M
    GATED: gl.constexpr = ACTIVATION is not None
    STEPS: gl.constexpr = K // (BLOCK_K * SPLIT)
    LOADED: gl.constexpr = (BLOCKS * BLOCK_N + BLOCK_M) * BLOCK_K
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_N, 32])
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [STAGES * BLOCKS] + w_desc.block_shape, w_desc.layout)
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    if not BESIDE:
        gdc_launch_dependents()
    steps = (items - program + programs - 1) // programs * STEPS
    for stage in gl.static_range(STAGES):
        tile, k = _coded_column(stage, program, programs, SPLIT, STEPS, BLOCK_K, STAGGER)
        mbarrier.expect(full.index(stage), LOADED, stage < steps)
        _ask(w_desc, full, w_smem, stage, tile, k, stage < steps, BLOCK_N, BLOCKS, GATED)
    gdc_wait()
    if BESIDE:
        gdc_launch_dependents()
    for stage in gl.static_range(STAGES):
        tile, k = _coded_column(stage, program, programs, SPLIT, STEPS, BLOCK_K, STAGGER)
        load_tile(x_desc, [first_row, k], full.index(stage), x_smem.index(stage), stage < steps)
    zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, MMA)
    m = gl.minimum(first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, MMA)), rows - 1)
    up = (gl.arange(0, BLOCK_N, gl.SliceLayout(0, MMA)) & 8) != 0
    none = (zero,) if BLOCKS == 1 else (zero, zero) if BLOCKS == 2 else (zero, zero, zero)
    tile, k = _coded_column(0, program, programs, SPLIT, STEPS, BLOCK_K, STAGGER)
    scales = _both_scales(none, scale_ptr, x_scale_ptr, m, tile, k, padded, N, K, GATED)
    for lap in range(steps // STEPS):
        totals = none
        for step in range(lap * STEPS, lap * STEPS + STEPS):
            at_stage = step % STAGES
            # Nothing else hides the time of these loads, so they are for the next step.
            tile, k = _coded_column(step + 1, program, programs, SPLIT, STEPS, BLOCK_K, STAGGER)
            next_scales = _both_scales(totals, scale_ptr, x_scale_ptr, m, tile, k, padded, N, K, GATED)
            mbarrier.wait(full.index(at_stage), step // STAGES & 1)
            totals = _add_products(totals, scales, w_smem, x_smem.index(at_stage), at_stage, zero, up, GATED)
            scales = next_scales
            # All products of this step have ended in all warps, so refill its stage.
            meet()
            ahead = step + STAGES
            tile, k = _coded_column(ahead, program, programs, SPLIT, STEPS, BLOCK_K, STAGGER)
            mbarrier.expect(full.index(at_stage), LOADED, ahead < steps)
            _ask(w_desc, full, w_smem, at_stage, tile, k, ahead < steps, BLOCK_N, BLOCKS, GATED)
            load_tile(x_desc, [first_row, k], full.index(at_stage), x_smem.index(at_stage), ahead < steps)
        item = program + lap * programs
        for block in gl.static_range(BLOCKS):
            at = item // SPLIT * BLOCKS + block
            _store(out_ptr, totals[block].permute((1, 0)), at, item % SPLIT, first_row, rows, N, ACTIVATION)


@gluon.jit(do_not_specialize=["rows", "items"])
def _stream_kernel(
    w_desc, x_desc, out_ptr,
    rows, N, items, tiles,
    K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCKS: gl.constexpr, BLOCK_K: gl.constexpr,
    SPLIT: gl.constexpr, ACTIVATION: gl.constexpr, STAGES: gl.constexpr, BESIDE: gl.constexpr, STAGGER: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    first_row = gl.program_id(1) * BLOCK_M
    GATED: gl.constexpr = ACTIVATION is not None
    STEPS: gl.constexpr = K // (BLOCK_K * SPLIT)
    LOADED: gl.constexpr = (BLOCKS * BLOCK_N + BLOCK_M) * BLOCK_K * w_desc.dtype.primitive_bitwidth // 8
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_M, 16])
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [STAGES * BLOCKS] + w_desc.block_shape, w_desc.layout)
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    if not BESIDE:
        gdc_launch_dependents()
    steps = (items - program + programs - 1) // programs * STEPS
    for stage in gl.static_range(STAGES - 2):
        tile, k = _column(stage, program, programs, tiles, STEPS, BLOCK_K, STAGGER)
        mbarrier.expect(full.index(stage), LOADED, stage < steps)
        _ask(w_desc, full, w_smem, stage, tile, k, stage < steps, BLOCK_N, BLOCKS, GATED)
    gdc_wait()
    if BESIDE:
        gdc_launch_dependents()
    for stage in gl.static_range(STAGES - 2):
        tile, k = _column(stage, program, programs, tiles, STEPS, BLOCK_K, STAGGER)
        load_tile(x_desc, [first_row, k], full.index(stage), x_smem.index(stage), stage < steps)
    for lap in range(steps // STEPS):
        zero = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)
        sums = (zero,) if BLOCKS == 1 else (zero, zero, zero)
        for step in range(lap * STEPS, lap * STEPS + STEPS):
            at_stage = step % STAGES
            mbarrier.wait(full.index(at_stage), step // STAGES & 1)
            x_tile = x_smem.index(at_stage).permute((1, 0))
            sums = _multiply(w_smem, x_tile, sums, at_stage)
            # The product of step - 1 may still run. Step - 2 has ended in all warps, so refill its stage.
            ahead = step + STAGES - 2
            free = ahead % STAGES
            tile, k = _column(ahead, program, programs, tiles, STEPS, BLOCK_K, STAGGER)
            mbarrier.expect(full.index(free), LOADED, ahead < steps)
            _ask(w_desc, full, w_smem, free, tile, k, ahead < steps, BLOCK_N, BLOCKS, GATED)
            load_tile(x_desc, [first_row, k], full.index(free), x_smem.index(free), ahead < steps)
            sums = _wait(sums, BLOCKS)
        sums = _wait(sums, 0)
        item = program + lap * programs
        for block in gl.static_range(BLOCKS):
            _store(out_ptr, sums[block], item % tiles * BLOCKS + block, item // tiles, first_row, rows, N, ACTIVATION)


def stages(block_n: int, block_m: int, block_k: int, most: int, w_bytes: int = 2, x_bytes: int = 2) -> int:
    """Stages of the ring: at most `most`, and no more than fit shared memory while the previous kernel still runs."""
    return max(3, min(most, 220_000 // (block_k * (block_n * w_bytes + x_bytes * block_m))))


def takes(x_MK: torch.Tensor, weights: Weights, gated: bool) -> bool:
    """True if the kernel can run: 16-bit activations on Hopper, in rows that the copy engine can address.

    Weights have the dtype of the activations, or are codes in rows of whole blocks, with scales of rows or of blocks.
    """
    w_NK = stored(weights)
    if gated and w_NK.shape[0] % 16:  # gate and up rows are loaded eight at a time
        return False
    if isinstance(weights, CodedMatrix) and (weights.format == "mxfp8" or weights.inputs % BLOCK):
        return False
    if not is_hopper(x_MK.device):
        return False
    return x_MK.dtype in (torch.bfloat16, torch.float16) and all(
        t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 and t.stride(1) == 1 for t in (x_MK, w_NK)
    )


def stream(
    x_MK: torch.Tensor,
    weights: Weights,
    out: torch.Tensor,
    outputs: int,
    block_n: int,
    block_k: int,
    split: int,
    num_warps: int,
    num_stages: int,
    programs: int,
    activation: Activation | None,
    beside: bool = False,
    stagger: bool = False,
    codes: bool = False,
) -> None:
    """Write a product to `out`, as `triton_linear.multiply_into` does, in tiles of `block_n` weight rows.

    `block_n` is a power of two or three times one; three blocks then share a tile of x, each with its own sums. So 128
    programs of 192 rows cover 24,576 outputs, where tiles of 256 would leave a quarter of 132 programs idle. Tiles of
    codes are powers of two. With `stagger`, programs are at different columns at any time, so they do not all read the
    same part of x at once. A tile of codes has 128 inputs.

    With `codes` (weights in `fp8_block`) activations are rounded to codes; a tile then has one to three blocks of 64.
    """
    coded = weights if isinstance(weights, CodedMatrix) else None
    w_NK = stored(weights)
    if coded is not None:
        assert block_k == BLOCK, f"a tile of codes has {BLOCK} inputs, not {block_k}"
        block_n = block_n if codes else block_n & -block_n
    rows, inputs = x_MK.shape
    block_m = min(128, max(64 if codes else 8, triton.next_power_of_2(rows)))
    tiles = triton.cdiv(w_NK.shape[0], block_n)
    items = tiles * split
    blocks = block_n // _CODES_BLOCK if codes else 3 if block_n % 3 == 0 else 1
    block = block_n // blocks
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    bits = 8 * w_NK.element_size()
    if codes:
        assert coded is not None and coded.format == "fp8_block", "activations are codes only where weights are blocks"
        w_NK, num_warps = w_NK.view(torch.float8_e4m3fn), min(num_warps, block_m // 16)
    swizzle = min(128, block_k * w_NK.element_size())  # no wider than a row of the tile
    if activation is not None:
        row = w_NK.stride(0)
        shape, strides = [outputs // 8, 2, 8, inputs], [8 * row, outputs * row, row, 1]
        paired = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=4)
        tensor = TensorDescriptor(w_NK, shape, strides, [block // 16, 2, 8, block_k], paired)
    else:
        flat = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=2)
        tensor = TensorDescriptor.from_tensor(w_NK, [block, block_k], flat)
    options = {
        "K": inputs,
        "BLOCK_M": block_m,
        "BLOCK_N": block,
        "BLOCK_K": block_k,
        "SPLIT": split,
        "ACTIVATION": activation,
        "STAGES": stages(block_n, block_m, block_k, num_stages, w_NK.element_size(), 1 if codes else 2),
        "BESIDE": beside,
        "STAGGER": stagger,
        "num_warps": num_warps,
        **follow_options(x_MK.device),
    }
    grid = (min(items, programs), triton.cdiv(rows, block_m))
    if coded is not None and codes:
        x_codes_MK, x_scales_BM, _ = code_rows(x_MK)
        flat = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
        x_desc = TensorDescriptor.from_tensor(x_codes_MK, [block_m, block_k], flat)
        padded = len(x_codes_MK)
        given = tensor, coded.scales, x_desc, x_scales_BM, out, rows, padded, outputs, items
        _block_kernel[grid](*given, BLOCKS=blocks, **options)
        return
    if coded is None:
        x_desc = TensorDescriptor.from_tensor(x_MK, [block_m, block_k], layout)
        _stream_kernel[grid](tensor, x_desc, out, rows, outputs, items, tiles, BLOCKS=blocks, **options)
        return
    x, x_scales = half_rows(x_MK)
    x_desc = TensorDescriptor.from_tensor(x, [block_m, block_k], layout)
    scale_rows, scale_columns = scale_block(coded.format, inputs)
    _coded_kernel[grid](
        tensor, coded.scales, x_desc, x_scales, out, rows, outputs, items,
        SCALE_ROWS=scale_rows, SCALE_COLUMNS=scale_columns, **options,
    )  # fmt: skip
