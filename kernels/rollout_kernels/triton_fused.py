"""What lies between the matrix products of a decode step, each as one Triton kernel.

    add_rms_norm   residual += sum of partial products; returns its normalised form
    finish_qkv     sum of partial products [+ bias], q/k norm, rope; keys and values go to the cache, queries come back

The partial sums come from `triton_linear.linear_parts` and are added up here in a fixed order, in float32.

Legend: M rows, S parts, H hidden, D head dimension, P pages, G KV heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_kernels.triton_math import follow, follow_options, narrow


@triton.jit(do_not_specialize=["rows"])
def _add_rms_norm_kernel(
    parts_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    rows,
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    live = h < H
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + h, mask=live, other=0.0).to(tl.float32)
    follow()
    x = tl.load(residual_ptr + row * H + h, mask=live, other=0.0).to(tl.float32)
    if PARTS > 0:
        added = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(PARTS):
            added += tl.load(parts_ptr + (part * rows + row) * H + h, mask=live, other=0.0)
        # The sum is rounded as a matrix product's result would be, then the residual as the model keeps it.
        stored = narrow(x + narrow(added, dtype).to(tl.float32), dtype)
        tl.store(residual_ptr + row * H + h, stored, mask=live)
        x = stored.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x) / H + eps)
    unit = narrow(x * scale, dtype).to(tl.float32)
    tl.store(out_ptr + row * H + h, narrow(unit * weight, dtype), mask=live)


def add_rms_norm(
    residual_MH: torch.Tensor, parts_SMH: torch.Tensor | None, weight_H: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add partial products (float32, None for none) to `residual_MH` in place; returns its RMS norm, [M, H]."""
    rows, hidden = residual_MH.shape
    out_MH = torch.empty_like(residual_MH)
    _add_rms_norm_kernel[(rows,)](
        parts_SMH,
        residual_MH,
        weight_H,
        out_MH,
        rows,
        eps,
        H=hidden,
        BLOCK=triton.next_power_of_2(hidden),
        PARTS=0 if parts_SMH is None else parts_SMH.shape[0],
        num_warps=8 if hidden > 1024 else 4,
        **follow_options(residual_MH.device),
    )
    return out_MH


@triton.jit(do_not_specialize=["rows"])
def _finish_qkv_kernel(
    parts_ptr,
    bias_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    rows,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    d = tl.arange(0, HALF)
    live = d < D // 2
    width: tl.constexpr = (Q_HEADS + 2 * KV_HEADS) * D
    follow()
    low = tl.zeros([HALF], tl.float32)
    high = tl.zeros([HALF], tl.float32)
    for part in tl.static_range(PARTS):
        here = parts_ptr + (part * rows + row) * width + head * D + d
        low += tl.load(here, mask=live, other=0.0)
        high += tl.load(here + D // 2, mask=live, other=0.0)
    if BIAS:
        low += tl.load(bias_ptr + head * D + d, mask=live, other=0.0).to(tl.float32)
        high += tl.load(bias_ptr + head * D + D // 2 + d, mask=live, other=0.0).to(tl.float32)
    low = narrow(low, dtype).to(tl.float32)
    high = narrow(high, dtype).to(tl.float32)
    if head < Q_HEADS + KV_HEADS:
        if NORM:
            scale = 1.0 / tl.sqrt((tl.sum(low * low) + tl.sum(high * high)) / D + eps)
            weight = norm_ptr + (head >= Q_HEADS).to(tl.int32) * D + d
            low = narrow(low * scale, dtype).to(tl.float32)
            high = narrow(high * scale, dtype).to(tl.float32)
            low = low * tl.load(weight, mask=live, other=0.0).to(tl.float32)
            high = high * tl.load(weight + D // 2, mask=live, other=0.0).to(tl.float32)
            low = narrow(low, dtype).to(tl.float32)
            high = narrow(high, dtype).to(tl.float32)
        cos = tl.load(cos_ptr + row * D + d, mask=live, other=0.0)
        # The sign of the rotation is folded into the sine: minus in the first half, plus in the second.
        sin_low = tl.load(sin_ptr + row * D + d, mask=live, other=0.0)
        sin_high = tl.load(sin_ptr + row * D + D // 2 + d, mask=live, other=0.0)
        low, high = low * cos + high * sin_low, high * cos + low * sin_high
    if head < Q_HEADS:
        at = q_ptr + (row * Q_HEADS + head) * D + d
    else:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        if head < Q_HEADS + KV_HEADS:
            at = k_cache_ptr + (slot * KV_HEADS + head - Q_HEADS) * D + d
        else:
            at = v_cache_ptr + (slot * KV_HEADS + head - Q_HEADS - KV_HEADS) * D + d
    tl.store(at, narrow(low, dtype), mask=live)
    tl.store(at + D // 2, narrow(high, dtype), mask=live)


def finish_qkv(
    parts_SMW: torch.Tensor,
    bias_W: torch.Tensor | None,
    norm_2D: torch.Tensor | None,
    eps: float,
    cos_M1D: torch.Tensor,
    sin_M1D: torch.Tensor,
    slots_M: torch.Tensor,
    k_cache_PSGD: torch.Tensor,
    v_cache_PSGD: torch.Tensor,
    q_heads: int,
) -> torch.Tensor:
    """Finish the fused q/k/v product of M tokens and write their keys and values; returns the queries [M, heads, D].

    Args:
        parts_SMW: float32 partial sums, W = (q_heads + 2 G) D.
        bias_W: bias of the projection, or None.
        norm_2D: weights of the query and the key norm over a head, or None.
        eps: of these norms.
        cos_M1D: float32, as `rope_cos_sin` gives it.
        sin_M1D: likewise, with the rotation's sign.
        slots_M: int64, page * page_size + offset of each token.
        k_cache_PSGD: keys, written in place; contiguous, in the model's dtype.
        v_cache_PSGD: values, likewise.
        q_heads: query heads.
    """
    parts, rows, _ = parts_SMW.shape
    kv_heads, dim = k_cache_PSGD.shape[2:]
    q_MHD = torch.empty(rows, q_heads, dim, dtype=k_cache_PSGD.dtype, device=parts_SMW.device)
    _finish_qkv_kernel[(rows, q_heads + 2 * kv_heads)](
        parts_SMW,
        bias_W,
        norm_2D,
        cos_M1D,
        sin_M1D,
        slots_M,
        q_MHD,
        k_cache_PSGD,
        v_cache_PSGD,
        rows,
        eps,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        D=dim,
        HALF=triton.next_power_of_2(dim // 2),
        PARTS=parts,
        BIAS=bias_W is not None,
        NORM=norm_2D is not None,
        num_warps=1,
        **follow_options(parts_SMW.device),
    )
    return q_MHD
