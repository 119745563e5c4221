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
#: From this number of tokens on, a program chooses the experts of several tokens. On an H100, 16,384 tokens of 128
#: experts take 16 us, and 160 with a program for each token (`scripts.bench.prefill_experts --parts between`).
MANY_TOKENS = 1024
_TILE = 1024  # logits of such a program
#: Experts whose index fits beside a short logit.
_MOST_SHORT = tl.constexpr(8192)


@dataclass(frozen=True, slots=True)
class Routing:
    """The chosen experts of each token and their weights; shared ones that are stored with them come last."""

    experts_TK: torch.Tensor  # int32, the most likely first
    weights_TK: torch.Tensor  # float32


@dataclass(frozen=True, slots=True)
class Record:
    """Where to record the experts of each token, for replay.

    Row `slots_T[t]` (int64) of `experts_RK` (uint8, uint16 or int32; any distance between rows) gets the experts of
    token t. A negative slot records nothing.
    """

    experts_RK: torch.Tensor
    slots_T: torch.Tensor


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
def place_of(order, E2: tl.constexpr):
    """The place of each expert: the number of earlier ones, by `order` [E2]."""
    if E2 <= _COMPARED:
        # A thread counts for one expert, so nothing is exchanged between threads.
        place = tl.sum((order[:, None] > order[None, :]).to(tl.int32), axis=0)
    else:
        PIECES: tl.constexpr = E2 // _COMPARED
        pieces = tl.reshape(order, [PIECES, _COMPARED])
        place = tl.zeros([E2], tl.int32)
        for piece in tl.static_range(PIECES):
            rival = tl.sum(tl.where((tl.arange(0, PIECES) == piece)[:, None], pieces, 0), axis=0)
            place += tl.sum((rival[:, None] > order[None, :]).to(tl.int32), axis=0)
    return place


@triton.jit
def store_choices(
    token,
    e,
    place,
    chosen,
    weight,
    gate,
    experts_ptr,
    weights_ptr,
    record_ptr,
    slots_ptr,
    record_stride,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    RECORD: tl.constexpr,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
):
    """Write the chosen experts of a token with their weights, then the shared ones, and the record."""
    CHOICES: tl.constexpr = TOP_K + SHARED
    out = token * CHOICES + place
    tl.store(experts_ptr + out, e, mask=chosen)
    tl.store(weights_ptr + out, weight, mask=chosen)
    for each in tl.static_range(SHARED):
        last = token * CHOICES + TOP_K + each
        tl.store(experts_ptr + last, E + each)
        if GATED:
            tl.store(weights_ptr + last, 1.0 / (1.0 + tl.exp(-gate)))
        else:
            tl.store(weights_ptr + last, 1.0)
    if RECORD:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            kept = record_ptr + slot * record_stride + place
            tl.store(kept, e.to(record_ptr.dtype.element_ty), mask=chosen)


@triton.jit
def choose(
    logits,
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
    SHORT: tl.constexpr = False,
    gate=0.0,
    SHARED: tl.constexpr = 0,
    GATED: tl.constexpr = False,
):
    """Choose the experts of one token from its float32 logits [E2]; an expert's place is the number of earlier ones.

    SHORT: see `order_of`. SHARED: so many experts from E on come last, weighted by the sigmoid of `gate` if GATED, else
    by 1.
    """
    e = tl.arange(0, E2)
    logits = tl.where(e < E, logits, float("-inf"))
    order = order_of(logits, e, E2, SHORT)
    place = place_of(order, E2)
    chosen = (place < TOP_K) & (e < E)
    # Finite even if all logits are NaN, so that padding gets no weight.
    largest = tl.maximum(tl.max(tl.where(logits == logits, logits, float("-inf"))), -3e38)
    weight = tl.where(e < E, tl.exp(logits - largest), 0.0)
    if RENORMALIZE:
        # NaN counts even if its expert was not chosen, as in a softmax over all experts.
        weight = weight / tl.sum(tl.where(chosen | (weight != weight), weight, 0.0))
    else:
        weight = weight / tl.sum(weight)
    store_choices(
        token, e, place, chosen, weight, gate,
        experts_ptr, weights_ptr, record_ptr, slots_ptr, record_stride, E, TOP_K, RECORD, SHARED, GATED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "record_stride"])
def _choose_kernel(
    parts_ptr,
    experts_ptr,
    weights_ptr,
    record_ptr,
    slots_ptr,
    tokens,
    record_stride,
    E: tl.constexpr,
    E2: tl.constexpr,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,
    DTYPE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    RECORD: tl.constexpr,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
):
    token = tl.program_id(0)
    e = tl.arange(0, E2)
    ROWS: tl.constexpr = E + 1 if GATED else E
    follow()
    logits = tl.zeros([E2], tl.float32)
    gate = tl.full([], 0.0, tl.float32)
    for part in tl.static_range(PARTS):
        at = parts_ptr + (part * tokens + token) * ROWS
        logits += tl.load(at + e, mask=e < E, other=0.0).to(tl.float32)
        if GATED:
            gate += tl.load(at + E).to(tl.float32)
    choose(
        narrow(logits, DTYPE).to(tl.float32),
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
        DTYPE != tl.float32 and E2 <= _MOST_SHORT,
        narrow(gate, DTYPE).to(tl.float32),
        SHARED,
        GATED,
    )


@triton.jit(do_not_specialize=["tokens", "record_stride"])
def _choose_many_kernel(
    parts_ptr,
    experts_ptr,
    weights_ptr,
    record_ptr,
    slots_ptr,
    tokens,
    record_stride,
    E: tl.constexpr,
    E2: tl.constexpr,
    TOP_K: tl.constexpr,
    K2: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PARTS: tl.constexpr,
    DTYPE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    RECORD: tl.constexpr,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
):
    """As `choose` for BLOCK_T tokens: in each round the first of the experts that are left."""
    ROWS: tl.constexpr = E + 1 if GATED else E
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
        if GATED:
            gate += tl.load(row + E, mask=t < tokens, other=0.0).to(tl.float32)
    logits = tl.where(e < E, narrow(logits, DTYPE).to(tl.float32), float("-inf"))
    SHORT: tl.constexpr = DTYPE != tl.float32 and E2 <= _MOST_SHORT
    order = order_of(logits, e, E2, SHORT)
    last: tl.constexpr = -(2**31) if SHORT else -(2**63)  # after every expert
    largest = tl.maximum(tl.max(tl.where(logits == logits, logits, float("-inf")), 1), -3e38)
    weight = tl.where(e < E, tl.exp(logits - largest[:, None]), 0.0)
    experts = tl.zeros([BLOCK_T, K2], tl.int32)
    weights = tl.zeros([BLOCK_T, K2], tl.float32)
    left = order
    for place in tl.static_range(TOP_K):
        first = left == tl.max(left, 1)[:, None]
        experts = tl.where(k == place, tl.sum(tl.where(first, e, 0), 1)[:, None], experts)
        weights = tl.where(k == place, tl.sum(tl.where(first, weight, 0.0), 1)[:, None], weights)
        left = tl.where(first, last, left)
    if RENORMALIZE:
        # NaN counts even if its expert was not chosen, as in a softmax over all experts.
        counts = (left != order) | (weight != weight)
        weights = weights / tl.sum(tl.where(counts, weight, 0.0), 1)[:, None]
    else:
        weights = weights / tl.sum(weight, 1)[:, None]
    kept = (t < tokens)[:, None] & (k < TOP_K)
    at = t[:, None] * CHOICES + k
    tl.store(experts_ptr + at, experts, mask=kept)
    tl.store(weights_ptr + at, weights, mask=kept)
    if SHARED > 0:
        share = tl.full([BLOCK_T], 1.0, tl.float32)
        if GATED:
            share = 1.0 / (1.0 + tl.exp(-narrow(gate, DTYPE).to(tl.float32)))
        for each in tl.static_range(SHARED):
            at = t * CHOICES + TOP_K + each
            tl.store(experts_ptr + at, tl.full([BLOCK_T], E + each, tl.int32), mask=t < tokens)
            tl.store(weights_ptr + at, share, mask=t < tokens)
    if RECORD:
        slot = tl.load(slots_ptr + t, mask=t < tokens, other=-1)[:, None]
        at = record_ptr + slot * record_stride + k
        tl.store(at, experts.to(record_ptr.dtype.element_ty), mask=kept & (slot >= 0))


def routing_outputs(tokens: int, top_k: int, device: torch.device, out: Routing | None) -> Routing:
    """`out`, or newly allocated memory for a routing."""
    if out is not None:
        assert out.experts_TK.shape == out.weights_TK.shape == (tokens, top_k)
        assert out.experts_TK.dtype == torch.int32 and out.weights_TK.dtype == torch.float32
        return out
    experts_TK = torch.empty(tokens, top_k, dtype=torch.int32, device=device)
    return Routing(experts_TK, torch.empty(tokens, top_k, dtype=torch.float32, device=device))


def record_arguments(record: Record | None, experts: int) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
    """The kernels' arguments for a record: tensor, slots, stride of a row."""
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
    record: Record | None = None,
    out: Routing | None = None,
    deterministic: bool = False,
    shared: Shared = NO_SHARED,
) -> Routing:
    """Choose the experts of each token.

    Args:
        x_TH: the normalised input of the layer.
        router_EH: weights of the router; of gated shared experts its last row is that of their gate.
        top_k: experts of a token, without shared ones.
        renormalize: True: the weights of a token add up to 1 (Qwen3-MoE with `norm_topk_prob`, Mixtral). False: they
            are those of the softmax over all experts (OLMoE).
        record: where to record the experts for replay, or None.
        out: memory for the result, or None to allocate it.
        deterministic: add the products of a logit in one order for every number of tokens, if `linear_config` has a
            configuration for this router.
        shared: the shared experts, whose numbers begin with that of the others.
    """
    parts_STE = router_logits(x_TH, router_EH, deterministic)
    return moe_choose(parts_STE, x_TH.dtype, top_k, renormalize, record, out, deterministic, shared)


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
    out: Routing | None = None,
    deterministic: bool = False,
    shared: Shared = NO_SHARED,
) -> Routing:
    """Choose experts from partial sums of logits, which are added and rounded to `dtype`; see `moe_route`.

    The choice does not depend on the number of tokens; with `deterministic` the bits of the weights do not either. The
    twin is `rollout_kernels.route`.
    """
    parts, tokens, rows = parts_STE.shape
    experts = rows - shared.gated
    assert parts_STE.is_contiguous() and 0 < top_k <= experts
    out = routing_outputs(tokens, top_k + shared.experts, parts_STE.device, out)
    kept, slots, stride = record_arguments(record, experts)
    width, options = places(experts), follow_options(parts_STE.device)
    if tokens >= MANY_TOKENS and not deterministic:
        block = max(1, _TILE // width)
        _choose_many_kernel[(triton.cdiv(tokens, block),)](
            parts_STE,
            out.experts_TK,
            out.weights_TK,
            kept,
            slots,
            tokens,
            stride,
            E=experts,
            E2=width,
            TOP_K=top_k,
            K2=triton.next_power_of_2(top_k),
            BLOCK_T=block,
            PARTS=parts,
            DTYPE=TRITON_DTYPES[dtype],
            RENORMALIZE=renormalize,
            RECORD=record is not None,
            SHARED=shared.experts,
            GATED=shared.gated,
            num_warps=4,
            **options,
        )
        return out
    _choose_kernel[(tokens,)](
        parts_STE,
        out.experts_TK,
        out.weights_TK,
        kept,
        slots,
        tokens,
        stride,
        E=experts,
        E2=width,
        TOP_K=top_k,
        PARTS=parts,
        DTYPE=TRITON_DTYPES[dtype],
        RENORMALIZE=renormalize,
        RECORD=record is not None,
        SHARED=shared.experts,
        GATED=shared.gated,
        num_warps=8 if experts > 256 else 4,
        **options,
    )
    return out


def places(experts: int) -> int:
    """Length of a program's vectors of experts: a power of two."""
    return max(_FEWEST, triton.next_power_of_2(experts))
