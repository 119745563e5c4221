"""Views of parameters that take whole tensors of a checkpoint, and copy the part that this rank keeps."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rollout.models.joined import JoinedView
from trainer_bridge.transports.cut import Cut

__all__ = ["Cut", "CutView", "kept_values", "whole_shape"]


class CutView(torch.Tensor):
    """A view of what a rank keeps of one tensor of a checkpoint; what is copied into it is the whole tensor.

    It has the shape of the memory for the kept part. `whole_shape` gives the shape of the tensor that it takes.
    """

    cut: Cut
    _kept: torch.Tensor
    #: Results of operations on it are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, kept: torch.Tensor, cut: Cut | None) -> torch.Tensor:
        """The view by which `kept` takes whole tensors; `kept` itself if nothing is cut."""
        if cut is None:
            return kept
        assert whole_shape(kept)[cut.dim] == cut.kept, "a cut has as many entries as the memory for it"
        view = kept.detach().as_subclass(cls)
        view.cut, view._kept = cut, kept.detach() if type(kept) is torch.nn.Parameter else kept
        return view

    @property
    def kept_part(self) -> torch.Tensor:
        """The memory that takes the kept part itself."""
        return self._kept

    def copy_(self, whole: torch.Tensor, non_blocking: bool = False) -> CutView:  # type: ignore[override]
        """Copy the kept part of a whole tensor, from any device."""
        if tuple(whole.shape) != whole_shape(self):
            raise ValueError(
                f"a tensor of shape {list(whole.shape)} is not a whole tensor of {list(whole_shape(self))}"
            )
        self._kept.copy_(self.cut.take(whole), non_blocking)
        return self

    def copy_kept(self, kept: torch.Tensor) -> None:
        """Copy a part that was cut already."""
        self._kept.copy_(kept)

    def destinations(self) -> Iterator[torch.Tensor | None]:
        """The views that take the entries of the whole tensor's first dimension; None for an entry that is not kept."""
        cut = self.cut
        if cut.dim > 0:
            yield from (CutView.of(part, cut.at(cut.dim - 1)) for part in self._kept)
            return
        kept = iter(self._kept)
        for index in range(cut.whole):
            yield next(kept) if any(begin <= index < end for begin, end in cut.ranges) else None


def whole_shape(view: torch.Tensor) -> tuple[int, ...]:
    """The shape of the tensor that is copied into a view."""
    if isinstance(view, JoinedView):
        return view.joined_shape
    if not isinstance(view, CutView):
        return tuple(view.shape)
    shape = list(whole_shape(view.kept_part))
    shape[view.cut.dim] = view.cut.whole
    return tuple(shape)


def kept_values(view: torch.Tensor) -> torch.Tensor:
    """The values that a view keeps of a copied tensor, in the order of that tensor."""
    kept = view.kept_part if isinstance(view, CutView) else view
    return kept.reshape(whole_shape(kept))
