"""The experts of each token that a rank keeps, for kernels that run K experts of each token.

The router's choice is among the experts of all ranks. Another rank's choice is replaced by an expert of this rank with
weight 0: one of the token's own choices, or the first expert. It adds nothing, and hardly any weights are read for it.
Every rank has its part of shared experts, which come after the routed experts.

Legend: T tokens, K experts a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_kernels.common.triton_math import follow, follow_options
from rollout_kernels.moe.triton_router import Routing


@triton.jit
def _keep_kernel(
    experts_ptr, weights_ptr, kept_ptr, kept_weights_ptr, first, count, experts, K: tl.constexpr, BLOCK_K: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    live = k < K
    follow()
    expert = tl.load(experts_ptr + token * K + k, mask=live, other=-1)
    weight = tl.load(weights_ptr + token * K + k, mask=live, other=0.0)
    shared = expert >= experts
    kept = live & (shared | ((expert >= first) & (expert < first + count)))
    expert = tl.where(shared, expert - experts + count, expert - first)
    other = tl.max(tl.where(kept, expert, 0))
    tl.store(kept_ptr + token * K + k, tl.where(kept, expert, other), mask=live)
    tl.store(kept_weights_ptr + token * K + k, tl.where(kept, weight, 0.0), mask=live)


def keep_experts(routing: Routing, first: int, count: int, experts: int) -> Routing:
    """The routing among the experts `first` .. `first + count - 1`, which become 0 .. `count - 1`.

    Shared experts, from `experts` on, follow from `count` on.
    """
    experts_TK, weights_TK = routing.experts_TK, routing.weights_TK
    tokens, top_k = experts_TK.shape
    assert experts_TK.is_contiguous() and weights_TK.is_contiguous()
    kept = Routing(torch.empty_like(experts_TK), torch.empty_like(weights_TK))
    if tokens:
        _keep_kernel[(tokens,)](
            experts_TK, weights_TK, kept.experts_TK, kept.weights_TK, first, count, experts,
            K=top_k, BLOCK_K=triton.next_power_of_2(top_k), num_warps=1, **follow_options(experts_TK.device),
        )  # fmt: skip
    return kept
