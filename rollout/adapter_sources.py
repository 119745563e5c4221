"""Where a worker's adapters come from: folders at start or by message, and the weight bridge."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rollout_kernels.lora import LEAST_RANK

from rollout.config import EngineSettings
from rollout.engine.adapter_table import AdapterRegistry
from rollout.models.adapters import AdapterSlots, AdapterWeights, places
from rollout.models.decoder import Decoder
from rollout.models.peft_config import read_peft_config
from rollout.models.peft_tensors import AdapterPlan, load_peft_folder, plan_adapter
from rollout.models.spec import ModelSpec
from rollout.service.adapter_loading import AdapterFolders

_MODULES_A_PLACE = 3


def adapter_folders(engine: EngineSettings, model: Decoder) -> AdapterFolders | None:
    """The folders that adapters may be loaded from by path; None without adapter slots."""
    if not engine.adapter_slots:
        return None
    rank, dtype, pinned = engine.adapter_rank, model.embed.dtype, model.embed.is_cuda
    root = None if engine.adapter_root is None else Path(engine.adapter_root).expanduser()
    return AdapterFolders(root, lambda folder: load_peft_folder(folder, model.spec, rank, dtype, pinned))


def read_adapters(engine: EngineSettings, model: Decoder) -> dict[str, AdapterWeights]:
    """The adapters to serve from the start, by name. Raises ValueError for a folder without an adapter."""
    folders = adapter_folders(engine, model)
    if folders is None:
        return {}
    return {name: folders.read(Path(folder).expanduser()) for name, folder in engine.adapter_folders.items()}


def adapter_target(engine: EngineSettings, model: Decoder, registry: AdapterRegistry | None) -> AdapterTarget | None:
    """The checks for adapters that arrive over the weight bridge; None if this worker serves no adapters."""
    if registry is None:
        return None
    return AdapterTarget(model.spec, engine.adapter_rank, model.embed.dtype, model.embed.is_cuda, registry)


class AdapterTarget:
    """Checks adapters against a model, the rank of its slots and the known adapters. Any thread may call it."""

    def __init__(
        self, spec: ModelSpec, most_rank: int, dtype: torch.dtype, pinned: bool, registry: AdapterRegistry
    ) -> None:
        self.pinned = pinned
        self.max_tensors = 2 * _MODULES_A_PLACE * len(places(spec))
        self.max_bytes = AdapterSlots.bytes_for(spec, 1, max(most_rank, LEAST_RANK), torch.float32)
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
