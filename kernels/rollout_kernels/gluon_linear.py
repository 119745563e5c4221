"""Matrix products with few rows on Hopper, whose weights are on their way before the kernel before has ended.

The same products and items as in `triton_linear`, in Gluon, where the copies are written out: the copy engine brings
tiles of weights and of x into a ring in shared memory, and the tensor cores take both from there. The ring is filled
with the first weights, which nobody writes, before the kernel waits for the one that makes x. So the memory is kept
busy while that one comes to its end. It lets the one after in before it waits itself: that one must read nothing but
weights before its own wait.

Legend: M tokens, N outputs, K inputs.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Renamed after Triton 3.6.
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def _column(step, program, programs, tiles, STEPS: gl.constexpr, BLOCK_K: gl.constexpr):
    """Tile and first input of a program's step."""
    item = program + step // STEPS * programs
    return item % tiles, (item // tiles * STEPS + step % STEPS) * BLOCK_K


@gluon.jit(do_not_specialize=["rows", "items"])
def _stream_kernel(
    w_desc,
    x_desc,
    out_ptr,
    rows,
    N,
    items,
    tiles,
    K: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    SPLIT: gl.constexpr,
    SILU: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    first_row = gl.program_id(1) * BLOCK_M
    STEPS: gl.constexpr = K // (BLOCK_K * SPLIT)
    HALVES: gl.constexpr = 2 if SILU else 1  # gate rows and the up rows that go with them are tiles of their own
    LOADED: gl.constexpr = (HALVES * BLOCK_N + BLOCK_M) * BLOCK_K * w_desc.dtype.primitive_bitwidth // 8
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_M, 16])
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [STAGES * HALVES, BLOCK_N, BLOCK_K], w_desc.layout)
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    gdc_launch_dependents()
    steps = (items - program + programs - 1) // programs * STEPS
    for stage in gl.static_range(STAGES - 2):
        tile, k = _column(stage, program, programs, tiles, STEPS, BLOCK_K)
        mbarrier.expect(full.index(stage), LOADED, stage < steps)
        for half in gl.static_range(HALVES):
            w_tile = w_smem.index(stage * HALVES + half)
            _copy(w_desc, [tile * BLOCK_N + half * N, k], full.index(stage), w_tile, stage < steps)
    gdc_wait()
    for stage in gl.static_range(STAGES - 2):
        tile, k = _column(stage, program, programs, tiles, STEPS, BLOCK_K)
        _copy(x_desc, [first_row, k], full.index(stage), x_smem.index(stage), stage < steps)
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, MMA))[:, None]
    m = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(0, MMA))[None, :]
    for turn in range(steps // STEPS):
        acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)
        up = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)
        for step in range(turn * STEPS, turn * STEPS + STEPS):
            place = step % STAGES
            mbarrier.wait(full.index(place), step // STAGES & 1)
            x_tile = x_smem.index(place).permute((1, 0))
            acc = warpgroup_mma(w_smem.index(place * HALVES), x_tile, acc, is_async=True)
            if SILU:
                up = warpgroup_mma(w_smem.index(place * HALVES + 1), x_tile, up, is_async=True)
            # The product of the step before may still run, but that of the one before it is over in all warps.
            ahead = step + STAGES - 2
            free = ahead % STAGES
            next_tile, next_k = _column(ahead, program, programs, tiles, STEPS, BLOCK_K)
            mbarrier.expect(full.index(free), LOADED, ahead < steps)
            for half in gl.static_range(HALVES):
                next_w = w_smem.index(free * HALVES + half)
                _copy(w_desc, [next_tile * BLOCK_N + half * N, next_k], full.index(free), next_w, ahead < steps)
            _copy(x_desc, [first_row, next_k], full.index(free), x_smem.index(free), ahead < steps)
            if SILU:
                acc, up = warpgroup_mma_wait(2, deps=(acc, up))
            else:
                acc = warpgroup_mma_wait(1, deps=(acc,))
        if SILU:
            acc, up = warpgroup_mma_wait(0, deps=(acc, up))
            acc = acc / (1.0 + gl.exp(-acc)) * up
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        item = program + turn * programs
        output = item % tiles * BLOCK_N + n
        at = ((item // tiles).to(gl.int64) * rows + m) * N + output
        gl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(m < rows) & (output < N))


def stages(block_n: int, block_m: int, block_k: int, silu: bool, most: int, element_bytes: int = 2) -> int:
    """Places of the ring: up to `most`, and what shared memory holds beside the kernel before."""
    return max(3, min(most, 220_000 // ((block_n * (2 if silu else 1) + block_m) * block_k * element_bytes)))


def takes(x_MK: torch.Tensor, w_NK: torch.Tensor) -> bool:
    """True where the kernel runs: 16 bits on Hopper, rows that the copy engine can address."""
    if x_MK.device.type != "cuda" or torch.cuda.get_device_capability(x_MK.device)[0] != 9:
        return False
    return x_MK.dtype in (torch.bfloat16, torch.float16) and all(
        t.data_ptr() % 16 == 0 and t.stride(0) % 8 == 0 and t.stride(1) == 1 for t in (x_MK, w_NK)
    )


def stream(
    x_MK: torch.Tensor,
    w_NK: torch.Tensor,
    out: torch.Tensor,
    outputs: int,
    block_n: int,
    block_k: int,
    split: int,
    num_warps: int,
    num_stages: int,
    programs: int,
    silu: bool,
) -> None:
    """The product into `out`, as `triton_linear._launch` makes it; `block_n` outputs a tile."""
    rows, inputs = x_MK.shape
    block_m = min(128, max(8, triton.next_power_of_2(rows)))
    tiles = triton.cdiv(outputs, block_n)
    items = tiles * split
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    _stream_kernel[(min(items, programs), triton.cdiv(rows, block_m))](
        TensorDescriptor.from_tensor(w_NK, [block_n, block_k], layout),
        TensorDescriptor.from_tensor(x_MK, [block_m, block_k], layout),
        out,
        rows,
        outputs,
        items,
        tiles,
        K=inputs,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        SPLIT=split,
        SILU=silu,
        STAGES=stages(block_n, block_m, block_k, silu, num_stages),
        num_warps=num_warps,
        launch_pdl=True,
    )
