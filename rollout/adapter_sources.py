"""The sources of a worker's adapters: folders, at start or by message, and the weight bridge."""

from __future__ import annotations

from pathlib import Path

from rollout.config import EngineSettings
from rollout.engine.adapter_table import AdapterRegistry
from rollout.models.decoder import Decoder
from rollout.models.lora_slots import AdapterWeights
from rollout.models.peft_tensors import load_peft_folder
from rollout.service.adapter_loading import AdapterFolders
from rollout.weights.adapter_target import AdapterTarget


def adapter_folders(engine: EngineSettings, model: Decoder) -> AdapterFolders | None:
    """The folders from which `load_adapter` may read; None without adapter slots."""
    if not engine.adapter_slots:
        return None
    rank, dtype, pinned = engine.adapter_rank, model.embed.dtype, model.embed.is_cuda
    root = None if engine.adapter_root is None else Path(engine.adapter_root).expanduser()
    return AdapterFolders(root, lambda folder: load_peft_folder(folder, model.spec, rank, dtype, pinned))


def read_adapters(engine: EngineSettings, model: Decoder) -> dict[str, AdapterWeights]:
    """The adapters to load at start, by name. Raises ValueError for a folder without an adapter."""
    folders = adapter_folders(engine, model)
    if folders is None:
        return {}
    return {name: folders.read(Path(folder).expanduser()) for name, folder in engine.adapter_folders.items()}


def adapter_target(engine: EngineSettings, model: Decoder, registry: AdapterRegistry | None) -> AdapterTarget | None:
    """The target of adapters that arrive over the weight bridge; None without adapter slots."""
    if registry is None:
        return None
    return AdapterTarget(model.spec, engine.adapter_rank, model.embed.dtype, model.embed.is_cuda, registry)
