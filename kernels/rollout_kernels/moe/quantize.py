"""Codes and scales from weights, in torch: the twins of `triton_quantize`, equal to it bit for bit.

Scales are the smallest that hold the largest value: amax / 448 (448 is the largest e4m3 value), for `mxfp8` the next
power of two. Where everything is zero a scale is 1, for `mxfp8` 2^-126. Rounding is to nearest even. What is not finite
is not refused: products with its row are not finite either, for `mxfp8` by a scale that is not a number.

Legend: E experts, N outputs, K inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rollout_kernels.common.fp8 import LARGEST, codes_of
from rollout_kernels.moe.formats import BLOCK, GROUP, ExpertWeights, Format

#: Bytes of weights that are on the device at once, while they are quantised, if an expert is not larger.
_PIECE_BYTES = 64 << 20


def quantize(w_ENK: torch.Tensor, format: Format, halves: int = 1) -> ExpertWeights:
    """Weights of experts (bf16, f16 or float32) in `format`; `halves` is 2 for gate rows followed by up rows.

    Weights that a format can hold come back exactly: for `mxfp8`, what was dequantised from it; for the others, codes
    times a power of two.
    """
    if format == "plain":
        return ExpertWeights(w_ENK, None, format, halves)
    w = w_ENK.float()
    if format == "fp8_row":
        scales = _scale(w.abs().amax(dim=2))
        codes = codes_of(w / scales[:, :, None])
    elif format == "mxfp8":
        groups = w.unflatten(2, (-1, GROUP))
        amax = groups.abs().amax(dim=3)
        exponents = power_code(amax)
        scales = torch.where(amax.isfinite(), exponents, 255).to(torch.uint8)
        # Exact: a power of two.
        codes = codes_of((groups * ((254 - exponents) << 23).view(torch.float32)[..., None]).flatten(2))
    else:
        codes, scales = _quantize_blocks(w, halves)
    return ExpertWeights(codes, scales, format, halves)


def quantize_to(w_ENK: torch.Tensor, out: ExpertWeights, non_blocking: bool = False) -> None:
    """Write the codes and scales of weights, wherever they lie, to `out`, which may be a `part` of larger ones.

    On a GPU whole experts are copied there and quantised, some at a time, so that little memory is needed beside. What
    is enqueued reads `w_ENK` until the current stream has run it, if `non_blocking` and it lies in pinned memory.
    """
    assert out.scales is not None and w_ENK.shape == out.values_ENK.shape
    if w_ENK.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        w_ENK = w_ENK.float()
    device = out.values_ENK.device
    if device.type != "cuda":
        made = quantize(w_ENK, out.format, out.halves)
        out.values_ENK.copy_(made.values_ENK)
        assert made.scales is not None
        out.scales.copy_(made.scales)
        return
    from rollout_kernels.moe.triton_quantize import quantize_in_pieces

    at_once = max(1, _PIECE_BYTES // (w_ENK[0].numel() * w_ENK.element_size()))
    quantize_in_pieces(w_ENK, out, at_once, non_blocking)


def power_code(amax: torch.Tensor) -> torch.Tensor:
    """The e8m0 code (int32) of the smallest power of two that, times 448, is at least `amax`; 1 or more."""
    bits = amax.contiguous().view(torch.int32)
    # 448 = 1.75 * 2^8: the exponent less 8, and one more if the mantissa is over 1.75.
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
    # A tensor as divisor: on a GPU torch multiplies by the reciprocal of a number.
    return torch.where(amax == 0, 1.0, amax / torch.full_like(amax, LARGEST))
