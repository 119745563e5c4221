"""An adapter with random weights, for benchmarks and tests."""

import torch
from rollout_kernels.lora import padded_rank

from rollout.models.lora_slots import AdapterWeights, model_products
from rollout.models.spec import ModelSpec


def random_adapter(spec: ModelSpec, rank: int, dtype: torch.dtype, seed: int, scale: float = 1e-3) -> AdapterWeights:
    """An adapter of all modules in slots of `rank`."""
    generator, parts = torch.Generator().manual_seed(seed), {}
    for key, linear in model_products(spec).items():
        a = torch.randn(len(linear.modules) * padded_rank(rank), linear.inputs, generator=generator) * scale
        b = torch.randn(linear.outputs, padded_rank(rank), generator=generator) * scale
        parts[key] = (a.to(dtype), b.to(dtype))
    return AdapterWeights(rank, parts)
