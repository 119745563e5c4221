"""`short_conv` on a GPU, in one launch.

    decode     a program for each row and block of channels: reads the row's inputs, writes them back one token later
    drafts     the same: the row's token, then its drafts. It reads the old inputs from the state for all of them, and
               writes the new ones last; programs of draft rows end at once
    prefill    a program for each block of tokens of a row and block of channels. The first program of a row reads its
               state, and writes the new one after that; no other program needs the old one

Legend: T tokens, B rows, C channels, W width, N places.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rollout_kernels.common.triton_math import narrow
from rollout_kernels.delta.spans import DraftInputs, Spans

_CHANNELS = 256  # channels of a program
_TOKENS, _PREFILL_CHANNELS = 32, 64


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _conv_step_kernel(
    x_ptr, weight_ptr, bias_ptr,  # None for none
    state_ptr, places_ptr, positions_ptr, out_ptr,
    stride_x,
    C: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, PAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = c < C
    place = tl.load(places_ptr + row)
    known = c < tl.where(tl.load(positions_ptr + row) > 0, C, 0)  # a token at position 0 reads no state
    x = tl.load(x_ptr + row * stride_x + c, mask=live, other=0.0)
    w = tl.arange(0, PAST)[None, :]
    state = state_ptr + (place * C + c[:, None]) * (W - 1) + w
    past = tl.load(state, mask=known[:, None] & (w < W - 1), other=0.0)
    moved = tl.load(state + 1, mask=known[:, None] & (w < W - 2), other=0.0)
    weights = tl.load(weight_ptr + c[:, None] * W + w, mask=live[:, None] & (w < W - 1), other=0.0)
    total = x.to(tl.float32) * tl.load(weight_ptr + c * W + W - 1, mask=live, other=0.0).to(tl.float32)
    total += tl.sum(past.to(tl.float32) * weights.to(tl.float32), 1)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + c, mask=live, other=0.0).to(tl.float32)
    tl.debug_barrier()  # all threads have read the old state
    tl.store(state, tl.where(w == W - 2, x[:, None], moved), mask=live[:, None] & (w < W - 1))
    tl.store(out_ptr + row * C + c, narrow(_silu(total), out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _input_or_state(x_ptr, state, at, known, live, stride_x, c, W: tl.constexpr):
    """The convolution's input at position `at` of this step's tokens; before these (below 0) it is in the state."""
    new = tl.load(x_ptr + at.to(tl.int64) * stride_x + c, mask=live & (at >= 0), other=0.0)
    old = tl.load(state + at + W - 1, mask=known & (at < 0), other=0.0)
    return tl.where(at >= 0, new, old)


@triton.jit
def _conv_spans_kernel(
    x_ptr, weight_ptr, bias_ptr,  # None for none
    state_ptr, places_ptr, positions_ptr, starts_ptr, out_ptr,
    stride_x,
    C: tl.constexpr, W: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, PAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    first = tl.program_id(2) * TOKENS
    start = tl.load(starts_ptr + row).to(tl.int64)
    length = (tl.load(starts_ptr + row + 1) - start).to(tl.int32)
    if first < length:
        c = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
        t = (first + tl.arange(0, TOKENS))[:, None]
        live_channels = c < C
        live = (t < length) & live_channels
        place = tl.load(places_ptr + row)
        known = c < tl.where(tl.load(positions_ptr + start) > 0, C, 0)  # a token at position 0 reads no state
        x_ptr += start * stride_x
        state = state_ptr + (place * C + c) * (W - 1)
        total = tl.zeros([TOKENS, BLOCK], tl.float32)
        for w in tl.static_range(W):
            weight = tl.load(weight_ptr + c * W + w, mask=live_channels, other=0.0).to(tl.float32)
            total += _input_or_state(x_ptr, state, t - (W - 1) + w, known, live, stride_x, c, W).to(tl.float32) * weight
        if bias_ptr is not None:
            total += tl.load(bias_ptr + c, mask=live_channels, other=0.0).to(tl.float32)
        out = out_ptr + (start + t) * C + c
        tl.store(out, narrow(_silu(total), out_ptr.dtype.element_ty), mask=live)
        if first == 0:
            last = tl.arange(0, PAST)[:, None]
            written = live_channels & (last < W - 1)
            at = length - (W - 1) + last
            kept = _input_or_state(x_ptr, state, at, known & written, written, stride_x, c, W)
            tl.debug_barrier()  # all threads have read the old state
            tl.store(state + last, kept, mask=written)


@triton.jit
def _conv_drafts_kernel(
    x_ptr, weight_ptr, bias_ptr,  # None for none
    state_ptr, places_ptr, positions_ptr, behind_ptr, out_ptr, inputs_ptr, mixed_ptr,  # None for rules that make it
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
                    seen = _input_or_state(x_ptr, state, at, known, live, stride_x, c, W)
                    total += seen.to(tl.float32) * weight
            else:  # the order of `_conv_step_kernel`
                weights = tl.load(weight_ptr + c[:, None] * W + w, mask=live[:, None] & (w < W - 1), other=0.0)
                at = j - (W - 1) + w
                wide = live[:, None] & (w < W - 1)
                past = _input_or_state(
                    x_ptr, state[:, None], at, known[:, None] & (w < W - 1), wide, stride_x, c[:, None], W
                )
                total = x.to(tl.float32) * tl.load(weight_ptr + c * W + W - 1, mask=live, other=0.0).to(tl.float32)
                total += tl.sum(past.to(tl.float32) * weights.to(tl.float32), 1)
            if bias_ptr is not None:
                total += tl.load(bias_ptr + c, mask=live, other=0.0).to(tl.float32)
            y = narrow(_silu(total), out_ptr.dtype.element_ty)
            tl.store(out_ptr + (row + j) * C + c, y, mask=live)
            drafted = live & (j > 0)
            draft = tl.load(places_ptr + row + j) - first
            tl.store(inputs_ptr + draft * C + c, x, mask=drafted)
            if mixed_ptr is not None:
                tl.store(mixed_ptr + draft * C + c, y, mask=drafted)
        tl.debug_barrier()  # all threads have read the old state
        tl.store(state[:, None] + w, tl.where(w == W - 2, own[:, None], moved), mask=live[:, None] & (w < W - 1))


def short_conv(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    state_NCW: torch.Tensor,
    spans: Spans,
    bias_C: torch.Tensor | None = None,
    kept: DraftInputs | None = None,
) -> torch.Tensor:
    """Like `rollout_kernels.delta.short_conv`; `x_TC` is contiguous in C, and a prefill needs `spans.starts_B1`."""
    count, (channels, width) = len(x_TC), weight_CW.shape
    assert x_TC.stride(1) == 1 and weight_CW.is_contiguous() and state_NCW.is_contiguous() and width >= 2
    out_TC = torch.empty(count, channels, dtype=x_TC.dtype, device=x_TC.device)
    given = x_TC, weight_CW, bias_C, state_NCW, spans.places_B, spans.positions_T
    how: dict[str, Any] = {"C": channels, "W": width, "PAST": triton.next_power_of_2(width - 1), "num_warps": 4}
    if kept is not None:
        assert kept.inputs_DC.is_contiguous() and kept.mixed_DX.is_contiguous()
        mixed_DX = kept.mixed_DX if kept.rule == "gated" else None
        _conv_drafts_kernel[(triton.cdiv(channels, _CHANNELS), count)](
            *given, spans.behind_B, out_TC, kept.inputs_DC, mixed_DX, kept.first, x_TC.stride(0),
            BLOCK=_CHANNELS, ONE_BY_ONE=spans.one_by_one, enable_fp_fusion=not spans.one_by_one, **how,
        )  # fmt: skip
    elif spans.lengths is None:
        grid = (triton.cdiv(channels, _CHANNELS), count)
        _conv_step_kernel[grid](*given, out_TC, x_TC.stride(0), BLOCK=_CHANNELS, **how)
    else:
        blocks, most = triton.cdiv(channels, _PREFILL_CHANNELS), triton.cdiv(max(spans.lengths), _TOKENS)
        _conv_spans_kernel[(blocks, len(spans.lengths), most)](
            *given, spans.starts_B1, out_TC, x_TC.stride(0),
            TOKENS=_TOKENS, BLOCK=_PREFILL_CHANNELS, enable_fp_fusion=not spans.one_by_one, **how,
        )  # fmt: skip
    return out_TC
