"""Matrix products with one to four rows, by output: a warp reads the weight rows of its outputs from end to end.

The same products as in `triton_linear`, for so few rows that tensor cores do not pay. Weights are read in whole rows,
which is faster than in tiles, by many small programs. A program starts to load weights before it waits for the previous
kernel, and programs of the next kernel start while the last ones of this kernel run. Sums are float32, in an order that
depends only on the shape and the configuration. Codes are multiplied as in `moe.triton_warp_experts`.

Legend: M tokens, N outputs, K inputs.
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
    follow,
    follow_options,
    narrow,
    two_floats,
)
from rollout_kernels.linear.coded import CodedMatrix, Weights, stored

#: The largest number of tokens.
MOST_ROWS = 4
#: Words of one load of a warp, 16 bytes a thread: pairs of values, or codes.
_WIDTH = 128
_CODES = 512


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """Launch configuration. A program computes `num_warps * neurons` outputs (for `gated_linear`, pairs)."""

    split: int = 1  # parts of K
    neurons: int = 1  # outputs of a warp
    at_once: int = 16  # loads of a weight row that are in flight together
    num_warps: int = 4


@triton.jit
def _gemv_kernel(
    x_ptr, w_ptr, scale_ptr, out_ptr,
    N,
    stride_x,
    blocks,
    FORMAT: tl.constexpr, STORED: tl.constexpr, TOKENS: tl.constexpr, SPLIT: tl.constexpr, ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, NEURONS: tl.constexpr, AT_ONCE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) % blocks
    split = tl.program_id(0) // blocks
    HALVES: tl.constexpr = 1 if ACTIVATION is None else 2
    READS: tl.constexpr = HALVES * NEURONS  # weight rows that a warp reads at the same time
    PART: tl.constexpr = STORED // SPLIT
    n = block * (ROWS * NEURONS) + tl.arange(0, ROWS)
    k = split * PART + tl.arange(0, WIDTH)[None, :]
    SUMS: tl.constexpr = WIDTH if FORMAT == "plain" else WIDTH // THREAD_CODES
    SCALED: tl.constexpr = FORMAT == "fp8_block" or FORMAT == "mxfp8"
    # Every row of the tile loads x for itself, so that x has the layout of the weights.
    x_row = x_ptr + n[:, None] * 0
    sums = ()  # sums of the gate rows, then of the up rows, for each token
    for _ in tl.static_range(TOKENS * READS):
        sums += (tl.zeros([ROWS, SUMS], tl.float32),)
    for start in tl.static_range(0, PART, AT_ONCE * WIDTH):
        tiles = ()
        scales = ()
        for piece in tl.static_range(AT_ONCE):
            for i in tl.static_range(READS):
                row = tl.minimum(n + i % NEURONS * ROWS, N - 1) + i // NEURONS * N
                at = row.to(tl.int64)[:, None] * STORED + (start + piece * WIDTH + k)
                tiles += (tl.load(w_ptr + at, eviction_policy="evict_first"),)
                if SCALED:
                    row0 = block * (ROWS * NEURONS) + i % NEURONS * ROWS + i // NEURONS * N
                    first = split * PART + start + piece * WIDTH
                    scales += (load_scales(scale_ptr, row0, first, HALVES * N, STORED, FORMAT, ROWS, SUMS),)
        if start == 0:
            follow()
        # The barrier keeps the loads of weights above it. Otherwise the compiler spreads them out, and too few are in
        # flight at once.
        tl.debug_barrier()
        for piece in tl.static_range(AT_ONCE):
            added = ()
            for token in tl.static_range(TOKENS):
                x = tl.load(x_row + token * stride_x + (start + piece * WIDTH + k), eviction_policy="evict_last")
                if FORMAT == "plain":
                    x_low, x_high = two_floats(x, DTYPE)
                    for i in tl.static_range(READS):
                        w_low, w_high = two_floats(tiles[piece * READS + i], DTYPE)
                        added += (sums[token * READS + i] + w_low * x_low + w_high * x_high,)
                else:
                    for i in tl.static_range(READS):
                        scale = scales[piece * READS + i] if SCALED else 0
                        tile = tiles[piece * READS + i]
                        added += (add_products(sums[token * READS + i], tile, x, scale, FORMAT, DTYPE),)
            sums = added
    for token in tl.static_range(TOKENS):
        for neuron in tl.static_range(NEURONS):
            total = tl.sum(sums[token * READS + neuron], axis=1)
            output = n + neuron * ROWS
            if FORMAT == "fp8_row":
                total *= tl.load(scale_ptr + tl.minimum(output, N - 1))
            if ACTIVATION is not None:
                up = tl.sum(sums[token * READS + NEURONS + neuron], axis=1)
                if FORMAT == "fp8_row":
                    up *= tl.load(scale_ptr + tl.minimum(output, N - 1) + N)
                total = activated(total, ACTIVATION) * up
            at = (split * TOKENS + token).to(tl.int64) * N + output
            tl.store(out_ptr + at, narrow(total, out_ptr.dtype.element_ty), mask=output < N)


def takes(x_MK: torch.Tensor, weights: Weights, config: GemvConfig) -> bool:
    """True if the kernel can run: up to `MOST_ROWS` rows of 16-bit values, whose length the configuration divides."""
    coded = isinstance(weights, CodedMatrix)
    w_NK = stored(weights)
    rows, inputs = x_MK.shape
    aligned = all(t.data_ptr() % 16 == 0 and t.stride(1) == 1 and t.stride(0) % 8 == 0 for t in (x_MK, w_NK))
    at_once = (_CODES if coded else 2 * _WIDTH) * config.at_once * config.split
    whole = inputs % at_once == 0 and w_NK.is_contiguous()
    return rows <= MOST_ROWS and x_MK.dtype in (torch.bfloat16, torch.float16) and aligned and whole


def gemv(
    x_MK: torch.Tensor,
    weights: Weights,
    out: torch.Tensor,
    outputs: int,
    config: GemvConfig,
    activation: Activation | None,
) -> None:
    """Write a product to `out`, as `triton_linear.multiply_into` does."""
    assert takes(x_MK, weights, config), f"{config} does not fit {tuple(x_MK.shape)}"
    blocks = triton.cdiv(outputs, config.num_warps * config.neurons)
    if isinstance(weights, CodedMatrix):
        given = (x_MK, weights.codes_NK, weights.scales)
        packed, width, format = 1, _CODES, weights.format
    else:
        given = (x_MK.view(torch.int32), weights.view(torch.int32), weights)
        packed, width, format = 2, _WIDTH, "plain"
    _gemv_kernel[(blocks * config.split,)](
        *given, out, outputs, x_MK.stride(0) // packed, blocks,
        FORMAT=format, STORED=x_MK.shape[1] // packed, TOKENS=x_MK.shape[0], SPLIT=config.split, ACTIVATION=activation,
        DTYPE=TRITON_DTYPES[x_MK.dtype], ROWS=config.num_warps, NEURONS=config.neurons, AT_ONCE=config.at_once,
        WIDTH=width, num_warps=config.num_warps, **follow_options(x_MK.device),
    )  # fmt: skip
