"""The short convolution before the recurrence: depthwise, causal, followed by SiLU.

Legend: T tokens, B rows, C channels, W width, N places.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rollout_kernels.delta.spans import DraftInputs, Spans


def short_conv(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    state_NCW: torch.Tensor,
    spans: Spans,
    bias_C: torch.Tensor | None = None,
    kept: DraftInputs | None = None,
) -> torch.Tensor:
    """`silu(conv(x) + bias)` of each row's tokens, [T, C] in the dtype of `x_TC`; sums in float32.

    Args:
        x_TC: the inputs, in the model's dtype.
        weight_CW: weights of the convolution; the last one belongs to the token itself.
        state_NCW: the last W - 1 inputs of each row, oldest first; changed in place.
        spans: the rows of the step.
        bias_C: in the dtype of the weights; None for none.
        kept: in a step with drafts, receives the inputs of each draft, and the outputs for "gated".
    """
    if x_TC.is_cuda:
        from rollout_kernels.delta.triton_conv import short_conv as on_gpu

        return on_gpu(x_TC, weight_CW, state_NCW, spans, bias_C, kept)
    if kept is not None:
        return _with_drafts(x_TC, weight_CW, state_NCW, spans, bias_C, kept)
    fresh_T11 = (spans.positions_T == 0)[:, None, None]
    if spans.lengths is None:
        return _one_token(x_TC, weight_CW, state_NCW, spans.places_B, fresh_T11, bias_C)
    width, out = weight_CW.shape[1], []
    if spans.one_by_one:
        for token, row in spans.tokens():
            at, place_1 = slice(token, token + 1), spans.places_B[row : row + 1]
            out.append(_one_token(x_TC[at], weight_CW, state_NCW, place_1, fresh_T11[at], bias_C))
        return torch.cat(out)
    weight_C1W, float_bias_C = weight_CW.float()[:, None], None if bias_C is None else bias_C.float()
    start = 0
    for row, length in enumerate(spans.lengths):
        place_1, end = spans.places_B[row : row + 1], start + length
        past_1CW = state_NCW.index_select(0, place_1).masked_fill(fresh_T11[start : start + 1], 0.0)
        window_1CT = torch.cat((past_1CW, x_TC[start:end].t()[None]), dim=2)
        state_NCW.index_copy_(0, place_1, window_1CT[:, :, -(width - 1) :].contiguous())
        y_1CT = F.conv1d(window_1CT.float(), weight_C1W, float_bias_C, groups=len(weight_CW))
        out.append(F.silu(y_1CT[0].t()).to(x_TC.dtype))
        start = end
    return torch.cat(out)


def _with_drafts(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    state_NCW: torch.Tensor,
    spans: Spans,
    bias_C: torch.Tensor | None,
    kept: DraftInputs,
) -> torch.Tensor:
    rows_by_depth = spans.rows_by_depth()
    out_TC = torch.empty_like(x_TC, memory_format=torch.contiguous_format)
    at_B = rows_by_depth[0]
    fresh_B11 = (spans.positions_T[at_B] == 0)[:, None, None]
    past_BCW = state_NCW.index_select(0, spans.places_B[at_B]).masked_fill(fresh_B11, 0.0)
    for depth, rows_B in enumerate(rows_by_depth):
        at_B = rows_B + depth
        if depth:
            past_BCW = past_BCW[torch.isin(rows_by_depth[depth - 1], rows_B)]
        out_TC[at_B], past_BCW = convolve_token(past_BCW, x_TC[at_B], weight_CW, bias_C)
        if not depth:
            state_NCW.index_copy_(0, spans.places_B[at_B], past_BCW)
    drafts_D, kept_D = kept.draft_rows(spans)
    kept.inputs_DC[kept_D] = x_TC[drafts_D]
    if kept.rule == "gated":
        kept.mixed_DX[kept_D] = out_TC[drafts_D]
    return out_TC


def _one_token(
    x_BC: torch.Tensor,
    weight_CW: torch.Tensor,
    state_NCW: torch.Tensor,
    places_B: torch.Tensor,
    fresh_B11: torch.Tensor,
    bias_C: torch.Tensor | None,
) -> torch.Tensor:
    past_BCW = state_NCW.index_select(0, places_B).masked_fill(fresh_B11, 0.0)
    y_BC, moved_BCW = convolve_token(past_BCW, x_BC, weight_CW, bias_C)
    state_NCW.index_copy_(0, places_B, moved_BCW)
    return y_BC


def convolve_token(
    past_BCW: torch.Tensor, x_BC: torch.Tensor, weight_CW: torch.Tensor, bias_C: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output for one token of each row, and the inputs that the next token finds."""
    window_BCW = torch.cat((past_BCW, x_BC[:, :, None]), dim=2)
    y_BC = (window_BCW.float() * weight_CW.float()).sum(2)
    y_BC = F.silu(y_BC if bias_C is None else y_BC + bias_C.float()).to(x_BC.dtype)
    return y_BC, window_BCW[:, :, 1:].contiguous()
