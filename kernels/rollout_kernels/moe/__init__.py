"""Mixture of experts.

    reference        torch twins: the router, and the experts as a loop
    formats          how weights are stored
    quantize         codes and scales from weights: torch twins; `triton_quantize`: on the device
    triton_router    logits, softmax, top-k in one kernel
    triton_warp      experts for few tokens, organised by output
    triton_grouping  which tokens chose which expert
    triton_grouped   experts for many tokens, organised by expert
    triton_tiles     a tile of weights as the tensor cores take it
    triton_half      activations in f16, for products with codes
    dispatch         which of the two, and how it is cut up, from a measured table

The Triton modules are imported where they are used, so that a machine without Triton can run the twins.
"""

from rollout_kernels.moe.formats import ExpertWeights
from rollout_kernels.moe.reference import moe_experts, route

__all__ = ["ExpertWeights", "moe_experts", "route"]
