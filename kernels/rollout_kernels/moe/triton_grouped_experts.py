"""Experts for many tokens, organised by expert: a weight tile is read once for all tokens that share the expert.

    group_pairs          sort the pairs of token and expert by expert, and cut them into tiles (`triton_group_pairs`)
    grouped_gate_up      h[pair] = silu(x g_e^T) * (x u_e^T), or with another activation, or of values without a gate
    grouped_down         parts[k, t] = weights[t, k] * (h[pair] d_e^T), float32
    combine              out[t] = sum over k of parts[k, t], in the order of k

Weights are the first operand of the tensor cores (64 rows or more), the tokens of a tile the second (swap AB). So 16
tokens are enough for the fast instruction, and little work is wasted if few tokens share an expert. With tiles of 64 or
128 tokens, the same kernels serve prefill. Sums are float32 in a fixed order, and no two programs write to the same
place. `combine` is not needed if the consumer, `add_rms_norm`, adds the parts.

Codes are decoded to bf16 or f16 without loss before they are multiplied (`triton_coded_tiles`). Scales of blocks and
rows are applied to the float32 sums.

With `half`, an additional kernel (`narrow_rows`) first converts bf16 activations to f16 with a scale for each row. A
code then takes half an instruction to decode, instead of two for bf16. bf16 has a larger range than f16, so each row is
multiplied by the power of two that brings its largest value to between 2^14 and 2^15, just below the f16 limit. The
conversion is exact for values down to 2^-28 of the row's largest; smaller values have an error of at most 2^-39 of the
largest.

Legend: T tokens, E experts, K experts a token, P = T K pairs, H hidden, I intermediate, M tokens of a tile, L tiles,
R rows, W width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from rollout_kernels.common.triton_coded_tiles import add_tile, tile_scales
from rollout_kernels.common.triton_math import (
    INTERPRETED,
    Activation,
    activated,
    clamped_glu,
    follow,
    follow_options,
    gated,
    narrow,
)
from rollout_kernels.moe.formats import ClampedGLU, ExpertWeights
from rollout_kernels.moe.triton_group_pairs import Groups


@dataclass(frozen=True, slots=True)
class GroupedConfig:
    """Launch configuration of `grouped_gate_up` and `grouped_down`; the tokens of a tile come with the `Groups`."""

    block_n: int = 64  # weight rows of a tile; for `fp8_block` a divisor of 128
    block_k: int = 128  # inputs of a tile; likewise
    num_warps: int = 4
    num_stages: int = 3
    bulk: bool = True  # the copy engine loads weights
    half: bool = False  # multiply in f16; only for `fp8_row` and `fp8_block`


@triton.jit
def _weights(
    w_ptr,
    row0, row, k,
    INPUTS: tl.constexpr, BULK: tl.constexpr, BLOCK_K: tl.constexpr, FIRST: tl.constexpr = 0, WIDTH: tl.constexpr = 0,
):  # fmt: skip
    """Stored weights from row `row0` and column `FIRST + k`; past the end of K they have no meaning.

    `row` [N] is clipped to the matrix. Its rows have WIDTH columns, or INPUTS if that is 0.
    """
    if BULK:
        return w_ptr.load([row0, FIRST + k])
    else:
        at = k + tl.arange(0, BLOCK_K)[None, :]
        rows = w_ptr + row[:, None].to(tl.int64) * (WIDTH if WIDTH > 0 else INPUTS) + FIRST
        if INPUTS % BLOCK_K == 0:
            return tl.load(rows + at, eviction_policy="evict_first")
        else:
            return tl.load(rows + at, mask=at < INPUTS, other=0, eviction_policy="evict_first")


@triton.jit
def _activations(row_ptr, live, k, INPUTS: tl.constexpr, BLOCK_K: tl.constexpr):
    """[M, K] activations from column `k` of the rows at `row_ptr` [M]."""
    at = k + tl.arange(0, BLOCK_K)[None, :]
    if INPUTS % BLOCK_K == 0:
        return tl.load(row_ptr[:, None] + at, mask=live[:, None], other=0.0)
    else:
        return tl.load(row_ptr[:, None] + at, mask=live[:, None] & (at < INPUTS), other=0.0)


@triton.jit
def _tile_rows(pairs_ptr, tiles_ptr, BLOCK_M: tl.constexpr, CACHE: tl.constexpr):
    """The tile of a program: expert, number of rows, pairs [M], and which of the pairs are live."""
    tile = tiles_ptr + 3 * tl.program_id(1)
    count = tl.load(tile + 2, cache_modifier=CACHE)
    expert = tl.load(tile, mask=count > 0, other=0, cache_modifier=CACHE)
    start = tl.load(tile + 1, mask=count > 0, other=0, cache_modifier=CACHE)
    m = tl.arange(0, BLOCK_M)
    live = m < count
    return expert, count, tl.load(pairs_ptr + start + m, mask=live, other=0, cache_modifier=CACHE), live


@triton.jit
def _gate_up_kernel(
    x_ptr, x_scale_ptr, w_ptr, scale_ptr, bias_ptr, pairs_ptr, tiles_ptr, h_ptr,
    alpha, limit,
    H: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, ACTIVATION: tl.constexpr, LIMITED: tl.constexpr,
    GATED: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr, BULK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, INNER - 1)
    follow()
    expert, count, pair, live = _tile_rows(pairs_ptr, tiles_ptr, BLOCK_M, "")
    if count == 0:
        return
    # Gate rows come before up rows; without a gate there are up rows alone, called gate here. With a clamped GLU they
    # alternate: a row of the matrix is then a gate row, and in the columns after it its up row.
    CLAMPED: tl.constexpr = bias_ptr is not None
    UP_ROWS: tl.constexpr = INNER if GATED and not CLAMPED else 0
    UP_COLUMNS: tl.constexpr = H if CLAMPED else 0
    WIDTH: tl.constexpr = 2 * H if CLAMPED else H
    UP_SCALES: tl.constexpr = SCALES // (2 * INNER) if CLAMPED else SCALES // 2
    gate_row0 = expert * (INNER + UP_ROWS) + tl.program_id(0) * BLOCK_N
    gate_row = expert * (INNER + UP_ROWS) + row
    gate_scale = scale_ptr + expert.to(tl.int64) * SCALES
    scale_row = 2 * row if CLAMPED else row
    x_row = x_ptr + (pair // TOP_K).to(tl.int64) * H
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if GATED:
        up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    # The pipeline that prefetches tiles skips loads as small as scales, so the next step's scales are loaded here.
    next_gate = tile_scales(gate_scale, scale_row, 0, H, FORMAT, BLOCK_K)
    if GATED:
        next_up = tile_scales(gate_scale + UP_SCALES, scale_row, 0, H, FORMAT, BLOCK_K)
    for k in tl.range(0, H, BLOCK_K, num_stages=STAGES):
        w_gate = _weights(w_ptr, gate_row0, gate_row, k, H, BULK, BLOCK_K, 0, WIDTH)
        if GATED:
            w_up = _weights(w_ptr, gate_row0 + UP_ROWS, gate_row + UP_ROWS, k, H, BULK, BLOCK_K, UP_COLUMNS, WIDTH)
        x = _activations(x_row, live, k, H, BLOCK_K)
        scale_gate = next_gate
        next_gate = tile_scales(gate_scale, scale_row, k + BLOCK_K, H, FORMAT, BLOCK_K)
        gate = add_tile(gate, w_gate, x, scale_gate, FORMAT, BLOCK_N, BLOCK_K)
        if GATED:
            scale_up = next_up
            next_up = tile_scales(gate_scale + UP_SCALES, scale_row, k + BLOCK_K, H, FORMAT, BLOCK_K)
            up = add_tile(up, w_up, x, scale_up, FORMAT, BLOCK_N, BLOCK_K)
    if x_scale_ptr is not None:
        x_scale = tl.load(x_scale_ptr + pair // TOP_K)[None, :]
        gate *= x_scale
        if GATED:
            up *= x_scale
    if FORMAT == "fp8_row":
        gate *= tl.load(gate_scale + scale_row)[:, None]
        if GATED:
            up *= tl.load(gate_scale + UP_SCALES + scale_row)[:, None]
    if CLAMPED:
        bias = bias_ptr + expert.to(tl.int64) * (2 * INNER) + 2 * row
        gate += tl.load(bias).to(tl.float32)[:, None]
        up += tl.load(bias + 1).to(tl.float32)[:, None]
        h = clamped_glu(gate, up, alpha, limit)
    elif GATED:
        h = gated(gate, up, limit, ACTIVATION, LIMITED)
    else:
        h = activated(gate, ACTIVATION)
    at = h_ptr + pair[None, :].to(tl.int64) * INNER + n[:, None]
    tl.store(at, narrow(h, h_ptr.dtype.element_ty), mask=live[None, :] & (n < INNER)[:, None])


@triton.jit(do_not_specialize=["tokens"])
def _down_kernel(
    h_ptr, h_scale_ptr, w_ptr, scale_ptr, pairs_ptr, tiles_ptr, weights_ptr, parts_ptr,
    tokens,
    H: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr,
    BULK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, H - 1)
    # The tiles were complete before `grouped_gate_up` started; only its activations need a wait. Without a wait the L1
    # cache may hold stale data, so these loads bypass it.
    expert, count, pair, live = _tile_rows(pairs_ptr, tiles_ptr, BLOCK_M, ".cg")
    weight = tl.load(weights_ptr + pair, mask=live, other=0.0, cache_modifier=".cg")
    scale = scale_ptr + expert.to(tl.int64) * SCALES
    next_scale = tile_scales(scale, row, 0, INNER, FORMAT, BLOCK_K)
    if count == 0:  # no wait, so that the next kernel can start: the programs of at least one tile do wait
        return
    follow()
    row0 = expert * H + tl.program_id(0) * BLOCK_N
    h_row = h_ptr + pair.to(tl.int64) * INNER
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in tl.range(0, INNER, BLOCK_K, num_stages=STAGES):
        w = _weights(w_ptr, row0, expert * H + row, k, INNER, BULK, BLOCK_K)
        x = _activations(h_row, live, k, INNER, BLOCK_K)
        scale_now = next_scale
        next_scale = tile_scales(scale, row, k + BLOCK_K, INNER, FORMAT, BLOCK_K)
        acc = add_tile(acc, w, x, scale_now, FORMAT, BLOCK_N, BLOCK_K)
    if h_scale_ptr is not None:
        weight *= tl.load(h_scale_ptr + pair)
    if FORMAT == "fp8_row":
        acc *= tl.load(scale + row)[:, None]
    at_part = ((pair % TOP_K) * tokens + pair // TOP_K).to(tl.int64) * H
    at = parts_ptr + at_part[None, :] + n[:, None]
    tl.store(at, acc * weight[None, :], mask=live[None, :] & (n < H)[:, None])


@triton.jit(do_not_specialize=["tokens"])
def _combine_kernel(parts_ptr, out_ptr, tokens, H: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    follow()
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        total += tl.load(parts_ptr + (slot * tokens.to(tl.int64) + token) * H + h, mask=h < H, other=0.0)
    tl.store(out_ptr + token * H + h, narrow(total, out_ptr.dtype.element_ty), mask=h < H)


@triton.jit
def _narrow_kernel(x_ptr, half_ptr, scale_ptr, W: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    follow()
    x = tl.load(x_ptr + row * W + at, mask=at < W, other=0.0).to(tl.float32)
    # Bits of the power of two below the largest value, at least 2^-112: then scale and inverse are normal numbers.
    power = tl.maximum(tl.max(tl.abs(x)).to(tl.int32, bitcast=True) & 0x7F800000, 15 << 23)
    factor = ((141 << 23) - power + (127 << 23)).to(tl.float32, bitcast=True)  # 2^14 over it
    tl.store(half_ptr + row * W + at, (x * factor).to(tl.float16), mask=at < W)
    tl.store(scale_ptr + row, (power - (14 << 23)).to(tl.float32, bitcast=True))


def narrow_rows(x_RW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert bf16 `x_RW` (contiguous) to f16 [R, W] and float32 scales [R], whose product is close to x."""
    assert x_RW.dtype == torch.bfloat16 and x_RW.is_contiguous()
    rows, width = x_RW.shape
    half_RW = torch.empty_like(x_RW, dtype=torch.float16)
    scales_R = torch.empty(rows, dtype=torch.float32, device=x_RW.device)
    block = triton.next_power_of_2(width)
    _narrow_kernel[(rows,)](
        x_RW, half_RW, scales_R,
        W=width, BLOCK=block, num_warps=min(16, max(1, block // 512)), **follow_options(x_RW.device),
    )  # fmt: skip
    return half_RW, scales_R


def _stored(
    weights: ExpertWeights, config: GroupedConfig, alternating: bool = False
) -> torch.Tensor | TensorDescriptor:
    """The kernels' argument for weights: the rows of all experts as one matrix, or a descriptor of it for `bulk`.

    Where gate and up rows alternate, two of them are one row of the matrix.
    """
    rows_NK = weights.values_ENK.flatten(0, 1)
    if alternating:
        rows_NK = rows_NK.unflatten(0, (-1, 2)).flatten(1, 2)
    if not config.bulk:
        return rows_NK
    return TensorDescriptor.from_tensor(rows_NK, [config.block_n, config.block_k])


def _scales(weights: ExpertWeights) -> torch.Tensor:
    """The kernels' argument for scales; for plain weights a placeholder, which they do not read."""
    return weights.values_ENK if weights.scales is None else weights.scales


def _halved(x: torch.Tensor, weights: ExpertWeights, config: GroupedConfig) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The activations that the kernels multiply, and their scales if they were converted to f16."""
    assert not config.half or weights.format in ("fp8_row", "fp8_block"), f"{config} is not for {weights.format}"
    return narrow_rows(x) if config.half and x.dtype == torch.bfloat16 else (x, None)


def _options(weights: ExpertWeights, config: GroupedConfig, device: torch.device) -> dict[str, Any]:
    if weights.format == "fp8_block":
        assert 128 % config.block_n == 0 and 128 % config.block_k == 0, f"{config} crosses blocks of scales"
    assert config.block_k % 32 == 0
    assert not config.bulk or weights.values_ENK.shape[2] * weights.values_ENK.element_size() % 16 == 0
    return {
        "FORMAT": weights.format,
        "SCALES": 0 if weights.scales is None else weights.scales[0].numel(),
        "BULK": config.bulk,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "STAGES": 1 if INTERPRETED.value else config.num_stages,
        "num_warps": config.num_warps,
        **follow_options(device),
    }


def _check(x: torch.Tensor, weights: ExpertWeights) -> None:
    assert x.is_contiguous() and x.shape[-1] == weights.values_ENK.shape[2]
    assert x.dtype in (torch.bfloat16, torch.float16)
    assert weights.format != "plain" or weights.values_ENK.dtype == x.dtype
    if weights.format == "mxfp8" and x.dtype != torch.bfloat16:
        raise ValueError("mxfp8 experts on the tensor cores need bf16 activations: f16 can't hold their scales")


def grouped_gate_up(
    x_TH: torch.Tensor,
    groups: Groups,
    gate_up: ExpertWeights,
    top_k: int,
    config: GroupedConfig,
    glu: ClampedGLU | None = None,
    activation: Activation = "silu",
    limit: float | None = None,
) -> torch.Tensor:
    """The gated activations of each pair, [P, I] in x's dtype, in the order of tokens and their experts.

    `groups` is from `group_pairs`; the other arguments are as for `moe_gate_up`.
    """
    _check(x_TH, gate_up)
    assert glu is None or (gate_up.format != "fp8_block" and gate_up.halves == 2)
    inner = gate_up.values_ENK.shape[1] // gate_up.halves
    out = x_TH.new_empty(groups.pairs_P.numel(), inner)
    factors_TH, x_scales_T = _halved(x_TH, gate_up, config)
    _gate_up_kernel[(triton.cdiv(inner, config.block_n), groups.tiles_L3.shape[0])](
        factors_TH, x_scales_T, _stored(gate_up, config, glu is not None),
        _scales(gate_up), None if glu is None else glu.bias_EG, groups.pairs_P, groups.tiles_L3, out,
        1.0 if glu is None else glu.alpha, (limit or 0.0) if glu is None else glu.limit,
        H=x_TH.shape[1], INNER=inner, TOP_K=top_k, ACTIVATION=activation, LIMITED=limit is not None,
        GATED=gate_up.halves == 2, BLOCK_M=max(16, groups.tile_rows), **_options(gate_up, config, x_TH.device),
    )  # fmt: skip
    return out


def grouped_down(
    h_PI: torch.Tensor, groups: Groups, weights_TK: torch.Tensor, down: ExpertWeights, config: GroupedConfig
) -> torch.Tensor:
    """The weighted output of each pair, float32 [K, T, H].

    It must be launched directly after the `grouped_gate_up` that computes `h_PI`, because it reads `groups` and
    `weights_TK` before that kernel has ended.

    `weights_TK` is float32; the other arguments are as for `moe_down`.
    """
    _check(h_PI, down)
    tokens, top_k = weights_TK.shape
    hidden = down.values_ENK.shape[1]
    out = torch.empty(top_k, tokens, hidden, dtype=torch.float32, device=h_PI.device)
    factors_PI, h_scales_P = _halved(h_PI, down, config)
    _down_kernel[(triton.cdiv(hidden, config.block_n), groups.tiles_L3.shape[0])](
        factors_PI, h_scales_P, _stored(down, config), _scales(down),
        groups.pairs_P, groups.tiles_L3, weights_TK, out, tokens,
        H=hidden, INNER=h_PI.shape[1], TOP_K=top_k, BLOCK_M=max(16, groups.tile_rows),
        **_options(down, config, h_PI.device),
    )  # fmt: skip
    return out


def combine(parts_KTH: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum of `parts_KTH` over each token's experts, in float32 and in the order of K; returns [T, H] in `dtype`."""
    top_k, tokens, hidden = parts_KTH.shape
    out = torch.empty(tokens, hidden, dtype=dtype, device=parts_KTH.device)
    block = min(1024, triton.next_power_of_2(hidden))
    _combine_kernel[(tokens, triton.cdiv(hidden, block))](
        parts_KTH, out, tokens, H=hidden, TOP_K=top_k, BLOCK=block, num_warps=4, **follow_options(parts_KTH.device)
    )
    return out
