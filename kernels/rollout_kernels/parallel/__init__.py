"""Tensor parallelism: the ranks that run one model together.

group            the ranks, and how they exchange tensors
"""

from rollout_kernels.parallel.group import ONE_RANK, TensorGroup

__all__ = ["ONE_RANK", "TensorGroup"]
