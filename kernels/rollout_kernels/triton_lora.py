"""The corrections of low-rank adapters as two Triton kernels a product, for batches of rows with different adapters.

    shrink   low[split, m] = A[slot of m] x[m]     float32, over SPLIT parts of the inputs
    expand   y[m] += B[slot of m] sum(low[:, m])

A program takes a tile of one slot's A or B and a block of tokens, of which it masks those of other slots: so a weight
is read once however many rows take it, and multiplied on the tensor cores. Decode steps have slots as a dimension of
the grid, and programs whose slot no row of their block takes end at once. In chunks of prompts a block has one slot, or
two where chunks meet: there one program goes through the slots between the least and the largest of its block. A token
has one slot, so no two programs write to the same place, and what a token gets does not depend on timing.

Legend: see `lora`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_kernels.lora import LoraBuffers
from rollout_kernels.triton_math import dot, follow, follow_options, narrow

_BLOCK_K = 128
_BLOCK_N = 64
_LARGEST_BLOCK_M = 64
_MOST_RANK_TILE = 64
#: Inputs from which on a decode step's first product is split once more, and into how many parts at the most.
_INPUTS_A_PART = 512
_MOST_PARTS = 8
_NEVER = 1 << 30


@triton.jit
def _shrink_slot(
    slot, slots, x, low, a_ptr, begin, tile, K: tl.constexpr, A: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Of one slot's A a tile, times the tokens that take it."""
    takes = slots == slot
    if tl.max(takes.to(tl.int32), 0) > 0:
        k = begin + tl.arange(0, BLOCK_K)
        r = tile * TILE + tl.arange(0, TILE)
        a = a_ptr + (slot - 1).to(tl.int64) * A * K + r[None, :] * K
        acc = tl.zeros([BLOCK_M, TILE], tl.float32)
        for step in range(0, STEPS):
            at = k + step * BLOCK_K
            x_MK = tl.load(x + at[None, :], mask=takes[:, None] & (at < K)[None, :], other=0.0)
            a_KR = tl.load(a + at[:, None], mask=(at < K)[:, None], other=0.0)
            acc = dot(x_MK, a_KR, acc)
        tl.store(low + r[None, :], acc, mask=takes[:, None])


@triton.jit(do_not_specialize=["tokens"])
def _shrink_kernel(
    x_ptr,
    a_ptr,
    slots_ptr,
    low_ptr,
    tokens,
    stride_x,
    K: tl.constexpr,
    A: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    SEGMENTED: tl.constexpr,
):
    tile, split = tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    STEPS: tl.constexpr = (K + BLOCK_K * SPLIT - 1) // (BLOCK_K * SPLIT)
    follow()
    slots = tl.load(slots_ptr + m, mask=m < tokens, other=0)
    x = x_ptr + m[:, None].to(tl.int64) * stride_x
    low = low_ptr + (split.to(tl.int64) * tokens + m[:, None]) * A
    begin = split * STEPS * BLOCK_K
    if SEGMENTED:
        slot, last = tl.min(tl.where(slots == 0, 1 << 30, slots), 0), tl.max(slots, 0)
        while slot <= last:
            _shrink_slot(slot, slots, x, low, a_ptr, begin, tile, K, A, BLOCK_M, BLOCK_K, TILE, STEPS)
            slot += 1
    else:
        slot = tl.program_id(1) + 1
        _shrink_slot(slot, slots, x, low, a_ptr, begin, tile, K, A, BLOCK_M, BLOCK_K, TILE, STEPS)


@triton.jit
def _expand_slot(
    slot, slots, m, n, live, module, low_ptr, b_ptr, y_ptr, tokens, N: tl.constexpr, A: tl.constexpr,
    R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """A tile of outputs of the tokens that take one slot."""
    takes = slots == slot
    if tl.max(takes.to(tl.int32), 0) > 0:
        r = tl.arange(0, R)
        low_MR = tl.zeros([BLOCK_M, R], tl.float32)
        for split in tl.range(0, SPLIT, num_stages=1):  # unrolled, the parts of large ranks take all registers
            at = (split * tokens.to(tl.int64) + m[:, None]) * A + module * R + r[None, :]
            low_MR += tl.load(low_ptr + at, mask=takes[:, None], other=0.0)
        b = b_ptr + ((slot - 1).to(tl.int64) * N + n[None, :]) * R + r[:, None]
        b_RN = tl.load(b, mask=live[None, :], other=0.0)
        low_MR = narrow(low_MR, b_ptr.dtype.element_ty)
        added = dot(low_MR, b_RN, tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        y = y_ptr + m[:, None].to(tl.int64) * N + n[None, :]
        here = takes[:, None] & live[None, :]
        whole = tl.load(y, mask=here, other=0.0).to(tl.float32) + added
        tl.store(y, narrow(whole, y_ptr.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["tokens"])
def _expand_kernel(
    low_ptr,
    b_ptr,
    slots_ptr,
    y_ptr,
    tokens,
    N: tl.constexpr,
    A: tl.constexpr,
    R: tl.constexpr,
    END_0: tl.constexpr,
    END_1: tl.constexpr,
    TILES_0: tl.constexpr,
    TILES_1: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    SEGMENTED: tl.constexpr,
):
    tile = tl.program_id(0)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    module = (tile >= TILES_0).to(tl.int32) + (tile >= TILES_1).to(tl.int32)
    begin = tl.where(module == 0, 0, tl.where(module == 1, END_0, END_1))
    end = tl.where(module == 0, END_0, tl.where(module == 1, END_1, N))
    first_tile = tl.where(module == 0, 0, tl.where(module == 1, TILES_0, TILES_1))
    n = begin + (tile - first_tile) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = n < end
    follow()
    slots = tl.load(slots_ptr + m, mask=m < tokens, other=0)
    if SEGMENTED:
        slot, last = tl.min(tl.where(slots == 0, 1 << 30, slots), 0), tl.max(slots, 0)
        while slot <= last:
            _expand_slot(
                slot, slots, m, n, live, module, low_ptr, b_ptr, y_ptr, tokens, N, A, R, BLOCK_M, BLOCK_N, SPLIT
            )
            slot += 1
    else:
        slot = tl.program_id(1) + 1
        _expand_slot(slot, slots, m, n, live, module, low_ptr, b_ptr, y_ptr, tokens, N, A, R, BLOCK_M, BLOCK_N, SPLIT)


def _parts(inputs: int, segmented: bool) -> int:
    """Of the inputs: few tokens make few programs, which then have less to read each."""
    if segmented:
        return 1
    return min(_MOST_PARTS, 1 << (max(1, inputs // _INPUTS_A_PART).bit_length() - 1))


def lora_add(
    y_MN: torch.Tensor, x_MK: torch.Tensor, buffers: LoraBuffers, slots_M: torch.Tensor, segmented: bool
) -> None:
    """See `rollout_kernels.lora.lora_add`."""
    a_SAK, b_SNR = buffers.a_SAK, buffers.b_SNR
    (tokens, inputs), (slots, ranks, _), (_, outputs, rank) = x_MK.shape, a_SAK.shape, b_SNR.shape
    assert y_MN.is_contiguous() and x_MK.stride(1) == 1 and slots_M.is_contiguous() and len(buffers.ends) <= 3
    block_m = _LARGEST_BLOCK_M if segmented else min(_LARGEST_BLOCK_M, max(16, triton.next_power_of_2(tokens)))
    tile, parts = min(rank, _MOST_RANK_TILE), _parts(inputs, segmented)
    grid_rest = (1 if segmented else slots, triton.cdiv(tokens, block_m))
    low = torch.empty(parts, tokens, ranks, dtype=torch.float32, device=x_MK.device)
    options = {"num_warps": 8 if rank > 32 and block_m > 16 else 4, **follow_options(x_MK.device)}
    _shrink_kernel[(ranks // tile * parts, *grid_rest)](
        x_MK,
        a_SAK,
        slots_M,
        low,
        tokens,
        x_MK.stride(0),
        K=inputs,
        A=ranks,
        BLOCK_M=block_m,
        BLOCK_K=_BLOCK_K,
        TILE=tile,
        SPLIT=parts,
        SEGMENTED=segmented,
        **options,
    )
    ends = (*buffers.ends, *(_NEVER for _ in range(3 - len(buffers.ends))))
    widths = [end - start for start, end in zip((0, *buffers.ends[:-1]), buffers.ends, strict=True)]
    tiles = [triton.cdiv(width, _BLOCK_N) for width in widths]
    _expand_kernel[(sum(tiles), *grid_rest)](
        low,
        b_SNR,
        slots_M,
        y_MN,
        tokens,
        N=outputs,
        A=ranks,
        R=rank,
        END_0=ends[0],
        END_1=ends[1] if len(tiles) > 1 else outputs,
        TILES_0=tiles[0] if len(tiles) > 1 else _NEVER,
        TILES_1=tiles[0] + tiles[1] if len(tiles) > 2 else _NEVER,
        BLOCK_M=block_m,
        BLOCK_N=_BLOCK_N,
        SPLIT=parts,
        SEGMENTED=segmented,
        **options,
    )
