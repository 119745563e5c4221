"""What an adapter update must fit: the model, the rank of the slots, the known adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from rollout_kernels.lora import LEAST_RANK

from rollout.engine.adapters import AdapterRegistry
from rollout.models.lora_slots import AdapterSlots, model_products
from rollout.models.peft_config import read_peft_config
from rollout.models.peft_tensors import AdapterPlan, AdapterRanks, plan_adapter
from rollout.models.spec import ModelSpec

_MODULES_A_PRODUCT = 3


class AdapterTarget:
    """Checks adapters against a model, the rank of its slots and the known adapters. Any thread may call it."""

    def __init__(
        self,
        spec: ModelSpec,
        most_rank: int,
        dtype: torch.dtype,
        pinned: bool,
        registry: AdapterRegistry,
        ranks: AdapterRanks | None = None,
    ) -> None:
        self.pinned, self.ranks = pinned, ranks
        self.max_tensors = 2 * _MODULES_A_PRODUCT * len(model_products(spec))
        self.max_bytes = AdapterSlots.bytes_for(spec, 1, max(most_rank, LEAST_RANK), torch.float32)
        if ranks is not None:  # tensors are those of the whole model
            self.max_bytes *= ranks.size
        self._spec, self._most_rank, self._dtype = spec, most_rank, dtype
        self._registry = registry

    def version_of(self, name: str) -> int | None:
        """The version of a known adapter; None for other names."""
        adapter = self._registry.known.get(name)
        return None if adapter is None else adapter.version

    def check(self, name: str, version: int) -> None:
        """Raise ValueError for an adapter that cannot be taken now: one too many, or an older version."""
        self._registry.check(name, version)

    def plan(self, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], name: str) -> AdapterPlan:
        """Where the tensors go. Raises ValueError that names the tensor or the option that does not fit."""
        where = f"adapter {name!r}"
        return plan_adapter(read_peft_config(config, where), shapes, self._spec, self._most_rank, self._dtype, where)
