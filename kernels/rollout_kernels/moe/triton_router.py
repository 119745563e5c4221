"""The router of a mixture of experts in one launch: logits, softmax, top-k and renormalisation.

    program (block of experts, block of tokens)       logits of these, to memory
    the last of a block of tokens to arrive           reads them back, and chooses

A logit is rounded to the model's dtype, as a matrix product of that dtype leaves it. Of equal logits the lower index
comes first. A logit that is not a number is never chosen before one that is, so experts are valid whatever the input;
the weights of such a token are not numbers. Sums have a fixed order: a token does not depend on the others.

Legend: T tokens, E experts, K experts a token, H hidden, R rows of a record.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rollout_kernels.triton_math import follow, follow_options, narrow

#: Experts whose logits a program makes.
BLOCK_E = 4
_BLOCK_T = 8
#: Rivals that an expert is compared with at once.
COMPARED = tl.constexpr(32)


@dataclass(frozen=True, slots=True)
class Routing:
    """What the router decided: int32 experts_TK, likeliest first, and their float32 weights_TK."""

    experts_TK: torch.Tensor
    weights_TK: torch.Tensor


@dataclass(frozen=True, slots=True)
class Record:
    """Where to keep the experts of each token, for replay.

    Row `slots_T[t]` (int64) of `experts_RK` (uint8, uint16 or int32; rows may be apart) gets the experts of token t;
    a slot below zero keeps nothing.
    """

    experts_RK: torch.Tensor
    slots_T: torch.Tensor


@dataclass(frozen=True, slots=True)
class RouterScratch:
    """What a router needs between its programs; one serves all layers of a model that run one after the other."""

    logits_TE: torch.Tensor  # float32
    arrived_B: torch.Tensor  # int32, zero between launches


def router_scratch(tokens: int, experts: int, device: torch.device) -> RouterScratch:
    """Scratch for up to `tokens` tokens."""
    logits_TE = torch.empty(tokens, experts, dtype=torch.float32, device=device)
    blocks = max(_BLOCK_T, triton.cdiv(tokens, _BLOCK_T))  # fewer tokens than a block are taken one by one
    return RouterScratch(logits_TE, torch.zeros(blocks, dtype=torch.int32, device=device))


@triton.jit
def _number(x):
    """`x`, or minus infinity where it is not a number."""
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def choose(
    logits_ptr,
    token,
    experts_ptr,
    weights_ptr,
    record_ptr,
    slots_ptr,
    record_stride,
    E: tl.constexpr,
    E2: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    RECORD: tl.constexpr,
):
    """The experts of one token: an expert's place is the number of experts before it."""
    at = logits_ptr + token * E
    e = tl.arange(0, E2)
    # Past the cache of this multiprocessor: other ones wrote them.
    logits = tl.load(at + e, mask=e < E, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
    number = _number(logits)
    place = tl.zeros([E2], tl.int32)
    for first in tl.static_range(0, E2, COMPARED):
        other = first + tl.arange(0, COMPARED)
        rival = _number(tl.load(at + other, mask=other < E, other=float("-inf"), cache_modifier=".cg").to(tl.float32))
        more = rival[None, :] > number[:, None]
        earlier = (rival[None, :] == number[:, None]) & (other[None, :] < e[:, None])
        place += tl.sum((more | earlier).to(tl.int32), axis=1)
    chosen = (place < TOP_K) & (e < E)
    # Finite even where no logit is a number, so that padding stays without weight.
    largest = tl.maximum(tl.max(number), -3e38)
    weight = tl.where(e < E, tl.exp(logits - largest), 0.0)
    if RENORMALIZE:
        weight = weight / tl.sum(tl.where(chosen, weight, 0.0))
    else:
        weight = weight / tl.sum(weight)
    out = token * TOP_K + place
    tl.store(experts_ptr + out, e, mask=chosen)
    tl.store(weights_ptr + out, weight, mask=chosen)
    if RECORD:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            kept = record_ptr + slot * record_stride + place
            tl.store(kept, e.to(record_ptr.dtype.element_ty), mask=chosen)


@triton.jit
def last_to_arrive(arrived_ptr):
    """True in the last of the programs along the first axis to get here: it sees what the others have stored."""
    # All threads have stored; one of them says so, and learns whether the other programs have too.
    tl.debug_barrier()
    last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1
    if last:
        tl.store(arrived_ptr, 0)
    return last


@triton.jit(do_not_specialize=["tokens", "record_stride"])
def _router_kernel(
    x_ptr,
    w_ptr,
    logits_ptr,
    arrived_ptr,
    experts_ptr,
    weights_ptr,
    record_ptr,
    slots_ptr,
    tokens,
    record_stride,
    H: tl.constexpr,
    H2: tl.constexpr,
    E: tl.constexpr,
    E2: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    RECORD: tl.constexpr,
):
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    first = tl.program_id(1) * BLOCK_T
    last = tl.minimum(first + BLOCK_T, tokens)
    h = tl.arange(0, H2)
    row = tl.minimum(e, E - 1)
    w = tl.load(w_ptr + row[:, None] * H + h[None, :], mask=h[None, :] < H, other=0.0)
    follow()
    for token in range(first, last):
        x = tl.load(x_ptr + token * H + h, mask=h < H, other=0.0).to(tl.float32)
        logits = tl.sum(w.to(tl.float32) * x[None, :], axis=1)
        kept = narrow(logits, w_ptr.dtype.element_ty).to(tl.float32)
        tl.store(logits_ptr + token * E + e, kept, mask=e < E)
    if last_to_arrive(arrived_ptr + tl.program_id(1)):
        for token in range(first, last):
            choose(
                logits_ptr,
                token,
                experts_ptr,
                weights_ptr,
                record_ptr,
                slots_ptr,
                record_stride,
                E,
                E2,
                TOP_K,
                RENORMALIZE,
                RECORD,
            )


@triton.jit(do_not_specialize=["record_stride"])
def _choose_kernel(
    logits_ptr,
    experts_ptr,
    weights_ptr,
    record_ptr,
    slots_ptr,
    record_stride,
    E: tl.constexpr,
    E2: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    RECORD: tl.constexpr,
):
    follow()
    choose(
        logits_ptr,
        tl.program_id(0),
        experts_ptr,
        weights_ptr,
        record_ptr,
        slots_ptr,
        record_stride,
        E,
        E2,
        TOP_K,
        RENORMALIZE,
        RECORD,
    )


def routing_outputs(tokens: int, top_k: int, device: torch.device, out: Routing | None) -> Routing:
    """`out`, or room for a routing."""
    if out is not None:
        assert out.experts_TK.shape == out.weights_TK.shape == (tokens, top_k)
        assert out.experts_TK.dtype == torch.int32 and out.weights_TK.dtype == torch.float32
        return out
    experts_TK = torch.empty(tokens, top_k, dtype=torch.int32, device=device)
    return Routing(experts_TK, torch.empty(tokens, top_k, dtype=torch.float32, device=device))


def record_arguments(record: Record | None, experts: int) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
    """Tensor, slots and stride of a record, as kernels take them."""
    if record is None:
        return None, None, 0
    kept = record.experts_RK
    assert kept.dtype in (torch.uint8, torch.uint16, torch.int32) and kept.stride(1) == 1
    assert experts - 1 <= torch.iinfo(kept.dtype).max, f"{experts} experts can't be numbered in {kept.dtype}"
    return kept, record.slots_T, kept.stride(0)


def moe_route(
    x_TH: torch.Tensor,
    router_EH: torch.Tensor,
    top_k: int,
    renormalize: bool,
    scratch: RouterScratch,
    record: Record | None = None,
    out: Routing | None = None,
) -> Routing:
    """Choose experts for the normalised `x_TH`; one launch.

    Weights are those of a softmax over all experts (OLMoE), or add up to 1 if `renormalize` (Qwen3-MoE with
    `norm_topk_prob`, Mixtral).
    """
    tokens, hidden = x_TH.shape
    experts = router_EH.shape[0]
    assert x_TH.is_contiguous() and router_EH.is_contiguous()
    assert scratch.logits_TE.shape[0] >= tokens and scratch.logits_TE.shape[1] == experts
    assert 0 < top_k <= experts
    out = routing_outputs(tokens, top_k, x_TH.device, out)
    kept, slots, stride = record_arguments(record, experts)
    block_t = 1 if tokens < _BLOCK_T else _BLOCK_T
    assert scratch.arrived_B.numel() >= triton.cdiv(tokens, block_t)
    _router_kernel[(triton.cdiv(experts, BLOCK_E), triton.cdiv(tokens, block_t))](
        x_TH,
        router_EH,
        scratch.logits_TE,
        scratch.arrived_B,
        out.experts_TK,
        out.weights_TK,
        kept,
        slots,
        tokens,
        stride,
        H=hidden,
        H2=triton.next_power_of_2(hidden),
        E=experts,
        E2=max(COMPARED.value, triton.next_power_of_2(experts)),
        TOP_K=top_k,
        BLOCK_E=BLOCK_E,
        BLOCK_T=block_t,
        RENORMALIZE=renormalize,
        RECORD=record is not None,
        num_warps=8 if experts > 256 else 4,
        **follow_options(x_TH.device),
    )
    return out


def moe_choose(
    logits_TE: torch.Tensor,
    top_k: int,
    renormalize: bool,
    record: Record | None = None,
    out: Routing | None = None,
) -> Routing:
    """The same from logits that a matrix product has made (many tokens); the twin of `rollout_kernels.route`."""
    tokens, experts = logits_TE.shape
    assert logits_TE.is_contiguous() and 0 < top_k <= experts
    out = routing_outputs(tokens, top_k, logits_TE.device, out)
    kept, slots, stride = record_arguments(record, experts)
    _choose_kernel[(tokens,)](
        logits_TE,
        out.experts_TK,
        out.weights_TK,
        kept,
        slots,
        stride,
        E=experts,
        E2=max(COMPARED.value, triton.next_power_of_2(experts)),
        TOP_K=top_k,
        RENORMALIZE=renormalize,
        RECORD=record is not None,
        num_warps=8 if experts > 256 else 4,
        **follow_options(logits_TE.device),
    )
    return out
