"""The sum of few rows over the ranks of a host, alone or with the residual sum and the norm that follow it.

    each program, for its row:
        parts of the product  -> added, rounded to the dtype, written to every peer with the exchange's number
        parts of every peer   -> read once they have that number
        all ranks' rows       -> added in float32 in the order of the ranks [-> residual -> norm]

The number is in every word, or in a flag that is written after the row (`peer_buffers`). A word's data and number
arrive together, so such an exchange takes one way over the link, and neither a barrier nor a fence. Everything that a
program reads of its peers is in this GPU's own memory. The sums have the same bits either way.

It rounds like `all_reduce` and then `add_rms_norm`. So a step may take either way.

Waiting is bounded: after `MOST_SPINS` reads of missing numbers a program sets `PeerBuffers.fault` to 1 plus the rank
that did not send, and no program of this rank waits any more. Missing values are NaN. A program whose row has a missing
value sends the row with negative numbers from then on, and a peer that finds a negative number sets its own flag. So no
sum of a rank whose flag is not set has a wrong value in it. The host looks at the flag before it uses the results of a
step.

Legend: M rows, S parts, H width, R ranks, W words.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_kernels.common.triton_math import (
    INTERPRETED,
    TRITON_DTYPES,
    follow_options,
    let_next_begin,
    narrow,
    wait_for_last,
)
from rollout_kernels.parallel.peer_buffers import TAIL, PeerBuffers

#: Reads of missing numbers, each of half a microsecond or more: over 10 seconds.
MOST_SPINS = 20_000_000


@triton.jit
def next_number(exchanges_at):
    """The number of a row's next exchange. After 2^31 - 1 comes 2, which has the other half, and is not negative."""
    number = tl.load(exchanges_at)
    return tl.where(number == 0x7FFFFFFF, 2, number + 1)


@triton.jit
def send_words(at, word, live):
    """Store words, each at once and visible to the other GPUs of the host."""
    if INTERPRETED:
        tl.store(at, word, mask=live)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.relaxed.sys.global.b64 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,l,r",
            [at, word, live.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def receive_words(at, live, number, fault_ptr, most_spins, RANK: tl.constexpr):
    """Words of rank RANK, once they have this number: data as int32, where it came or is not live, 1 if some did not.

    A word has one of three states: 0, arrived; 1, never comes; 2, may still come.
    """
    word = tl.load(at, mask=live, other=0, volatile=True)
    sent = (word >> 32).to(tl.int32)
    state = tl.max(tl.where((sent == number) | (live == 0), 0, tl.where(sent < 0, 1, 2)))
    spins = 0
    while state == 2:
        word = tl.load(at, mask=live, other=0, volatile=True)
        sent = (word >> 32).to(tl.int32)
        # All threads must agree on the end of the loop, so the flag is a part of what they find the maximum of.
        fault = tl.load(fault_ptr + tl.zeros_like(word), volatile=True)
        never = (sent < 0) | (fault != 0)
        state = tl.max(tl.where((sent == number) | (live == 0), 0, tl.where(never, 1, 2)))
        spins += 1
        if (state == 2) & (spins >= most_spins):
            state = 1
    if state == 1:
        tl.atomic_cas(fault_ptr, 0, 1 + RANK)  # the first cause stays
    return word.to(tl.int32), (sent == number) | (live == 0), state


@triton.jit
def receive_flag(at, number, fault_ptr, most_spins, RANK: tl.constexpr):
    """Wait until a row of rank RANK has this number: whether it came, and 1 if it did not.

    The states are the ones of `receive_words`. One thread reads and tells the others, so all threads agree.
    """
    sent = tl.atomic_add(at, 0, sem="acquire", scope="sys")
    state = tl.where(sent == number, 0, tl.where(sent < 0, 1, 2))
    spins = 0
    while state == 2:
        sent = tl.atomic_add(at, 0, sem="acquire", scope="sys")
        fault = tl.atomic_add(fault_ptr, 0, sem="relaxed")
        state = tl.where(sent == number, 0, tl.where((sent < 0) | (fault != 0), 1, 2))
        spins += 1
        if (state == 2) & (spins >= most_spins):
            state = 1
    if state == 1:
        tl.atomic_cas(fault_ptr, 0, 1 + RANK)  # the first cause stays
    return sent == number, state


@triton.jit
def _from(memory, rank, half, row, rows, row_words, RANKS: tl.constexpr, FLAGGED: tl.constexpr):
    """The address of the row that rank `rank` sent, in this half of a buffer."""
    if FLAGGED:  # addresses and sizes of rows are multiples of 16 bytes
        first = tl.multiple_of(memory.to(tl.pointer_type(tl.int32)), 16)
        return tl.multiple_of(first + ((half * RANKS + rank) * rows + row) * row_words, 16)
    else:
        return memory.to(tl.pointer_type(tl.int64)) + ((half * RANKS + rank) * rows + row) * row_words


@triton.jit
def _row_at(first_ptr, at, halves, PAIRS: tl.constexpr):
    """Pointers to a row's values, two a word if they have 16 bits: [W, 2], or [W]."""
    if PAIRS:
        return first_ptr + 2 * at[:, None] + halves[None, :]
    else:
        return first_ptr + at


@triton.jit
def _all_reduce_kernel(
    parts_ptr, residual_ptr, weight_ptr, out_ptr, addresses_ptr, exchanges_ptr, fault_ptr,
    rows, row_words, most_rows, eps, most_spins,
    H: tl.constexpr, BLOCK_W: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    UNIT_OFFSET: tl.constexpr, PAIRS: tl.constexpr, FLAGGED: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    words: tl.constexpr = H // 2 if PAIRS else H
    w = tl.arange(0, BLOCK_W)
    halves = tl.arange(0, 2)
    live_W = w < words
    if PAIRS:
        live = tl.broadcast_to(live_W[:, None], [BLOCK_W, 2])
    else:
        live = live_W
    if residual_ptr is not None:
        weight = tl.load(_row_at(weight_ptr, w, halves, PAIRS), mask=live, other=0.0).to(tl.float32)
    let_next_begin()
    wait_for_last()
    number = next_number(exchanges_ptr + row)
    added = tl.load(_row_at(parts_ptr + row * H, w, halves, PAIRS), mask=live, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        added += tl.load(_row_at(parts_ptr + (part * rows + row) * H, w, halves, PAIRS), mask=live, other=0.0)
    own = narrow(added, dtype)
    if PAIRS:
        low, high = tl.split(own)
        low = low.to(tl.int16, bitcast=True).to(tl.int32) & 65535
        data = low | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        data = own.to(tl.int32, bitcast=True)
    half = (number & 1).to(tl.int64)
    for step in tl.static_range(1, RANKS):
        peer = tl.load(addresses_ptr + (RANK + step) % RANKS)
        to = _from(peer, RANK, half, row, most_rows, row_words, RANKS, FLAGGED)
        if FLAGGED:
            if number > 0:  # a wrong row is not sent: a late peer may still read an earlier row, with its flag
                tl.store(to + w, data, mask=live_W)
        else:
            word = (data.to(tl.int64) & 0xFFFFFFFF) | (number.to(tl.int64) << 32)
            send_words(to + w, word, live_W)
    if FLAGGED:
        tl.debug_barrier()  # all threads have written
        for step in tl.static_range(1, RANKS):
            peer = tl.load(addresses_ptr + (RANK + step) % RANKS)
            to = _from(peer, RANK, half, row, most_rows, row_words, RANKS, FLAGGED)
            tl.atomic_xchg(to + row_words - TAIL, number, sem="release", scope="sys")
    if residual_ptr is not None:
        x = tl.load(_row_at(residual_ptr + row * H, w, halves, PAIRS), mask=live, other=0.0).to(tl.float32)
    mine = tl.load(addresses_ptr + RANK)
    total = tl.zeros_like(added)
    lost = 0
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            total += own.to(tl.float32)
        else:
            at = _from(mine, rank, half, row, most_rows, row_words, RANKS, FLAGGED)
            if FLAGGED:
                came, missed = receive_flag(at + row_words - TAIL, number, fault_ptr, most_spins, rank)
                data = tl.load(at + w, mask=live_W, other=0, cache_modifier=".cg")
            else:
                data, came, missed = receive_words(at + w, live_W, number, fault_ptr, most_spins, rank)
            lost = lost | missed
            if PAIRS:
                low = (data & 65535).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
                high = (data >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
                total += tl.join(tl.where(came, low, float("nan")), tl.where(came, high, float("nan")))
            else:
                total += tl.where(came, data.to(tl.float32, bitcast=True), float("nan"))
    tl.store(exchanges_ptr + row, number | (lost << 31))  # negative for ever: no word of this row is believed again
    total = narrow(total, dtype)
    if residual_ptr is not None:
        stored = narrow(x + total.to(tl.float32), dtype)
        tl.store(_row_at(residual_ptr + row * H, w, halves, PAIRS), stored, mask=live)
        x = stored.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(x * x) / H + eps)
        if UNIT_OFFSET:
            total = narrow(x * scale * (weight + 1.0), dtype)
        else:
            total = narrow(narrow(x * scale, dtype).to(tl.float32) * weight, dtype)
    tl.store(_row_at(out_ptr + row * H, w, halves, PAIRS), total, mask=live)


def _launch(
    parts_SMH: torch.Tensor,
    out_MH: torch.Tensor,
    residual_MH: torch.Tensor | None,
    weight_H: torch.Tensor | None,
    eps: float,
    unit_offset: bool,
    peers: PeerBuffers,
    most_spins: int,
) -> torch.Tensor:
    parts, rows, width = parts_SMH.shape
    dtype = out_MH.dtype
    assert parts_SMH.is_contiguous() and dtype in TRITON_DTYPES
    assert peers.fits(rows, width, dtype), "more than the buffers were made for"
    pairs = dtype.itemsize == 2
    block = triton.next_power_of_2(width // 2 if pairs else width)
    _all_reduce_kernel[(rows,)](
        parts_SMH, residual_MH, weight_H, out_MH, peers.addresses_R, peers.exchanges_M, peers.fault, rows,
        peers.memory_2RMW.shape[3], peers.rows, eps, most_spins,
        H=width, BLOCK_W=block, PARTS=parts, RANK=peers.rank, RANKS=peers.size, UNIT_OFFSET=unit_offset, PAIRS=pairs,
        FLAGGED=peers.flagged, TAIL=TAIL, num_warps=max(1, min(16, block // 64)), **follow_options(out_MH.device),
    )  # fmt: skip
    return out_MH


def all_reduce_rows(
    parts_SMH: torch.Tensor, peers: PeerBuffers, dtype: torch.dtype | None = None, most_spins: int = MOST_SPINS
) -> torch.Tensor:
    """The sum of a row's parts over the ranks, [M, H].

    Args:
        parts_SMH: contiguous; several parts are added in float32 first.
        peers: with room for M rows of H values.
        dtype: of the sum, to which each rank rounds its own first; None: the parts' dtype.
        most_spins: reads of missing numbers before the fault flag is set.
    """
    out_MH = torch.empty(parts_SMH.shape[1:], dtype=dtype or parts_SMH.dtype, device=parts_SMH.device)
    return _launch(parts_SMH, out_MH, None, None, 0.0, False, peers, most_spins)


def all_reduce_norm(
    residual_MH: torch.Tensor,
    parts_SMH: torch.Tensor,
    weight_H: torch.Tensor,
    eps: float,
    peers: PeerBuffers,
    unit_offset: bool = False,
    most_spins: int = MOST_SPINS,
) -> torch.Tensor:
    """Add the sum of the parts of all ranks to the residual stream, and normalise it: `add_rms_norm` over ranks.

    Args:
        residual_MH: changed in place; contiguous, in the model's dtype, equal on all ranks.
        parts_SMH: this rank's partial sums of a product, contiguous: float32, or one in the model's dtype.
        weight_H: weights of the norm.
        eps: of the norm.
        peers: with room for M rows of H values.
        unit_offset: the weights are stored less 1.
        most_spins: reads of missing numbers before the fault flag is set.

    Returns:
        The norm of the new residual, [M, H] in its dtype.
    """
    out_MH = torch.empty_like(residual_MH)
    return _launch(parts_SMH, out_MH, residual_MH, weight_H, eps, unit_offset, peers, most_spins)
