"""The norm before a mixture of experts, and its router, in one launch for few tokens.

It computes `add_rms_norm` and then `moe_route`. Every program adds and normalises its token again, which costs less
than another launch if there are few tokens; the first program of a token writes the results. Other programs may not
have read the residual stream by then, so the new residual stream goes to other memory.

Legend: T tokens, S parts, E experts, K experts a token, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rollout_kernels.common.triton_math import follow, follow_options, last_to_arrive, narrow
from rollout_kernels.moe.formats import NO_SHARED, Shared
from rollout_kernels.moe.triton_router import (
    Outputs,
    Record,
    Routing,
    choice_of,
    choose,
    output_arguments,
    routing_outputs,
    warps_of,
)

#: The most tokens for which this is faster: a token's residual and parts are read once for every `_BLOCK_E` experts.
MOST_TOKENS = 8
#: Experts whose logits a program computes.
_BLOCK_E = 4


@dataclass(frozen=True, slots=True)
class RouterScratch:
    """Memory through which the programs of a token pass their logits to the last program. All layers can share one."""

    logits_TE: torch.Tensor  # float32
    arrived_T: torch.Tensor  # int32, zero between launches


def router_scratch(logits: int, device: torch.device) -> RouterScratch:
    """Scratch for routers with this number of logits."""
    logits_TE = torch.empty(MOST_TOKENS, logits, dtype=torch.float32, device=device)
    return RouterScratch(logits_TE, torch.zeros(MOST_TOKENS, dtype=torch.int32, device=device))


@dataclass(frozen=True, slots=True)
class NormRouting:
    """The new residual stream and its norm, both [T, H], and the chosen experts."""

    residual_TH: torch.Tensor
    x_TH: torch.Tensor
    routing: Routing


@triton.jit(do_not_specialize=["tokens", "record_stride"])
def _norm_router_kernel(
    residual_ptr, parts_ptr, norm_ptr, w_ptr, new_residual_ptr, x_ptr, logits_ptr, arrived_ptr, experts_ptr,
    weights_ptr, record_ptr, slots_ptr,
    tokens,
    record_stride,
    eps,
    H: tl.constexpr, H2: tl.constexpr, CHOICE: tl.constexpr, BLOCK_E: tl.constexpr, PARTS: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):  # fmt: skip
    E: tl.constexpr = CHOICE.E
    ROWS: tl.constexpr = E + CHOICE.GATED
    block = tl.program_id(0)
    token = tl.program_id(1)
    e = block * BLOCK_E + tl.arange(0, BLOCK_E)
    h = tl.arange(0, H2)
    live = h < H
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    w = tl.load(w_ptr + tl.minimum(e, ROWS - 1)[:, None] * H + h[None, :], mask=live[None, :], other=0.0)
    norm = tl.load(norm_ptr + h, mask=live, other=0.0).to(tl.float32)
    follow()
    added = tl.zeros([H2], tl.float32)
    for part in tl.static_range(PARTS):
        added += tl.load(parts_ptr + (part * tokens + token) * H + h, mask=live, other=0.0)
    residual = tl.load(residual_ptr + token * H + h, mask=live, other=0.0).to(tl.float32)
    # Round where `add_rms_norm` rounds: the product's result, the sum, the norm, and the weighted norm.
    stored = narrow(residual + narrow(added, dtype).to(tl.float32), dtype)
    value = stored.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value) / H + eps)
    if UNIT_OFFSET:
        x = narrow(value * scale * (norm + 1.0), dtype)
    else:
        x = narrow(narrow(value * scale, dtype).to(tl.float32) * norm, dtype)
    if block == 0:
        tl.store(new_residual_ptr + token * H + h, stored, mask=live)
        tl.store(x_ptr + token * H + h, x, mask=live)
    logits = tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
    tl.store(logits_ptr + token * ROWS + e, narrow(logits, dtype).to(tl.float32), mask=e < ROWS)
    if last_to_arrive(arrived_ptr + token):
        every = tl.arange(0, CHOICE.E2)
        # Bypass the L1 cache, because programs on other multiprocessors wrote these logits.
        written = tl.load(logits_ptr + token * ROWS + every, mask=every < E, other=0.0, cache_modifier=".cg")
        gate = tl.full([], 0.0, tl.float32)
        if CHOICE.GATED:
            gate = tl.load(logits_ptr + token * ROWS + E, cache_modifier=".cg")
        to = Outputs(experts_ptr, weights_ptr, record_ptr, slots_ptr, record_stride)
        choose(written, token, gate, to, CHOICE, False)


def norm_route(
    residual_TH: torch.Tensor,
    parts_STH: torch.Tensor,
    norm_H: torch.Tensor,
    eps: float,
    router_EH: torch.Tensor,
    top_k: int,
    renormalize: bool,
    scratch: RouterScratch,
    record: Record | None = None,
    unit_offset: bool = False,
    shared: Shared = NO_SHARED,
) -> NormRouting:
    """Add partial products to the residual stream, normalise it and choose experts, for up to `MOST_TOKENS` tokens.

    Args:
        residual_TH: contiguous, not changed.
        parts_STH: float32, contiguous.
        norm_H: weights of the norm.
        eps: of the norm.
        router_EH: weights of the router, contiguous.
        top_k: experts of a token.
        renormalize: whether the weights of a token add up to 1.
        scratch: from `router_scratch`.
        record: where to record the experts for replay, or None.
        unit_offset: the weights of the norm are stored less 1.
        shared: as for `moe_route`.
    """
    tokens, hidden = residual_TH.shape
    logits = router_EH.shape[0]
    choice = choice_of(logits, top_k, renormalize, record, shared)
    assert tokens <= MOST_TOKENS <= scratch.arrived_T.numel() and scratch.logits_TE.shape[1] == logits
    assert residual_TH.is_contiguous() and parts_STH.is_contiguous() and router_EH.is_contiguous()
    routing = routing_outputs(tokens, choice, residual_TH.device)
    out = NormRouting(torch.empty_like(residual_TH), torch.empty_like(residual_TH), routing)
    _norm_router_kernel[(triton.cdiv(logits, _BLOCK_E), tokens)](
        residual_TH, parts_STH, norm_H, router_EH, out.residual_TH, out.x_TH, scratch.logits_TE, scratch.arrived_T,
        *output_arguments(routing, record, tokens), eps,
        H=hidden, H2=triton.next_power_of_2(hidden), CHOICE=choice, BLOCK_E=_BLOCK_E, PARTS=parts_STH.shape[0],
        UNIT_OFFSET=unit_offset, num_warps=warps_of(choice), **follow_options(residual_TH.device),
    )  # fmt: skip
    return out
