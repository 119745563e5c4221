"""The gated delta rule: each token decays its head's state S [K, V] and corrects what the state says about its key.

    S <- exp(g) S          g = -exp(a_log) softplus(a + dt_bias)        a decay below 1
    u  = beta (v - k S)    beta = beta_scale sigmoid(b)                 what the state lacks
    S <- S + k u           o = q S                                      keys and queries have unit length

Source: S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464. Many tokens of a row go through it
in chunks of `CHUNK`: within a chunk the u of all tokens solve one triangular system (arXiv 2406.06484, section 3), with
the decay d_i = g_1 + ... + g_i since the chunk began:

    u_i + beta_i sum_{j<i} exp(d_i - d_j) (k_i k_j) u_j = beta_i (v_i - exp(d_i) k_i S)
    o_i = exp(d_i) q_i S + sum_{j<=i} exp(d_i - d_j) (q_i k_j) u_j
    S  <- exp(d_last) S + sum_j exp(d_last - d_j) k_j u_j

`gated_norm` is what follows: the norm and the gate of the outputs.

Legend: T tokens, B rows, N places, H value heads, G key heads, K and V dimensions of a key and a value, C the width of
queries, keys and values side by side, I tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from rollout_kernels.delta.spans import CHUNK, UNIT_EPS, DraftInputs, Spans
from rollout_kernels.norm_rope.elementwise import rms_norm


def gated_delta(
    mixed_TC: torch.Tensor,
    b_TH: torch.Tensor,
    a_TH: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    state_NHKV: torch.Tensor,
    spans: Spans,
    beta_scale: float = 1.0,
    kept: DraftInputs | None = None,
) -> torch.Tensor:
    """The outputs of all value heads, [T, H, V] in the dtype of `mixed_TC`; computed in float32.

    Args:
        mixed_TC: queries, keys and values of all heads side by side, after the convolution. A key head serves
            H / G value heads that are neighbours.
        b_TH: before the sigmoid of beta.
        a_TH: before the softplus of the decay.
        a_log_H: float32.
        dt_bias_H: float32.
        state_NHKV: float32 states; the states of the step's rows are changed in place.
        spans: the rows of the step.
        beta_scale: factor of beta, 1 or 2.
        kept: in a step with drafts, receives the gates of each draft.
    """
    if mixed_TC.is_cuda:
        from rollout_kernels.delta.triton_rule import gated_delta as on_gpu

        return on_gpu(mixed_TC, b_TH, a_TH, a_log_H, dt_bias_H, state_NHKV, spans, beta_scale, kept)
    q_THK, k_THK, v_THV = heads_of(mixed_TC, state_NHKV)
    tokens = q_THK, k_THK, v_THV, *gates_of(b_TH, a_TH, a_log_H, dt_bias_H, beta_scale)
    return through_states(tokens, state_NHKV, spans, _one_chunk, kept).to(mixed_TC.dtype)


#: Maps a state [H, K, V] and the inputs of consecutive tokens to their outputs and the state after them.
AdvanceChunk = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def through_states(
    tokens: tuple[torch.Tensor, ...],
    state_NHKV: torch.Tensor,
    spans: Spans,
    one_chunk: AdvanceChunk,
    kept: DraftInputs | None = None,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """The outputs of a step's tokens, [T, H, V]; the states of its rows are changed in place.

    Args:
        tokens: what `one_token` takes of each token; the first dimension is T.
        state_NHKV: float32.
        spans: the rows of the step.
        one_chunk: of the same rule.
        kept: in a step with drafts, receives what the rule takes of each draft.
        chunk: tokens of a chunk, at most.
    """
    if kept is not None:
        return _through_drafts(tokens, state_NHKV, spans, kept)
    fresh_T = spans.positions_T == 0

    def step(at: slice, places_B: torch.Tensor) -> torch.Tensor:
        state_BHKV = state_NHKV.index_select(0, places_B).masked_fill(fresh_T[at, None, None, None], 0.0)
        out_BHV, state_BHKV = one_token(state_BHKV, *(x[at] for x in tokens))
        state_NHKV.index_copy_(0, places_B, state_BHKV)
        return out_BHV

    if spans.lengths is None:
        return step(slice(None), spans.places_B)
    if spans.one_by_one:
        rows = spans.tokens()
        return torch.cat([step(slice(token, token + 1), spans.places_B[row : row + 1]) for token, row in rows])
    out, start = [], 0
    for row, length in enumerate(spans.lengths):
        place_1, end = spans.places_B[row : row + 1], start + length
        fresh_111 = fresh_T[start : start + 1, None, None]
        state_HKV = state_NHKV.index_select(0, place_1)[0].masked_fill(fresh_111, 0.0)
        for begin in range(start, end, chunk):
            at = slice(begin, min(begin + chunk, end))
            out_IHV, state_HKV = one_chunk(state_HKV, *(x[at] for x in tokens))
            out.append(out_IHV)
        state_NHKV.index_copy_(0, place_1, state_HKV[None])
        start = end
    return torch.cat(out)


def _through_drafts(
    tokens: tuple[torch.Tensor, ...], state_NHKV: torch.Tensor, spans: Spans, kept: DraftInputs
) -> torch.Tensor:
    rows_by_depth, out_THV = spans.rows_by_depth(), torch.empty_like(tokens[2])
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
    drafts_D, kept_D = kept.draft_rows(spans)
    _, k_DHK, v_DHV, g_DHX, *beta_DH = (x[drafts_D] for x in tokens)
    kept.gates_DX[kept_D] = torch.cat((*beta_DH, g_DHX.exp().flatten(1)), dim=1)
    if kept.rule != "gated":
        kept.mixed_DX[kept_D] = torch.cat((k_DHK.flatten(1), v_DHV.flatten(1)), dim=1)
    return out_THV


def gated_norm(out_THV: torch.Tensor, z_THV: torch.Tensor, weight_V: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm(out) * silu(z)`, each head on its own; computed in float32, [T, H V] in the dtype of `z_THV`."""
    if out_THV.is_cuda:
        from rollout_kernels.delta.triton_rule import gated_norm as on_gpu

        return on_gpu(out_THV, z_THV, weight_V, eps)
    normed_THV = rms_norm(out_THV.float(), weight_V.float(), eps)
    return (normed_THV * F.silu(z_THV.float())).to(z_THV.dtype).flatten(1)


def gates_of(
    b_TH: torch.Tensor, a_TH: torch.Tensor, a_log_H: torch.Tensor, dt_bias_H: torch.Tensor, beta_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logarithms g [T, H, 1] of decays, and beta [T, H], of all tokens and heads, float32."""
    g_TH = -a_log_H.float().exp() * F.softplus(a_TH.float() + dt_bias_H.float())
    return g_TH[..., None], beta_scale * torch.sigmoid(b_TH.float())


def heads_of(mixed_TC: torch.Tensor, state_NHKV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys of unit length, the queries scaled, one for each value head; values. All in float32."""
    _, heads, key_dim, value_dim = state_NHKV.shape
    keys = (mixed_TC.shape[1] - heads * value_dim) // 2
    q_TGK, k_TGK, v_THV = (
        part.unflatten(1, (-1, dim)).float()
        for part, dim in zip(
            mixed_TC.split((keys, keys, heads * value_dim), 1), (key_dim, key_dim, value_dim), strict=True
        )
    )
    each = heads // q_TGK.shape[1]
    q_THK, k_THK = (_unit(x_TGK).repeat_interleave(each, dim=1) for x_TGK in (q_TGK, k_TGK))
    return q_THK * key_dim**-0.5, k_THK, v_THV


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)


def one_token(
    state_BHKV: torch.Tensor,
    q_BHK: torch.Tensor,
    k_BHK: torch.Tensor,
    v_BHV: torch.Tensor,
    g_BHX: torch.Tensor,
    beta_BH: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of one token of each row, and the states after it; `g` as `advance` takes the decay."""
    state_BHKV = advance(state_BHKV, k_BHK, v_BHV, g_BHX.exp(), beta_BH)
    return look_up(state_BHKV, q_BHK), state_BHKV


def advance(
    state_BHKV: torch.Tensor,
    k_BHK: torch.Tensor,
    v_BHV: torch.Tensor,
    decay_BHX: torch.Tensor,
    beta_BH: torch.Tensor | None = None,
) -> torch.Tensor:
    """The states after one token of each row.

    The decay is exp(g), one for a head (X is 1) or one for each channel of its key. Without beta a token adds its value
    as it is.
    """
    state_BHKV = state_BHKV * decay_BHX[..., None]
    u_BHV = v_BHV if beta_BH is None else beta_BH[..., None] * (v_BHV - look_up(state_BHKV, k_BHK))
    return state_BHKV + k_BHK[..., None] * u_BHV[:, :, None]


def look_up(state_BHKV: torch.Tensor, q_BHK: torch.Tensor) -> torch.Tensor:
    """The outputs of the tokens after which the states are these, [B, H, V]."""
    return (q_BHK[..., None] * state_BHKV).sum(2)


def _one_chunk(
    state_HKV: torch.Tensor,
    q_IHK: torch.Tensor,
    k_IHK: torch.Tensor,
    v_IHV: torch.Tensor,
    g_IH1: torch.Tensor,
    beta_IH: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    q_HIK, k_HIK, v_HIV = (x.transpose(0, 1) for x in (q_IHK, k_IHK, v_IHV))
    beta_HI1, d_HI = beta_IH.t()[..., None], g_IH1[..., 0].t().cumsum(1)
    decay_HII, since_HI1 = decays_between(d_HI), d_HI.exp()[..., None]
    system_HII = beta_HI1 * (k_HIK @ k_HIK.mT) * decay_HII  # its diagonal is taken as 1
    right_HIV = beta_HI1 * (v_HIV - since_HI1 * (k_HIK @ state_HKV))
    u_HIV = torch.linalg.solve_triangular(system_HII, right_HIV, upper=False, unitriangular=True)
    return end_of_chunk(state_HKV, q_HIK, k_HIK, u_HIV, d_HI, decay_HII)


def decays_between(d_HI: torch.Tensor) -> torch.Tensor:
    """exp(d_i - d_j) for tokens j up to i of a chunk, 0 for later ones: [H, I, I]."""
    size = d_HI.shape[1]
    later_II = torch.ones(size, size, dtype=torch.bool, device=d_HI.device).triu(1)
    return (d_HI[:, :, None] - d_HI[:, None]).masked_fill(later_II, float("-inf")).exp()


def end_of_chunk(
    state_HKV: torch.Tensor,
    q_HIK: torch.Tensor,
    k_HIK: torch.Tensor,
    u_HIV: torch.Tensor,
    d_HI: torch.Tensor,
    decay_HII: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of a chunk, [I, H, V], and the state after it, once it is known what each token adds."""
    since_HI1 = d_HI.exp()[..., None]
    out_HIV = since_HI1 * (q_HIK @ state_HKV) + ((q_HIK @ k_HIK.mT) * decay_HII) @ u_HIV
    left_HI1 = (d_HI[:, -1:] - d_HI).exp()[..., None]
    state_HKV = since_HI1[:, -1:] * state_HKV + (left_HI1 * k_HIK).mT @ u_HIV
    return out_HIV.transpose(0, 1), state_HKV
