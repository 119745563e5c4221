"""The router of a mixture of experts: softmax, top-k and renormalisation of its logits.

    few tokens   triton_norm_router   norm, logits and choice in one launch
    more         moe_route            logits by a product cut along H, so that its few outputs keep the chip busy; then
                                      a launch that adds up the parts and chooses, a program a token

A logit is rounded to the model's dtype, as a matrix product of that dtype leaves it. Of equal logits the lower index
comes first. A logit that is not a number is never chosen before one that is, so experts are valid whatever the input;
the weights of such a token are not numbers. Sums have a fixed order: a token does not depend on the others.

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

#: Rivals that an expert is compared with at once, and the fewest places for experts.
_COMPARED = tl.constexpr(128)
_FEWEST = 32


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


@triton.jit
def _order(logits, e, E2: tl.constexpr):
    """Integers that are larger the earlier an expert comes: by logit, numbers before others, then by index."""
    number = tl.where(logits == logits, logits, float("-inf")) + 0.0  # of two zeros neither is the larger
    bits = number.to(tl.int32, bitcast=True)
    ascending = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ascending.to(tl.int64) << 32) | (E2 - 1 - e).to(tl.int64)


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
):
    """The experts of one token, from its logits [E2], float32: an expert's place is the number of experts before it."""
    e = tl.arange(0, E2)
    logits = tl.where(e < E, logits, float("-inf"))
    order = _order(logits, e, E2)
    if E2 <= _COMPARED:
        place = tl.sum((order[None, :] > order[:, None]).to(tl.int32), axis=1)
    else:
        PIECES: tl.constexpr = E2 // _COMPARED
        pieces = tl.reshape(order, [PIECES, _COMPARED])
        place = tl.zeros([E2], tl.int32)
        for piece in tl.static_range(PIECES):
            rival = tl.sum(tl.where((tl.arange(0, PIECES) == piece)[:, None], pieces, 0), axis=0)
            place += tl.sum((rival[None, :] > order[:, None]).to(tl.int32), axis=1)
    chosen = (place < TOP_K) & (e < E)
    # Finite even where no logit is a number, so that padding stays without weight.
    largest = tl.maximum(tl.max(tl.where(logits == logits, logits, float("-inf"))), -3e38)
    weight = tl.where(e < E, tl.exp(logits - largest), 0.0)
    if RENORMALIZE:
        # What is not a number counts even where it was not chosen, as it does for a softmax over all.
        weight = weight / tl.sum(tl.where(chosen | (weight != weight), weight, 0.0))
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
):
    token = tl.program_id(0)
    e = tl.arange(0, E2)
    follow()
    logits = tl.zeros([E2], tl.float32)
    for part in tl.static_range(PARTS):
        at = parts_ptr + (part * tokens + token) * E + e
        logits += tl.load(at, mask=e < E, other=0.0).to(tl.float32)
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
    record: Record | None = None,
    out: Routing | None = None,
    deterministic: bool = False,
) -> Routing:
    """Choose experts for the normalised `x_TH`.

    Weights are those of a softmax over all experts (OLMoE), or add up to 1 if `renormalize` (Qwen3-MoE with
    `norm_topk_prob`, Mixtral). `deterministic` adds a logit's products in one order whatever the number of tokens,
    where `linear_config` has a configuration for such a router.
    """
    experts, hidden = router_EH.shape
    config = linear_config(experts, hidden, "parts", len(x_TH), deterministic)
    parts_STE = F.linear(x_TH, router_EH)[None] if config is None else linear_parts(x_TH, router_EH, config)
    return moe_choose(parts_STE, x_TH.dtype, top_k, renormalize, record, out)


def moe_choose(
    parts_STE: torch.Tensor,
    dtype: torch.dtype,
    top_k: int,
    renormalize: bool,
    record: Record | None = None,
    out: Routing | None = None,
) -> Routing:
    """The same from logits in parts, which are added up and rounded to `dtype`; the twin of `rollout_kernels.route`."""
    parts, tokens, experts = parts_STE.shape
    assert parts_STE.is_contiguous() and 0 < top_k <= experts
    out = routing_outputs(tokens, top_k, parts_STE.device, out)
    kept, slots, stride = record_arguments(record, experts)
    _choose_kernel[(tokens,)](
        parts_STE,
        out.experts_TK,
        out.weights_TK,
        kept,
        slots,
        tokens,
        stride,
        E=experts,
        E2=places(experts),
        TOP_K=top_k,
        PARTS=parts,
        DTYPE=TRITON_DTYPES[dtype],
        RENORMALIZE=renormalize,
        RECORD=record is not None,
        num_warps=8 if experts > 256 else 4,
        **follow_options(parts_STE.device),
    )
    return out


def places(experts: int) -> int:
    """Length of the vectors that programs keep experts in."""
    return max(_FEWEST, triton.next_power_of_2(experts))
