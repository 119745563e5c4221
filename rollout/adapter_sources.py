"""Where a worker's adapters come from: folders at start or by message, and the weight bridge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rollout_kernels.lora import LEAST_RANK

from rollout.config import EngineSettings
from rollout.engine.adapter_table import AdapterTable
from rollout.models.adapters import AdapterSlots, AdapterWeights, places
from rollout.models.decoder import Decoder
from rollout.models.peft_config import read_peft_config
from rollout.models.peft_tensors import AdapterPlan, load_peft_folder, plan_adapter
from rollout.models.spec import ModelSpec
from rollout.service.adapter_loading import AdapterFolders

_MODULES_A_PLACE = 3


def adapter_folders(engine: EngineSettings, model: Decoder) -> AdapterFolders | None:
    """Where adapters may come from by path, if any are served."""
    if not engine.adapter_slots:
        return None
    rank, dtype, pinned = engine.adapter_rank, model.embed.dtype, model.embed.is_cuda
    root = None if engine.adapter_root is None else Path(engine.adapter_root).expanduser()
    return AdapterFolders(root, lambda folder: load_peft_folder(folder, model.spec, rank, dtype, pinned))


def read_adapters(engine: EngineSettings, model: Decoder) -> dict[str, AdapterWeights]:
    """The adapters to serve from the start, by name. Raises ValueError for a folder that holds none."""
    folders = adapter_folders(engine, model)
    if folders is None:
        return {}
    return {name: folders.read(Path(folder).expanduser()) for name, folder in engine.adapter_folders.items()}


def adapter_target(
    engine: EngineSettings, model: Decoder, table: Callable[[], AdapterTable | None]
) -> AdapterTarget | None:
    """What adapters that come over the weight bridge must fit, if any are served."""
    if not engine.adapter_slots:
        return None
    return AdapterTarget(model.spec, engine.adapter_rank, model.embed.dtype, model.embed.is_cuda, table)


class AdapterTarget:
    """Checks adapters against a model, the rank of its slots and those that are known. May be called from any thread.

    `table` gives those that are known, None as long as there is no engine.
    """

    def __init__(
        self,
        spec: ModelSpec,
        most_rank: int,
        dtype: torch.dtype,
        pinned: bool,
        table: Callable[[], AdapterTable | None],
    ) -> None:
        self.pinned = pinned
        self.max_tensors = 2 * _MODULES_A_PLACE * len(places(spec))
        self.max_bytes = AdapterSlots.bytes_for(spec, 1, max(most_rank, LEAST_RANK), torch.float32)
        self._spec, self._most_rank, self._dtype = spec, most_rank, dtype
        self._table = table

    def version_of(self, name: str) -> int | None:
        """Of an adapter that is known; None for others."""
        table = self._table()
        adapter = None if table is None else table.known.get(name)
        return None if adapter is None else adapter.version

    def check(self, name: str, version: int) -> None:
        """Raise ValueError for an adapter that could not be taken now: one too many, or an older version."""
        if (table := self._table()) is not None:
            table.check(name, version)

    def plan(self, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], name: str) -> AdapterPlan:
        """Where the tensors go. Raises ValueError that names what does not fit."""
        where = f"adapter {name!r}"
        return plan_adapter(read_peft_config(config, where), shapes, self._spec, self._most_rank, self._dtype, where)
