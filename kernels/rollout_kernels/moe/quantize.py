"""Codes and scales from weights, in torch: the twins of `triton_quantize`, equal bit for bit.

A scale is the smallest one that can represent the largest magnitude: amax / 448 (448 is the largest e4m3 value), for
`mxfp8` the next power of two. If all values are zero, the scale is 1, for `mxfp8` 2^-126. Codes are rounded to nearest
even. Weights that are not finite raise no error: products with their row are not finite either (for `mxfp8` because the
scale is NaN).

Legend: E experts, N outputs, K inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rollout_kernels.common.fp8 import LARGEST, codes_of
from rollout_kernels.moe.formats import BLOCK, GROUP, ExpertWeights, Format

#: Bytes of unquantised weights on the device at once; more only if one expert is larger.
_PIECE_BYTES = 64 << 20


def quantize(w_ENK: torch.Tensor, format: Format, halves: int = 1) -> ExpertWeights:
    """Weights of experts (bf16, f16 or float32) in `format`; `halves` is 2 for gate rows followed by up rows.

    Weights that a format can represent are stored exactly: for `mxfp8` all weights that were dequantised from it; for
    the other formats, codes times a power of two.
    """
    if format == "plain":
        return ExpertWeights(w_ENK, None, format, halves)
    float_ENK = w_ENK.float()
    if format == "fp8_row":
        scales = _scale(float_ENK.abs().amax(dim=2))
        codes = codes_of(float_ENK / scales[:, :, None])
    elif format == "mxfp8":
        groups = float_ENK.unflatten(2, (-1, GROUP))
        amax = groups.abs().amax(dim=3)
        exponents = power_code(amax)
        scales = torch.where(amax.isfinite(), exponents, 255).to(torch.uint8)
        # The factor is a power of two, so this product is exact.
        codes = codes_of((groups * ((254 - exponents) << 23).view(torch.float32)[..., None]).flatten(2))
    else:
        codes, scales = _quantize_blocks(float_ENK, halves)
    return ExpertWeights(codes, scales, format, halves)


def quantize_to(w_ENK: torch.Tensor, out: ExpertWeights, non_blocking: bool = False) -> None:
    """Write the codes and scales of weights on any device to `out`, which may be a `part` of larger weights.

    If `out` is on a GPU, whole experts are copied there and quantised, a few at a time, so little extra memory is
    needed. With `non_blocking` and pinned memory, do not change `w_ENK` before the current stream has run the copies.
    """
    assert out.scales is not None and w_ENK.shape == out.values_ENK.shape
    if w_ENK.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        w_ENK = w_ENK.float()
    device = out.values_ENK.device
    if device.type != "cuda":
        made = quantize(w_ENK.contiguous(), out.format, out.halves)
        out.values_ENK.copy_(made.values_ENK)
        assert made.scales is not None
        out.scales.copy_(made.scales)
        return
    from rollout_kernels.moe.triton_quantize import quantize_in_pieces

    at_once = max(1, _PIECE_BYTES // (w_ENK[0].numel() * w_ENK.element_size()))
    quantize_in_pieces(w_ENK, out, at_once, non_blocking)


def power_code(amax: torch.Tensor) -> torch.Tensor:
    """The e8m0 code (int32, at least 1) of the smallest power of two that, times 448, is at least `amax`."""
    bits = amax.contiguous().view(torch.int32)
    # 448 = 1.75 * 2^8: the exponent minus 8, plus 1 if the mantissa is above 1.75.
    return ((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000)).clamp(min=1).to(torch.int32)


def _quantize_blocks(w: torch.Tensor, halves: int) -> tuple[torch.Tensor, torch.Tensor]:
    experts, outputs, inputs = w.shape
    w = w.reshape(experts * halves, outputs // halves, inputs)
    padded = F.pad(w, (0, -inputs % BLOCK, 0, -w.shape[1] % BLOCK))
    blocks = padded.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    scales = _scale(blocks.abs().amax(dim=(2, 4)))
    codes = codes_of(blocks / scales[:, :, None, :, None]).flatten(3, 4).flatten(1, 2)
    codes = codes[:, : w.shape[1], :inputs].reshape(experts, outputs, inputs)
    return codes.contiguous(), scales.view(experts, -1, scales.shape[2])


def _scale(amax: torch.Tensor) -> torch.Tensor:
    # The divisor is a tensor: on a GPU, torch replaces division by a Python number with a product by its reciprocal.
    return torch.where(amax == 0, 1.0, amax / torch.full_like(amax, LARGEST))
