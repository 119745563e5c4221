"""Mixture of experts.

    reference               the router and the experts in torch: the CPU path, and the twins of the kernels
    formats                 how the weights of experts are stored
    quantize                codes and scales from weights, in torch; `triton_quantize`: the same on a GPU
    triton_router           the choice of experts on a GPU; `triton_norm_router`: fused with the norm before it
    triton_scored_router    the same for routers with sigmoids, biases, groups
    dispatch                the layer on a GPU: which kernels it uses, with which configuration (`table.json`)
    triton_warp_experts     experts for few tokens: one warp for each output
    triton_group_pairs      tokens sorted by the expert that they chose
    triton_grouped_experts  experts for many tokens: tiles of tokens that share an expert
    triton_padded_groups    the same with rows of their own, which the copy engine loads and stores
    gluon_experts           16-bit experts for very many tokens, on Hopper

The Triton modules are imported where they are used, so a machine without Triton can run the twins.
"""

from rollout_kernels.moe.formats import ExpertWeights
from rollout_kernels.moe.torch_moe import clamped_glu, moe_experts, route

__all__ = ["ExpertWeights", "clamped_glu", "moe_experts", "route"]
