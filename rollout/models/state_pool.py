"""The states of rows in layers of linear attention, and snapshots of them: tensors indexed by place.

    place     0          1 .. rows     rows + 1 .. places - 1
              padding    the rows      snapshots

All layers use the same place for the same row. A layer reads no state for a token at position 0, so a row that begins
needs no clearing; what lies in its place then may be anything. Draft rows have no place: a state goes through the
drafts of its row in registers, and what they are made of is kept until it is known which are accepted (`catch_up`).

Legend: L layers, N places, D draft rows, H heads, K and V dimensions of a key and of a value, C channels of the
convolution, W its width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from rollout_kernels.delta import DraftInputs, catch_up

from rollout.models.spec import ModelSpec


class LayerState(NamedTuple):
    """One layer's part of the pool."""

    recurrent_NHKV: torch.Tensor  # float32
    conv_NCW: torch.Tensor  # the last W - 1 inputs of the convolution, oldest first; in the model's dtype


class States:
    """The states of all layers with states. `layers` has the tensors of each; their first dimension is the place."""

    layers: Sequence[tuple[torch.Tensor, ...]]
    drafts: DraftInputs | None  # the inputs of a step's drafts, of all layers; with speculation

    __slots__ = ()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of all layers; the first dimension of each is the place."""
        return [tensor for layer in self.layers for tensor in layer]

    @property
    def go_ahead(self) -> bool:
        """True if steps with tokens ahead are other steps for the model: its states go through these tokens, too."""
        return self.drafts is not None

    def copy(self, pairs_M2: torch.Tensor) -> None:
        """Copy places: (source, target) int64 each. No target may be the source of another pair."""
        source_M, target_M = pairs_M2.unbind(1)
        for tensor in self.tensors:
            tensor.index_copy_(0, target_M, tensor.index_select(0, source_M))

    def catch_up(
        self, verified_M4: torch.Tensor, rows_S: torch.Tensor, accepted_S: torch.Tensor, one_by_one: bool
    ) -> None:
        """Advance the rows of a step by their accepted drafts; without drafts there is nothing to do."""


@dataclass(frozen=True, slots=True)
class StatePool(States):
    """The states of all layers of linear attention, in the order of these layers."""

    recurrent_LNHKV: torch.Tensor
    conv_LNCW: torch.Tensor
    drafts: DraftInputs | None = None  # the inputs of a step's drafts, of all layers; with speculation
    layers: list[LayerState] = field(init=False)
    _drafts_by_layer: list[DraftInputs] = field(init=False)

    def __post_init__(self) -> None:
        """Make the views of each layer."""
        pairs = zip(self.recurrent_LNHKV, self.conv_LNCW, strict=True)
        object.__setattr__(self, "layers", [LayerState(recurrent, conv) for recurrent, conv in pairs])
        drafts = self.drafts
        by_layer = [] if drafts is None else [drafts.of_layer(layer) for layer in range(len(self.layers))]
        object.__setattr__(self, "_drafts_by_layer", by_layer)

    @property
    def places(self) -> int:
        """Places in each tensor, the padding one included."""
        return self.recurrent_LNHKV.shape[1]

    def drafts_of(self, layer: int) -> DraftInputs:
        """The inputs that a step keeps of its drafts in this layer."""
        return self._drafts_by_layer[layer]

    def catch_up(
        self, verified_M4: torch.Tensor, rows_S: torch.Tensor, accepted_S: torch.Tensor, one_by_one: bool
    ) -> None:
        """Advance the rows of a step by their accepted drafts; see `rollout_kernels.delta.catch_up`."""
        if self.drafts is not None:
            states = self.recurrent_LNHKV, self.conv_LNCW, self.drafts
            catch_up(*states, verified_M4, rows_S, accepted_S, one_by_one)

    @classmethod
    def allocate(
        cls,
        spec: ModelSpec,
        places: int,
        dtype: torch.dtype,
        device: torch.device | str,
        zeros: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None,
        draft_rows: range = range(0),
    ) -> StatePool:
        """Memory for `places` states of a model whose dtype is `dtype`; `NO_STATES` for a model without states.

        `zeros` makes the tensors of states; by default torch makes them on `device`. `draft_rows` are the numbers of
        the rows that hold drafts.
        """
        if not spec.state_mixers:
            return NO_STATES
        ((shape, sizes),) = {(mixer.state, mixer.kept) for mixer in spec.state_mixers}
        count, make = len(spec.state_mixers), zeros or functools.partial(_zeros, device)
        drafts = None
        if draft_rows:
            kept = count, len(draft_rows)
            drafts = DraftInputs(
                _zeros(device, (*kept, shape.channels), dtype),
                _zeros(device, (*kept, sizes.mixed), sizes.mixed_dtype(dtype)),
                _zeros(device, (*kept, sizes.gates), torch.float32),
                draft_rows.start,
                sizes.rule,
            )
        return cls(
            make((count, places, shape.heads, shape.key_dim, shape.value_dim), torch.float32),
            make((count, places, shape.channels, shape.conv - 1), dtype),
            drafts,
        )


#: The pool of a model without layers of linear attention.
NO_STATES = StatePool(torch.zeros(0, 0, 0, 0, 0), torch.zeros(0, 0, 0, 0))


def _zeros(device: torch.device | str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)
