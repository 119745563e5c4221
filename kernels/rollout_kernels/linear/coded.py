"""The weights of a product as e4m3 codes with scales, in the formats that experts have (`moe.formats`).

A fused product holds several modules, such as q, k and v. Each module is quantised alone: blocks start at its own first
row, so codes and scales equal a checkpoint's.

    codes   |===== q =====|== k ==|== v ==|     uint8 [N, K]
    scales  |-- of q --|- of k -|- of v -|      one row for each block of rows of a module

Products of few tokens read codes (`triton_linear`). For more tokens, `products.dense` makes 16-bit weights.

Legend: N outputs, K inputs, M tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from rollout_kernels.common.fp8 import codes_of, quantize_heads, values_of
from rollout_kernels.moe.formats import BLOCK, SCALE_BLOCKS, ExpertWeights, Format, scale_shape
from rollout_kernels.moe.quantize import quantize_to


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """Codes [N, K] of a product and their scales; `widths` are the rows of its modules.

    The scales have the shape that `scales_shape` returns, in the dtype of the format.
    """

    codes_NK: torch.Tensor
    scales: torch.Tensor
    format: Format
    widths: tuple[int, ...]

    @property
    def inputs(self) -> int:
        """Columns of the weights."""
        return self.codes_NK.shape[1]

    @property
    def in_step(self) -> bool:
        """Whether a row's number alone gives the row of its scales, as the kernels need it.

        Else a module that is not the last one ends within a block of rows.
        """
        return self.format != "fp8_block" or all(width % BLOCK == 0 for width in self.widths[:-1])

    def kernels_take(self, dtype: torch.dtype) -> bool:
        """Whether the kernels multiply these weights with activations of `dtype`."""
        return self.in_step and not (self.format == "mxfp8" and dtype == torch.float16)

    @property
    def takes_codes(self) -> bool:
        """Whether they can be multiplied with activations that are codes, too (`triton_code_rows`)."""
        return self.format == "fp8_block" and self.in_step and self.inputs % BLOCK == 0

    def parts(self) -> Iterator[ExpertWeights]:
        """Each module by itself, [1, N of the module, K], as a view."""
        rows, scale_rows = 0, 0
        for width in self.widths:
            shape = scale_shape(1, width, self.inputs, self.format, 1)
            assert shape is not None
            codes = self.codes_NK[rows : rows + width]
            scales = self.scales[scale_rows : scale_rows + shape[1]]
            yield ExpertWeights(codes[None], scales[None], self.format)
            rows, scale_rows = rows + width, scale_rows + shape[1]

    def quantize(self, w_NK: torch.Tensor) -> None:
        """Store weights (bf16, f16 or float32) as codes, module by module."""
        for part, weights in zip(self.parts(), w_NK.split(self.widths), strict=True):
            quantize_to(weights[None], part)

    def dequantized(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """The values of the weights, [N, K]: products of codes and scales, rounded to `dtype` once."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return torch.cat([part.dequantized(wide)[0] for part in self.parts()]).to(dtype)


#: The weights of a product.
Weights = torch.Tensor | CodedMatrix


def stored(weights: Weights) -> torch.Tensor:
    """The matrix [N, K] that is in memory: the weights themselves, or their codes."""
    return weights.codes_NK if isinstance(weights, CodedMatrix) else weights


class CodedRows(NamedTuple):
    """Codes and scales of `rows` tokens; M is `rows`, padded with any values."""

    codes_MK: torch.Tensor  # float8_e4m3fn
    scales_BM: torch.Tensor
    rows: int

    def dequantized(self) -> torch.Tensor:
        """The values of the codes, float64 [rows, K]."""
        scales_MK = self.scales_BM.T.double().repeat_interleave(BLOCK, dim=1)
        return (self.codes_MK.double() * scales_MK)[: self.rows]


def rounded_rows(x_MK: torch.Tensor) -> torch.Tensor:
    """Activations rounded to codes with a scale for 128 neighbours, in their own dtype: twin of `triton_code_rows`."""
    columns = x_MK.shape[1]
    blocks = F.pad(x_MK.float(), (0, -columns % BLOCK)).unflatten(1, (-1, BLOCK))
    _, scales = quantize_heads(blocks)
    values = values_of(codes_of(blocks * (1 / scales)[..., None])) * scales[..., None]
    return values.flatten(1)[:, :columns].to(x_MK.dtype)


def scales_shape(widths: Sequence[int], inputs: int, format: Format) -> tuple[int, ...]:
    """The shape of the scales of a coded product whose modules have `widths` rows each."""
    shapes = [scale_shape(1, width, inputs, format, 1) for width in widths]
    rows = sum(shape[1] for shape in shapes if shape is not None)
    last = shapes[-1]
    assert last is not None, "plain weights have no scales"
    return rows, *last[2:]


def scale_block(format: Format, inputs: int) -> tuple[int, int]:
    """Rows and columns of weights that share a scale."""
    rows, columns = SCALE_BLOCKS[format]
    return rows, inputs if columns is None else columns
