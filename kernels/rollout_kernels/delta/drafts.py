"""Decode steps in which rows have drafts: a state is a chain, and only accepted drafts may become links of it.

    place in the step    p        p + 1      p + 2          the rows of a step; drafts follow their row
    token                last     draft 1    draft 2
    behind_B             2        -1         -1
    state                S0 ----> S1 ------> S2 ------> S3

    forward     `drafted_conv`, then a rule: outputs of all three; the row keeps S1, as after a step without drafts.
                S2 and S3 are never written: what they are made of is kept, for each layer and draft row
    catch up    after the comparison with the tokens drawn: rows with a accepted drafts go from S1 to S1+a, in all
                layers at once. A row without any stays as it is

So after the step, in stream order, each state has seen exactly the tokens of its row. Draft rows have no states.

Legend: T tokens, one for each row of the step, B these rows, L layers, N places of states, D draft rows, M rows with
drafts, C channels, W width, H value heads, K and V dimensions of a key and a value.
"""

from __future__ import annotations

import torch

from rollout_kernels.delta.conv import convolve_token
from rollout_kernels.delta.rule import advance, gates_of, heads_of, one_token
from rollout_kernels.delta.spans import DraftInputs, Spans


def drafted_conv(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    state_NCW: torch.Tensor,
    spans: Spans,
    kept: DraftInputs,
    bias_C: torch.Tensor | None = None,
) -> torch.Tensor:
    """`short_conv` of a decode step with drafts; keeps the inputs of the draft rows, and the outputs for "gated"."""
    if x_TC.is_cuda:
        from rollout_kernels.delta.triton_drafts import drafted_conv as on_gpu

        return on_gpu(x_TC, weight_CW, state_NCW, spans, kept, bias_C)
    rows_by_depth = _rows_by_depth(spans)
    out_TC = torch.empty_like(x_TC, memory_format=torch.contiguous_format)
    at_B, places_B = rows_by_depth[0], spans.places_B[rows_by_depth[0]]
    fresh_B11 = (spans.positions_T[at_B] == 0)[:, None, None]
    past_BCW = state_NCW.index_select(0, places_B).masked_fill(fresh_B11, 0.0)
    out_TC[at_B], past_BCW = convolve_token(past_BCW, x_TC[at_B], weight_CW, bias_C)
    state_NCW.index_copy_(0, places_B, past_BCW)
    for depth, rows_B in enumerate(rows_by_depth[1:], start=1):
        at_B = rows_B + depth
        past_BCW = past_BCW[torch.isin(rows_by_depth[depth - 1], rows_B)]
        out_TC[at_B], past_BCW = convolve_token(past_BCW, x_TC[at_B], weight_CW, bias_C)
    drafts_D, kept_D = _draft_rows(spans, kept)
    kept.inputs_DC[kept_D] = x_TC[drafts_D]
    if kept.rule == "gated":
        kept.mixed_DX[kept_D] = out_TC[drafts_D]
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
) -> torch.Tensor:
    """`gated_delta` of a decode step with drafts; keeps the gates of the draft rows."""
    if mixed_TC.is_cuda:
        from rollout_kernels.delta.triton_drafts import drafted_delta as on_gpu

        return on_gpu(mixed_TC, b_TH, a_TH, a_log_H, dt_bias_H, state_NHKV, spans, kept, beta_scale)
    q_THK, k_THK, v_THV = heads_of(mixed_TC, state_NHKV)
    tokens = q_THK, k_THK, v_THV, *gates_of(b_TH, a_TH, a_log_H, dt_bias_H, beta_scale)
    return through_drafts(tokens, state_NHKV, spans, kept).to(mixed_TC.dtype)


def through_drafts(
    tokens: tuple[torch.Tensor, ...], state_NHKV: torch.Tensor, spans: Spans, kept: DraftInputs
) -> torch.Tensor:
    """`through_states` of a decode step with drafts; keeps what the rule takes of the draft rows."""
    rows_by_depth, out_THV = _rows_by_depth(spans), torch.empty_like(tokens[2])
    at_B, places_B = rows_by_depth[0], spans.places_B[rows_by_depth[0]]
    fresh_B = spans.positions_T[at_B] == 0
    state_BHKV = state_NHKV.index_select(0, places_B).masked_fill(fresh_B[:, None, None, None], 0.0)
    for depth, rows_B in enumerate(rows_by_depth):
        at_B = rows_B + depth
        if depth:
            state_BHKV = state_BHKV[torch.isin(rows_by_depth[depth - 1], rows_B)]
        out_THV[at_B], state_BHKV = one_token(state_BHKV, *(x[at_B] for x in tokens))
        if not depth:
            state_NHKV.index_copy_(0, places_B, state_BHKV)
    drafts_D, kept_D = _draft_rows(spans, kept)
    _, k_DHK, v_DHV, g_DHX, *beta_DH = (x[drafts_D] for x in tokens)
    kept.gates_DX[kept_D] = torch.cat((*beta_DH, g_DHX.exp().flatten(1)), dim=1)
    if kept.rule != "gated":
        kept.mixed_DX[kept_D] = torch.cat((k_DHK.flatten(1), v_DHV.flatten(1)), dim=1)
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
    """Advance the states of rows, in all layers, by their accepted drafts.

    Args:
        state_LNHKV: float32, changed in place.
        conv_LNCW: the last inputs of the convolution, changed in place.
        kept: of all layers, with a dimension L before the others.
        verified_M4: int64: row, place of its own draw, number of drafts, and something else.
        rows_S: int64 rows of the step; a row's drafts follow it.
        accepted_S: int32 number of accepted drafts at the place of each row with drafts.
        one_by_one: as in `Spans`, of the step.
    """
    if state_LNHKV.is_cuda:
        from rollout_kernels.delta.triton_drafts import catch_up as on_gpu

        on_gpu(state_LNHKV, conv_LNCW, kept, verified_M4, rows_S, accepted_S, one_by_one)
        return
    for row, place, *_ in verified_M4.tolist():
        accepted = int(accepted_S[place])
        if accepted:
            drafts_A = rows_S[place + 1 : place + 1 + accepted] - kept.first
            for layer in range(len(state_LNHKV)):
                _catch_up_row(state_LNHKV[layer], conv_LNCW[layer], kept.of_layer(layer), row, drafts_A)


def _catch_up_row(
    state_NHKV: torch.Tensor, conv_NCW: torch.Tensor, kept: DraftInputs, row: int, drafts_A: torch.Tensor
) -> None:
    inputs_AC, mixed_AX, gates_AX = (tensor[drafts_A] for tensor in kept[:3])
    _, heads, key_dim, value_dim = state_NHKV.shape
    if kept.rule == "gated":
        _, k_AHK, v_AHV = heads_of(mixed_AX, state_NHKV)
    else:
        parts = mixed_AX.split((heads * key_dim, heads * value_dim), dim=1)
        k_AHK, v_AHV = (part.unflatten(1, (heads, -1)) for part in parts)
    beta_AH = None if kept.rule == "plain" else gates_AX[:, :heads]
    decay_AHX = (gates_AX if beta_AH is None else gates_AX[:, heads:]).unflatten(1, (heads, -1))
    state_1HKV = state_NHKV[row : row + 1]
    for i in range(len(drafts_A)):
        at = slice(i, i + 1)
        beta_1H = None if beta_AH is None else beta_AH[at]
        state_1HKV = advance(state_1HKV, k_AHK[at], v_AHV[at], decay_AHX[at], beta_1H)
    state_NHKV[row] = state_1HKV[0]
    seen_CT = torch.cat((conv_NCW[row], inputs_AC.t()), dim=1)
    conv_NCW[row] = seen_CT[:, -conv_NCW.shape[2] :]


def _rows_by_depth(spans: Spans) -> list[torch.Tensor]:
    """Places in the step of all rows, of those with a draft, of those with two, and so on; no draft rows."""
    behind_B = spans.behind_B
    assert behind_B is not None, "a step with drafts says where they are"
    most = int(behind_B.max())
    return [torch.nonzero(behind_B >= depth)[:, 0] for depth in range(max(most, 0) + 1)]


def _draft_rows(spans: Spans, kept: DraftInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of the draft rows in the step, and in what is kept."""
    assert spans.behind_B is not None
    drafts_D = torch.nonzero(spans.behind_B < 0)[:, 0]
    return drafts_D, spans.places_B[drafts_D] - kept.first
