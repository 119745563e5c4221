"""Updates of a LoRA adapter instead of the model: `begin` has `adapter`, all else of the bridge is the same.

    {name, config}      the adapter's name, and its adapter_config.json as a map; tensors have PEFT's names

The bytes land in host memory of their own; once all are verified they are packed as slots hold them, on the receiver's
thread, and the loop takes the adapter between two steps. Generation goes on all the while, however weights are applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from rollout.weights.destination import StagedDestination
from trainer_bridge.wire.errors import BadRequest, WeightsRejected
from trainer_bridge.wire.manifest import Manifest
from trainer_bridge.wire.tensors import typed_view

if TYPE_CHECKING:
    from rollout.engine.adapter_table import AdapterUpdate
    from rollout.models.peft_tensors import AdapterPlan
    from rollout.weights.adapter_target import AdapterTarget

MAX_NAME_CHARS = 128


class IncomingAdapter:
    """One update of an adapter, from `begin` until the loop takes it. Owned by the receiver's thread."""

    def __init__(self, name: str, config: Mapping[str, Any], target: AdapterTarget) -> None:
        self.name = name
        self._config = config
        self._target = target
        self._plan: AdapterPlan | None = None

    @property
    def max_tensors(self) -> int:
        """More than any adapter of the model has; the few too many are for the refusal to name."""
        return self._target.max_tensors + 64

    @property
    def version(self) -> int | None:
        """Of the adapter that is known by this name; None if there is none."""
        return self._target.version_of(self.name)

    def check(self, manifest: Manifest) -> None:
        """Raise `WeightsRejected` that names what does not fit the model, or the adapters that are there."""
        self._check_room(manifest)
        shapes = {entry.name: entry.shape for entry in manifest.tensors}
        try:
            self._plan = self._target.plan(self._config, shapes, self.name)
        except ValueError as error:
            raise _rejected(error) from None

    def open(self, manifest: Manifest) -> StagedDestination:
        """Where the bytes go; `check` has bounded how many they are."""
        return StagedDestination(torch.empty(manifest.total_bytes, dtype=torch.uint8), None)

    def update(self, manifest: Manifest, destination: StagedDestination) -> AdapterUpdate:
        """What the loop takes; `destination` is whole and verified.

        Raises `WeightsRejected` where other adapters have come meanwhile, so that it cannot be taken any more.
        """
        from rollout.engine.adapter_table import AdapterUpdate

        assert self._plan is not None, "it was checked when it began"
        self._check_room(manifest)
        tensors = {entry.name: typed_view(destination.stream, entry) for entry in manifest.tensors}
        weights = self._plan.pack(tensors, self._target.pinned)
        return AdapterUpdate(self.name, manifest.version, manifest.tensor_bytes, weights)

    def _check_room(self, manifest: Manifest) -> None:
        try:
            self._target.check(self.name, manifest.version)
        except ValueError as error:
            raise _rejected(error) from None


def read_adapter(header: Mapping[str, Any], target: AdapterTarget | None) -> IncomingAdapter | None:
    """The adapter that a `begin` is for, None for one of the model. Raises `BadRequest`."""
    value = header.get("adapter")
    if value is None:
        return None
    if target is None:
        raise BadRequest("this worker does not offer adapters; start it with 'adapter_slots'", field="adapter")
    if type(value) is not dict or value.keys() != {"name", "config"} or type(value["config"]) is not dict:
        raise BadRequest("adapter must be a map of name and config, the adapter's configuration", field="adapter")
    name = value["name"]
    if type(name) is not str or not 1 <= len(name) <= MAX_NAME_CHARS:
        raise BadRequest(f"an adapter's name has 1 to {MAX_NAME_CHARS} characters", field="adapter.name")
    return IncomingAdapter(name, value["config"], target)


def _rejected(error: ValueError) -> WeightsRejected:
    return WeightsRejected(f"{error}"[:2000], field="adapter")
