"""How states catch up with accepted drafts on a GPU: one launch for all layers.

A program for each row with drafts, layer, value head and block of values; it ends at once if nothing was accepted. Each
also moves a share of the convolution's inputs.

In steps with drafts a token is computed as in steps without drafts, with the same tiles: where steps without drafts
give a row the same bits in every step, so do steps with drafts. That is so where tokens come one by one, and products
are rounded before the sum.

Legend: as in `drafts`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_kernels.delta.spans import DraftInputs
from rollout_kernels.delta.triton_rule import (
    LARGE_TILE,
    SMALL_TILE,
    advance,
    head_sizes,
    key_and_value,
    padded,
    state_tile,
)
from rollout_kernels.delta.triton_states import advance_ready, ready_token


@triton.jit
def _catch_up_kernel(
    state_ptr, conv_ptr, inputs_ptr, mixed_ptr, gates_ptr, verified_ptr, rows_ptr, accepted_ptr,
    first, places, drafts,
    HEADS: tl.constexpr, C: tl.constexpr, W: tl.constexpr, MIXED: tl.constexpr, GATES: tl.constexpr,
    READY: tl.constexpr, CORRECTS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, SHARE: tl.constexpr,
    PAST: tl.constexpr,
):  # fmt: skip
    m, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row, step_place = tl.load(verified_ptr + 4 * m), tl.load(verified_ptr + 4 * m + 1)
    accepted = tl.load(accepted_ptr + step_place)
    if accepted > 0:
        blocks: tl.constexpr = (HEADS.V + BLOCK_V - 1) // BLOCK_V
        head = tl.program_id(0) // blocks
        k = tl.arange(0, HEADS.BLOCK_K)
        v = tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
        place, kept = layer * places + row, layer * drafts
        rows_ptr += step_place + 1
        tile, in_state = state_tile(state_ptr, place, head, k, v, HEADS)
        state = tl.load(tile, mask=in_state, other=0.0)
        for j in range(0, accepted):
            draft = kept + tl.load(rows_ptr + j) - first
            mixed, gates = mixed_ptr + draft * MIXED, gates_ptr + draft * GATES
            if READY:
                key, value, beta, decay = ready_token(mixed, gates, head, v, HEADS, CORRECTS)
                state = advance_ready(state, key, value, beta, decay, CORRECTS)
            else:
                key, value = key_and_value(mixed, head, v, HEADS)
                state = advance(state, key, value, tl.load(gates + head), tl.load(gates + HEADS.H + head))
        tl.store(tile, state, mask=in_state)
        # A share of the channels: what the convolution saw last, the accepted drafts included.
        c = tl.program_id(0) * SHARE + tl.arange(0, BLOCK_C)
        mine = ((tl.arange(0, BLOCK_C) < SHARE) & (c < C))[:, None]
        w = tl.arange(0, PAST)[None, :]
        seen = conv_ptr + (place * C + c[:, None]) * (W - 1) + w
        at = w + accepted - (W - 1)  # index among the drafts; below 0 it is in the state
        old = tl.load(seen + accepted, mask=mine & (at < 0), other=0.0)
        drafted = mine & (at >= 0) & (w < W - 1)
        from_rows = kept + tl.load(rows_ptr + at, mask=(at >= 0) & (w < W - 1), other=0) - first
        new = tl.load(inputs_ptr + from_rows * C + c[:, None], mask=drafted, other=0.0)
        tl.debug_barrier()  # all threads have read the old inputs
        tl.store(seen, tl.where(at < 0, old, new), mask=mine & (w < W - 1))


def catch_up(
    state_LNHKV: torch.Tensor,
    conv_LNCW: torch.Tensor,
    kept: DraftInputs,
    verified_M4: torch.Tensor,
    rows_S: torch.Tensor,
    accepted_S: torch.Tensor,
    one_by_one: bool = False,
) -> None:
    """Like `rollout_kernels.delta.catch_up`."""
    layers, places, heads, key_dim, value_dim = state_LNHKV.shape
    channels, past = conv_LNCW.shape[2:]
    assert all(tensor.is_contiguous() for tensor in (state_LNHKV, conv_LNCW, *kept[:3], verified_M4))
    rows = len(verified_M4)
    tile = SMALL_TILE if one_by_one else LARGE_TILE
    block_v = min(padded(value_dim), tile.values)
    parts = heads * triton.cdiv(value_dim, block_v)
    share = triton.cdiv(channels, parts)
    _catch_up_kernel[(parts, rows, layers)](
        state_LNHKV, conv_LNCW, *kept[:3], verified_M4, rows_S, accepted_S, kept.first, places, kept.inputs_DC.shape[1],
        HEADS=head_sizes(channels, heads, key_dim, value_dim), C=channels, W=past + 1, MIXED=kept.mixed_DX.shape[2],
        GATES=kept.gates_DX.shape[2], READY=kept.rule != "gated", CORRECTS=kept.rule != "plain", BLOCK_V=block_v,
        BLOCK_C=triton.next_power_of_2(share), SHARE=share, PAST=triton.next_power_of_2(past), num_warps=tile.num_warps,
        enable_fp_fusion=not one_by_one,
    )  # fmt: skip
