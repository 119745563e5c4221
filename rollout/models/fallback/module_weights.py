"""Views of a module's parameters by the names of the checkpoint.

transformers may rename the tensors of a checkpoint, stack them, or lay them side by side. The reverse conversion, with
which it saves checkpoints, gives the parameter of a tensor, and its part. It is run here on the parameters themselves,
without its copies, so that each result is a view: a copy into it changes the module. Files are loaded and updates
applied through these views.

A parameter has up to two names: the checkpoint's, in files and from `save_pretrained`, and the module's, from
`named_parameters()` of a trainer's model.
"""

from collections import defaultdict
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers.core_model_loading import revert_weight_conversion

from rollout.models.names import Region


class _WithoutCopies(TorchFunctionMode):
    """While it is entered, `contiguous()` returns its tensor as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, unless it only copies."""
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def own_tensors(module: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Parameters and saved buffers by their first names, and each other name of a tied tensor with its first name."""
    first: dict[int, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) in first:
            aliases[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
            tensors[name] = tensor.detach()
    return tensors, aliases


def checkpoint_regions(module: Any) -> list[Region]:
    """The parameters and saved buffers of a module, each once, by checkpoint names and by its own names.

    Raises ValueError with the name of a tensor that the checkpoint stores in an order of its own.
    """
    own, _ = own_tensors(module)
    with _WithoutCopies(), torch.no_grad():
        stored = revert_weight_conversion(module, dict(own))
    buffers = {name for name, _ in module.named_buffers()}  # trainers send parameters only
    owner = {_storage(tensor): name for name, tensor in own.items()}
    parts: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, view in stored.items():
        if _storage(view) not in owner:
            raise ValueError(
                f"its tensor {name} is stored in another order than transformers keeps it, so weights cannot be written"
            )
        parts[owner[_storage(view)]][name] = view
    regions = []
    for name, tensor in own.items():
        views = parts[name]
        if sum(view.numel() for view in views.values()) != tensor.numel():
            raise ValueError(f"transformers saves only a part of {name}, so weights cannot be written")
        alternatives = (views,) if set(views) == {name} else (views, {name: tensor})
        regions.append(Region(alternatives, kept_if_absent=name in buffers))
    return regions


def _storage(tensor: torch.Tensor) -> int:
    """A key for the memory of a tensor; on the meta device, too."""
    return tensor.untyped_storage()._cdata
