"""Experts whose weights are kept as e4m3 codes: views that take weights and store codes.

A checkpoint or a trainer sends weights; what the model holds are codes and scales. The codes of a tensor have its shape
and lie where its weights would, so a view of them says which parameters a name writes, as any view does. Only what
copying into it does is different: it quantises, on the view's device.

    weights from a file or over the bridge  --copy_-->  CodedView  = codes, and the scales that go with them
"""

from __future__ import annotations

import torch
from rollout_kernels.moe.formats import GROUP, ExpertWeights, Format
from rollout_kernels.moe.quantize import quantize_to

from rollout.models.spec import ModelSpec


class CodedView(torch.Tensor):
    """Codes (uint8) of one tensor of a checkpoint; its shape is that of the weights."""

    _weights: ExpertWeights
    #: What operations make of it are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, weights: ExpertWeights, shape: tuple[int, ...]) -> CodedView:
        """A view of `weights` for a tensor of this shape."""
        view = weights.values_ENK.detach().view(shape).as_subclass(cls)
        view._weights = weights
        return view

    def copy_(self, weights: torch.Tensor, non_blocking: bool = False) -> CodedView:  # type: ignore[override]
        """Quantise weights of the view's shape, from any device, into codes and scales.

        Raises TypeError for what is not floating point: codes without their scales mean nothing.
        """
        if not weights.is_floating_point():
            raise TypeError(f"weights to be quantised must be floating point, not {weights.dtype}")
        if weights.shape != self.shape:
            raise ValueError(f"weights of shape {list(weights.shape)} don't go into {list(self.shape)}")
        quantize_to(weights.detach().reshape(self._weights.values_ENK.shape), self._weights, non_blocking)
        return self


def check_format(spec: ModelSpec, format: Format) -> None:
    """Raise ValueError, saying why, if a model's experts can't be kept in `format`."""
    if format == "plain":
        return
    if spec.moe is None:
        raise ValueError(
            f"expert_dtype = {format}, but {spec.architecture} of this checkpoint has no experts: use auto"
        )
    odd = [width for width in (spec.hidden, spec.moe.intermediate) if width % GROUP]
    if odd:
        raise ValueError(f"expert_dtype = {format} needs widths that are multiples of {GROUP}, not {odd[0]}: use auto")
