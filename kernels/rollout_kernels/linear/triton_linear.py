"""Matrix products with few rows, limited only by how fast the weights can be read: `x_MK @ w_NK.T` for decode steps.

    linear        out = x w^T            bf16 or float32 out, SPLIT = 1
    linear_parts  parts[s] = x_s w_s^T   float32 [SPLIT, M, N], summed by the consumer
    gated_linear  out = act(x g^T) * (x u^T) for w = [g; u]; half the rows of a tile are gate rows, half up rows

An item is a tile of BLOCK_N weight rows and one of SPLIT parts of K. A fixed number of programs share the items. A
program computes its items in one loop, so the loads of an item overlap with the product of the item before, and the
chip never waits for a new program to start. The weights are the first operand of the tensor cores; the M tokens, padded
to BLOCK_M, are the second (swap AB). More than 128 tokens are computed 128 at a time and read all weights each time.
This pays only where a result must not depend on the number of tokens.

Weights may be e4m3 codes (`coded`). A tile of codes is decoded in registers, without loss, and its scales are applied
to float32 sums (`common.triton_coded_tiles`). Activations are rounded only where a configuration has `codes`.

A split product leaves float32 partial sums, which the consuming kernel adds up in a fixed order. So a row's result
depends on the configuration, but never on timing or on the other rows. With `beside`, the next kernel may read x before
it waits for this product.

Legend: M tokens, N outputs, K inputs, S parts of K, I intermediate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from rollout_kernels.common.triton_coded_tiles import tile_operand
from rollout_kernels.common.triton_math import Activation, activated, dot, follow, follow_options, narrow
from rollout_kernels.linear import gluon_linear, triton_gemv
from rollout_kernels.linear.coded import CodedMatrix, Weights, rounded_rows, stored
from rollout_kernels.linear.triton_gemv import GemvConfig

#: Shared memory of a Hopper multiprocessor that programs may use, in bytes, and the multiprocessors of an H200.
_SHARED_BYTES = 220_000
_MULTIPROCESSORS = 132


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Launch configuration of a product; `table` chooses it.

    A program that uses more than half of the shared memory has a multiprocessor to itself. With one program for each
    multiprocessor, the work is spread evenly, even while the previous kernel still runs on some of them.
    """

    block_n: int  # weight rows of a tile
    block_k: int  # inputs of a tile
    split: int  # parts of K
    num_warps: int
    num_stages: int
    programs: int
    streamed: bool = False  # use `gluon_linear` where it can run
    stagger: bool = False  # streamed: every item starts at another column of K
    codes: bool = False  # streamed, weights in `fp8_block`: activations are codes, too


@triton.jit
def _store_tile(
    out_ptr,
    acc, tile, split, m, rows, N,
    BLOCK_M: tl.constexpr, OUT: tl.constexpr, ACTIVATION: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """Write the finished sums of an item, [BLOCK_N, BLOCK_M]; a tile has OUT outputs."""
    if ACTIVATION is not None:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [2, OUT, BLOCK_M]), [1, 2, 0]))
        acc = activated(gate, ACTIVATION) * up
    n = tile * OUT + tl.arange(0, OUT)
    here = m[None, :] < rows
    if not EVEN_N:
        here = here & (n[:, None] < N)
    at = (split.to(tl.int64) * rows + m[None, :]) * N + n[:, None]
    tl.store(out_ptr + at, narrow(acc, out_ptr.dtype.element_ty), mask=here)


@triton.jit
def _tile(w_ptr, tile, begin, row, offset, N, K: tl.constexpr, OUT: tl.constexpr, EVEN_N: tl.constexpr):
    """Addresses of a tile's weights, [BLOCK_N, BLOCK_K], from column `begin`. Rows past the end repeat the last row."""
    first = tile * OUT
    if not EVEN_N:
        offset -= tl.maximum(row + first - (N - 1), 0).to(tl.int64)[:, None] * K
    return w_ptr + (first.to(tl.int64) * K + begin) + offset


@triton.jit
def _row_of_tile(tile, row, n, N, OUT: tl.constexpr, GATED: tl.constexpr):
    """The weight rows of a tile, [BLOCK_N]; rows past the end are the last row."""
    rows = tl.minimum(tile * OUT + row, N - 1)
    if GATED:
        rows += n // OUT * N
    return rows


@triton.jit
def _scales(scale_ptr, rows, k, K: tl.constexpr, FORMAT: tl.constexpr, BLOCK_K: tl.constexpr):
    """The scales of weight rows [BLOCK_N] from column `k`: as `tile_operand` and `_add` take them."""
    if FORMAT == "fp8_block":
        return tl.load(scale_ptr + rows // 128 * ((K + 127) // 128) + k // 128)
    elif FORMAT == "mxfp8":
        return tl.load(scale_ptr + rows[:, None] * (K // 32) + (k // 32 + tl.arange(0, BLOCK_K // 32))[None, :])
    elif FORMAT == "fp8_row":
        return tl.load(scale_ptr + rows)
    else:
        return rows


@triton.jit
def _add(acc, w, x, scale, FORMAT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """`acc` [N, M] plus the product of a tile of stored weights [N, K] and activations [K, M]."""
    if FORMAT == "plain":
        return dot(w, x, acc)
    w = tile_operand(w, scale, FORMAT, x.dtype, BLOCK_N, BLOCK_K)
    if FORMAT == "fp8_block":
        return acc + scale[:, None] * dot(w, x, tl.zeros_like(acc))
    else:
        return dot(w, x, acc)


@triton.jit(do_not_specialize=["rows", "items"])
def _linear_kernel(
    x_ptr, w_ptr, scale_ptr, out_ptr,
    rows, N,
    stride_x,
    items, tiles,
    K: tl.constexpr, FORMAT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, ACTIVATION: tl.constexpr, EVEN_N: tl.constexpr, ONE_ITEM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    GATED: tl.constexpr = ACTIVATION is not None
    OUT: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    STEPS: tl.constexpr = K // (BLOCK_K * SPLIT)
    n = tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    live = m[None, :] < rows
    x = x_ptr + m[None, :] * stride_x + k[:, None]
    # Rows of a tile, relative to its first: OUT rows, or OUT gate rows and their OUT up rows.
    row = n % OUT
    offset = row[:, None].to(tl.int64) * K + k[None, :]
    if GATED:
        offset += (n // OUT).to(tl.int64)[:, None] * N * K
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    follow()
    if ONE_ITEM:
        tile = program % tiles
        split = program // tiles
        begin = split * STEPS * BLOCK_K
        w = _tile(w_ptr, tile, begin, row, offset, N, K, OUT, EVEN_N)
        w_rows = _row_of_tile(tile, row, n, N, OUT, GATED)
        for step in tl.range(0, STEPS, num_stages=STAGES):
            w_tile = tl.load(w + step * BLOCK_K, eviction_policy="evict_first")
            x_tile = tl.load(x + begin + step * BLOCK_K, mask=live, other=0.0)
            scale = _scales(scale_ptr, w_rows, begin + step * BLOCK_K, K, FORMAT, BLOCK_K)
            acc = _add(acc, w_tile, x_tile, scale, FORMAT, BLOCK_N, BLOCK_K)
        if FORMAT == "fp8_row":
            acc *= _scales(scale_ptr, w_rows, 0, K, FORMAT, BLOCK_K)[:, None]
        _store_tile(out_ptr, acc, tile, split, m, rows, N, BLOCK_M, OUT, ACTIVATION, EVEN_N)
    else:
        own_items = (items - program + programs - 1) // programs
        for i in tl.range(0, own_items * STEPS, num_stages=STAGES):
            item = program + i // STEPS * programs
            tile = item % tiles
            split = item // tiles
            begin = (split * STEPS + i % STEPS) * BLOCK_K
            w = _tile(w_ptr, tile, begin, row, offset, N, K, OUT, EVEN_N)
            w_tile = tl.load(w, eviction_policy="evict_first")
            x_tile = tl.load(x + begin, mask=live, other=0.0)
            w_rows = _row_of_tile(tile, row, n, N, OUT, GATED)
            scale = _scales(scale_ptr, w_rows, begin, K, FORMAT, BLOCK_K)
            acc = _add(acc, w_tile, x_tile, scale, FORMAT, BLOCK_N, BLOCK_K)
            if i % STEPS == STEPS - 1:
                if FORMAT == "fp8_row":
                    acc *= scale[:, None]
                _store_tile(out_ptr, acc, tile, split, m, rows, N, BLOCK_M, OUT, ACTIVATION, EVEN_N)
                acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)


def _block_m(rows: int) -> int:
    return min(128, max(16, triton.next_power_of_2(rows)))


def _stages(config: LinearConfig, block_m: int, x_bytes: int, w_bytes: int, gated: bool) -> int:
    """The configured number of stages, or fewer if shared memory is too small. Results do not depend on it."""
    tile_bytes = config.block_k * (config.block_n * w_bytes + block_m * x_bytes)
    on_one = min(2, triton.cdiv(config.programs, _MULTIPROCESSORS))
    room = _SHARED_BYTES // on_one
    if w_bytes < x_bytes:
        # The decoded tile takes the place of one stage; gate and up cross from one half of the sums to the other.
        room += tile_bytes - config.block_n * (config.block_k * x_bytes + (4 * block_m if gated else 0))
    return max(1, min(config.num_stages, room // tile_bytes))


def multiply_into(
    x_MK: torch.Tensor,
    weights: Weights,
    out: torch.Tensor,
    outputs: int,
    config: LinearConfig | GemvConfig,
    activation: Activation | None = None,
    beside: bool = False,
) -> None:
    """Launch the kernel that `config` names; the ops below allocate its output.

    Args:
        x_MK: float32, bf16 or f16, contiguous in K.
        weights: contiguous, in the dtype of x, or codes that are `in_step`; with an activation gate rows, then up.
        out: [M, outputs] in any of these dtypes, or float32 [split, M, outputs].
        outputs: number of outputs; with an activation half the rows of the weights.
        config: launch configuration; the fallback is `triton_linear`'s own kernel where the named one cannot run.
        activation: write `activation(gate) * up`; None: there are no gates.
        beside: the kernel that is launched next may read x before it waits for this product.
    """
    rows, inputs = x_MK.shape
    if isinstance(config, GemvConfig):
        if triton_gemv.takes(x_MK, weights, config):
            triton_gemv.gemv(x_MK, weights, out, outputs, config, activation)
            return
        config = LinearConfig(64, 64, config.split, 4, 8, _MULTIPROCESSORS)  # runs for every dtype
    assert inputs % (config.block_k * config.split) == 0, f"K = {inputs} is no multiple of {config}"
    block_m = _block_m(rows)
    if config.streamed:
        if gluon_linear.takes(x_MK, weights, activation is not None):
            shape = (config.block_n, config.block_k, config.split, config.num_warps, config.num_stages, config.programs)
            gluon_linear.stream(x_MK, weights, out, outputs, *shape, activation, beside, config.stagger, config.codes)
            return
        config = replace(config, block_n=config.block_n & -config.block_n)  # `_linear_kernel` needs a power of two
        x_MK = rounded_rows(x_MK) if config.codes else x_MK
    outputs_a_tile = config.block_n if activation is None else config.block_n // 2
    tiles = triton.cdiv(outputs, outputs_a_tile)
    items = tiles * config.split
    w_NK = stored(weights)
    _linear_kernel[(min(items, config.programs), triton.cdiv(rows, block_m))](
        x_MK, w_NK, weights.scales if isinstance(weights, CodedMatrix) else w_NK, out, rows, outputs, x_MK.stride(0),
        items, tiles,
        K=inputs, FORMAT=weights.format if isinstance(weights, CodedMatrix) else "plain", BLOCK_M=block_m,
        BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLIT=config.split, ACTIVATION=activation,
        EVEN_N=outputs % outputs_a_tile == 0, ONE_ITEM=items <= config.programs,
        STAGES=_stages(config, block_m, x_MK.element_size(), w_NK.element_size(), activation is not None),
        num_warps=config.num_warps, **follow_options(x_MK.device),
    )  # fmt: skip


def linear(
    x_MK: torch.Tensor,
    weights: Weights,
    config: LinearConfig | GemvConfig,
    out_dtype: torch.dtype | None = None,
    beside: bool = False,
) -> torch.Tensor:
    """`x @ w.T`, summed in float32; returns [M, N] in `out_dtype` (x's by default). `config.split` must be 1."""
    assert config.split == 1
    outputs = len(stored(weights))
    out_MN = torch.empty(x_MK.shape[0], outputs, dtype=out_dtype or x_MK.dtype, device=x_MK.device)
    multiply_into(x_MK, weights, out_MN, outputs, config, beside=beside)
    return out_MN


def linear_parts(
    x_MK: torch.Tensor, weights: Weights, config: LinearConfig | GemvConfig, beside: bool = False
) -> torch.Tensor:
    """Partial sums of `x @ w.T` over the `config.split` parts of K, float32 [S, M, N]."""
    outputs = len(stored(weights))
    parts_SMN = torch.empty(config.split, x_MK.shape[0], outputs, dtype=torch.float32, device=x_MK.device)
    multiply_into(x_MK, weights, parts_SMN, outputs, config, beside=beside)
    return parts_SMN


def gated_linear(
    x_MK: torch.Tensor, weights: Weights, config: LinearConfig | GemvConfig, activation: Activation = "silu"
) -> torch.Tensor:
    """`activation(x @ g.T) * (x @ u.T)`, where `weights` holds all rows of g, then of u: [M, I] in x's dtype."""
    assert config.split == 1
    outputs = len(stored(weights)) // 2
    out_MI = torch.empty(x_MK.shape[0], outputs, dtype=x_MK.dtype, device=x_MK.device)
    multiply_into(x_MK, weights, out_MI, outputs, config, activation)
    return out_MI
