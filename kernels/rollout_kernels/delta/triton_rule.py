"""`gated_delta` on a GPU: one launch for a decode step, two for a prefill; and `gated_norm`: one more for any step.

States and sums are float32.

    decode     step      a program for each row, value head and block of values: reads and writes its part of the state
                         once. With drafts: the row's token, after which it writes the state, then the drafts; programs
                         of draft rows end at once
    one by one walk      as `step`, with the row's tokens one after the other: decode and prefill by one kernel, so that
                         both give the same bits. Several times slower than chunks. Products are rounded before they
                         are added: where the compiler fused them, it would choose differently in each kernel
    prefill    prepare   a program for each chunk of a row and value head: the scores of queries and keys, and the
                         chunk's triangular system for two right sides, so that u = U - W S for any state S before it
               scan      a program for each row, value head and block of values: goes through the row's chunks with its
                         part of the state in registers, and writes the outputs
    any        norm      a program for each head of a token

Programs that start together read memory that lies together: the first axis of a grid is the part of a state, or the
head of a chunk. A program takes pieces of 128 bytes of a state's 64 KB. If the other pieces were read much later, the
memory would open each of its own pages again.

The system I + A is inverted in blocks of `_BLOCK` tokens by forward substitution, all blocks of a chunk at once: a
product of powers of A would be faster, but they may be too large for float32. Then pairs of blocks are joined: for a
block diagonal D and what lies below it in pairs, L, the inverse is D - D L D.

The system and its inverse are sums of three tf32 products each, nearly as exact as float32: the solution depends
strongly on them where keys are alike. The other products are tf32, eight times as exact as bf16 inputs, since three of
them would need more registers than there are.

Legend: T tokens, B rows, N places, H value heads, G key heads, K and V dimensions of a key and a value, C width of
queries, keys and values side by side, I tokens of a chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from rollout_kernels.common.triton_math import narrow
from rollout_kernels.delta.spans import CHUNK, UNIT_EPS, DraftInputs, Spans

_SCAN_VALUES = 32  # values of a program
_BLOCK = 16


class StepTile(NamedTuple):
    """The work of a program of a decode step: a part of a head's values, with all keys."""

    values: int
    num_warps: int


#: The fastest tiles on an H100 in the sizes of Qwen3.5-27B. Few states make more, smaller programs.
#: Tokens one by one have one tile in all steps: the tile decides the order in which products are added.
LARGE_TILE, SMALL_TILE = StepTile(values=64, num_warps=4), StepTile(values=32, num_warps=4)
_FEW_PROGRAMS = 264


def step_tile(states: int, value_dim: int) -> StepTile:
    """The tile of a decode step over this number of states: rows times heads."""
    few = states * triton.cdiv(value_dim, LARGE_TILE.values) < _FEW_PROGRAMS
    return SMALL_TILE if few else LARGE_TILE


class RuleHeads(NamedTuple):
    """The sizes that the kernels of the rule are compiled for."""

    H: int  # value heads
    G: int  # key heads
    K: int  # dimension of a key
    V: int  # dimension of a value
    BLOCK_K: int  # length of a program's vectors of a key: a power of two
    EPS: float  # added to the squared length of queries and keys


class Gates(NamedTuple):
    """A kernel's inputs for beta and the decay of all tokens."""

    b_ptr: Any
    a_ptr: Any
    a_log_ptr: Any
    dt_bias_ptr: Any
    stride_b: Any
    stride_a: Any
    beta_scale: Any


@triton.jit
def _tf32_dot(a, b):
    return tl.dot(a, b, input_precision="tf32")


@triton.jit
def _dot(a, b):
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _decay(a, a_log, dt_bias):
    """The logarithm of the decay: -exp(a_log) softplus(a + dt_bias)."""
    x = a + dt_bias
    return -tl.exp(a_log) * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def unit_query(mixed, head, scale, HEADS: tl.constexpr):
    """The query of a token's value head, of length `scale`; `mixed` points to the token's queries, keys and values."""
    k = tl.arange(0, HEADS.BLOCK_K)
    key_head = head // (HEADS.H // HEADS.G)
    q = tl.load(mixed + key_head * HEADS.K + k, mask=k < HEADS.K, other=0.0).to(tl.float32)
    return q * (scale / tl.sqrt(tl.sum(q * q, 0) + HEADS.EPS))


@triton.jit
def key_and_value(mixed, head, v, HEADS: tl.constexpr):
    """The key of a token's value head, of unit length, and a part of its value."""
    k = tl.arange(0, HEADS.BLOCK_K)
    keys = mixed + (HEADS.G + head // (HEADS.H // HEADS.G)) * HEADS.K
    key = tl.load(keys + k, mask=k < HEADS.K, other=0.0).to(tl.float32)
    values = mixed + 2 * HEADS.G * HEADS.K + head * HEADS.V
    value = tl.load(values + v, mask=v < HEADS.V, other=0.0).to(tl.float32)
    return key * (1.0 / tl.sqrt(tl.sum(key * key, 0) + HEADS.EPS)), value


@triton.jit
def _token_gates(gates, token, head):
    """Beta and the decay of a token's value head."""
    b = tl.load(gates.b_ptr + token * gates.stride_b + head).to(tl.float32)
    a = tl.load(gates.a_ptr + token * gates.stride_a + head).to(tl.float32)
    g = _decay(a, tl.load(gates.a_log_ptr + head), tl.load(gates.dt_bias_ptr + head))
    return gates.beta_scale / (1.0 + tl.exp(-b)), tl.exp(g)


@triton.jit
def state_tile(state_ptr, place, head, k, v, HEADS: tl.constexpr):
    """Pointers to a part of a head's state [K, V], and which of them are in it."""
    in_state = (k < HEADS.K)[:, None] & (v < HEADS.V)[None, :]
    tile = state_ptr + (place * HEADS.H + head) * (HEADS.K * HEADS.V) + k[:, None] * HEADS.V + v[None, :]
    return tile, in_state


@triton.jit
def load_state(state_ptr, place, position, head, k, v, HEADS: tl.constexpr):
    """A part of a head's state before a token, then as `state_tile`. A token at position 0 reads no state."""
    known_k = k < tl.where(position > 0, HEADS.K, 0)
    tile, in_state = state_tile(state_ptr, place, head, k, v, HEADS)
    return tl.load(tile, mask=known_k[:, None] & (v < HEADS.V)[None, :], other=0.0), tile, in_state


@triton.jit
def store_output(out_ptr, token, head, v, out, HEADS: tl.constexpr):
    """Write a part of the output of a token's value head."""
    at = out_ptr + (token * HEADS.H + head) * HEADS.V + v
    tl.store(at, narrow(out, out_ptr.dtype.element_ty), mask=v < HEADS.V)


@triton.jit
def advance(state, key, value, beta, decay):
    """A part of a head's state after a token."""
    state *= decay
    u = beta * (value - tl.sum(state * key[:, None], 0))
    return state + key[:, None] * u[None, :]


@triton.jit
def _one_token(state, mixed_ptr, gates, token, head, v, scale, HEADS: tl.constexpr):
    """A part of a head's state after a token, the outputs of that part, beta and the decay. `gates` is `Gates`."""
    mixed = mixed_ptr + token * (2 * HEADS.G * HEADS.K + HEADS.H * HEADS.V)
    q = unit_query(mixed, head, scale, HEADS)
    key, value = key_and_value(mixed, head, v, HEADS)
    beta, decay = _token_gates(gates, token, head)
    state = advance(state, key, value, beta, decay)
    return state, tl.sum(state * q[:, None], 0), beta, decay


@triton.jit
def _step_kernel(
    mixed_ptr, b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, state_ptr, places_ptr, positions_ptr,
    behind_ptr, out_ptr, gates_ptr, first,  # without drafts all are None except `out_ptr`
    stride_b, stride_a,
    scale, beta_scale,
    HEADS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    length = 1
    if behind_ptr is not None:
        length = tl.load(behind_ptr + row) + 1
    if length > 0:
        k = tl.arange(0, HEADS.BLOCK_K)
        v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
        gates = Gates(b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, stride_b, stride_a, beta_scale)
        place, position = tl.load(places_ptr + row), tl.load(positions_ptr + row)
        state, tile, in_state = load_state(state_ptr, place, position, head, k, v, HEADS)
        for j in range(0, length):
            token = row + j
            state, out, beta, decay = _one_token(state, mixed_ptr, gates, token, head, v, scale, HEADS)
            tl.store(tile, state, mask=in_state & (j == 0))
            store_output(out_ptr, token, head, v, out, HEADS)
            if behind_ptr is not None:
                kept = gates_ptr + (tl.load(places_ptr + token) - first) * (2 * HEADS.H) + head
                keeps = (j > 0) & (tl.program_id(0) == 0)
                tl.store(kept, beta, mask=keeps)
                tl.store(kept + HEADS.H, decay, mask=keeps)


@triton.jit
def _walk_kernel(
    mixed_ptr, b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, state_ptr, places_ptr, positions_ptr, starts_ptr, out_ptr,
    stride_b, stride_a,
    scale, beta_scale,
    HEADS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(2), tl.program_id(1)
    k = tl.arange(0, HEADS.BLOCK_K)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    gates = Gates(b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, stride_b, stride_a, beta_scale)
    start, length = _span(starts_ptr, row)
    place, position = tl.load(places_ptr + row), tl.load(positions_ptr + start)
    state, tile, in_state = load_state(state_ptr, place, position, head, k, v, HEADS)
    for token in range(0, length):
        state, out, _beta, _decay = _one_token(state, mixed_ptr, gates, start + token, head, v, scale, HEADS)
        store_output(out_ptr, start + token, head, v, out, HEADS)
    tl.store(tile, state, mask=in_state)


@triton.jit
def _span(starts_ptr, row):
    """The first token of a row in the step, int64, and its number of tokens, int32."""
    start = tl.load(starts_ptr + row).to(tl.int64)
    return start, (tl.load(starts_ptr + row + 1) - start).to(tl.int32)


@triton.jit
def _chunk_gates(gates, token, live, head):
    """Beta of a chunk's tokens, and the logarithm of the decay since the chunk began."""
    b = tl.load(gates.b_ptr + token * gates.stride_b + head, mask=live, other=0.0).to(tl.float32)
    a = tl.load(gates.a_ptr + token * gates.stride_a + head, mask=live, other=0.0).to(tl.float32)
    g = _decay(a, tl.load(gates.a_log_ptr + head), tl.load(gates.dt_bias_ptr + head))
    beta = tl.where(live, gates.beta_scale / (1.0 + tl.exp(-b)), 0.0)
    return beta, tl.cumsum(tl.where(live, g, 0.0), 0)


@triton.jit
def _unit_rows(ptr, token, width, column, live, EPS: tl.constexpr):
    """Rows of unit length, float32 [I, K]."""
    x = tl.load(ptr + token[:, None] * width + column[None, :], mask=live, other=0.0).to(tl.float32)
    return x / tl.sqrt(tl.sum(x * x, 1) + EPS)[:, None]


@triton.jit
def _decays_between(d, i, j):
    """exp(d_i - d_j) for j up to i, else 0."""
    earlier = i[:, None] >= j[None, :]
    return tl.where(earlier, tl.exp(tl.where(earlier, d[:, None] - d[None, :], 0.0)), 0.0)


@triton.jit
def _prepare_kernel(
    mixed_ptr, b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, starts_ptr, w_ptr, u_ptr, scores_ptr,
    stride_b, stride_a,
    scale, beta_scale,
    HEADS: tl.constexpr, BLOCK_V: tl.constexpr, I: tl.constexpr,  # noqa: E741
    BLOCK: tl.constexpr,
):  # fmt: skip
    H: tl.constexpr = HEADS.H
    G: tl.constexpr = HEADS.G
    K: tl.constexpr = HEADS.K
    V: tl.constexpr = HEADS.V
    row, head = tl.program_id(1), tl.program_id(0)
    first = tl.program_id(2) * I
    start, length = _span(starts_ptr, row)
    if first < length:
        i, k, v = tl.arange(0, I), tl.arange(0, HEADS.BLOCK_K), tl.arange(0, BLOCK_V)
        token = start + first + i
        live = first + i < length
        live_k, live_v = live[:, None] & (k < K)[None, :], live[:, None] & (v < V)[None, :]
        gates = Gates(b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, stride_b, stride_a, beta_scale)
        beta, d = _chunk_gates(gates, token, live, head)
        width: tl.constexpr = 2 * G * K + H * V
        key = _unit_rows(mixed_ptr, token, width, (G + head // (H // G)) * K + k, live_k, HEADS.EPS)
        decays = _decays_between(d, i, i)
        at = token[:, None] * H + head
        q = _unit_rows(mixed_ptr, token, width, head // (H // G) * K + k, live_k, HEADS.EPS) * scale
        tl.store(scores_ptr + at * I + i[None, :], _tf32_dot(q, tl.trans(key)) * decays, mask=live[:, None])
        below = i[:, None] > i[None, :]
        system = tl.where(below, beta[:, None] * _dot(key, tl.trans(key)) * decays, 0.0)
        unit = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        # The inverse of the blocks on the diagonal, row by row of all blocks at once.
        near = tl.where(i[:, None] // BLOCK == i[None, :] // BLOCK, system, 0.0)
        inverse = unit
        for r in range(1, BLOCK):
            of_row = (i % BLOCK == r)[:, None]
            inverse = tl.where(of_row, unit - _dot(tl.where(of_row, near, 0.0), inverse), inverse)
        size = BLOCK
        while size < I:
            of_pair = (i[:, None] // (2 * size) == i[None, :] // (2 * size)) & (
                i[:, None] // size != i[None, :] // size
            )
            inverse -= _dot(_dot(inverse, tl.where(of_pair, system, 0.0)), inverse)
            size *= 2
        w = _tf32_dot(inverse, key * (beta * tl.exp(d))[:, None])
        tl.store(w_ptr + at * K + k[None, :], w, mask=live_k)
        columns = 2 * G * K + head * V + v
        value = tl.load(mixed_ptr + token[:, None] * width + columns[None, :], mask=live_v, other=0.0).to(tl.float32)
        u = _tf32_dot(inverse, value * beta[:, None])
        tl.store(u_ptr + at * V + v[None, :], u, mask=live_v)


@triton.jit
def _scan_kernel(
    mixed_ptr, b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, w_ptr, u_ptr, scores_ptr, state_ptr, places_ptr, positions_ptr,
    starts_ptr, out_ptr,
    stride_b, stride_a,
    scale,
    HEADS: tl.constexpr, BLOCK_V: tl.constexpr, I: tl.constexpr,  # noqa: E741
):  # fmt: skip
    H: tl.constexpr = HEADS.H
    G: tl.constexpr = HEADS.G
    K: tl.constexpr = HEADS.K
    V: tl.constexpr = HEADS.V
    row, head = tl.program_id(2), tl.program_id(1)
    i, k = tl.arange(0, I), tl.arange(0, HEADS.BLOCK_K)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    start, length = _span(starts_ptr, row)
    gates = Gates(b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, stride_b, stride_a, 1.0)
    place, position = tl.load(places_ptr + row), tl.load(positions_ptr + start)
    state, tile, in_state = load_state(state_ptr, place, position, head, k, v, HEADS)
    width: tl.constexpr = 2 * G * K + H * V
    key_head = head // (H // G)
    for first in range(0, length, I):
        token = start + first + i
        live = first + i < length
        live_k, live_v = live[:, None] & (k < K)[None, :], live[:, None] & (v < V)[None, :]
        _, d = _chunk_gates(gates, token, live, head)
        last = tl.sum(tl.where(i == I - 1, d, 0.0), 0)
        at = token[:, None] * H + head
        w = tl.load(w_ptr + at * K + k[None, :], mask=live_k, other=0.0)
        u = tl.load(u_ptr + at * V + v[None, :], mask=live_v, other=0.0) - _tf32_dot(w, state)
        q = _unit_rows(mixed_ptr, token, width, key_head * K + k, live_k, HEADS.EPS)
        out = _tf32_dot(q * (scale * tl.exp(d))[:, None], state)
        scores = tl.load(scores_ptr + at * I + i[None, :], mask=live[:, None], other=0.0)
        out += _tf32_dot(scores, u)
        tl.store(out_ptr + at * V + v[None, :], narrow(out, out_ptr.dtype.element_ty), mask=live_v)
        key = _unit_rows(mixed_ptr, token, width, (G + key_head) * K + k, live_k, HEADS.EPS)
        state = state * tl.exp(last) + _tf32_dot(tl.trans(key * tl.exp(last - d)[:, None]), u)
    tl.store(tile, state, mask=in_state)


def padded(dim: int) -> int:
    """Length of a program's vectors of a dimension."""
    return max(16, triton.next_power_of_2(dim))


def head_sizes(channels: int, heads: int, key_dim: int, value_dim: int) -> RuleHeads:
    """The sizes of heads whose queries, keys and values take this number of channels."""
    key_heads = (channels - heads * value_dim) // (2 * key_dim)
    return RuleHeads(heads, key_heads, key_dim, value_dim, padded(key_dim), UNIT_EPS)


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
    tile: StepTile | None = None,
) -> torch.Tensor:
    """Like `rollout_kernels.delta.gated_delta`; prefills need `spans.starts_B1`. `step_tile` is the default `tile`."""
    count, (_, heads, key_dim, value_dim) = len(mixed_TC), state_NHKV.shape
    assert mixed_TC.is_contiguous() and state_NHKV.is_contiguous() and a_log_H.dtype == torch.float32
    assert b_TH.stride(1) == a_TH.stride(1) == 1 and dt_bias_H.dtype == torch.float32
    sizes, gates = head_sizes(mixed_TC.shape[1], heads, key_dim, value_dim), (b_TH, a_TH, a_log_H, dt_bias_H)
    strides = b_TH.stride(0), a_TH.stride(0)
    out_THV = torch.empty(count, heads, value_dim, dtype=mixed_TC.dtype, device=mixed_TC.device)
    scale, rows = key_dim**-0.5, len(spans.places_B)
    if spans.lengths is None or spans.one_by_one:
        if tile is None:
            tile = SMALL_TILE if spans.one_by_one else step_tile(rows * heads, value_dim)
        block_v = min(padded(value_dim), tile.values)
        last: list[torch.Tensor | int | None]
        kernel, last = _step_kernel, [None, out_THV, None, None]
        if kept is not None:
            assert kept.gates_DX.is_contiguous()
            last = [spans.behind_B, out_THV, kept.gates_DX, kept.first]
        elif spans.one_by_one:
            kernel, last = _walk_kernel, [spans.starts_B1, out_THV]
        kernel[(triton.cdiv(value_dim, block_v), heads, rows)](
            mixed_TC, *gates, state_NHKV, spans.places_B, spans.positions_T, *last, *strides, scale, beta_scale,
            HEADS=sizes, BLOCK_V=block_v, num_warps=tile.num_warps, enable_fp_fusion=not spans.one_by_one,
        )  # fmt: skip
        return out_THV
    w_THK = torch.empty(count, heads, key_dim, dtype=torch.float32, device=mixed_TC.device)
    u_THV = torch.empty(count, heads, value_dim, dtype=torch.float32, device=mixed_TC.device)
    scores_THI = torch.empty(count, heads, CHUNK, dtype=torch.float32, device=mixed_TC.device)
    _prepare_kernel[(heads, rows, triton.cdiv(max(spans.lengths), CHUNK))](
        mixed_TC, *gates, spans.starts_B1, w_THK, u_THV, scores_THI, *strides, scale, beta_scale,
        HEADS=sizes, BLOCK_V=padded(value_dim), I=CHUNK, BLOCK=_BLOCK, num_warps=8, num_stages=1,
    )  # fmt: skip
    block_v = min(padded(value_dim), _SCAN_VALUES)
    _scan_kernel[(triton.cdiv(value_dim, block_v), heads, rows)](
        mixed_TC, *gates, w_THK, u_THV, scores_THI, state_NHKV, spans.places_B, spans.positions_T, spans.starts_B1,
        out_THV, *strides, scale,
        HEADS=sizes, BLOCK_V=block_v, I=CHUNK, num_warps=8, num_stages=1,
    )  # fmt: skip
    return out_THV


@triton.jit
def _gated_norm_kernel(
    out_ptr, z_ptr, weight_ptr, result_ptr, stride_z, eps, H: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr
):
    token, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H  # neighbours start together
    v = tl.arange(0, BLOCK)
    live = v < V
    x = tl.load(out_ptr + (token * H + head) * V + v, mask=live, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + token * stride_z + head * V + v, mask=live, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + v, mask=live, other=0.0).to(tl.float32)
    x = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / V + eps)) * weight * (z / (1.0 + tl.exp(-z)))
    tl.store(result_ptr + (token * H + head) * V + v, narrow(x, result_ptr.dtype.element_ty), mask=live)


def gated_norm(out_THV: torch.Tensor, z_THV: torch.Tensor, weight_V: torch.Tensor, eps: float) -> torch.Tensor:
    """Like `rollout_kernels.delta.gated_norm`; the heads of `z_THV` lie side by side."""
    tokens, heads, width = out_THV.shape
    assert out_THV.is_contiguous() and z_THV.stride(1) == width and z_THV.stride(2) == 1
    result_TV = torch.empty(tokens, heads * width, dtype=z_THV.dtype, device=z_THV.device)
    _gated_norm_kernel[(tokens * heads,)](
        out_THV, z_THV, weight_V, result_TV, z_THV.stride(0), eps,
        H=heads, V=width, BLOCK=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return result_TV
