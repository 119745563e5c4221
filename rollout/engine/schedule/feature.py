"""A feature of steps on the host: what an optional capability adds to plans, uploads and commits.

The stages of a step call every feature of their worker by these hooks, and know none by name. A worker without a
feature has no object of it. Its part on the device is a `step.feature.DeviceFeature`.

    plan      plan_begins, then fit and decodes for each span of a prompt
    upload    words bounds what pack puts
    weights   weights_changed, between two steps
    sleep     kv_left
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar, TypeVar

from rollout.engine.schedule.plan import Plan
from rollout.engine.sequence.sequence import Sequence
from rollout.engine.upload import Staging

F = TypeVar("F")


class StepFeature:
    """One feature of an engine. A hook that is not overridden does nothing."""

    name: ClassVar[str]  # that of its part on the device

    # --- plan ---------------------------------------------------------------------------------------------------------

    def plan_begins(self) -> None:
        """A step of prompts is being planned; it is packed and launched before the next one."""

    def fit(self, seq: Sequence, start: int, length: int) -> int:
        """How many of `length` tokens of a prompt, from position `start` on, the step can take; 0 ends the step."""
        return length

    def decodes(self, seq: Sequence, start: int, length: int) -> bool:
        """False if the decode forward cannot compute these tokens of a prompt."""
        return True

    # --- upload -------------------------------------------------------------------------------------------------------

    def words(self, seq: Sequence, length: int) -> int:
        """Upper bound on the int32 words that `pack` puts for `length` tokens of a prompt."""
        return 0

    def pack(self, plan: Plan, staging: Staging) -> None:
        """Put the feature's sections and extras of a step. Sections of a decode lie first and are there already."""

    # --- between the steps --------------------------------------------------------------------------------------------

    def weights_changed(self, names: Collection[str]) -> None:
        """An update has written these tensors."""

    def kv_left(self) -> None:
        """All KV has left the pool: a sleep is about to give the memory back."""

    # --- books --------------------------------------------------------------------------------------------------------

    def gauges(self) -> Mapping[str, float]:
        """Values for the meter by metric."""
        return {}

    def check(self) -> None:
        """Assert that nothing leaked; only when drained."""


def find(features: Collection[object], kind: type[F]) -> F | None:
    """The feature of this class; None if there is none."""
    return next((feature for feature in features if isinstance(feature, kind)), None)
