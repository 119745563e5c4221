"""Decode steps with drafts on a GPU: a launch for the convolution, one for the rule, and one to catch up in all layers.

    conv        a program for each row and block of channels: the row's token, then its drafts. It reads the old inputs
                from the state for all of them, and writes the new ones last
    rule        a program for each row, value head and block of values, with its part of the state in registers: the
                row's token, after which it writes the state, then the drafts
    catch up    a program for each row with drafts, layer, value head and block of values; it ends at once if nothing
                was accepted. Each also moves a share of the convolution's inputs

Programs of draft rows end at once. A token is computed as in steps without drafts, with the same tiles: where these
give a row the same bits in every step, so does a step with drafts. This holds where tokens come one by one, and
products are rounded before the sum.

Legend: as in `drafts`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_kernels.common.triton_math import narrow
from rollout_kernels.delta.spans import DraftInputs, Spans
from rollout_kernels.delta.triton_conv import CHANNELS, input_or_state, silu
from rollout_kernels.delta.triton_rule import (
    LARGE_TILE,
    SMALL_TILE,
    Gates,
    StepTile,
    advance,
    head_sizes,
    key_and_value,
    load_state,
    one_token,
    padded,
    rule_arguments,
    state_tile,
    step_tile,
    store_output,
)
from rollout_kernels.delta.triton_states import advance_ready, ready_token


@triton.jit
def _conv_kernel(
    x_ptr, weight_ptr, state_ptr, places_ptr, positions_ptr, behind_ptr, bias_ptr,  # None for none
    out_ptr, inputs_ptr, mixed_ptr,  # None where the rule keeps what it makes of the outputs
    first,
    stride_x,
    C: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, PAST: tl.constexpr, ONE_BY_ONE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    length = tl.load(behind_ptr + row) + 1
    if length > 0:
        c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        live = c < C
        place = tl.load(places_ptr + row)
        known = c < tl.where(tl.load(positions_ptr + row) > 0, C, 0)  # a token at position 0 reads no state
        x_ptr += row * stride_x
        w = tl.arange(0, PAST)[None, :]
        state = state_ptr + (place * C + c) * (W - 1)
        own = tl.load(x_ptr + c, mask=live, other=0.0)
        moved = tl.load(state[:, None] + w + 1, mask=known[:, None] & (w < W - 2), other=0.0)
        for j in range(0, length):
            x = tl.load(x_ptr + j * stride_x + c, mask=live, other=0.0)
            if ONE_BY_ONE:  # the order of `_conv_spans_kernel`
                total = tl.zeros([BLOCK], tl.float32)
                for i in tl.static_range(W):
                    weight = tl.load(weight_ptr + c * W + i, mask=live, other=0.0).to(tl.float32)
                    at = tl.zeros([BLOCK], tl.int32) + (j - (W - 1) + i)
                    seen = input_or_state(x_ptr, state, at, known, live, stride_x, c, W)
                    total += seen.to(tl.float32) * weight
            else:  # the order of `_conv_step_kernel`
                weights = tl.load(weight_ptr + c[:, None] * W + w, mask=live[:, None] & (w < W - 1), other=0.0)
                at = j - (W - 1) + w
                wide = live[:, None] & (w < W - 1)
                past = input_or_state(
                    x_ptr, state[:, None], at, known[:, None] & (w < W - 1), wide, stride_x, c[:, None], W
                )
                total = x.to(tl.float32) * tl.load(weight_ptr + c * W + W - 1, mask=live, other=0.0).to(tl.float32)
                total += tl.sum(past.to(tl.float32) * weights.to(tl.float32), 1)
            if bias_ptr is not None:
                total += tl.load(bias_ptr + c, mask=live, other=0.0).to(tl.float32)
            y = narrow(silu(total), out_ptr.dtype.element_ty)
            tl.store(out_ptr + (row + j) * C + c, y, mask=live)
            drafted = live & (j > 0)
            draft = tl.load(places_ptr + row + j) - first
            tl.store(inputs_ptr + draft * C + c, x, mask=drafted)
            if mixed_ptr is not None:
                tl.store(mixed_ptr + draft * C + c, y, mask=drafted)
        tl.debug_barrier()  # all threads have read the old state
        tl.store(state[:, None] + w, tl.where(w == W - 2, own[:, None], moved), mask=live[:, None] & (w < W - 1))


@triton.jit
def _rule_kernel(
    mixed_ptr, b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, state_ptr, places_ptr, positions_ptr, behind_ptr, out_ptr,
    gates_ptr,
    first,
    stride_b, stride_a,
    scale, beta_scale,
    HEADS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    length = tl.load(behind_ptr + row) + 1
    if length > 0:
        k = tl.arange(0, HEADS.BLOCK_K)
        v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
        gates = Gates(b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, stride_b, stride_a, beta_scale)
        place, position = tl.load(places_ptr + row), tl.load(positions_ptr + row)
        state, tile, in_state = load_state(state_ptr, place, position, head, k, v, HEADS)
        for j in range(0, length):
            token = row + j
            state, out, beta, decay = one_token(state, mixed_ptr, gates, token, head, v, scale, HEADS)
            tl.store(tile, state, mask=in_state & (j == 0))
            store_output(out_ptr, token, head, v, out, HEADS)
            kept = gates_ptr + (tl.load(places_ptr + token) - first) * (2 * HEADS.H) + head
            keeps = (j > 0) & (tl.program_id(0) == 0)
            tl.store(kept, beta, mask=keeps)
            tl.store(kept + HEADS.H, decay, mask=keeps)


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


def drafted_conv(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    state_NCW: torch.Tensor,
    spans: Spans,
    kept: DraftInputs,
    bias_C: torch.Tensor | None = None,
) -> torch.Tensor:
    """Like `rollout_kernels.delta.drafted_conv`; `x_TC` is contiguous in C."""
    count, (channels, width) = len(x_TC), weight_CW.shape
    assert x_TC.stride(1) == 1 and weight_CW.is_contiguous() and state_NCW.is_contiguous() and width >= 2
    assert kept.inputs_DC.is_contiguous() and kept.mixed_DX.is_contiguous()
    out_TC = torch.empty(count, channels, dtype=x_TC.dtype, device=x_TC.device)
    _conv_kernel[(triton.cdiv(channels, CHANNELS), count)](
        x_TC, weight_CW, state_NCW, spans.places_B, spans.positions_T, spans.behind_B, bias_C, out_TC, kept.inputs_DC,
        kept.mixed_DX if kept.rule == "gated" else None, kept.first, x_TC.stride(0),
        C=channels, W=width, BLOCK=CHANNELS, PAST=triton.next_power_of_2(width - 1), ONE_BY_ONE=spans.one_by_one,
        num_warps=4, enable_fp_fusion=not spans.one_by_one,
    )  # fmt: skip
    return out_TC


def drafted_delta(
    mixed_TC: torch.Tensor,
    b_TH: torch.Tensor,
    a_TH: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    state_NHKV: torch.Tensor,
    spans: Spans,
    kept: DraftInputs,
    beta_scale: float = 1.0,
    tile: StepTile | None = None,
) -> torch.Tensor:
    """Like `rollout_kernels.delta.drafted_delta`. `step_tile` is the default `tile`."""
    count, (_, heads, key_dim, value_dim) = len(mixed_TC), state_NHKV.shape
    sizes, gates, strides = rule_arguments(mixed_TC, b_TH, a_TH, a_log_H, dt_bias_H, state_NHKV)
    assert kept.gates_DX.is_contiguous()
    out_THV = torch.empty(count, heads, value_dim, dtype=mixed_TC.dtype, device=mixed_TC.device)
    if tile is None:
        tile = SMALL_TILE if spans.one_by_one else step_tile(count * heads, value_dim)
    block_v = min(padded(value_dim), tile.values)
    _rule_kernel[(triton.cdiv(value_dim, block_v), heads, count)](
        mixed_TC, *gates, state_NHKV, spans.places_B, spans.positions_T, spans.behind_B, out_THV, kept.gates_DX,
        kept.first, *strides, key_dim**-0.5, beta_scale,
        HEADS=sizes, BLOCK_V=block_v, num_warps=tile.num_warps, enable_fp_fusion=not spans.one_by_one,
    )  # fmt: skip
    return out_THV


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
