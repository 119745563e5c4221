"""Commands that load and unload adapters, and adapters that the weight bridge brings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rollout.engine.messages.to_engine import FeatureCommand, FeatureUpdate

if TYPE_CHECKING:
    from rollout.models.lora_slots import AdapterWeights

NAME = "adapters"


@dataclass(frozen=True, slots=True)
class PutAdapter(FeatureCommand):
    """Load an adapter, or a newer version of one. Running rows go on with the new version.

    Without a `version` it is the last version plus 1, or 0.
    """

    feature: ClassVar[str] = NAME
    name: str
    weights: AdapterWeights
    version: int | None = None
    token: int | None = None


@dataclass(frozen=True, slots=True)
class DropAdapter(FeatureCommand):
    """Unload an adapter that no unfinished request names."""

    feature: ClassVar[str] = NAME
    name: str
    token: int


@dataclass(frozen=True, slots=True)
class AdapterUpdate(FeatureUpdate):
    """An adapter that arrived over the weight bridge, complete and checked."""

    name: str
    version: int
    nbytes: int
    weights: AdapterWeights
    released: bool = True  # it refers to no memory of the bridge

    @property
    def command(self) -> PutAdapter:
        return PutAdapter(self.name, self.weights, self.version)

    def close(self, applied: bool) -> None:
        """The engine is done with this update."""
