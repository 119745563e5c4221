"""Decode steps in which rows have drafts: a state is a chain, and only accepted drafts may become links of it.

    place in the step    p        p + 1      p + 2          the rows of a step; drafts follow their row
    token                last     draft 1    draft 2
    behind_B             2        -1         -1
    state                S0 ----> S1 ------> S2 ------> S3

    forward     `short_conv`, then a rule: outputs of all three; the row keeps S1, as after a step without drafts.
                S2 and S3 are never written: what they are made of is kept, for each layer and draft row
    catch up    after the comparison with the tokens drawn: rows with a accepted drafts go from S1 to S1+a, in all
                layers at once. A row without accepted drafts stays as it is

So after the step, in stream order, each state has seen exactly the tokens of its row. Draft rows have no states.

Legend: T tokens, one for each row of the step, B these rows, L layers, N places of states, D draft rows, M rows with
drafts, C channels, W width, H value heads, K and V dimensions of a key and a value.
"""

from __future__ import annotations

import torch

from rollout_kernels.delta.rule import advance, heads_of
from rollout_kernels.delta.spans import DraftInputs


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
        kept: of all layers, with a first dimension L.
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
