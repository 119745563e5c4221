"""Our experts in transformers' interface for experts.

transformers keeps the experts of a layer as two stacked tensors and calls the function that the config names. Our
kernels run experts of the form that they know: SiLU on the gate, no biases, gate rows first. Other experts run as in
transformers: on a GPU by its grouped product, which reads nothing on the host; on a CPU, where the product refuses some
widths, in turn.

Legend: T tokens, K experts a token, H hidden, E experts, I intermediate.
"""

from typing import Any

import torch
from rollout_kernels import moe_experts
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

EXPERTS = "rollout_experts"
#: The grouped product wants rows of a multiple of so many bytes.
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
    """True if our kernels can run these experts."""
    layout = module.has_gate and module.is_concatenated and not module.is_transposed
    extras = module.has_bias or getattr(module, "has_post_expert_norm", False)  # older releases have no such norm
    own_gate = type(module)._apply_gate.__module__ != ExpertsInterface.__module__
    return layout and not extras and not own_gate and isinstance(module.act_fn, (nn.SiLU, type(ACT2FN["silu"])))


def _plain(module: Any, x_TH: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    gate_up_EGH, down_EHI = module.gate_up_proj.data, module.down_proj.data
    if x_TH.is_cuda and kernels_take(module):
        return by_kernels(x_TH, weights_TK, experts_TK, gate_up_EGH, down_EHI)
    return moe_experts(x_TH, weights_TK.float(), experts_TK.long(), gate_up_EGH, down_EHI)


def kernels_take(module: Any) -> bool:
    """True if the kernels run these experts on a GPU: 16 bits, and even widths."""
    down_EHI = module.down_proj
    even = down_EHI.shape[1] % 2 == 0 and down_EHI.shape[2] % 2 == 0
    return is_plain(module) and even and down_EHI.dtype in (torch.bfloat16, torch.float16)


def by_kernels(
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor,
    experts_TK: torch.Tensor,
    gate_up_EGH: torch.Tensor,
    down_EHI: torch.Tensor,
) -> torch.Tensor:
    """The result of `moe_experts`, by the kernels; nothing is read on the host."""
    from rollout_kernels.moe import dispatch
    from rollout_kernels.moe.formats import ExpertWeights
    from rollout_kernels.moe.triton_router import Routing

    plan = dispatch.moe_plan(_shape(gate_up_EGH, experts_TK.shape[1]), "plain", x_TH.dtype, len(x_TH))
    routing = Routing(experts_TK.int().contiguous(), weights_TK.float().contiguous())
    return dispatch.run_experts(
        x_TH.contiguous(), routing, ExpertWeights(gate_up_EGH, halves=2), ExpertWeights(down_EHI), plan
    )


def kernel_sizes(module: Any, top_k: int) -> set[int]:
    """Numbers of tokens up to which these experts run by the same kernels; none if no kernels run them."""
    if not kernels_take(module):
        return set()
    from rollout_kernels.moe.dispatch import table_entry
    from rollout_kernels.moe.triton_group_pairs import last_pairs

    bands = [most for most, _ in table_entry(_shape(module.gate_up_proj, top_k), "plain").bands[:-1]]
    return {*bands, *(pairs // top_k for pairs in last_pairs())} - {0}


def _shape(gate_up_EGH: torch.Tensor, top_k: int) -> Any:
    from rollout_kernels.moe.dispatch import MoEShape

    experts, outputs, hidden = gate_up_EGH.shape
    return MoEShape(experts, top_k, hidden, outputs // 2)


def _rows_are_aligned(module: Any) -> bool:
    wide = module.gate_up_proj if module.has_gate else module.up_proj
    return all(weight.shape[-1] * weight.element_size() % _ROW_BYTES == 0 for weight in (wide, module.down_proj))


ExpertsInterface.register(EXPERTS, run_experts)
