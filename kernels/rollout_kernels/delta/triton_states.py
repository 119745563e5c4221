"""`state_rule` of a decode step on a GPU, with drafts or without: one launch.

A program for each row, head and block of values has its part of the state in registers: the row's token, after which it
writes the state, then the drafts. Programs of draft rows end at once.

Legend: as in `states`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_kernels.delta.spans import DraftInputs, Spans
from rollout_kernels.delta.triton_rule import RuleHeads, advance, load_state, padded, step_tile, store_output


@triton.jit
def ready_token(mixed, gates, head, v, HEADS: tl.constexpr, CORRECTS: tl.constexpr):
    """Key, value, beta and decays of a token's head. `mixed` points to keys, then values; `gates` to its gates."""
    k = tl.arange(0, HEADS.BLOCK_K)
    key = tl.load(mixed + head * HEADS.K + k, mask=k < HEADS.K, other=0.0)
    value = tl.load(mixed + HEADS.H * HEADS.K + head * HEADS.V + v, mask=v < HEADS.V, other=0.0)
    beta = tl.load(gates + head)  # without a correction it is the decay
    if CORRECTS:
        decay = tl.load(gates + HEADS.H + head * HEADS.K + k, mask=k < HEADS.K, other=0.0)
    else:
        decay = tl.zeros_like(key) + beta
    return key, value, beta, decay


@triton.jit
def advance_ready(state, key, value, beta, decay, CORRECTS: tl.constexpr):
    """A part of a head's state after a token."""
    if CORRECTS:
        return advance(state, key, value, beta, decay[:, None])
    else:
        return state * decay[:, None] + key[:, None] * value[None, :]


@triton.jit
def _states_kernel(
    q_ptr, mixed_ptr, gates_ptr, state_ptr, places_ptr, positions_ptr, behind_ptr,  # None in a step without drafts
    out_ptr, kept_mixed_ptr, kept_gates_ptr,
    first,
    HEADS: tl.constexpr, MIXED: tl.constexpr, GATES: tl.constexpr, CORRECTS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    length = 1
    if behind_ptr is not None:
        length = tl.load(behind_ptr + row) + 1
    if length > 0:
        k = tl.arange(0, HEADS.BLOCK_K)
        v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
        place, position = tl.load(places_ptr + row), tl.load(positions_ptr + row)
        state, tile, in_state = load_state(state_ptr, place, position, head, k, v, HEADS)
        for j in range(0, length):
            token = row + j
            key, value, beta, decay = ready_token(
                mixed_ptr + token * MIXED, gates_ptr + token * GATES, head, v, HEADS, CORRECTS
            )
            state = advance_ready(state, key, value, beta, decay, CORRECTS)
            tl.store(tile, state, mask=in_state & (j == 0))
            q = tl.load(q_ptr + (token * HEADS.H + head) * HEADS.K + k, mask=k < HEADS.K, other=0.0)
            store_output(out_ptr, token, head, v, tl.sum(state * q[:, None], 0), HEADS)
            if behind_ptr is not None:
                draft = tl.load(places_ptr + token) - first
                kept, gates = kept_mixed_ptr + draft * MIXED, kept_gates_ptr + draft * GATES
                once = (j > 0) & (tl.program_id(0) == 0)
                tl.store(kept + head * HEADS.K + k, key, mask=(k < HEADS.K) & once)
                tl.store(kept + HEADS.H * HEADS.K + head * HEADS.V + v, value, mask=(v < HEADS.V) & (j > 0))
                tl.store(gates + head, beta, mask=once)
                if CORRECTS:
                    tl.store(gates + HEADS.H + head * HEADS.K + k, decay, mask=(k < HEADS.K) & once)


def decode_states(
    tokens: tuple[torch.Tensor, ...], state_NHKV: torch.Tensor, spans: Spans, kept: DraftInputs | None
) -> torch.Tensor:
    """Like `rollout_kernels.delta.state_rule`, of a decode step."""
    (count, heads, key_dim), value_dim = tokens[0].shape, state_NHKV.shape[3]
    q_THK, k_THK, v_THV, g_THX, *beta_TH = tokens
    mixed_TX = torch.cat((k_THK.flatten(1), v_THV.flatten(1)), dim=1)
    gates_TX = torch.cat((*beta_TH, g_THX.exp().flatten(1)), dim=1)
    assert state_NHKV.is_contiguous() and g_THX.shape[2] == (key_dim if beta_TH else 1)
    kept_mixed, kept_gates = (None, None) if kept is None else (kept.mixed_DX, kept.gates_DX)
    out_THV = torch.empty(count, heads, value_dim, dtype=torch.float32, device=state_NHKV.device)
    tile = step_tile(count * heads, value_dim)
    block_v = min(padded(value_dim), tile.values)
    _states_kernel[(triton.cdiv(value_dim, block_v), heads, count)](
        q_THK.contiguous(), mixed_TX, gates_TX, state_NHKV, spans.places_B, spans.positions_T, spans.behind_B, out_THV,
        kept_mixed, kept_gates, 0 if kept is None else kept.first,
        HEADS=RuleHeads(heads, heads, key_dim, value_dim, padded(key_dim), 0.0), MIXED=mixed_TX.shape[1],
        GATES=gates_TX.shape[1], CORRECTS=bool(beta_TH), BLOCK_V=block_v, num_warps=tile.num_warps,
    )  # fmt: skip
    return out_THV
