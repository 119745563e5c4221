"""The operations between the matrix products of a decode step: one Triton kernel between two products.

    add_rms_norm   residual += [factor *] [norm of] the sum of partial products [, then residual *= factor]; returns the
                   norm of the residual
    finish_qkv     sum of partial products [+ bias], q/k norm, rope; writes keys and values [and gates of the queries],
                   returns queries
    gated          activation(gate) * up
    embed_rope     the first layer's input: embeddings of the tokens, cosines and sines of the positions

For caches of e4m3 codes, `finish_qkv` quantises the keys and values that it would have stored.

The first three also add the corrections of low-rank adapters to the product that they read, if
`triton_lora.shrink_beside` was launched for it.

Partial sums come from `triton_linear.linear_parts`; they are added here in float32, in a fixed order. A product that is
not split is one part, of any dtype.

Legend: M tokens, S parts, H hidden, D head dimension, I intermediate, W width of the q/k/v product, P pages, G KV
heads, V vocabulary, B rows of a step.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from rollout_kernels.common.triton_fp8 import block_codes, e4m3_code, head_scale, int8_code
from rollout_kernels.common.triton_math import (
    INTERPRETED,
    NANS,
    Activation,
    activated,
    follow,
    follow_options,
    let_next_begin,
    narrow,
    wait_for_last,
)
from rollout_kernels.linear.coded import CodedRows
from rollout_kernels.linear.triton_code_rows import empty_rows
from rollout_kernels.lora.lora_buffers import Correction
from rollout_kernels.lora.triton_lora import begin_expand, correction_arguments, expand_row

_BLOCK_HEADS = 8  # heads of a program of `finish_qkv`
_EMBED_BLOCK = 1024


@triton.jit(do_not_specialize=["rows"])
def _add_rms_norm_kernel(
    parts_ptr, residual_ptr, output_weight_ptr, weight_ptr, factor_ptr, out_ptr, low_ptr, b_ptr, adapters_ptr,
    rows, eps, scale,
    H: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, SCALED: tl.constexpr, R: tl.constexpr,
    LOW_PARTS: tl.constexpr, AT_ONCE: tl.constexpr, UNIT_OFFSET: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    live = h < H
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + h, mask=live, other=0.0).to(tl.float32)
    if output_weight_ptr is not None:
        output_weight = tl.load(output_weight_ptr + h, mask=live, other=0.0).to(tl.float32)
        if UNIT_OFFSET:
            output_weight += 1.0
    if R > 0:
        adapter = tl.load(adapters_ptr + row, cache_modifier=".cg")
        b = b_ptr + ((adapter - 1).to(tl.int64) * H + h[:, None]) * R
        takes = h[:, None] < tl.where(adapter > 0, H, 0)
        first = begin_expand(b, takes, AT_ONCE)
    # The next product prefetches its first weights while this kernel and its predecessor still run.
    let_next_begin()
    wait_for_last()
    x = tl.load(residual_ptr + row * H + h, mask=live, other=0.0).to(tl.float32)
    if PARTS > 0:
        added = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(PARTS):
            added += tl.load(parts_ptr + (part * rows + row) * H + h, mask=live, other=0.0)
        if R > 0:
            added += expand_row(
                first, b, takes, low_ptr + row * R, rows * R, tl.where(adapter > 0, R, 0), R, LOW_PARTS, AT_ONCE
            )
        # Round as the unfused ops do: first the result of the product, its norm, its factor, then the residual.
        added = narrow(added, dtype).to(tl.float32)
        if output_weight_ptr is not None:
            added = added * (1.0 / tl.sqrt(tl.sum(added * added) / H + eps)) * output_weight
            added = narrow(added, dtype).to(tl.float32)
        if SCALED:
            added = narrow(added * scale, dtype).to(tl.float32)
        stored = narrow(x + added, dtype)
        if factor_ptr is not None:
            stored = narrow(stored.to(tl.float32) * tl.load(factor_ptr).to(tl.float32), dtype)
        tl.store(residual_ptr + row * H + h, stored, mask=live)
        x = stored.to(tl.float32)
    if weight_ptr is not None:
        unit = 1.0 / tl.sqrt(tl.sum(x * x) / H + eps)
        if UNIT_OFFSET:
            normed = x * unit * (weight + 1.0)
        else:
            normed = narrow(x * unit, dtype).to(tl.float32) * weight
        tl.store(out_ptr + row * H + h, narrow(normed, dtype), mask=live)


def add_rms_norm(
    residual_MH: torch.Tensor,
    parts_SMH: torch.Tensor | None,
    weight_H: torch.Tensor | None,
    eps: float,
    correction: Correction | None = None,
    unit_offset: bool = False,
    output_weight_H: torch.Tensor | None = None,
    scale: float = 1.0,
    factor_1: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add partial products and their correction to the residual stream, and normalise it.

    Args:
        residual_MH: changed in place; contiguous, in the model's dtype.
        parts_SMH: partial sums of a product, contiguous, or None to only normalise.
        weight_H: weights of the norm; None: there is none.
        eps: of the norms.
        correction: corrections that adapters add to the product, or None.
        unit_offset: the weights are stored less 1.
        output_weight_H: weights of a norm of the product before it is added; None: there is none.
        scale: factor of what is added.
        factor_1: factor of the sum; None: there is none.

    Returns:
        The norm of the new residual, [M, H] in its dtype; without a norm the residual itself.
    """
    rows, hidden = residual_MH.shape
    assert parts_SMH is not None or (
        correction is None and output_weight_H is None and scale == 1.0 and factor_1 is None
    )
    block = triton.next_power_of_2(hidden)
    # At most four values of a part a thread. With more, the compiler serialises the loads of parts to save registers.
    warps = min(block // 128, 16) if correction is None else 4 if hidden <= 1024 else 8 if hidden <= 2048 else 16
    # No more threads than values. Otherwise two warps own the same value, and one may read what the other has stored.
    warps = max(min(warps, block // 32), 1)
    out_MH = residual_MH if weight_H is None else torch.empty_like(residual_MH)
    _add_rms_norm_kernel[(rows,)](
        parts_SMH, residual_MH, output_weight_H, weight_H, factor_1, out_MH,
        rows=rows, eps=eps, scale=scale, H=hidden, BLOCK=block, PARTS=0 if parts_SMH is None else parts_SMH.shape[0],
        SCALED=scale != 1.0, UNIT_OFFSET=unit_offset, num_warps=warps, **correction_arguments(correction, block),
        **follow_options(residual_MH.device),
    )  # fmt: skip
    return out_MH


@triton.jit
def _squares(
    parts_ptr, bias_ptr,
    row, rows, blocks,
    FIRST_HEAD: tl.constexpr, HEADS: tl.constexpr, ALL: tl.constexpr, D: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    HALF: tl.constexpr, PARTS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """The sum of squares of HEADS heads of a product, rounded to `dtype`, in `blocks` blocks; of no blocks it is 0."""
    total = tl.zeros([BLOCK_HEADS, 2 * HALF], tl.float32)
    d = tl.arange(0, 2 * HALF)[None, :]
    for block in tl.range(0, blocks):
        head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
        live = (head < HEADS) & (d < D)
        at = (FIRST_HEAD + head) * D + d
        x = tl.zeros([BLOCK_HEADS, 2 * HALF], tl.float32)
        for part in tl.static_range(PARTS):
            x += tl.load(parts_ptr + (part * rows + row) * (ALL * D) + at, mask=live, other=0.0)
        if bias_ptr is not None:
            x += tl.load(bias_ptr + at, mask=live, other=0.0).to(tl.float32)
        x = narrow(x, dtype).to(tl.float32)
        total += x * x
    return tl.sum(tl.sum(total, 1), 0)


@triton.jit(do_not_specialize=["rows"])
def _finish_qkv_kernel(
    parts_ptr, bias_ptr, norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, slots_ptr, q_ptr, gate_ptr, k_cache_ptr, v_cache_ptr,
    scales_ptr, low_ptr, b_ptr, adapters_ptr,
    rows, eps, clip,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, TURNED: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    HALF: tl.constexpr, PARTS: tl.constexpr, VALUE_NORM: tl.constexpr, KEYS_ARE_VALUES: tl.constexpr,
    UNIT_OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr, PAGE_SIZE: tl.constexpr, R: tl.constexpr,
    LOW_PARTS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    d = tl.arange(0, HALF)[None, :]
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    heads: tl.constexpr = Q_HEADS + 2 * KV_HEADS
    live = (d < D // 2) & (head < heads)
    # Two of the first TURNED dimensions turn together if they are TURNED / 2 apart, or neighbours. `low` and `high` are
    # tiles of such pairs, and after them of the dimensions that stay.
    turns = d < TURNED // 2
    if INTERLEAVED:
        at_low = tl.where(turns, 2 * d, d + TURNED // 2)
        at_high = tl.where(turns, 2 * d + 1, d + D // 2)
    elif TURNED == D:
        at_low = d
        at_high = d + D // 2
    else:
        at_low = d + tl.where(turns, 0, TURNED // 2)
        at_high = d + tl.where(turns, TURNED // 2, D // 2)
    GATED: tl.constexpr = gate_ptr is not None
    NORM: tl.constexpr = norm_ptr is not None and k_norm_ptr is None
    is_q = head < Q_HEADS
    is_v = head >= Q_HEADS + KV_HEADS
    product_heads: tl.constexpr = heads + GATED * Q_HEADS - KEYS_ARE_VALUES * KV_HEADS
    product_head = head
    if KEYS_ARE_VALUES:  # the product has keys alone
        product_head -= tl.where(is_v, KV_HEADS, 0)
    if GATED:  # in the product a gate follows each query head
        product_head += tl.minimum(head, Q_HEADS)
    if R > 0:
        adapter = tl.load(adapters_ptr + row, cache_modifier=".cg")
        b = b_ptr + (adapter - 1).to(tl.int64) * (heads * D) * R
        b_low = b + (head * D + at_low)[:, :, None] * R
        b_high = b + (head * D + at_high)[:, :, None] * R
        takes = ((d < D // 2) & (head < tl.where(adapter > 0, heads, 0)))[:, :, None]
        first_low = begin_expand(b_low, takes, AT_ONCE)
        first_high = begin_expand(b_high, takes, AT_ONCE)
    if NORM:
        weight = norm_ptr + tl.where(is_q, 0, D)
        weight_low = tl.load(weight + at_low, mask=live, other=0.0).to(tl.float32)
        weight_high = tl.load(weight + at_high, mask=live, other=0.0).to(tl.float32)
        if UNIT_OFFSET:
            weight_low += 1.0
            weight_high += 1.0
    is_k = (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS)
    if k_norm_ptr is not None:
        at_norm = tl.where(is_q, head, head - Q_HEADS) * D
        weight_low = tl.load(norm_ptr + at_norm + at_low, mask=live & is_q, other=0.0).to(tl.float32)
        weight_high = tl.load(norm_ptr + at_norm + at_high, mask=live & is_q, other=0.0).to(tl.float32)
        weight_low += tl.load(k_norm_ptr + at_norm + at_low, mask=live & is_k, other=0.0).to(tl.float32)
        weight_high += tl.load(k_norm_ptr + at_norm + at_high, mask=live & is_k, other=0.0).to(tl.float32)
        if UNIT_OFFSET:
            weight_low += 1.0
            weight_high += 1.0
    follow()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    low = tl.zeros([BLOCK_HEADS, HALF], tl.float32)
    high = tl.zeros([BLOCK_HEADS, HALF], tl.float32)
    for part in tl.static_range(PARTS):
        here = parts_ptr + ((part * rows + row) * product_heads + product_head) * D
        low += tl.load(here + at_low, mask=live, other=0.0)
        high += tl.load(here + at_high, mask=live, other=0.0)
    if GATED:
        gate_low = tl.zeros([BLOCK_HEADS, HALF], tl.float32)
        gate_high = tl.zeros([BLOCK_HEADS, HALF], tl.float32)
        for part in tl.static_range(PARTS):
            here = parts_ptr + ((part * rows + row) * product_heads + product_head + 1) * D
            gate_low += tl.load(here + at_low, mask=live & is_q, other=0.0)
            gate_high += tl.load(here + at_high, mask=live & is_q, other=0.0)
        if bias_ptr is not None:
            gate_low += tl.load(bias_ptr + (product_head + 1) * D + at_low, mask=live & is_q, other=0.0).to(tl.float32)
            gate_high += tl.load(bias_ptr + (product_head + 1) * D + at_high, mask=live & is_q, other=0.0).to(
                tl.float32
            )
        at_gate = gate_ptr + (row * Q_HEADS + head) * D
        tl.store(at_gate + at_low, narrow(gate_low, dtype), mask=live & is_q)
        tl.store(at_gate + at_high, narrow(gate_high, dtype), mask=live & is_q)
    if R > 0:
        module = (head >= Q_HEADS).to(tl.int32) + is_v.to(tl.int32)
        sums = low_ptr + (row * 3 + module[:, :, None]) * R
        ranks = tl.where(head < tl.where(adapter > 0, heads, 0), R, 0)[:, :, None]
        low += expand_row(first_low, b_low, takes, sums, rows * 3 * R, ranks, R, LOW_PARTS, AT_ONCE)
        high += expand_row(first_high, b_high, takes, sums, rows * 3 * R, ranks, R, LOW_PARTS, AT_ONCE)
    if bias_ptr is not None:
        low += tl.load(bias_ptr + product_head * D + at_low, mask=live, other=0.0).to(tl.float32)
        high += tl.load(bias_ptr + product_head * D + at_high, mask=live, other=0.0).to(tl.float32)
    # Round as the result of the unfused product is rounded.
    low = narrow(low, dtype).to(tl.float32)
    high = narrow(high, dtype).to(tl.float32)
    x_low, x_high = low, high
    if k_norm_ptr is not None:
        # Each program reads all queries, or all keys, again: they are in the L2 cache.
        first = tl.program_id(1) * BLOCK_HEADS
        q_blocks = tl.where(first < Q_HEADS, tl.cdiv(Q_HEADS, BLOCK_HEADS), 0)
        k_blocks = tl.where(
            (first + BLOCK_HEADS > Q_HEADS) & (first < Q_HEADS + KV_HEADS), tl.cdiv(KV_HEADS, BLOCK_HEADS), 0
        )
        q_sum = _squares(
            parts_ptr, bias_ptr, row, rows, q_blocks, 0, Q_HEADS, heads, D, BLOCK_HEADS, HALF, PARTS, dtype
        )
        k_sum = _squares(
            parts_ptr, bias_ptr, row, rows, k_blocks, Q_HEADS, KV_HEADS, heads, D, BLOCK_HEADS, HALF, PARTS, dtype
        )
        mean = tl.where(is_q, q_sum / (Q_HEADS * D), k_sum / (KV_HEADS * D))
        scale = 1.0 / tl.sqrt(mean + eps)
        x_low = narrow(low * scale * weight_low, dtype).to(tl.float32)
        x_high = narrow(high * scale * weight_high, dtype).to(tl.float32)
    if clip is not None:
        # NaN stays NaN: it must reach the logits.
        x_low, x_high = tl.clamp(x_low, -clip, clip, NANS), tl.clamp(x_high, -clip, clip, NANS)
        low, high = tl.clamp(low, -clip, clip, NANS), tl.clamp(high, -clip, clip, NANS)
    if NORM or VALUE_NORM:
        scale = 1.0 / tl.sqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + eps)[:, None]
    if NORM:
        if UNIT_OFFSET:
            x_low = low * scale * weight_low
            x_high = high * scale * weight_high
        else:
            x_low = narrow(low * scale, dtype).to(tl.float32) * weight_low
            x_high = narrow(high * scale, dtype).to(tl.float32) * weight_high
        x_low = narrow(x_low, dtype).to(tl.float32)
        x_high = narrow(x_high, dtype).to(tl.float32)
    if VALUE_NORM:  # below, `low` and `high` are of values
        low *= scale
        high *= scale
    cos = tl.load(cos_ptr + row * TURNED + at_low, mask=turns, other=1.0)
    # The sine carries the sign of the rotation: minus for the first of a pair, plus for the second.
    sin_low = tl.load(sin_ptr + row * TURNED + at_low, mask=turns, other=0.0)
    sin_high = tl.load(sin_ptr + row * TURNED + at_high, mask=turns, other=0.0)
    low = narrow(tl.where(is_v, low, x_low * cos + x_high * sin_low), dtype)
    high = narrow(tl.where(is_v, high, x_high * cos + x_low * sin_high), dtype)
    at_q = q_ptr + (row * Q_HEADS + head) * D
    tl.store(at_q + at_low, low, mask=live & is_q)
    tl.store(at_q + at_high, high, mask=live & is_q)
    token = slot * KV_HEADS
    at_k = k_cache_ptr + (token + head - Q_HEADS) * D
    if scales_ptr is not None:
        low = low.to(tl.float32)
        high = high.to(tl.float32)
        most_low = tl.max(tl.where(low == low, tl.abs(low), 0.0), 1)
        most_high = tl.max(tl.where(high == high, tl.abs(high), 0.0), 1)
        most = tl.maximum(most_low, most_high)
        scale = head_scale(most)[:, None]
        if v_cache_ptr.dtype.element_ty == tl.int8:
            nans = tl.max(tl.maximum((low != low).to(tl.int32), (high != high).to(tl.int32)), 1) > 0
            v_scale = tl.where(nans, float("nan"), tl.maximum(tl.div_rn(most, 127.0), 2.0**-126))[:, None]
            scale = tl.where(is_v, v_scale, scale)
        low = tl.div_rn(low, tl.broadcast_to(scale, low.shape))
        high = tl.div_rn(high, tl.broadcast_to(scale, high.shape))
        v_low, v_high = low, high
        low, high = e4m3_code(low), e4m3_code(high)
        if v_cache_ptr.dtype.element_ty == tl.int8:
            v_low, v_high = int8_code(v_low), int8_code(v_high)
        else:
            v_low, v_high = low, high
        # Scales are [P, 2, G, page size]. Heads of values follow heads of keys, in the scales as in `head`.
        page = slot // PAGE_SIZE * (2 * KV_HEADS) + head - Q_HEADS
        tl.store(scales_ptr + page * PAGE_SIZE + slot % PAGE_SIZE, scale, mask=(head >= Q_HEADS) & (head < heads))
    tl.store(at_k + at_low, low, mask=live & is_k)
    tl.store(at_k + at_high, high, mask=live & is_k)
    at_v = v_cache_ptr + (token + head - Q_HEADS - KV_HEADS) * D
    tl.store(at_v + at_low, v_low if scales_ptr is not None else low, mask=live & is_v)
    tl.store(at_v + at_high, v_high if scales_ptr is not None else high, mask=live & is_v)


def finish_qkv(
    parts_SMW: torch.Tensor,
    bias_W: torch.Tensor | None,
    norm_2D: torch.Tensor | None,
    eps: float,
    cos_M1T: torch.Tensor,
    sin_M1T: torch.Tensor,
    slots_M: torch.Tensor,
    k_cache_PSGD: torch.Tensor,
    v_cache_PSGD: torch.Tensor,
    q_heads: int,
    scales_P2GS: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    correction: Correction | None = None,
    unit_offset: bool = False,
    gates_MHD: torch.Tensor | None = None,
    whole_norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    clip: float | None = None,
    interleaved: bool = False,
    kv: Literal["own", "keys", "shared"] = "own",
    value_norm: bool = False,
) -> torch.Tensor:
    """Finish the fused q/k/v product of M tokens: sum, bias, norms, rope. Write keys and values, return the queries.

    Args:
        parts_SMW: partial sums, contiguous; W = (q_heads + 2 G) D, or (2 q_heads + 2 G) D with gates. `kv` may say that
            keys or values are not in it.
        bias_W: bias of the projection, or None.
        norm_2D: weights of the query norm and the key norm over a head, or None.
        eps: of these norms.
        cos_M1T: float32, from `rope_cos_sin` or `embed_rope`, for the first T dimensions of a head; the others stay.
        sin_M1T: likewise, with the sign of the rotation.
        slots_M: int64, page * page_size + offset of each token.
        k_cache_PSGD: keys, written in place; contiguous, in the model's dtype, or uint8 for e4m3 codes.
        v_cache_PSGD: values, likewise, or int8 beside e4m3 keys.
        q_heads: query heads.
        scales_P2GS: float32 scales of keys, then values, contiguous and written in place; only with e4m3 codes.
        dtype: the model's dtype, for the queries; required with e4m3 codes.
        correction: corrections that adapters add to the product, or None; not with gates.
        unit_offset: the weights of the norms are stored less 1.
        gates_MHD: of the queries; each query head is followed by its gate in the product. Contiguous, written in place;
            None if the product has none.
        whole_norms: weights of a norm of all query heads together, and of all key heads; not with `norm_2D`, gates or a
            correction.
        clip: bound of queries, keys and values, after such norms; None: there is none.
        interleaved: a dimension turns with its neighbour, and not with the one T / 2 further on.
        kv: `keys`: the product has no values, they are the keys before their norm; `shared`: it has queries alone, and
            nothing is written. Neither goes with gates, `whole_norms` or a correction.
        value_norm: each head of the values is normalised, without weights.

    Returns:
        The queries, [M, q_heads, D].
    """
    parts, rows, _ = parts_SMW.shape
    kv_heads, dim = k_cache_PSGD.shape[2:]
    kv_heads = 0 if kv == "shared" else kv_heads
    assert kv == "own" or (gates_MHD is None and whole_norms is None and correction is None)
    assert (k_cache_PSGD.dtype == torch.uint8) == (scales_P2GS is not None) and (
        scales_P2GS is None or dtype is not None
    )
    assert scales_P2GS is None or scales_P2GS.is_contiguous()
    assert gates_MHD is None or (correction is None and gates_MHD.is_contiguous())
    assert whole_norms is None or (norm_2D is None and gates_MHD is None and correction is None)
    q_norm, k_norm = whole_norms or (norm_2D, None)
    half = triton.next_power_of_2(dim // 2)
    q_MHD = torch.empty(rows, q_heads, dim, dtype=dtype or k_cache_PSGD.dtype, device=parts_SMW.device)
    _finish_qkv_kernel[(rows, triton.cdiv(q_heads + 2 * kv_heads, _BLOCK_HEADS))](
        parts_SMW, bias_W, q_norm, k_norm, cos_M1T, sin_M1T, slots_M, q_MHD, gates_MHD, k_cache_PSGD, v_cache_PSGD,
        scales_P2GS,
        rows=rows, eps=eps, clip=clip, Q_HEADS=q_heads, KV_HEADS=kv_heads, D=dim, TURNED=cos_M1T.shape[-1],
        BLOCK_HEADS=_BLOCK_HEADS, HALF=half, PARTS=parts, VALUE_NORM=value_norm, KEYS_ARE_VALUES=int(kv == "keys"),
        UNIT_OFFSET=unit_offset, INTERLEAVED=interleaved, PAGE_SIZE=k_cache_PSGD.shape[1], num_warps=8,
        **correction_arguments(correction, _BLOCK_HEADS * 2 * half), **follow_options(parts_SMW.device),
    )  # fmt: skip
    return q_MHD


@triton.jit(do_not_specialize=["rows"])
def _gated_kernel(
    gate_up_ptr, out_ptr, scales_ptr, low_ptr, b_ptr, adapters_ptr,
    rows, padded,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, R: tl.constexpr, LOW_PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = i < WIDTH
    dtype: tl.constexpr = gate_up_ptr.dtype.element_ty
    if R > 0:
        adapter = tl.load(adapters_ptr + row, cache_modifier=".cg")
        b = b_ptr + ((adapter - 1).to(tl.int64) * (2 * WIDTH) + i[:, None]) * R
        takes = i[:, None] < tl.where(adapter > 0, WIDTH, 0)
        first_gate = begin_expand(b, takes, AT_ONCE)
        first_up = begin_expand(b + WIDTH * R, takes, AT_ONCE)
    follow()
    gate = tl.load(gate_up_ptr + row * 2 * WIDTH + i, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * WIDTH + WIDTH + i, mask=live, other=0.0).to(tl.float32)
    if R > 0:
        low, part, ranks = low_ptr + row * 2 * R, rows * 2 * R, tl.where(adapter > 0, R, 0)
        gate += expand_row(first_gate, b, takes, low, part, ranks, R, LOW_PARTS, AT_ONCE)
        up += expand_row(first_up, b + WIDTH * R, takes, low + R, part, ranks, R, LOW_PARTS, AT_ONCE)
        gate, up = narrow(gate, dtype).to(tl.float32), narrow(up, dtype).to(tl.float32)
    gate = narrow(activated(gate, ACTIVATION), dtype).to(tl.float32)
    out = narrow(gate * up, dtype)
    if scales_ptr is not None:
        codes, scales = block_codes(tl.reshape(out.to(tl.float32), [BLOCK // 128, 128]))
        out = tl.reshape(codes, [BLOCK])
        block = tl.program_id(1) * (BLOCK // 128) + tl.arange(0, BLOCK // 128)
        tl.store(scales_ptr + block * padded + row, scales, mask=block * 128 < WIDTH)
    tl.store(out_ptr + row * WIDTH + i, out, mask=live)


def gated(
    gate_up_M2I: torch.Tensor, correction: Correction | None = None, activation: Activation = "silu"
) -> torch.Tensor:
    """`activation(gate) * up` of the corrected product, where gate comes first; returns [M, I] in the same dtype."""
    rows, width = gate_up_M2I.shape
    out_MI = torch.empty(rows, width // 2, dtype=gate_up_M2I.dtype, device=gate_up_M2I.device)
    _gate(gate_up_M2I, out_MI, None, correction, activation)
    return out_MI


def gated_codes(gate_up_M2I: torch.Tensor, activation: Activation = "silu") -> CodedRows:
    """Like `gated`, without a correction, rounded to codes; I is a multiple of 128."""
    rows, width = gate_up_M2I.shape
    made = empty_rows(rows, width // 2, gate_up_M2I.device)
    _gate(gate_up_M2I, made.codes_MK.view(torch.uint8), made.scales_BM, None, activation)
    return made


def _gate(
    gate_up_M2I: torch.Tensor,
    out_MI: torch.Tensor,
    scales_BM: torch.Tensor | None,
    correction: Correction | None,
    activation: Activation,
) -> None:
    rows, width = gate_up_M2I.shape
    assert gate_up_M2I.is_contiguous()
    block = 1024 if correction is None else 512
    _gated_kernel[(rows, triton.cdiv(width // 2, block))](
        gate_up_M2I, out_MI, scales_BM,
        rows=rows, padded=len(out_MI), WIDTH=width // 2, BLOCK=block, ACTIVATION=activation, num_warps=4,
        **correction_arguments(correction, 2 * block), **follow_options(out_MI.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _embed_rope_kernel(
    token_ids_ptr, positions_ptr, embed_ptr, inv_freq_ptr, sign_ptr, residual_ptr, cos_sin_ptr,
    rows, first_token, tokens, scale,
    H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if part == 0:
        d = tl.arange(0, BLOCK_D)
        live = d < D
        inv_freq = tl.load(inv_freq_ptr + d, mask=live, other=0.0)
        sign = tl.load(sign_ptr + d, mask=live, other=0.0)
        factor = tl.load(sign_ptr + D - 1)
        follow()
        angle = tl.load(positions_ptr + b).to(tl.float32) * inv_freq
        if INTERPRETED:
            cos = tl.cos(angle)
            sin = tl.sin(angle)
        else:
            # Triton's own functions are approximate instructions, which are off by whole turns at large angles.
            cos = libdevice.cos(angle)
            sin = libdevice.sin(angle)
        tl.store(cos_sin_ptr + b * D + d, cos * factor, mask=live)
        tl.store(cos_sin_ptr + (rows + b) * D + d, sin * sign, mask=live)
    else:
        h = (part - 1) * BLOCK + tl.arange(0, BLOCK)
        follow()
        token = tl.load(token_ids_ptr + b)
        if first_token is not None:
            token -= first_token
            width = tl.where((token >= 0) & (token < tokens), H, 0)
            x = tl.load(embed_ptr + token * H + h, mask=h < width, other=0.0)
        else:
            x = tl.load(embed_ptr + token * H + h, mask=h < H)
        if SCALED:
            x = narrow(x.to(tl.float32) * scale, x.dtype)
        tl.store(residual_ptr + b * H + h, x, mask=h < H)


def embed_rope(
    token_ids_B: torch.Tensor,
    positions_B: torch.Tensor,
    embed_VH: torch.Tensor,
    inv_freq_D: torch.Tensor,
    sign_D: torch.Tensor,
    first_token: int | None = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """The embeddings of a step's tokens, and the cosines and sines of their positions, in one launch.

    Args:
        token_ids_B: int64.
        positions_B: int64.
        embed_VH: the embedding table, contiguous.
        inv_freq_D: see `rope_cos_sin`; D is even.
        sign_D: likewise.
        first_token: of a table with a part of the vocabulary, the token of its first row; other embeddings are zeros.
            None: the table has all.
        scale: factor of the embeddings.

    Returns:
        The embeddings [B, H], newly allocated in the dtype of `embed_VH`, and the result of `rope_cos_sin`.
    """
    count, hidden, dim = len(token_ids_B), embed_VH.shape[1], len(inv_freq_D)
    assert token_ids_B.is_contiguous() and positions_B.is_contiguous() and embed_VH.is_contiguous()
    residual_BH = torch.empty(count, hidden, dtype=embed_VH.dtype, device=embed_VH.device)
    cos_sin_2B1D = torch.empty(2, count, 1, dim, dtype=torch.float32, device=embed_VH.device)
    _embed_rope_kernel[(count, 1 + triton.cdiv(hidden, _EMBED_BLOCK))](
        token_ids_B, positions_B, embed_VH, inv_freq_D, sign_D, residual_BH, cos_sin_2B1D, count, first_token,
        len(embed_VH), scale,
        H=hidden, D=dim, SCALED=scale != 1.0, BLOCK=_EMBED_BLOCK, BLOCK_D=triton.next_power_of_2(dim), num_warps=4,
        **follow_options(embed_VH.device),
    )  # fmt: skip
    cos_B1D, sin_B1D = cos_sin_2B1D.unbind(0)
    return residual_BH, (cos_B1D, sin_B1D)
