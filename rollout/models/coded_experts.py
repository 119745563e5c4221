"""Experts whose weights are kept as e4m3 codes: views that take weights and store codes.

A checkpoint or a trainer sends weights; the model holds codes and scales. The codes of a tensor have its shape and lie
where its weights would. So a view of the codes tells which parameters a name writes, as any view does. Only the copy
into it differs: it quantises, on the view's device.

    weights from a file or over the bridge  --copy_-->  CodedView  = codes, and the scales that go with them
"""

from __future__ import annotations

import torch
from rollout_kernels.moe.formats import GROUP, ExpertWeights, Format
from rollout_kernels.moe.quantize import quantize_to

from rollout.models.spec import ModelSpec


class CodedView(torch.Tensor):
    """Codes (uint8) of one tensor of a checkpoint, in the shape of the weights."""

    _weights: ExpertWeights
    #: Results of operations on it are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, weights: ExpertWeights, shape: tuple[int, ...]) -> CodedView:
        """A view of `weights` for a tensor of this shape."""
        view = weights.values_ENK.detach().view(shape).as_subclass(cls)
        view._weights = weights
        return view

    def copy_(self, weights: torch.Tensor, non_blocking: bool = False) -> CodedView:  # type: ignore[override]
        """Quantise weights of the view's shape, from any device, into codes and scales.

        Raises TypeError for integers: codes without their scales mean nothing.
        """
        if not weights.is_floating_point():
            raise TypeError(f"weights to be quantised must be floating point, not {weights.dtype}")
        if weights.shape != self.shape:
            raise ValueError(f"weights of shape {list(weights.shape)} do not fit into {list(self.shape)}")
        quantize_to(weights.detach().reshape(self._weights.values_ENK.shape), self._weights, non_blocking)
        return self


def check_format(spec: ModelSpec, format: Format) -> None:
    """Raise ValueError with the reason if a model's experts cannot be kept in `format`."""
    if format == "plain":
        return
    if spec.moe is None:
        raise ValueError(
            f"expert_dtype = {format}, but {spec.architecture} in this checkpoint has no experts: use auto"
        )
    if spec.moe.clamped is not None:
        raise ValueError(f"expert_dtype = {format} is for experts without biases, unlike {spec.architecture}: use auto")
    odd = [width for width in (spec.hidden, spec.moe.intermediate) if width % GROUP]
    if odd:
        raise ValueError(f"expert_dtype = {format} needs widths that are multiples of {GROUP}, not {odd[0]}: use auto")
