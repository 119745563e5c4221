"""The list of optional features. A new feature is a folder next to this file, and an entry here, in any place."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol, runtime_checkable

from rollout.config import EngineSettings
from rollout.engine.features.adapters.memory import AdapterMemory
from rollout.engine.features.dealt_rows.feature import DealtRows
from rollout.engine.features.drafts.verifier import DraftVerifier
from rollout.engine.features.images.encoder import ImageEncoder
from rollout.engine.features.routing.record import RoutingRecord
from rollout.engine.features.scores.taker import ScoreTaker
from rollout.engine.step.device_feature import DeviceFeature, Site
from rollout.engine.step.execute import Executor
from rollout.engine.step.slot import Slot
from rollout.models.language_model import LanguageModel


@runtime_checkable
class MeasuresSteps(Protocol):
    """A device's part that measures steps at the start."""

    def measure(self, executor: Executor, slot: Slot) -> None:
        """Called on every rank when decode steps are captured, before `host_part`; no row and no KV is in use."""


#: Makes a feature's part on the device; None where this worker does not have the feature.
MakeFeature = Callable[[Site], DeviceFeature | None]
KINDS: Seq[type[DeviceFeature]] = (AdapterMemory, ScoreTaker, ImageEncoder, DealtRows, DraftVerifier, RoutingRecord)
FEATURES: tuple[MakeFeature, ...] = tuple(kind.make for kind in KINDS)


def host_bytes(settings: EngineSettings, model: LanguageModel) -> int:
    """The most host memory that features take while the worker runs."""
    return sum(kind.host_bytes(settings, model) for kind in KINDS)


def keeps_token_ids(settings: EngineSettings, model: LanguageModel) -> bool:
    """Whether a feature reads the token ids of rows on the device: then the KV pool holds them."""
    return any(kind.keeps_token_ids(settings, model) for kind in KINDS)
