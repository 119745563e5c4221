"""The states of rows in layers of linear attention, and snapshots of them: tensors indexed by place.

    place     0          1 .. rows     rows + 1 .. places - 1
              padding    the rows      snapshots

All layers use the same place for the same row. A layer reads no state for a token at position 0, so a row that begins
needs no clearing; what lies in its place then may be anything.

Legend: N places, H value heads, K and V dimensions of a key and of a value, C channels of the convolution, W its width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rollout.models.spec import DeltaNetSpec, ModelSpec


class LayerState(NamedTuple):
    """One layer's part of the pool."""

    recurrent_NHKV: torch.Tensor  # float32
    conv_NCW: torch.Tensor  # the last W - 1 inputs of the convolution, oldest first; in the model's dtype


@dataclass(frozen=True, slots=True)
class StatePool:
    """The states of all layers of linear attention, in the order of these layers."""

    layers: list[LayerState]

    @property
    def places(self) -> int:
        """Places in each tensor, the padding one included."""
        return len(self.layers[0].recurrent_NHKV)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors; the first dimension of each is the place."""
        return [tensor for layer in self.layers for tensor in layer]

    def copy(self, pairs_M2: torch.Tensor) -> None:
        """Copy places: (source, target) int64 each. No target may be the source of another pair."""
        source_M, target_M = pairs_M2.unbind(1)
        for tensor in self.tensors:
            tensor.index_copy_(0, target_M, tensor.index_select(0, source_M))

    @classmethod
    def allocate(
        cls,
        spec: ModelSpec,
        places: int,
        dtype: torch.dtype,
        device: torch.device | str,
        zeros: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None,
    ) -> StatePool | None:
        """Memory for `places` states of a model whose dtype is `dtype`; None for a model without states.

        `zeros` makes the tensors; by default torch makes them on `device`.
        """
        make = zeros or functools.partial(_zeros, device)
        layers = [
            LayerState(
                make((places, mixer.value_heads, mixer.key_dim, mixer.value_dim), torch.float32),
                make((places, mixer.mixed, mixer.conv - 1), dtype),
            )
            for mixer in (layer.mixer for layer in spec.layers)
            if isinstance(mixer, DeltaNetSpec)
        ]
        return cls(layers) if layers else None


def _zeros(device: torch.device | str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)
