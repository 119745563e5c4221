"""Matrix products with up to four rows, by output: a warp reads the weight rows of its outputs from end to end.

The same products as in `triton_linear`, for which that few rows leave the tensor cores no work. Weights are read in
whole rows, which memory gives faster than tiles, by many small programs; the first of a program are under way before it
waits for the kernel before, and when the last programs run, those of the kernel after move in. Sums are float32, in an
order that depends on the shape and the configuration alone.

Legend: M tokens, N outputs, K inputs.
"""

# Kernels collect tiles in tuples, whose type changes as they grow.
# mypy: disable-error-code="assignment,var-annotated"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rollout_kernels.common.triton_math import TRITON_DTYPES, follow, follow_options, narrow, two_floats

#: Tokens that a program can take.
MOST_ROWS = 4
#: Pairs of values that a warp reads at once: 16 bytes a lane.
_WIDTH = 128


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """How such a product is cut up.

    A program has an output, or with `gate_up_silu` a pair of them, for each of its warps, times `neurons`; `at_once`
    loads of a row are under way together. K is cut into `split` parts.
    """

    split: int = 1
    neurons: int = 1
    at_once: int = 16
    num_warps: int = 4


@triton.jit
def _gemv_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    N,
    stride_x,
    blocks,
    STORED: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    SILU: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    NEURONS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    block = tl.program_id(0) % blocks
    split = tl.program_id(0) // blocks
    HALVES: tl.constexpr = 2 if SILU else 1
    READS: tl.constexpr = HALVES * NEURONS  # rows that a warp goes through side by side
    PART: tl.constexpr = STORED // SPLIT
    n = block * (ROWS * NEURONS) + tl.arange(0, ROWS)
    k = split * PART + tl.arange(0, WIDTH)[None, :]
    # Each row of the tile reads x itself: so x is laid out as the weights are.
    x_row = x_ptr + n[:, None] * 0
    sums = ()  # token by token, of the gate rows and then of the up rows
    for _ in tl.static_range(TOKENS * READS):
        sums += (tl.zeros([ROWS, WIDTH], tl.float32),)
    for start in tl.static_range(0, PART, AT_ONCE * WIDTH):
        tiles = ()
        for piece in tl.static_range(AT_ONCE):
            for i in tl.static_range(READS):
                row = tl.minimum(n + i % NEURONS * ROWS, N - 1) + i // NEURONS * N
                at = row.to(tl.int64)[:, None] * STORED + (start + piece * WIDTH + k)
                tiles += (tl.load(w_ptr + at, eviction_policy="evict_first"),)
        if start == 0:
            follow()
        # No weights may be read later than this: else the loads are spread out, and too few are under way.
        tl.debug_barrier()
        for piece in tl.static_range(AT_ONCE):
            added = ()
            for token in tl.static_range(TOKENS):
                x = tl.load(x_row + token * stride_x + (start + piece * WIDTH + k), eviction_policy="evict_last")
                x_low, x_high = two_floats(x, DTYPE)
                for i in tl.static_range(READS):
                    w_low, w_high = two_floats(tiles[piece * READS + i], DTYPE)
                    added += (sums[token * READS + i] + w_low * x_low + w_high * x_high,)
            sums = added
    for token in tl.static_range(TOKENS):
        for neuron in tl.static_range(NEURONS):
            total = tl.sum(sums[token * READS + neuron], axis=1)
            if SILU:
                up = tl.sum(sums[token * READS + NEURONS + neuron], axis=1)
                total = total / (1.0 + tl.exp(-total)) * up
            output = n + neuron * ROWS
            at = (split * TOKENS + token).to(tl.int64) * N + output
            tl.store(out_ptr + at, narrow(total, out_ptr.dtype.element_ty), mask=output < N)


def takes(x_MK: torch.Tensor, w_NK: torch.Tensor, config: GemvConfig) -> bool:
    """True where the kernel runs: few rows of 16 bits, whose length the configuration divides."""
    rows, inputs = x_MK.shape
    aligned = all(t.data_ptr() % 16 == 0 and t.stride(1) == 1 and t.stride(0) % 8 == 0 for t in (x_MK, w_NK))
    whole = inputs % (2 * _WIDTH * config.at_once * config.split) == 0 and w_NK.is_contiguous()
    return rows <= MOST_ROWS and x_MK.dtype in (torch.bfloat16, torch.float16) and aligned and whole


def gemv(
    x_MK: torch.Tensor, w_NK: torch.Tensor, out: torch.Tensor, outputs: int, config: GemvConfig, silu: bool
) -> None:
    """The product into `out`, as `triton_linear._launch` makes it."""
    assert takes(x_MK, w_NK, config), f"{config} does not fit {tuple(x_MK.shape)} by {tuple(w_NK.shape)}"
    blocks = triton.cdiv(outputs, config.num_warps * config.neurons)
    _gemv_kernel[(blocks * config.split,)](
        x_MK.view(torch.int32),
        w_NK.view(torch.int32),
        out,
        outputs,
        x_MK.stride(0) // 2,
        blocks,
        STORED=x_MK.shape[1] // 2,
        TOKENS=x_MK.shape[0],
        SPLIT=config.split,
        SILU=silu,
        DTYPE=TRITON_DTYPES[x_MK.dtype],
        ROWS=config.num_warps,
        NEURONS=config.neurons,
        AT_ONCE=config.at_once,
        WIDTH=_WIDTH,
        num_warps=config.num_warps,
        **follow_options(x_MK.device),
    )
