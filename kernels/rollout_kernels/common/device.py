"""Facts about a GPU that kernels need."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache(maxsize=8)
def is_hopper(device: torch.device) -> bool:
    """True for GPUs of compute capability 9.x, whose instructions our Gluon kernels use."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@lru_cache(maxsize=8)
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
