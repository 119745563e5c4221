"""Routers with more rules than a softmax, on a GPU: from logits to experts and weights in one launch.

The scores of a token's experts are the sigmoids or the softmax of its logits. Experts are chosen by their scores with a
bias for the choice, and from a few groups of neighbours if there are groups; the weights are the scores alone,
perhaps divided by their sum, times a factor. Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.1.2), gpt-oss.

The order of equal choices, NaN, the record and shared experts are as in `triton_router`. A token does not depend on
the other tokens. Legend: T tokens, S parts, E experts, K experts a token, G groups.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl

from rollout_kernels.common.triton_math import TRITON_DTYPES, follow, follow_options, narrow
from rollout_kernels.moe.formats import NO_SHARED, Shared
from rollout_kernels.moe.triton_router import (
    Outputs,
    Record,
    Routing,
    choice_of,
    count_earlier,
    order_of,
    output_arguments,
    padded_experts,
    routing_outputs,
    softmax_terms,
    store_choices,
    sum_logits,
    sum_of_chosen,
    warps_of,
)

#: Added to the sum by which weights are divided.
_SUM_EPS = tl.constexpr(1e-20)


class ScoreRule(NamedTuple):
    """The rule that makes a choice from scores; for the fields see `rollout.models.spec.RouterSpec`."""

    scoring: Literal["softmax", "sigmoid", "sqrtsoftplus"]
    top_k: int
    renormalize: bool
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    scale: float = 1.0
    least_sum: float = 0.0

    def takes(self, experts: int) -> bool:
        """True if the kernel has this rule for this number of experts: groups must be powers of two."""
        if self.scoring == "sqrtsoftplus":
            return False
        if self.groups == 1:
            return True
        size = experts // self.groups
        even = experts == padded_experts(experts) and self.groups & (self.groups - 1) == 0
        return even and self.group_best in (1, 2) and size >= 2


@triton.jit
def _in_best_groups(
    choice, e, E2: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr
):
    """`choice` [E2], with -inf for experts outside of the groups with the largest sums of their best choices."""
    SIZE: tl.constexpr = E2 // GROUPS
    choice_GE = tl.reshape(choice, [GROUPS, SIZE])
    order_GE = tl.reshape(order_of(choice, e, E2, False), [GROUPS, SIZE])
    first_G = tl.max(order_GE, 1)
    sums_G = tl.sum(tl.where(order_GE == first_G[:, None], choice_GE, 0.0), 1)
    if GROUP_BEST == 2:
        rest_GE = tl.where(order_GE == first_G[:, None], -(2**63), order_GE)
        second_G = tl.max(rest_GE, 1)
        sums_G += tl.sum(tl.where(rest_GE == second_G[:, None], choice_GE, 0.0), 1)
    g = tl.arange(0, GROUPS)
    order_G = order_of(sums_G, g, GROUPS, False)
    place_G = tl.sum((order_G[None, :] > order_G[:, None]).to(tl.int32), axis=1)
    return tl.reshape(tl.where((place_G < TOP_GROUPS)[:, None], choice_GE, float("-inf")), [E2])


@triton.jit(do_not_specialize=["tokens", "record_stride", "least_sum"])
def _choose_scored_kernel(
    parts_ptr, logit_bias_ptr, score_bias_ptr, experts_ptr, weights_ptr, record_ptr, slots_ptr,
    tokens,
    record_stride,
    scale, least_sum,
    CHOICE: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr, SIGMOID: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    E2: tl.constexpr = CHOICE.E2
    e = tl.arange(0, E2)
    live = e < CHOICE.E
    follow()
    logits, gate = sum_logits(parts_ptr, token, tokens, e, PARTS, CHOICE)
    logits = narrow(logits, DTYPE).to(tl.float32)
    if logit_bias_ptr is not None:
        bias = tl.load(logit_bias_ptr + e, mask=live, other=0.0).to(tl.float32)
        logits = narrow(logits + bias, DTYPE).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        terms = softmax_terms(tl.where(live, logits, float("-inf")), live)
        scores = terms / tl.sum(terms)
    choice = scores
    if score_bias_ptr is not None:
        choice += tl.load(score_bias_ptr + e, mask=live, other=0.0)
    choice = tl.where(live, choice, float("-inf"))
    if GROUPS > 1:
        choice = _in_best_groups(choice, e, E2, GROUPS, TOP_GROUPS, GROUP_BEST)
    if not SIGMOID and score_bias_ptr is None and GROUPS == 1:
        choice = tl.where(live, logits, float("-inf"))  # in the order of the scores, which may round to equal ones
    earlier = count_earlier(order_of(choice, e, E2, False), E2)
    chosen = (earlier < CHOICE.TOP_K) & live
    weight = tl.where(live, scores, 0.0)
    if CHOICE.RENORMALIZE:
        weight = weight / (tl.maximum(sum_of_chosen(weight, chosen), least_sum) + _SUM_EPS)
    weight *= scale
    to = Outputs(experts_ptr, weights_ptr, record_ptr, slots_ptr, record_stride)
    store_choices(token, e, earlier, chosen, weight, narrow(gate, DTYPE).to(tl.float32), to, CHOICE)


def choose_scored(
    parts_STE: torch.Tensor,
    dtype: torch.dtype,
    rule: ScoreRule,
    *,
    logit_bias_E: torch.Tensor | None = None,
    score_bias_E: torch.Tensor | None = None,
    record: Record | None = None,
    shared: Shared = NO_SHARED,
) -> Routing:
    """Choose experts by a rule that takes this number of experts.

    The twins are `ROUTES` of `rollout.models.layers`.

    Args:
        parts_STE: partial sums of logits, from `router_logits`; of gated shared experts the last logit is their gate's.
        dtype: the sums, and sums with the bias, are rounded to it.
        rule: how experts are chosen and weighted.
        logit_bias_E: added to the logits.
        score_bias_E: float32, added to the scores for the choice alone.
        record: where to record the experts for replay, or None.
        shared: as for `moe_route`.
    """
    parts, tokens, logits = parts_STE.shape
    choice = choice_of(logits, rule.top_k, rule.renormalize, record, shared)
    assert parts_STE.is_contiguous() and rule.takes(choice.E)
    assert score_bias_E is None or score_bias_E.dtype == torch.float32
    out = routing_outputs(tokens, choice, parts_STE.device)
    _choose_scored_kernel[(tokens,)](
        parts_STE, logit_bias_E, score_bias_E, *output_arguments(out, record, tokens), rule.scale, rule.least_sum,
        CHOICE=choice, PARTS=parts, DTYPE=TRITON_DTYPES[dtype], SIGMOID=rule.scoring == "sigmoid", GROUPS=rule.groups,
        TOP_GROUPS=rule.top_groups, GROUP_BEST=rule.group_best, num_warps=warps_of(choice),
        **follow_options(parts_STE.device),
    )  # fmt: skip
    return out
