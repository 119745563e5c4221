"""Mixture of experts: the router, and the experts of the tokens that chose them.

Legend: T tokens, E experts, K experts a token, H hidden, I intermediate of one expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rollout_kernels.norm_rope.elementwise import silu_mul


def route(logits_TE: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts: softmax in float32, then the `top_k` likeliest; of equal ones the lower index.

    Returns float32 weights_TK (summing to 1 a token if `renormalize`) and int64 experts_TK, likeliest first.
    """
    probs_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
    # topk leaves the order of equal values open; a stable sort does not.
    sorted_TE, order_TE = torch.sort(probs_TE, dim=-1, descending=True, stable=True)
    weights_TK, experts_TK = sorted_TE[:, :top_k], order_TE[:, :top_k]
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return weights_TK, experts_TK


def moe_experts(
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor,
    experts_TK: torch.Tensor,
    gate_up_EGH: torch.Tensor,
    down_EHI: torch.Tensor,
) -> torch.Tensor:
    """Weighted sum of each token's experts, [T, H] in x's dtype; summed in float32.

    `gate_up_EGH` is [E, 2 I, H], gate rows first. Only experts that a token chose are read. This torch path asks the
    device for the number of tokens of each expert, so it waits for the device once a call.
    """
    tokens, top_k = experts_TK.shape
    flat = experts_TK.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=gate_up_EGH.shape[0]).tolist()
    sorted_x = x_TH.index_select(0, order // top_k)
    sorted_y = torch.empty_like(sorted_x)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            hidden = silu_mul(F.linear(sorted_x[start : start + count], gate_up_EGH[expert]))
            sorted_y[start : start + count] = F.linear(hidden, down_EHI[expert])
            start += count
    y_NH = torch.empty_like(sorted_y)
    y_NH[order] = sorted_y
    y_TKH = y_NH.view(tokens, top_k, -1)
    return torch.einsum("tkh,tk->th", y_TKH.float(), weights_TK).to(x_TH.dtype)
