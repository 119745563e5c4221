"""Tensors in a packed stream: the dtypes that may be sent, as torch has them, and views of a stream's bytes."""

from __future__ import annotations

import torch

from trainer_bridge.wire.manifest import TensorEntry

#: torch's types by the names that manifests use.
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def typed_view(stream: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """The bytes of one tensor in a packed stream (uint8, one dimension) as a tensor of its dtype and shape."""
    return stream[entry.offset : entry.end].view(TORCH_DTYPES[entry.dtype]).view(entry.shape)
