"""Formats of the weights of experts: in 16 bits, or as e4m3 codes with scales.

    plain      bf16 or f16
    fp8_row    e4m3 codes, one float32 scale for each output row
    fp8_block  e4m3 codes, one float32 scale for each block of 128 x 128
    mxfp8      e4m3 codes, one e8m0 scale (a power of two; 255 is NaN) for 32 codes along K

Codes and e8m0 scales are stored as uint8. In a fused gate/up projection, the blocks of `fp8_block` start anew in each
half.

Legend: E experts, N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch

Format = Literal["plain", "fp8_row", "fp8_block", "mxfp8"]
FORMATS: tuple[Format, ...] = get_args(Format)
#: Rows and columns of a block of `fp8_block`.
BLOCK = 128
#: Codes along K that share one scale of `mxfp8`.
GROUP = 32
#: Rows and columns of weights that share a scale; None: all columns.
SCALE_BLOCKS: dict[Format, tuple[int, int | None]] = {
    "fp8_row": (1, None),
    "fp8_block": (BLOCK, BLOCK),
    "mxfp8": (1, GROUP),
}


def scale_dtype(format: Format) -> torch.dtype:
    """The dtype of a format's scales; e8m0 is stored as uint8."""
    return torch.uint8 if format == "mxfp8" else torch.float32


def scale_shape(experts: int, outputs: int, inputs: int, format: Format, halves: int) -> tuple[int, ...] | None:
    """Shape of the scales, or None for `plain`; `halves` is 2 for a fused gate/up projection."""
    if format == "plain":
        return None
    if format == "fp8_row":
        return experts, outputs
    if format == "mxfp8":
        return experts, outputs, inputs // GROUP
    if format != "fp8_block":
        raise ValueError(f"{format!r} is no format of experts: {', '.join(FORMATS)}")
    return experts, halves * -(-(outputs // halves) // BLOCK), -(-inputs // BLOCK)


class Shared(NamedTuple):
    """Shared experts, which every token takes: how many follow the routed experts, and whether a logit gates them."""

    experts: int = 0
    gated: bool = False


#: No shared experts are stored with the others.
NO_SHARED = Shared()


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One projection of all experts.

    `values_ENK` is contiguous: bf16 or f16 if `plain`, else e4m3 codes as uint8. `scales` has the shape that
    `scale_shape` returns, in float32 (`mxfp8`: uint8); it is None if `plain`. `halves` is 2 for gate rows followed by
    up rows. Raises ValueError if shapes, dtypes and format do not fit together.
    """

    values_ENK: torch.Tensor
    scales: torch.Tensor | None = None
    format: Format = "plain"
    halves: int = 1

    def __post_init__(self) -> None:
        experts, outputs, inputs = self.values_ENK.shape
        if outputs % self.halves:
            raise ValueError(f"{outputs} output rows don't divide into {self.halves} halves")
        sixteen = self.values_ENK.dtype in (torch.bfloat16, torch.float16)
        if not (sixteen if self.format == "plain" else self.values_ENK.dtype == torch.uint8):
            raise ValueError(f"weights in {self.format} can't have dtype {self.values_ENK.dtype}")
        if not self.values_ENK.is_contiguous():
            raise ValueError("weights of experts must be contiguous")
        if self.format == "mxfp8" and inputs % GROUP:
            raise ValueError(f"mxfp8 needs a number of inputs that is a multiple of {GROUP}, not {inputs}")
        shape = scale_shape(experts, outputs, inputs, self.format, self.halves)
        given = None if self.scales is None else tuple(self.scales.shape)
        if given != shape:
            raise ValueError(f"scales of {self.format} weights must have shape {shape}, not {given}")
        dtype = scale_dtype(self.format)
        if self.scales is not None and (self.scales.dtype != dtype or not self.scales.is_contiguous()):
            raise ValueError(f"scales of {self.format} weights must be contiguous and {dtype}, not {self.scales.dtype}")

    @property
    def bytes_per_expert(self) -> int:
        """Bytes of one expert's values and scales."""
        tensors = (self.values_ENK,) if self.scales is None else (self.values_ENK, self.scales)
        return sum(tensor[0].numel() * tensor.element_size() for tensor in tensors)

    def part(self, expert: int, half: int | None = None) -> ExpertWeights:
        """A view of one expert, or of one half of it."""
        values, scales = self.values_ENK[expert : expert + 1], self.scales
        if scales is not None:
            scales = scales[expert : expert + 1]
        if half is None:
            return ExpertWeights(values, scales, self.format, self.halves)
        values = values.unflatten(1, (self.halves, -1))[:, half]
        if scales is not None:
            scales = scales.unflatten(1, (self.halves, -1))[:, half]
        return ExpertWeights(values, scales, self.format)

    def dequantized(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """The values of the weights, [E, N, K]; exact in float64."""
        if self.format == "plain":
            return self.values_ENK.to(dtype)
        codes = self.values_ENK.view(torch.float8_e4m3fn).to(torch.float32).to(dtype)
        return codes * self._scales_of_each_code().to(dtype)

    def _scales_of_each_code(self) -> torch.Tensor:
        assert self.scales is not None
        _, outputs, inputs = self.values_ENK.shape
        if self.format == "fp8_row":
            return self.scales[:, :, None]
        if self.format == "mxfp8":
            powers = torch.exp2(self.scales.double() - 127).masked_fill(self.scales == 255, torch.nan)
            return powers.repeat_interleave(GROUP, dim=2)
        rows = self.scales.unflatten(1, (self.halves, -1)).repeat_interleave(BLOCK, dim=2)
        rows = rows[:, :, : outputs // self.halves].flatten(1, 2)
        return rows.repeat_interleave(BLOCK, dim=2)[:, :, :inputs]


@dataclass(frozen=True, slots=True)
class ClampedGLU:
    """An activation with biases in the place of SiLU, see `clamped_glu`; gate and up rows of the weights alternate."""

    bias_EG: torch.Tensor  # bias of the gate and up rows, which alternate too; contiguous
    alpha: float
    limit: float
