"""Experts for few tokens, organised by output: a warp owns an output neuron and streams its weight rows once.

    moe_gate_up   h[t, k] = silu(x[t] g_e^T) * (x[t] u_e^T)       e = experts[t, k]; or with another activation, or of
                  values without a gate
    moe_down      out[t] = sum over k of weights[t, k] * (h[t, k] d_e^T)

There is no padding, gathering, scattering or combining, and the only intermediate result is h. Sums are float32, in an
order that depends only on the shape and the configuration. So a row's result is the same, bit for bit, in every batch.
A token reads the weights of all its experts, so the cost grows with the number of tokens, even if they share experts;
for many tokens use `triton_grouped_experts`.

A thread loads 16 bytes of weights at once. A tile is [R, W]: W stored elements of each of R output rows. 16-bit weights
are read as int32, two values each, because one shift or mask converts a bf16 to float32. Codes are read as uint8.

Source: Cursor's post "Better MoE model inference with warp decode" (2026).

Legend: T tokens, E experts, K experts a token, H hidden, I intermediate of one expert, R rows, W stored elements and A
partial sums of a row.
"""

# Kernels collect tiles in tuples, whose type changes as they grow.
# mypy: disable-error-code="assignment,var-annotated"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rollout_kernels.common.triton_coded_tiles import THREAD_CODES, add_products, load_scales
from rollout_kernels.common.triton_math import (
    TRITON_DTYPES,
    Activation,
    activated,
    clamped_glu,
    follow,
    follow_options,
    gated,
    narrow,
)
from rollout_kernels.moe.formats import ClampedGLU, ExpertWeights

#: Bytes that a thread loads at once.
_THREAD_BYTES = 16


@dataclass(frozen=True, slots=True)
class WarpConfig:
    """Launch configuration of `moe_gate_up` and `moe_down`; a program computes `rows * neurons` outputs."""

    rows: int = 4  # outputs that are spread over the warps of a program
    neurons: int = 1  # outputs of a warp that share each load of the activations
    at_once: int = 8  # loads in flight: along H in `moe_gate_up`, experts in `moe_down`; rounded down to a divisor
    num_warps: int = 4
    across: bool = False  # neighbouring programs: same outputs of different tokens (True), or the other way round
    once: bool = True  # weights leave the cache after use
    fence: bool = True  # a barrier keeps the loads of weights together; in `moe_gate_up`


@triton.jit(do_not_specialize=["pairs"])
def _gate_up_kernel(
    x_ptr, w_ptr, scale_ptr, bias_ptr, experts_ptr, h_ptr,
    pairs, alpha, limit,
    H: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, ACTIVATION: tl.constexpr, LIMITED: tl.constexpr,
    HALVES: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr, ROWS: tl.constexpr, NEURONS: tl.constexpr,
    WIDTH: tl.constexpr, PIECES: tl.constexpr, ACROSS: tl.constexpr, EVICT: tl.constexpr, FENCE: tl.constexpr,
):  # fmt: skip
    # Gate rows come before up rows, or, with a clamped GLU, they alternate; without a gate there are up rows alone.
    CLAMPED: tl.constexpr = bias_ptr is not None
    STEP: tl.constexpr = 2 if CLAMPED else 1
    UP: tl.constexpr = 1 if CLAMPED else INNER
    UP_SCALES: tl.constexpr = SCALES // (2 * INNER) if CLAMPED else SCALES // 2
    DTYPE: tl.constexpr = h_ptr.dtype.element_ty
    STORED: tl.constexpr = H // 2 if FORMAT == "plain" else H
    SUMS: tl.constexpr = WIDTH if FORMAT == "plain" else WIDTH // THREAD_CODES
    SCALED: tl.constexpr = FORMAT == "fp8_block" or FORMAT == "mxfp8"
    BLOCKS: tl.constexpr = (INNER + ROWS * NEURONS - 1) // (ROWS * NEURONS)
    pair, block = _split(tl.program_id(0), pairs, BLOCKS, ACROSS)
    n = block * (ROWS * NEURONS) + tl.arange(0, ROWS)
    k = tl.arange(0, WIDTH)
    # The previous kernel chooses the experts, so no weights can be prefetched before it has ended.
    follow()
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    w = w_ptr + expert * (HALVES * INNER * STORED)
    scale = scale_ptr + expert * SCALES
    # Every row of the tile loads x for itself, so that x has the layout of the weights.
    x_row = x_ptr + (pair // TOP_K) * STORED + n[:, None] * 0
    sums = ()  # sums of the gate rows, then sums of the up rows, for each neuron
    for _ in tl.static_range(HALVES * NEURONS):
        sums += (tl.zeros([ROWS, SUMS], tl.float32),)
    for start in tl.static_range(0, STORED, PIECES * WIDTH):
        tiles = ()
        scales = ()
        for piece in tl.static_range(PIECES):
            at = start + piece * WIDTH + k[None, :]
            for i in tl.static_range(HALVES * NEURONS):
                row = tl.minimum(n + i % NEURONS * ROWS, INNER - 1)
                w_row = w + (i // NEURONS * UP + row[:, None] * STEP) * STORED
                tiles += (_load(w_row + at, at, STORED, WIDTH, EVICT),)
                if SCALED:
                    half = scale + i // NEURONS * UP_SCALES
                    row0 = block * (ROWS * NEURONS) + i % NEURONS * ROWS
                    k0 = start + piece * WIDTH
                    scales += (load_scales(half, row0, k0, INNER, H, FORMAT, ROWS, SUMS, STEP),)
        # The barrier keeps the loads of weights above it. Otherwise ptxas spreads them out to save registers, and too
        # few are in flight at once. The activations are loaded below it, so that no arithmetic can move above it.
        if FENCE:
            tl.debug_barrier()
        for piece in tl.static_range(PIECES):
            at = start + piece * WIDTH + k[None, :]
            x = _load(x_row + at, at, STORED, WIDTH, "evict_last")
            added = ()
            for i in tl.static_range(HALVES * NEURONS):
                tile_scale = scales[piece * HALVES * NEURONS + i] if SCALED else 0
                added += (add_products(sums[i], tiles[piece * HALVES * NEURONS + i], x, tile_scale, FORMAT, DTYPE),)
            sums = added
    for i in tl.static_range(NEURONS):
        g = tl.sum(sums[i], axis=1)
        if HALVES == 2:
            u = tl.sum(sums[NEURONS + i], axis=1)
        neuron = n + i * ROWS
        if FORMAT == "fp8_row":
            row = tl.minimum(neuron, INNER - 1) * STEP
            g *= tl.load(scale + row)
            if HALVES == 2:
                u *= tl.load(scale + UP_SCALES + row)
        if CLAMPED:
            bias = bias_ptr + expert * (2 * INNER) + 2 * tl.minimum(neuron, INNER - 1)
            g += tl.load(bias).to(tl.float32)
            u += tl.load(bias + 1).to(tl.float32)
            h = clamped_glu(g, u, alpha, limit)
        elif HALVES == 2:
            h = gated(g, u, limit, ACTIVATION, LIMITED)
        else:
            h = activated(g, ACTIVATION)
        tl.store(h_ptr + pair.to(tl.int64) * INNER + neuron, narrow(h, DTYPE), mask=neuron < INNER)


@triton.jit(do_not_specialize=["tokens"])
def _down_kernel(
    h_ptr, w_ptr, scale_ptr, experts_ptr, weights_ptr, out_ptr,
    tokens,
    H: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr,
    SCALES: tl.constexpr, ROWS: tl.constexpr, NEURONS: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr,
    AT_ONCE: tl.constexpr, ACROSS: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    STORED: tl.constexpr = INNER // 2 if FORMAT == "plain" else INNER
    SUMS: tl.constexpr = WIDTH if FORMAT == "plain" else WIDTH // THREAD_CODES
    SCALED: tl.constexpr = FORMAT == "fp8_block" or FORMAT == "mxfp8"
    BLOCKS: tl.constexpr = (H + ROWS * NEURONS - 1) // (ROWS * NEURONS)
    token, block = _split(tl.program_id(0), tokens, BLOCKS, ACROSS)
    n = block * (ROWS * NEURONS) + tl.arange(0, ROWS)
    k = tl.arange(0, WIDTH)
    sums = ()  # the sum over the experts, for each neuron
    for _ in tl.static_range(NEURONS):
        sums += (tl.zeros([ROWS, SUMS], tl.float32),)
    for first in tl.static_range(0, TOP_K, AT_ONCE):
        for start in tl.static_range(0, STORED, PIECES * WIDTH):
            tiles = ()
            scales = ()
            row_scales = ()
            for i in tl.static_range(AT_ONCE):
                # Bypass the L1 cache, which may hold stale data, because this kernel has not waited yet.
                expert = tl.load(experts_ptr + token * TOP_K + first + i, cache_modifier=".cg").to(tl.int64)
                scale = scale_ptr + expert * SCALES
                for neuron in tl.static_range(NEURONS):
                    row0 = block * (ROWS * NEURONS) + neuron * ROWS
                    row = tl.minimum(n + neuron * ROWS, H - 1)
                    w_row = w_ptr + expert * (H * STORED) + row[:, None] * STORED
                    for piece in tl.static_range(PIECES):
                        at = start + piece * WIDTH + k[None, :]
                        tiles += (_load(w_row + at, at, STORED, WIDTH, EVICT),)
                        if SCALED:
                            scales += (load_scales(scale, row0, start + piece * WIDTH, H, INNER, FORMAT, ROWS, SUMS),)
                    if FORMAT == "fp8_row":
                        row_scales += (load_scales(scale, row0, 0, H, INNER, FORMAT, ROWS, SUMS),)
            # The experts were known before this kernel could start, because `moe_gate_up` had waited for the router.
            # The activations exist only when `moe_gate_up` has ended.
            if first == 0 and start == 0:
                follow()
            for i in tl.static_range(AT_ONCE):
                pair = token * TOP_K + first + i
                h_row = h_ptr + pair.to(tl.int64) * STORED + n[:, None] * 0
                xs = ()
                for piece in tl.static_range(PIECES):
                    at = start + piece * WIDTH + k[None, :]
                    xs += (_load(h_row + at, at, STORED, WIDTH, "evict_last"),)
                weight = tl.load(weights_ptr + pair)
                added = ()
                for neuron in tl.static_range(NEURONS):
                    part = tl.zeros([ROWS, SUMS], tl.float32)
                    for piece in tl.static_range(PIECES):
                        tile_scale = scales[(i * NEURONS + neuron) * PIECES + piece] if SCALED else 0
                        tile = tiles[(i * NEURONS + neuron) * PIECES + piece]
                        part = add_products(part, tile, xs[piece], tile_scale, FORMAT, DTYPE)
                    if FORMAT == "fp8_row":
                        part *= row_scales[i * NEURONS + neuron]
                    added += (sums[neuron] + part * weight,)
                sums = added
    for neuron in tl.static_range(NEURONS):
        total = tl.sum(sums[neuron], axis=1)
        at = n + neuron * ROWS
        tl.store(out_ptr + token.to(tl.int64) * H + at, narrow(total, out_ptr.dtype.element_ty), mask=at < H)


@triton.jit
def _split(program, items, BLOCKS: tl.constexpr, ACROSS: tl.constexpr):
    """The item (a pair or a token) and the block of neurons of a program."""
    if ACROSS:
        return program % items, program // items
    else:
        return program // BLOCKS, program % BLOCKS


@triton.jit
def _load(pointers, at, STORED: tl.constexpr, WIDTH: tl.constexpr, EVICT: tl.constexpr):
    if STORED % WIDTH == 0:
        return tl.load(pointers, eviction_policy=EVICT)
    else:
        return tl.load(pointers, mask=at < STORED, other=0, eviction_policy=EVICT)


#: The most loads of 16 bytes, 4 registers each, that a thread has in flight in `moe_down`.
_MOST_LOADS = 24
#: The most tiles of less than 512 bytes in a row.
_MOST_NARROW = 8


def _tile(weights: ExpertWeights) -> tuple[int, int]:
    """Width of a tile in stored elements, and the number of rows that a warp covers with one load.

    A warp loads 512 bytes of one row, 256 bytes of each of 2 rows or 128 of each of 4, so that tiles divide the row.
    Loops over tiles are unrolled, and many of them spill all registers: then the last tile of a row is cut by a mask.
    """
    plain, whole = weights.format == "plain", 32 * _THREAD_BYTES
    element_bytes = 4 if plain else 1
    row_bytes = weights.values_ENK.shape[2] * weights.values_ENK.element_size()
    for rows in (1, 2, 4):
        narrow_enough = rows == 1 or not plain or row_bytes * rows <= _MOST_NARROW * whole
        if row_bytes % (whole // rows) == 0 and narrow_enough:
            return whole // rows // element_bytes, rows
    return whole // element_bytes, 1


def _pieces(whole: int, most: int) -> int:
    """The largest divisor of `whole` that is at most `most`."""
    return next(pieces for pieces in range(max(1, min(whole, most)), 0, -1) if whole % pieces == 0)


def _operand(x: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
    """A tensor as the kernels read it: with 16-bit weights, two values in an int32."""
    assert x.is_contiguous(), "activations must be contiguous"
    return x.view(torch.int32) if weights.format == "plain" else x


def _check(x: torch.Tensor, weights: ExpertWeights, experts_TK: torch.Tensor) -> None:
    assert experts_TK.dtype == torch.int32 and experts_TK.is_contiguous(), "experts must be contiguous int32"
    assert x.dtype in (torch.bfloat16, torch.float16), f"activations must have 16 bits, not {x.dtype}"
    assert weights.format != "plain" or weights.values_ENK.dtype == x.dtype, "weights and activations differ in dtype"
    assert x.shape[-1] == weights.values_ENK.shape[2], "weights and activations differ in width"
    assert x.shape[-1] % 2 == 0, "the width must be even"


def moe_gate_up(
    x_TH: torch.Tensor,
    experts_TK: torch.Tensor,
    gate_up: ExpertWeights,
    config: WarpConfig,
    glu: ClampedGLU | None = None,
    activation: Activation = "silu",
    limit: float | None = None,
) -> torch.Tensor:
    """The gated activations of each token's experts, [T, K, I] in x's dtype.

    Args:
        x_TH: bf16 or f16, contiguous, H even.
        experts_TK: int32, contiguous.
        gate_up: gate rows, then up rows, of all experts (2 halves), or without a gate 1 half; plain weights have the
            dtype of x.
        config: launch configuration.
        glu: for weights whose gate and up rows alternate, not in `fp8_block`; None: `activation`.
        activation: of the gates, or of the values without a gate.
        limit: see `rollout_kernels.gated`.
    """
    _check(x_TH, gate_up, experts_TK)
    assert glu is None or (gate_up.format != "fp8_block" and gate_up.halves == 2)
    (tokens, hidden), top_k = x_TH.shape, experts_TK.shape[1]
    inner = gate_up.values_ENK.shape[1] // gate_up.halves
    out = x_TH.new_empty(tokens, top_k, inner)
    width, warp_rows = _tile(gate_up)
    rows = config.rows * warp_rows
    stored = hidden // 2 if gate_up.format == "plain" else hidden
    scales = gate_up.scales
    _gate_up_kernel[(tokens * top_k * triton.cdiv(inner, rows * config.neurons),)](
        _operand(x_TH, gate_up), _operand(gate_up.values_ENK, gate_up),
        gate_up.values_ENK if scales is None else scales, None if glu is None else glu.bias_EG, experts_TK, out,
        tokens * top_k, 1.0 if glu is None else glu.alpha, (limit or 0.0) if glu is None else glu.limit,
        H=hidden, INNER=inner, TOP_K=top_k, ACTIVATION=activation, LIMITED=limit is not None, HALVES=gate_up.halves,
        FORMAT=gate_up.format, SCALES=0 if scales is None else scales[0].numel(), ROWS=rows, NEURONS=config.neurons,
        WIDTH=width, PIECES=_pieces(triton.cdiv(stored, width), config.at_once), ACROSS=config.across,
        EVICT="evict_first" if config.once else "", FENCE=config.fence, num_warps=config.num_warps,
        **follow_options(x_TH.device),
    )  # fmt: skip
    return out


def moe_down(
    h_TKI: torch.Tensor,
    experts_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    down: ExpertWeights,
    config: WarpConfig,
    parts: bool = False,
) -> torch.Tensor:
    """The weighted sum of each token's experts: [T, H] in h's dtype, or float32 [1, T, H] with `parts`.

    It must be launched directly after the `moe_gate_up` that computes `h_TKI`, because it reads `experts_TK` before
    that kernel has ended.

    Args:
        h_TKI: from `moe_gate_up`.
        experts_TK: int32, contiguous.
        weights_TK: float32, contiguous.
        down: the down projections of all experts.
        config: launch configuration.
        parts: return one float32 part, for a consumer that adds parts.
    """
    _check(h_TKI, down, experts_TK)
    assert weights_TK.dtype == torch.float32 and weights_TK.is_contiguous()
    tokens, top_k, inner = h_TKI.shape
    hidden = down.values_ENK.shape[1]
    shape = (1, tokens, hidden) if parts else (tokens, hidden)
    out = torch.empty(shape, dtype=torch.float32 if parts else h_TKI.dtype, device=h_TKI.device)
    width, warp_rows = _tile(down)
    rows = config.rows * warp_rows
    scales = down.scales
    stored = inner // 2 if down.format == "plain" else inner
    at_once = _pieces(top_k, config.at_once)
    _down_kernel[(tokens * triton.cdiv(hidden, rows * config.neurons),)](
        _operand(h_TKI, down), _operand(down.values_ENK, down), down.values_ENK if scales is None else scales,
        experts_TK, weights_TK, out, tokens,
        H=hidden, INNER=inner, TOP_K=top_k, FORMAT=down.format, DTYPE=TRITON_DTYPES[h_TKI.dtype],
        SCALES=0 if scales is None else scales[0].numel(), ROWS=rows, NEURONS=config.neurons, WIDTH=width,
        PIECES=_pieces(triton.cdiv(stored, width), _MOST_LOADS // (at_once * config.neurons)), AT_ONCE=at_once,
        ACROSS=config.across, EVICT="evict_first" if config.once else "", num_warps=config.num_warps,
        **follow_options(h_TKI.device),
    )  # fmt: skip
    return out
