"""A feature of steps on the host: what an optional capability adds to plans, uploads and commits.

The stages of a step call every feature of their worker by these hooks. A worker without a
feature has no object of it. Its part on the device is a `step.feature.DeviceFeature`.

    request   refusal, enter; a sequence gets a row: ready, admitted; gives it back: left
    plan      plan_begins, then fit and decodes for each span of a prompt, then note; plan_decode
    upload    words bounds what pack puts
    launch    launched
    commit    commit, committed, ran; delta_fields for each delta
    KV        stow, fetched, restored (`PageMirror`)
    loop      tick, wait
    weights   weights_changed, between two steps
    sleep     memory_leaves
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from typing import Any, ClassVar, TypeVar

from rollout.engine.kv.allocator import PageAllocator
from rollout.engine.kv.page_mirror import PageMirror
from rollout.engine.messages.requests import Request
from rollout.engine.messages.to_service import Rejected
from rollout.engine.schedule.plan import Plan, Span
from rollout.engine.sequence.row_needs import RowNeeds
from rollout.engine.sequence.sequence import Group, Sequence
from rollout.engine.step_output import StepOutput
from rollout.engine.upload import Staging

F = TypeVar("F")


class StepFeature(PageMirror):
    """One feature of an engine. A hook that is not overridden does nothing."""

    name: ClassVar[str]  # that of its part on the device
    serves: ClassVar[RowNeeds] = RowNeeds.NONE  # of `OPTIONAL`: requests that need it are refused without the feature

    # --- requests -----------------------------------------------------------------------------------------------------

    def refusal(self, request: Request) -> Rejected | None:
        """Why a request cannot be taken; None if it can."""
        return None

    def enter(self, group: Group) -> None:
        """A request was taken; its sequences do not exist yet."""

    def ready(self, seq: Sequence) -> bool:
        """False if a waiting sequence cannot have a row yet."""
        return True

    def admitted(self, seq: Sequence) -> None:
        """The sequence has got pages and gets a row."""

    def left(self, seq: Sequence) -> None:
        """No step names the sequence any more: it gives row and pages back."""

    # --- plan ---------------------------------------------------------------------------------------------------------

    def plan_begins(self) -> None:
        """A step of prompts is being planned; it is packed and launched before the next one."""

    def fit(self, seq: Sequence, start: int, length: int) -> int:
        """How many of `length` tokens of a prompt, from position `start` on, the step can take; 0 ends the step."""
        return length

    def decodes(self, seq: Sequence, start: int, length: int) -> bool:
        """False if the decode forward cannot compute these tokens of a prompt."""
        return True

    def note(self, spans: Seq[Span]) -> Any:
        """What the feature reads later in the `Plan.notes` of a step of these prompts; None if nothing."""
        return None

    def plan_decode(self, seqs: list[Sequence], version: int, allocator: PageAllocator, kept: int) -> Plan | None:
        """The step of these decode rows under the weights of `version`, if one token each is not all that it takes.

        It may give rows more pages, but leaves `kept` pages free. The first feature that gives a plan makes the step.
        """
        return None

    # --- upload -------------------------------------------------------------------------------------------------------

    def words(self, seq: Sequence, length: int) -> int:
        """Upper bound on the int32 words that `pack` puts for `length` tokens of a prompt."""
        return 0

    def pack(self, plan: Plan, staging: Staging) -> None:
        """Put the feature's sections and extras of a step. Sections of a decode lie first and are there already."""

    # --- launch and commit --------------------------------------------------------------------------------------------

    def launched(self, plan: Plan) -> None:
        """A step is in flight."""

    def commit(self, plan: Plan, output: StepOutput) -> None:
        """A step has ended; its tokens are not taken yet."""

    def committed(self, plan: Plan, output: StepOutput) -> None:
        """The tokens of a step are taken."""

    def ran(self, plan: Plan, tokens: int, seconds: float) -> None:
        """A committed step took `seconds` on the device, waits for masks too, and `tokens` of its tokens were kept."""

    def delta_fields(self, seq: Sequence) -> dict[str, Any]:
        """Fields of the `Delta` that is being made. They count as sent; `seq.finish` is set for the last one."""
        return {}

    # --- between the steps --------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Called at every tick."""

    def wait(self) -> None:
        """No step is in flight and none can be planned: wait for work of the feature that delays admission."""

    def weights_changed(self, version: int, names: Collection[str]) -> None:
        """An update has written these tensors; the weights have this version now."""

    def memory_leaves(self) -> None:
        """A sleep is about to give the device's memory back; no sequence has a row."""

    # --- books --------------------------------------------------------------------------------------------------------

    def gauges(self) -> Mapping[str, float]:
        """Values for the meter by metric."""
        return {}

    def check(self) -> None:
        """Assert that nothing leaked; only when drained."""


def find(features: Collection[object], kind: type[F]) -> F | None:
    """The feature of this class; None if there is none."""
    return next((feature for feature in features if isinstance(feature, kind)), None)
