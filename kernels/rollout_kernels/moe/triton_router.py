"""The router of a mixture of experts on a GPU: softmax, top-k and renormalisation of its logits.

    few tokens   triton_norm_router   norm, logits and choice in one launch
    more         moe_route            logits by a product that is split along H, so that its few outputs keep the chip
                                      busy; then a launch that adds the parts and chooses, with one program a token
    a prefill    moe_route            the same, with several tokens a program, which finds their experts one by one

Shared experts that are stored after the others (E, E + 1 ...) are every token's last choices. Their weight is 1, or
the sigmoid of one logit: then the router has one more row.

Logits are rounded to the model's dtype, as the result of a matrix product is. Of equal logits the lower index comes
first. NaN logits come last, so the experts are valid for any input; the weights of a token with NaN logits are NaN.
Sums have a fixed order, so a token does not depend on the other tokens.

Legend: T tokens, S parts, E experts, K experts a token, H hidden, R rows of a record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from rollout_kernels.common.triton_math import TRITON_DTYPES, follow, follow_options, narrow
from rollout_kernels.linear.table import linear_config
from rollout_kernels.linear.triton_linear import linear_parts
from rollout_kernels.moe.formats import NO_SHARED, Shared

#: Other experts that an expert is compared with at once, and the smallest length of vectors of experts.
_COMPARED = tl.constexpr(128)
_FEWEST = 32
#: From this number of tokens on, a program chooses the experts of several tokens: a program for each token takes ten
#: times as long for 16,384 tokens.
MANY_TOKENS = 1024
_TILE = 1024  # logits of such a program
#: Experts whose index fits beside a short logit.
_MOST_SHORT = tl.constexpr(8192)


@dataclass(frozen=True, slots=True)
class Routing:
    """The chosen experts of each token and their weights; shared experts that are stored with them come last."""

    experts_TK: torch.Tensor  # int32, the most likely first
    weights_TK: torch.Tensor  # float32


@dataclass(frozen=True, slots=True)
class Record:
    """The buffers that record the experts of each token, for replay.

    Row `slots_T[t]` (int64) of `experts_RK` (uint8, uint16 or int32; any distance between rows) gets the experts of
    token t. A negative slot records nothing.
    """

    experts_RK: torch.Tensor
    slots_T: torch.Tensor


class RouterConstants(NamedTuple):
    """The constants of the kernels that choose experts; from `choice_of`."""

    E: int  # experts, without shared ones
    E2: int  # length of a program's vectors of experts: a power of two
    TOP_K: int  # experts of a token, without shared ones
    RENORMALIZE: bool
    RECORD: bool
    SHARED: int  # experts from E on that come last
    GATED: bool  # shared experts are weighted by the sigmoid of one more logit, else by 1


class Outputs(NamedTuple):
    """A kernel's outputs: the choices of all tokens."""

    experts_ptr: Any
    weights_ptr: Any
    record_ptr: Any  # None without a record, as `slots_ptr`
    slots_ptr: Any
    record_stride: Any


@triton.jit
def order_of(logits, e, E2: tl.constexpr, SHORT: tl.constexpr):
    """An integer for each expert, larger for experts that come earlier: by logit (NaN last), then by index.

    It has 32 bits with SHORT, which is for logits of at most 11 significant bits, such as logits rounded to bf16 or
    f16: then the 13 lower bits of a float32 say nothing. Otherwise it has 64.
    """
    number = tl.where(logits == logits, logits, float("-inf")) + 0.0  # makes -0.0 equal to 0.0
    bits = number.to(tl.int32, bitcast=True)
    ascending = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    if SHORT:
        return (ascending & -8192) | (E2 - 1 - e)
    else:
        return (ascending.to(tl.int64) << 32) | (E2 - 1 - e).to(tl.int64)


@triton.jit
def count_earlier(order, E2: tl.constexpr):
    """The number of experts that come before each expert, by `order` [E2]."""
    if E2 <= _COMPARED:
        # A thread counts for one expert, so nothing is exchanged between threads.
        earlier = tl.sum((order[:, None] > order[None, :]).to(tl.int32), axis=0)
    else:
        PIECES: tl.constexpr = E2 // _COMPARED
        pieces = tl.reshape(order, [PIECES, _COMPARED])
        earlier = tl.zeros([E2], tl.int32)
        for piece in tl.static_range(PIECES):
            rival = tl.sum(tl.where((tl.arange(0, PIECES) == piece)[:, None], pieces, 0), axis=0)
            earlier += tl.sum((rival[:, None] > order[None, :]).to(tl.int32), axis=0)
    return earlier


@triton.jit
def sum_logits(parts_ptr, token, tokens, e, PARTS: tl.constexpr, CHOICE: tl.constexpr):
    """The sums over parts of a token's logits [E2] and of the logit of its gate, float32; 0 where there is none.

    `e` are the numbers below E2.
    """
    E: tl.constexpr = CHOICE.E
    E2: tl.constexpr = CHOICE.E2
    ROWS: tl.constexpr = E + CHOICE.GATED
    logits = tl.zeros([E2], tl.float32)
    gate = tl.full([], 0.0, tl.float32)
    for part in tl.static_range(PARTS):
        at = parts_ptr + (part * tokens + token) * ROWS
        logits += tl.load(at + e, mask=e < E, other=0.0).to(tl.float32)
        if CHOICE.GATED:
            gate += tl.load(at + E).to(tl.float32)
    return logits, gate


@triton.jit
def softmax_terms(logits, live):
    """The terms of a softmax over the last axis, before their division by their sum; 0 where not `live`.

    `logits` are -inf where not `live`.
    """
    known = tl.where(logits == logits, logits, float("-inf"))
    # Finite even if all logits are NaN, so that padding gets no weight.
    largest = tl.maximum(tl.max(known, axis=-1, keep_dims=True), -3e38)
    return tl.where(live, tl.exp(logits - largest), 0.0)


@triton.jit
def sum_of_chosen(weight, chosen):
    """The sum of the weights of chosen experts over the last axis, which is kept with length 1."""
    # NaN counts even if its expert was not chosen, as in a softmax over all experts.
    return tl.sum(tl.where(chosen | (weight != weight), weight, 0.0), axis=-1, keep_dims=True)


@triton.jit
def store_choices(token, e, earlier, chosen, weight, gate, to, CHOICE: tl.constexpr):
    """Write the chosen experts of a token with their weights, then the shared experts, and the record.

    `to` is `Outputs`; `gate` is the logit of the shared experts' gate.
    """
    E: tl.constexpr = CHOICE.E
    TOP_K: tl.constexpr = CHOICE.TOP_K
    SHARED: tl.constexpr = CHOICE.SHARED
    out = token * (TOP_K + SHARED) + earlier
    tl.store(to.experts_ptr + out, e, mask=chosen)
    tl.store(to.weights_ptr + out, weight, mask=chosen)
    for each in tl.static_range(SHARED):
        last = token * (TOP_K + SHARED) + TOP_K + each
        tl.store(to.experts_ptr + last, E + each)
        if CHOICE.GATED:
            tl.store(to.weights_ptr + last, 1.0 / (1.0 + tl.exp(-gate)))
        else:
            tl.store(to.weights_ptr + last, 1.0)
    if CHOICE.RECORD:
        slot = tl.load(to.slots_ptr + token)
        if slot >= 0:
            kept = to.record_ptr + slot * to.record_stride + earlier
            tl.store(kept, e.to(to.record_ptr.dtype.element_ty), mask=chosen)


@triton.jit
def choose(logits, token, gate, to, CHOICE: tl.constexpr, SHORT: tl.constexpr):
    """Choose the experts of one token from its float32 logits [E2], in the order of `order_of`.

    `gate` and `to` are as for `store_choices`. SHORT: see `order_of`.
    """
    E2: tl.constexpr = CHOICE.E2
    e = tl.arange(0, E2)
    live = e < CHOICE.E
    logits = tl.where(live, logits, float("-inf"))
    earlier = count_earlier(order_of(logits, e, E2, SHORT), E2)
    chosen = (earlier < CHOICE.TOP_K) & live
    weight = softmax_terms(logits, live)
    if CHOICE.RENORMALIZE:
        weight = weight / sum_of_chosen(weight, chosen)
    else:
        weight = weight / tl.sum(weight)
    store_choices(token, e, earlier, chosen, weight, gate, to, CHOICE)


@triton.jit(do_not_specialize=["tokens", "record_stride"])
def _choose_kernel(
    parts_ptr, experts_ptr, weights_ptr, record_ptr, slots_ptr,
    tokens,
    record_stride,
    CHOICE: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    e = tl.arange(0, CHOICE.E2)
    follow()
    logits, gate = sum_logits(parts_ptr, token, tokens, e, PARTS, CHOICE)
    logits, gate = narrow(logits, DTYPE).to(tl.float32), narrow(gate, DTYPE).to(tl.float32)
    SHORT: tl.constexpr = DTYPE != tl.float32 and CHOICE.E2 <= _MOST_SHORT
    to = Outputs(experts_ptr, weights_ptr, record_ptr, slots_ptr, record_stride)
    choose(logits, token, gate, to, CHOICE, SHORT)


@triton.jit(do_not_specialize=["tokens", "record_stride"])
def _choose_many_kernel(
    parts_ptr, experts_ptr, weights_ptr, record_ptr, slots_ptr,
    tokens,
    record_stride,
    CHOICE: tl.constexpr, K2: tl.constexpr, BLOCK_T: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Like `choose` for BLOCK_T tokens: in each round the first of the experts that are left."""
    E: tl.constexpr = CHOICE.E
    E2: tl.constexpr = CHOICE.E2
    TOP_K: tl.constexpr = CHOICE.TOP_K
    SHARED: tl.constexpr = CHOICE.SHARED
    ROWS: tl.constexpr = E + CHOICE.GATED
    CHOICES: tl.constexpr = TOP_K + SHARED
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, E2)[None, :]
    k = tl.arange(0, K2)[None, :]
    live = (t < tokens)[:, None] & (e < E)
    follow()
    logits = tl.zeros([BLOCK_T, E2], tl.float32)
    gate = tl.zeros([BLOCK_T], tl.float32)
    for part in tl.static_range(PARTS):
        row = parts_ptr + (part * tokens + t) * ROWS
        logits += tl.load(row[:, None] + e, mask=live, other=0.0).to(tl.float32)
        if CHOICE.GATED:
            gate += tl.load(row + E, mask=t < tokens, other=0.0).to(tl.float32)
    logits = tl.where(e < E, narrow(logits, DTYPE).to(tl.float32), float("-inf"))
    SHORT: tl.constexpr = DTYPE != tl.float32 and E2 <= _MOST_SHORT
    order = order_of(logits, e, E2, SHORT)
    last: tl.constexpr = -(2**31) if SHORT else -(2**63)  # after every expert
    weight = softmax_terms(logits, e < E)
    experts = tl.zeros([BLOCK_T, K2], tl.int32)
    weights = tl.zeros([BLOCK_T, K2], tl.float32)
    left = order
    for choice in tl.static_range(TOP_K):
        first = left == tl.max(left, 1)[:, None]
        experts = tl.where(k == choice, tl.sum(tl.where(first, e, 0), 1)[:, None], experts)
        weights = tl.where(k == choice, tl.sum(tl.where(first, weight, 0.0), 1)[:, None], weights)
        left = tl.where(first, last, left)
    if CHOICE.RENORMALIZE:
        weights = weights / sum_of_chosen(weight, left != order)
    else:
        weights = weights / tl.sum(weight, 1)[:, None]
    kept = (t < tokens)[:, None] & (k < TOP_K)
    at = t[:, None] * CHOICES + k
    tl.store(experts_ptr + at, experts, mask=kept)
    tl.store(weights_ptr + at, weights, mask=kept)
    if SHARED > 0:
        share = tl.full([BLOCK_T], 1.0, tl.float32)
        if CHOICE.GATED:
            share = 1.0 / (1.0 + tl.exp(-narrow(gate, DTYPE).to(tl.float32)))
        for each in tl.static_range(SHARED):
            at = t * CHOICES + TOP_K + each
            tl.store(experts_ptr + at, tl.full([BLOCK_T], E + each, tl.int32), mask=t < tokens)
            tl.store(weights_ptr + at, share, mask=t < tokens)
    if CHOICE.RECORD:
        slot = tl.load(slots_ptr + t, mask=t < tokens, other=-1)[:, None]
        at = record_ptr + slot * record_stride + k
        tl.store(at, experts.to(record_ptr.dtype.element_ty), mask=kept & (slot >= 0))


def choice_of(logits: int, top_k: int, renormalize: bool, record: Record | None, shared: Shared) -> RouterConstants:
    """The constants of a choice from this number of logits, the gate's logit included."""
    experts = logits - shared.gated
    assert 0 < top_k <= experts
    if record is not None:
        dtype = record.experts_RK.dtype
        assert dtype in (torch.uint8, torch.uint16, torch.int32) and record.experts_RK.stride(1) == 1
        assert experts - 1 <= torch.iinfo(dtype).max, f"{experts} experts can't be numbered in {dtype}"
    return RouterConstants(
        experts, padded_experts(experts), top_k, renormalize, record is not None, shared.experts, shared.gated
    )


def routing_outputs(tokens: int, choice: RouterConstants, device: torch.device) -> Routing:
    """Memory for a routing."""
    shape = (tokens, choice.TOP_K + choice.SHARED)
    experts_TK = torch.empty(shape, dtype=torch.int32, device=device)
    return Routing(experts_TK, torch.empty(shape, dtype=torch.float32, device=device))


def output_arguments(out: Routing, record: Record | None, tokens: int) -> tuple[torch.Tensor | int | None, ...]:
    """The kernels' arguments for their results: experts, weights, record, its slots, tokens, stride of the record."""
    kept, slots, stride = None, None, 0
    if record is not None:
        kept, slots, stride = record.experts_RK, record.slots_T, record.experts_RK.stride(0)
    return out.experts_TK, out.weights_TK, kept, slots, tokens, stride


def warps_of(choice: RouterConstants) -> int:
    """Warps of a program that chooses the experts of one token."""
    return 8 if choice.E > 256 else 4


def moe_route(
    x_TH: torch.Tensor,
    router_EH: torch.Tensor,
    top_k: int,
    renormalize: bool,
    record: Record | None = None,
    deterministic: bool = False,
    shared: Shared = NO_SHARED,
    many_tokens: int = MANY_TOKENS,
) -> Routing:
    """Choose the experts of each token.

    Args:
        x_TH: the normalised input of the layer.
        router_EH: weights of the router; the last row is the gate of gated shared experts.
        top_k: experts of a token, without shared ones.
        renormalize: True: the weights of a token add up to 1 (Qwen3-MoE with `norm_topk_prob`, Mixtral). False: they
            are the softmax over all experts (OLMoE).
        record: where to record the experts for replay, or None.
        deterministic: add the products of a logit in one order for every number of tokens, if `linear_config` has a
            configuration for this router.
        shared: the shared experts, which are numbered after the others.
        many_tokens: from so many tokens on, a program chooses the experts of several.
    """
    parts_STE = router_logits(x_TH, router_EH, deterministic)
    return moe_choose(parts_STE, x_TH.dtype, top_k, renormalize, record, deterministic, shared, many_tokens)


def router_logits(
    x_TH: torch.Tensor, router_EH: torch.Tensor, deterministic: bool = False, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Logits as partial sums [S, T, E], float32 where there are several. For `deterministic` see `moe_route`.

    With float32 as `dtype` nothing is rounded to x's dtype on the way.
    """
    experts, hidden = router_EH.shape
    config = linear_config(experts, hidden, "parts", len(x_TH), deterministic)
    if config is not None:
        return linear_parts(x_TH, router_EH, config)
    if dtype == torch.float32:
        x_TH, router_EH = x_TH.float(), router_EH.float()
    return F.linear(x_TH, router_EH)[None]


def sum_of_parts(parts_STE: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum over S, [T, E], in ascending order and rounded to `dtype`: what `moe_choose` chooses by."""
    first, *others = parts_STE.unbind()
    for part in others:
        first = first + part
    return first.to(dtype)


def moe_choose(
    parts_STE: torch.Tensor,
    dtype: torch.dtype,
    top_k: int,
    renormalize: bool,
    record: Record | None = None,
    deterministic: bool = False,
    shared: Shared = NO_SHARED,
    many_tokens: int = MANY_TOKENS,
) -> Routing:
    """Choose experts from partial sums of logits, which are added and rounded to `dtype`; see `moe_route`.

    The choice does not depend on the number of tokens; with `deterministic` the bits of the weights do not either. The
    twin is `rollout_kernels.route`.
    """
    parts, tokens, logits = parts_STE.shape
    assert parts_STE.is_contiguous()
    choice = choice_of(logits, top_k, renormalize, record, shared)
    out = routing_outputs(tokens, choice, parts_STE.device)
    given = (parts_STE, *output_arguments(out, record, tokens))
    how = {"CHOICE": choice, "PARTS": parts, "DTYPE": TRITON_DTYPES[dtype], **follow_options(parts_STE.device)}
    if tokens >= many_tokens and not deterministic:
        block = max(1, _TILE // choice.E2)
        grid = (triton.cdiv(tokens, block),)
        _choose_many_kernel[grid](*given, **how, K2=triton.next_power_of_2(top_k), BLOCK_T=block, num_warps=4)
    else:
        _choose_kernel[(tokens,)](*given, **how, num_warps=warps_of(choice))
    return out


def padded_experts(experts: int) -> int:
    """Length of a program's vectors of experts: a power of two."""
    return max(_FEWEST, triton.next_power_of_2(experts))
