"""The corrections of low-rank adapters on a GPU, for batches whose rows use different adapters.

Two kernels for each product:

    shrink   low[split, m] = A[slot of m] @ x[m]     float32, over SPLIT parts of the inputs
    expand   y[m] += B[slot of m] @ sum(low[:, m])

A program handles a tile of one slot's A or B and a block of tokens, and masks the tokens of other slots. So a weight is
read once, however many rows use it, and multiplied on the tensor cores. In decode steps, slots are a dimension of the
grid; a program ends at once if no row of its block uses its slot. In chunks of prompts a block has one slot, or two
where chunks meet; there one program loops over the slots from the smallest to the largest of its block. A token has one
slot, so no two programs write to the same place, and results do not depend on timing.

With few tokens, the correction of a product takes only one more kernel, which costs almost nothing because it runs at
the same time as the product:

    product    launched with `beside`: once its own wait is over, the next kernel may start
    shrink     starts then, and ends only after the product has ended
    consumer   the kernel that reads the product: prefetches B (weights), waits for the shrink and so for both, and adds
               the correction (`expand_row`)

Every row then reads B itself, which is worth it for few rows only (`adds_later`).

Legend: see `lora_buffers`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rollout_kernels.common.triton_math import dot, follow, follow_options, let_next_begin, narrow, wait_for_last
from rollout_kernels.linear.table import MOST_ROWS
from rollout_kernels.lora.lora_buffers import TILE_OUTPUTS, Correction, LoraBuffers

_BLOCK_K = 128
_LARGEST_BLOCK_M = 64
_MOST_RANK_TILE = 64
#: In decode steps the shrink splits its inputs: the least inputs of a part, and the most parts.
_INPUTS_A_PART = 512
_MOST_PARTS = 8
#: The most bytes of B that rows may read separately; above, a kernel that reads B once is faster.
_MOST_READ_BYTES = 16 << 20
#: Ranks that `expand_row` handles at once, and the most values of B that a program then holds.
_RANKS_AT_ONCE = 16
_VALUES_AT_ONCE = 1 << 15


@triton.jit
def _shrink_slot(
    slot, slots, x, low, a_ptr, begin, tile, K: tl.constexpr, A: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """A tile of one slot's A times the tokens that use this slot."""
    takes = slots == slot
    if tl.max(takes.to(tl.int32), 0) > 0:
        k = begin + tl.arange(0, BLOCK_K)
        r = tile * TILE + tl.arange(0, TILE)
        a = a_ptr + (slot - 1).to(tl.int64) * A * K + r[None, :] * K
        acc = tl.zeros([BLOCK_M, TILE], tl.float32)
        for step in range(0, STEPS):
            at = k + step * BLOCK_K
            here = takes[:, None] & (at < K)[None, :]
            # Bypass the L1 cache, which may hold stale data, because this kernel may not have waited.
            x_MK = tl.load(x + at[None, :], mask=here, other=0.0, cache_modifier=".cg")
            a_KR = tl.load(a + at[:, None], mask=(at < K)[:, None], other=0.0)
            acc = dot(x_MK, a_KR, acc)
        tl.store(low + r[None, :], acc, mask=takes[:, None])


@triton.jit(do_not_specialize=["tokens"])
def _shrink_kernel(
    x_ptr, a_ptr, slots_ptr, low_ptr,
    tokens,
    stride_x,
    K: tl.constexpr, A: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr, SEGMENTED: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    STEPS: tl.constexpr = (K + BLOCK_K * SPLIT - 1) // (BLOCK_K * SPLIT)
    if BESIDE:
        let_next_begin()
    else:
        follow()
    slots = tl.load(slots_ptr + m, mask=m < tokens, other=0, cache_modifier=".cg")
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
    # One waiting program is enough to keep the kernel from ending. The others end and make room for other programs.
    if BESIDE and tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0:
        wait_for_last()


@triton.jit
def _expand_slot(
    slot, slots, m, n, live, module, low_ptr, b_ptr, y_ptr, tokens, N: tl.constexpr, A: tl.constexpr,
    R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Add a tile of outputs for the tokens that use one slot."""
    takes = slots == slot
    if tl.max(takes.to(tl.int32), 0) > 0:
        r = tl.arange(0, R)
        low_MR = tl.zeros([BLOCK_M, R], tl.float32)
        for split in tl.range(0, SPLIT, num_stages=1):  # not unrolled: large ranks would use up all registers
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
    low_ptr, b_ptr, slots_ptr, tiles_ptr, y_ptr,
    tokens,
    N: tl.constexpr, A: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr, SEGMENTED: tl.constexpr,
):  # fmt: skip
    tile = tiles_ptr + tl.program_id(0) * 3
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    module = tl.load(tile)
    n = tl.load(tile + 1) + tl.arange(0, BLOCK_N)
    live = n < tl.load(tile + 2)
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
    """Parts that the shrink splits its inputs into: few tokens make few programs, and parts give each less to read."""
    if segmented:
        return 1
    return min(_MOST_PARTS, 1 << (max(1, inputs // _INPUTS_A_PART).bit_length() - 1))


def _block_m(tokens: int, segmented: bool) -> int:
    return _LARGEST_BLOCK_M if segmented else min(_LARGEST_BLOCK_M, max(16, triton.next_power_of_2(tokens)))


def _options(rank: int, block_m: int, device: torch.device) -> dict[str, Any]:
    return {"num_warps": 8 if rank > 32 and block_m > 16 else 4, **follow_options(device)}


def _shrink(
    x_MK: torch.Tensor, buffers: LoraBuffers, slots_M: torch.Tensor, segmented: bool, beside: bool
) -> torch.Tensor:
    """Sums of A x over parts of the inputs, float32 [P, M, A]; undefined for tokens of slot 0."""
    (tokens, inputs), (slots, ranks, _), rank = x_MK.shape, buffers.a_SAK.shape, buffers.rank
    assert x_MK.stride(1) == 1 and slots_M.is_contiguous()
    block_m, tile, parts = _block_m(tokens, segmented), min(rank, _MOST_RANK_TILE), _parts(inputs, segmented)
    low = torch.empty(parts, tokens, ranks, dtype=torch.float32, device=x_MK.device)
    _shrink_kernel[(ranks // tile * parts, 1 if segmented else slots, triton.cdiv(tokens, block_m))](
        x_MK, buffers.a_SAK, slots_M, low, tokens, x_MK.stride(0),
        K=inputs, A=ranks, BLOCK_M=block_m, BLOCK_K=_BLOCK_K, TILE=tile, SPLIT=parts, SEGMENTED=segmented,
        BESIDE=beside, **_options(rank, block_m, x_MK.device),
    )  # fmt: skip
    return low


def adds_later(tokens: int, buffers: LoraBuffers, segmented: bool) -> bool:
    """True if the consumer of a product should add its corrections in a step of `tokens` tokens (see the module).

    The answer changes only at powers of two up to `MOST_ROWS`, the sizes that start-up compiles for.
    """
    read = triton.next_power_of_2(tokens) * buffers.b_SNR[0].nbytes
    return not segmented and tokens <= MOST_ROWS and read <= _MOST_READ_BYTES


def shrink_beside(x_MK: torch.Tensor, buffers: LoraBuffers, slots_M: torch.Tensor) -> Correction:
    """Launch the shrink of a correction next to the product of `x_MK`, which was launched last, with `beside`.

    Kernels launched before that product have ended when this starts, so `slots_M` must be at least that old. The
    consumer of the product adds the correction that this returns.
    """
    return Correction(_shrink(x_MK, buffers, slots_M, segmented=False, beside=True), buffers, slots_M)


def correction_arguments(correction: Correction | None, block: int) -> dict[str, Any]:
    """Arguments of a kernel that adds a correction to tiles of `block` outputs, a power of two.

    Without a correction, R is 0 and the kernel compiles without the code for it.
    """
    if correction is None:
        return {"low_ptr": None, "b_ptr": None, "adapters_ptr": None, "R": 0, "LOW_PARTS": 0, "AT_ONCE": 0}
    rank = correction.buffers.rank
    return {
        "low_ptr": correction.low_PMA,
        "b_ptr": correction.buffers.b_SNR,
        "adapters_ptr": correction.slots_M,
        "R": rank,
        "LOW_PARTS": correction.low_PMA.shape[0],
        "AT_ONCE": max(1, min(rank, _RANKS_AT_ONCE, _VALUES_AT_ONCE // block)),
    }


@triton.jit
def begin_expand(b, takes, AT_ONCE: tl.constexpr):
    """Prefetch the first ranks of B; call it before `follow`. `b` points to rows of B, [..., 1]."""
    return tl.load(b + tl.arange(0, AT_ONCE), mask=takes, other=0.0)


@triton.jit
def _times_low(b_R, low, part, ranks, LOW_PARTS: tl.constexpr):
    """Some ranks of rows of B, times a token's sums of these ranks."""
    r = tl.arange(0, b_R.shape[len(b_R.shape) - 1])
    low_R = tl.load(low + r, mask=r < ranks, other=0.0)
    for at in tl.static_range(1, LOW_PARTS):
        low_R += tl.load(low + at * part + r, mask=r < ranks, other=0.0)
    return tl.sum(b_R.to(tl.float32) * low_R, axis=len(b_R.shape) - 1)


@triton.jit
def expand_row(first, b, takes, low, part, ranks, R: tl.constexpr, LOW_PARTS: tl.constexpr, AT_ONCE: tl.constexpr):
    """One token's correction, float32, in the shape of `b` without its last dimension.

    `first` is the result of `begin_expand`. `low` points to the token's sums, and `part` is the distance between two
    parts of them. `ranks` is R, or 0 if the token has no adapter.
    """
    total = _times_low(first, low, part, ranks, LOW_PARTS)
    for begin in tl.range(AT_ONCE, R, AT_ONCE, num_stages=1):  # not unrolled: large ranks would use up all registers
        rest = tl.load(b + begin + tl.arange(0, AT_ONCE), mask=takes, other=0.0)
        total += _times_low(rest, low + begin, part, ranks, LOW_PARTS)
    return total


def lora_add(
    y_MN: torch.Tensor, x_MK: torch.Tensor, buffers: LoraBuffers, slots_M: torch.Tensor, segmented: bool
) -> None:
    """`rollout_kernels.lora.lora_add` on a GPU; the arguments are the same."""
    (tokens, _), (slots, outputs, rank) = x_MK.shape, buffers.b_SNR.shape
    assert y_MN.is_contiguous()
    low = _shrink(x_MK, buffers, slots_M, segmented, beside=False)
    block_m = _block_m(tokens, segmented)
    _expand_kernel[(len(buffers.tiles_X3), 1 if segmented else slots, triton.cdiv(tokens, block_m))](
        low, buffers.b_SNR, slots_M, buffers.tiles_X3, y_MN, tokens,
        N=outputs, A=low.shape[2], R=rank, BLOCK_M=block_m, BLOCK_N=TILE_OUTPUTS, SPLIT=low.shape[0],
        SEGMENTED=segmented, **_options(rank, block_m, x_MK.device),
    )  # fmt: skip
