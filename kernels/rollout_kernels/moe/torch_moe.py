"""The router and the experts in torch: the CPU path, and the twins of `triton_router` and `dispatch.run_experts`.

Legend: T tokens, E experts, K experts a token, P = T K pairs of token and expert, H hidden, I intermediate of one
expert, G = 2 I.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from rollout_kernels.norm_rope.elementwise import clamped, silu_mul


def route(logits_TE: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts: softmax in float32, then the `top_k` most likely; of equal ones the lower index.

    Returns float32 weights [T, K] (of sum 1 for each token if `renormalize`) and int64 experts [T, K], the most likely
    first.
    """
    probs_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
    # torch.topk does not define the order of equal values; a stable sort does.
    sorted_TE, order_TE = torch.sort(probs_TE, dim=-1, descending=True, stable=True)
    weights_TK, experts_TK = sorted_TE[:, :top_k], order_TE[:, :top_k]
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return weights_TK, experts_TK


def clamped_glu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """`clamped` for `gate_up` [..., 2 I], where gates and values alternate; returns [..., I]."""
    gate, up = gate_up.unflatten(-1, (-1, 2)).unbind(-1)
    return clamped(gate, up, alpha, limit)


def moe_experts(
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor,
    experts_TK: torch.Tensor,
    gate_up_EGH: torch.Tensor,
    down_EHI: torch.Tensor,
    activation: Callable[[torch.Tensor], torch.Tensor] = silu_mul,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    adds_bias: bool = True,
) -> torch.Tensor:
    """Weighted sum of each token's experts, [T, H] in x's dtype; summed in float32.

    Only experts that a token chose are read. Each call waits for the device once, for the number of tokens of each
    expert.

    Args:
        x_TH: the layer's input.
        weights_TK: float32 weight of each token's experts.
        experts_TK: int64; others than 0 .. E - 1 add nothing.
        gate_up_EGH: [E, 2 I, H], gate rows first.
        down_EHI: the down projections.
        activation: from [..., 2 I] to [..., I].
        biases: of both projections, [E, 2 I] and [E, H], or None.
        adds_bias: whether the bias of the down projection is added.
    """
    (tokens, top_k), experts = experts_TK.shape, gate_up_EGH.shape[0]
    experts_P = experts_TK.reshape(-1)
    experts_P = torch.where((experts_P < 0) | (experts_P > experts), experts, experts_P)
    order_P = torch.argsort(experts_P, stable=True)
    counts = torch.bincount(experts_P, minlength=experts + 1).tolist()
    sorted_x_PH = x_TH.index_select(0, order_P // top_k)
    sorted_y_PH = torch.empty_like(sorted_x_PH)
    start = 0
    for expert, count in enumerate(counts[:experts]):
        if count:
            bias_G, bias_H = (None, None) if biases is None else (bias[expert] for bias in biases)
            bias_H = bias_H if adds_bias else None
            hidden = activation(F.linear(sorted_x_PH[start : start + count], gate_up_EGH[expert], bias_G))
            sorted_y_PH[start : start + count] = F.linear(hidden, down_EHI[expert], bias_H)
            start += count
    sorted_y_PH[start:] = 0.0
    y_PH = torch.empty_like(sorted_y_PH)
    y_PH[order_P] = sorted_y_PH
    y_TKH = y_PH.view(tokens, top_k, -1)
    return torch.einsum("tkh,tk->th", y_TKH.float(), weights_TK).to(x_TH.dtype)
