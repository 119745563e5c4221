"""Our experts behind transformers' interface for experts.

transformers keeps the experts of a layer as two stacked tensors and calls the function that the config names. Where the
experts are those that our kernels know (SiLU on the gate, no biases, gate rows first), these run them. Others run as
transformers runs them: on a GPU by its grouped product, which reads nothing on the host; on a CPU, where that product
refuses some widths, one expert after the other.

Legend: T tokens, K experts a token, H hidden, E experts, I intermediate.
"""

from __future__ import annotations

from typing import Any

import torch
from rollout_kernels import moe_experts
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

EXPERTS = "rollout_experts"
#: The grouped product wants rows whose length is a multiple of this, bytes.
_ROW_BYTES = 16


def run_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of each token's experts, [T, H]."""
    if is_plain(module):
        return _plain(module, hidden_states, top_k_index, top_k_weights)
    if hidden_states.is_cuda and _rows_are_aligned(module):
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden_states, top_k_index, top_k_weights)
    return type(module).forward.__wrapped__(module, hidden_states, top_k_index, top_k_weights)


def is_plain(module: Any) -> bool:
    """True if the experts are those that our kernels know."""
    layout = module.has_gate and module.is_concatenated and not module.is_transposed
    extras = module.has_bias or getattr(module, "has_post_expert_norm", False) or module._is_expert_parallel
    own_gate = type(module)._apply_gate.__module__ != ExpertsInterface.__module__
    return layout and not extras and not own_gate and isinstance(module.act_fn, (nn.SiLU, type(ACT2FN["silu"])))


def _plain(module: Any, x_TH: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    gate_up_EGH, down_EHI = module.gate_up_proj, module.down_proj
    even = x_TH.shape[1] % 2 == 0 and down_EHI.shape[2] % 2 == 0
    if not (x_TH.is_cuda and x_TH.dtype in (torch.bfloat16, torch.float16) and even):
        return moe_experts(x_TH, weights_TK.float(), experts_TK.long(), gate_up_EGH, down_EHI)
    from rollout_kernels.moe.dispatch import MoEShape, moe_plan
    from rollout_kernels.moe.dispatch import run_experts as by_kernels
    from rollout_kernels.moe.formats import ExpertWeights
    from rollout_kernels.moe.triton_router import Routing

    shape = MoEShape(len(gate_up_EGH), experts_TK.shape[1], x_TH.shape[1], down_EHI.shape[2])
    plan = moe_plan(shape, "plain", x_TH.dtype, len(x_TH))
    routing = Routing(experts_TK.int().contiguous(), weights_TK.float().contiguous())
    gate_up, down = ExpertWeights(gate_up_EGH.data, halves=2), ExpertWeights(down_EHI.data)
    return by_kernels(x_TH.contiguous(), routing, gate_up, down, plan)


def _rows_are_aligned(module: Any) -> bool:
    wide = module.gate_up_proj if module.has_gate else module.up_proj
    return all(weight.shape[-1] * weight.element_size() % _ROW_BYTES == 0 for weight in (wide, module.down_proj))


ExpertsInterface.register(EXPERTS, run_experts)
