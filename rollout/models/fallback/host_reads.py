"""Operations of a forward that wait for the device: a step with one cannot be captured as a CUDA graph.

Reads are found by running the step once on its device and watching its operations.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: Operations whose result on the host, or whose size, depends on values on the device.
_READING = {
    *("_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount"),
    *("unique_dim", "unique_consecutive", "_unique", "_unique2"),
}
#: Operations that read the positions of a mask among their indices.
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class HostReads(TorchDispatchMode):
    """While it is entered, collects the names of such operations in `found`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` and note it if it reads."""
        kwargs = kwargs or {}
        with self:  # an operation made of other operations: look at each of them
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        name = func._schema.name.removeprefix("aten::")
        by_sizes = name == "repeat_interleave" and kwargs.get("output_size") is None and func._overloadname == "Tensor"
        if name in _READING or by_sizes or (name in _INDEXING and any(_is_mask(index) for index in args[1])):
            self.found.add(name)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.device.type == "cpu" and _any_on_gpu(args):
            self.found.add(name)
        return result


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _any_on_gpu(args: Any) -> bool:
    return any(isinstance(arg, torch.Tensor) and arg.is_cuda for arg in args)
