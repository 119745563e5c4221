"""Products of any number of tokens with weights of any format: what runs where no kernel was chosen for a product.

Modules with kernels are imported where they are used, so a machine without Triton can run the rest.

Legend: N outputs, K inputs, M tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rollout_kernels.common.device import is_hopper
from rollout_kernels.linear.coded import CodedMatrix, CodedRows, Weights, rounded_rows


def dense(weights: Weights, dtype: torch.dtype) -> torch.Tensor:
    """The weights [N, K] in `dtype`: as they are, or made from codes into memory of their own."""
    if isinstance(weights, torch.Tensor):
        return weights
    if weights.codes_NK.is_cuda:
        from rollout_kernels.linear.triton_decode_codes import decode_codes

        return decode_codes(weights, dtype)
    return weights.dequantized(dtype)


def product(x_MK: torch.Tensor, weights: Weights, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ w.T + bias`, [M, N]: by torch, or of few tokens and codes on a GPU by a kernel that reads the codes."""
    by_kernel = _by_kernel(x_MK, weights)
    if by_kernel is None:
        return F.linear(x_MK, dense(weights, x_MK.dtype), bias)
    return by_kernel if bias is None else by_kernel + bias


def product_of_codes(x_MK: torch.Tensor | CodedRows, weights: CodedMatrix) -> torch.Tensor:
    """`x @ w.T`, [M, N], with activations rounded to codes: of many tokens. `weights.takes_codes` must be true.

    On Hopper the tensor cores multiply codes, by cuBLAS or by our own kernel; elsewhere torch multiplies their values.
    """
    if isinstance(x_MK, CodedRows):
        from rollout_kernels.linear.triton_code_rows import scaled_product

        return scaled_product(x_MK, weights)
    if not is_hopper(x_MK.device) or x_MK.dtype == torch.float32:
        return F.linear(rounded_rows(x_MK), dense(weights, x_MK.dtype))
    if cublas_takes_codes(x_MK.device, x_MK.dtype, weights.inputs):
        from rollout_kernels.linear.triton_code_rows import code_rows, scaled_product

        return scaled_product(code_rows(x_MK), weights)
    from rollout_kernels.linear.triton_linear import LinearConfig, linear

    return linear(x_MK, weights, LinearConfig(128, 128, 1, 8, 6, 132, streamed=True, codes=True))


def cublas_takes_codes(device: torch.device, dtype: torch.dtype, inputs: int) -> bool:
    """Whether cuBLAS multiplies rows of `inputs` codes (`CodedRows`) with codes of blocks, with results in `dtype`."""
    return is_hopper(device) and dtype == torch.bfloat16 and inputs % 512 == 0


def add_product(
    residual_MN: torch.Tensor, x_MK: torch.Tensor, weights: Weights, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`residual_MN` plus `product`, in one operation of torch where there is no bias."""
    if bias is not None:
        return residual_MN + product(x_MK, weights, bias)
    by_kernel = _by_kernel(x_MK, weights)
    if by_kernel is None:
        return torch.addmm(residual_MN, x_MK, dense(weights, x_MK.dtype).t())
    return residual_MN + by_kernel


def _by_kernel(x_MK: torch.Tensor, weights: Weights) -> torch.Tensor | None:
    if isinstance(weights, torch.Tensor) or not x_MK.is_cuda or x_MK.dtype == torch.float32:
        return None
    from rollout_kernels.linear.table import linear_config
    from rollout_kernels.linear.triton_linear import linear

    outputs, inputs = weights.codes_NK.shape
    config = linear_config(outputs, inputs, "whole", len(x_MK), format=weights.format)
    return linear(x_MK, weights, config) if config is not None and weights.kernels_take(x_MK.dtype) else None
