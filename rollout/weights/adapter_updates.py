"""Updates of a LoRA adapter instead of the model: `begin` has the field `adapter`; the rest of the bridge is the same.

    {name, config}      the adapter's name, and its adapter_config.json as a map; tensors have PEFT's names

The bytes go to host memory of their own. Once all are verified, the receiver's thread packs them in the layout of
adapter slots, and the loop takes the adapter between two steps. Generation never stops for an adapter.
"""

import time
from collections.abc import Mapping
from typing import Any

import torch
from rollout_kernels.lora import LEAST_RANK

from rollout.engine.features.adapters.known_adapters import AdapterRegistry
from rollout.engine.messages.to_engine import FeatureUpdate, PutAdapter
from rollout.models.lora_slots import AdapterSlots, AdapterWeights, model_products
from rollout.models.peft_config import read_peft_config
from rollout.models.peft_tensors import AdapterPacker, AdapterPlan, plan_adapter
from rollout.models.spec import ModelSpec
from rollout.weights.kept_memory import StagedMemory
from rollout.weights.parameter_map import ManifestFit
from rollout.weights.staging import WeightStaging
from rollout.weights.update_memory import RankUpdateMemory
from trainer_bridge.transports.tensors import typed_view
from trainer_bridge.wire.errors import BadRequest, WeightsRejected
from trainer_bridge.wire.manifest import Manifest

MAX_NAME_CHARS = 128
_MODULES_A_PRODUCT = 3


class AdapterTarget:
    """Checks adapters against a model, the rank of its slots and the known adapters. Any thread may call it."""

    def __init__(
        self,
        spec: ModelSpec,
        most_rank: int,
        dtype: torch.dtype,
        registry: AdapterRegistry,
        packer: AdapterPacker,
    ) -> None:
        self.packer = packer
        self.max_tensors = 2 * _MODULES_A_PRODUCT * len(model_products(spec))
        # Each rank needs as much: the tensors belong to the whole model.
        self.max_bytes = packer.size * AdapterSlots.bytes_for(spec, 1, max(most_rank, LEAST_RANK), torch.float32)
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
        """The memory for the tensors. Raises ValueError that names the tensor or the option that does not fit."""
        where = f"adapter {name!r}"
        return plan_adapter(read_peft_config(config, where), shapes, self._spec, self._most_rank, self._dtype, where)


class IncomingAdapter:
    """One update of an adapter, from `begin` until the loop takes it. Owned by the receiver's thread."""

    def __init__(self, name: str, config: Mapping[str, Any], target: AdapterTarget) -> None:
        self.name = name
        self._config = config
        self._target = target
        self._plan: AdapterPlan | None = None
        self._memory: RankUpdateMemory | None = None
        self._packed: AdapterWeights | None = None
        self._since_s: float | None = None  # when it was complete

    @property
    def max_tensors(self) -> int:
        """Limit of tensors to read: a few more than any adapter of the model has, so that the refusal can name them."""
        return self._target.max_tensors + 64

    @property
    def version(self) -> int | None:
        """Version of the adapter that is loaded under this name, or None."""
        return self._target.version_of(self.name)

    def check(self, manifest: Manifest) -> None:
        """Raise `WeightsRejected` naming each tensor that does not fit the model or the loaded adapters."""
        self._check_slot(manifest)
        if codes := [entry.name for entry in manifest.tensors if entry.dtype == "float8_e4m3fn"]:
            raise WeightsRejected(f"an adapter has no codes: send {codes[0]} in 16 or 32 bits", field="manifest")
        shapes = {entry.name: entry.shape for entry in manifest.tensors}
        try:
            self._plan = self._target.plan(self._config, shapes, self.name)
        except ValueError as error:
            raise _rejected(error) from None

    def open(self, manifest: Manifest) -> RankUpdateMemory:
        """The memory of the bytes; `check` has bounded their number."""
        staging = WeightStaging(StagedMemory({}, "host"))
        staging.open(manifest, ManifestFit((), ()))
        self._memory = RankUpdateMemory(staging, manifest, staging)
        return self._memory

    def update(self, manifest: Manifest) -> FeatureUpdate | None:
        """The update for the loop; all bytes are verified. None: other ranks have no parts yet.

        Raises `WeightsRejected` when other adapters took the last slot meanwhile, or when a rank cannot have its part,
        and other errors when the ranks cannot have it now.
        """
        assert self._plan is not None and self._memory is not None, "it was checked when it began"
        self._check_slot(manifest)
        try:
            weights = self._pack(self._plan, manifest, self._memory)
            if weights is None or not self._target.packer.ready(weights):
                return None
        except ValueError as error:
            raise _rejected(error) from None
        command = PutAdapter(self.name, weights, manifest.version)
        return FeatureUpdate(self.name, manifest.version, manifest.tensor_bytes, command)

    def _pack(self, plan: AdapterPlan, manifest: Manifest, memory: RankUpdateMemory) -> AdapterWeights | None:
        if self._packed is None:
            tensors = {entry.name: typed_view(memory.stream, entry) for entry in manifest.tensors}
            self._since_s = time.monotonic() if self._since_s is None else self._since_s
            self._packed = self._target.packer.pack(plan, tensors, self._since_s)
        return self._packed

    def _check_slot(self, manifest: Manifest) -> None:
        try:
            self._target.check(self.name, manifest.version)
        except ValueError as error:
            raise _rejected(error) from None


def read_adapter(header: Mapping[str, Any], target: AdapterTarget | None) -> IncomingAdapter | None:
    """The adapter that a `begin` names; None for an update of the model. Raises `BadRequest`."""
    value = header.get("adapter")
    if value is None:
        return None
    if target is None:
        raise BadRequest(
            "this worker does not offer adapters; start it with --adapter-slots N (engine.adapter_slots)",
            field="adapter",
        )
    if type(value) is not dict or value.keys() != {"name", "config"} or type(value["config"]) is not dict:
        raise BadRequest("adapter must be a map of name and config, the adapter's configuration", field="adapter")
    name = value["name"]
    if type(name) is not str or not 1 <= len(name) <= MAX_NAME_CHARS:
        raise BadRequest(f"an adapter's name has 1 to {MAX_NAME_CHARS} characters", field="adapter.name")
    return IncomingAdapter(name, value["config"], target)


def _rejected(error: ValueError) -> WeightsRejected:
    return WeightsRejected(f"{error}"[:2000], field="adapter")
