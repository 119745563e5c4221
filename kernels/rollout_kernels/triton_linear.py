"""Matrix products with few rows, at the speed at which the weights can be read: Triton kernels for decode steps.

`x_MK @ w_NK.T` with M up to 128. A program owns BLOCK_N output features and reads their weight rows once, as the first
operand of the tensor cores (at least 64 rows); the M tokens are the second (swap AB), padded to BLOCK_M. Where N alone
makes too few programs to keep all memory channels busy, SPLIT programs share the K dimension; each writes float32
partial sums of its own, and the kernel that consumes them adds them up in a fixed order. So a result depends on the
chosen configuration, never on timing.

    linear        out = x w^T               [+ residual], bf16 or float32 out, SPLIT = 1
    linear_parts  parts[s] = x_s w_s^T      float32 [SPLIT, M, N], summed by the consumer
    gate_up_silu  out = silu(x g^T) * (x u^T) for w = [g; u]

Legend: M tokens, N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rollout_kernels.triton_math import dot, follow, follow_options

#: Shared memory of a Hopper multiprocessor that one program may take, bytes.
_SHARED_BYTES = 220_000


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """How a product is cut up; see `rollout_kernels.linear_table`."""

    block_n: int
    block_k: int
    split: int
    num_warps: int
    num_stages: int


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    residual_ptr,
    rows,
    N,
    K,
    stride_x,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    SILU: tl.constexpr,
    PARTS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EVEN_N: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    steps = K // (BLOCK_K * SPLIT)
    begin = split * steps * BLOCK_K
    row = n if EVEN_N else tl.minimum(n, N - 1)
    w = w_ptr + row[:, None].to(tl.int64) * K + begin + k[None, :]
    x = x_ptr + m[None, :] * stride_x + begin + k[:, None]
    live = m[None, :] < rows
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    # The first weights are under way before the kernel that makes x has ended.
    w_tile = tl.load(w)
    if SILU:
        u_tile = tl.load(w + N.to(tl.int64) * K)
    follow()
    x_tile = tl.load(x, mask=live, other=0.0)
    acc = dot(w_tile, x_tile, acc)
    if SILU:
        up = dot(u_tile, x_tile, up)
    for _ in range(1, steps):
        w += BLOCK_K
        x += BLOCK_K
        w_tile = tl.load(w)
        x_tile = tl.load(x, mask=live, other=0.0)
        acc = dot(w_tile, x_tile, acc)
        if SILU:
            up = dot(tl.load(w + N.to(tl.int64) * K), x_tile, up)
    if SILU:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    here = (m[None, :] < rows) & (n[:, None] < N)
    at = m[None, :] * N + n[:, None]
    if PARTS:
        tl.store(out_ptr + split.to(tl.int64) * rows * N + at, acc, mask=here)
    else:
        if RESIDUAL:
            acc += tl.load(residual_ptr + at, mask=here, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=here)


def _block_m(rows: int) -> int:
    return max(16, triton.next_power_of_2(rows))


def _stages(config: LinearConfig, block_m: int, element_bytes: int, silu: bool) -> int:
    """As many stages as the configuration asks for and shared memory holds beside the first tile; no result changes."""
    tile_bytes = config.block_k * (config.block_n * (2 if silu else 1) + block_m) * element_bytes
    return max(1, min(config.num_stages, _SHARED_BYTES // tile_bytes - 1))


def _launch(x_MK, w_NK, out, residual, outputs: int, config: LinearConfig, silu: bool, parts: bool) -> None:
    rows, inputs = x_MK.shape
    assert inputs % (config.block_k * config.split) == 0, f"K = {inputs} is no multiple of {config}"
    block_m = _block_m(rows)
    _linear_kernel[(triton.cdiv(outputs, config.block_n), config.split)](
        x_MK,
        w_NK,
        out,
        residual,
        rows,
        outputs,
        inputs,
        x_MK.stride(0),
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SPLIT=config.split,
        SILU=silu,
        PARTS=parts,
        RESIDUAL=residual is not None,
        EVEN_N=outputs % config.block_n == 0,
        num_warps=config.num_warps,
        num_stages=_stages(config, block_m, x_MK.element_size(), silu),
        **follow_options(x_MK.device),
    )


def linear(
    x_MK: torch.Tensor,
    w_NK: torch.Tensor,
    config: LinearConfig,
    residual_MN: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`x w^T` [+ residual], accumulated in float32. `config.split` must be 1. Returns [M, N]."""
    assert config.split == 1
    outputs = w_NK.shape[0]
    out_MN = torch.empty(x_MK.shape[0], outputs, dtype=out_dtype or x_MK.dtype, device=x_MK.device)
    _launch(x_MK, w_NK, out_MN, residual_MN, outputs, config, silu=False, parts=False)
    return out_MN


def linear_parts(x_MK: torch.Tensor, w_NK: torch.Tensor, config: LinearConfig) -> torch.Tensor:
    """Partial sums of `x w^T` over `config.split` parts of K, float32 [split, M, N]."""
    outputs = w_NK.shape[0]
    parts = torch.empty(config.split, x_MK.shape[0], outputs, dtype=torch.float32, device=x_MK.device)
    _launch(x_MK, w_NK, parts, None, outputs, config, silu=False, parts=True)
    return parts


def gate_up_silu(x_MK: torch.Tensor, w_2IK: torch.Tensor, config: LinearConfig) -> torch.Tensor:
    """`silu(x g^T) * (x u^T)` for the gate rows and then the up rows of `w_2IK`; returns [M, I] in x's dtype."""
    assert config.split == 1
    outputs = w_2IK.shape[0] // 2
    out_MI = torch.empty(x_MK.shape[0], outputs, dtype=x_MK.dtype, device=x_MK.device)
    _launch(x_MK, w_2IK, out_MI, None, outputs, config, silu=True, parts=False)
    return out_MI
