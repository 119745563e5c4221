"""Views of experts that a checkpoint has as one: side by side along the intermediate width.

    gate, up [2 I, H] of a checkpoint    |== expert E ==|== expert E+1 ==|
    down     [H, 2 I]                    the same, of the other dimension
    memory   [E + 2, ...]                | ... | expert E | expert E+1 |     one matrix after the other

The output of a gated feed-forward block is a sum over its intermediate width, so the parts' outputs add up to the
whole.
"""

from __future__ import annotations

import torch


class JoinedView(torch.Tensor):
    """A view of several experts, which takes the one tensor that a checkpoint has of them.

    It has the shape of the memory: one dimension of the checkpoint's tensor is two here, the expert and the place
    in its width. `joined_shape` is the shape of that tensor.
    """

    joined_dim: int  # a dimension of the checkpoint's tensor
    _memory: torch.Tensor
    #: Results of operations on it are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, experts_NRC: torch.Tensor, dim: int) -> torch.Tensor:
        """The view of `experts_NRC`, whose matrices are joined along `dim` (0 or 1); a plain one of one expert."""
        if len(experts_NRC) == 1:
            return experts_NRC[0].detach()
        memory = experts_NRC.detach() if dim == 0 else experts_NRC.detach().transpose(0, 1)
        view = memory.as_subclass(cls)
        view.joined_dim, view._memory = dim, memory
        return view

    @property
    def joined_shape(self) -> tuple[int, ...]:
        """The shape of the checkpoint's tensor."""
        shape, dim = self._memory.shape, self.joined_dim
        return (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])

    def copy_(self, tensor: torch.Tensor, non_blocking: bool = False) -> JoinedView:  # type: ignore[override]
        """Copy the checkpoint's tensor, from any device."""
        if tuple(tensor.shape) != self.joined_shape:
            raise ValueError(f"a tensor of shape {list(tensor.shape)} does not fit into {list(self.joined_shape)}")
        dim = self.joined_dim
        self._memory.copy_(tensor.unflatten(dim, self._memory.shape[dim : dim + 2]), non_blocking)
        return self
