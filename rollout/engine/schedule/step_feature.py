"""A feature of steps on the host: what an optional capability adds to plans, uploads and commits.

The stages of a step call these hooks of every feature that their worker has. The feature's part on the device is a
`step.device_feature.DeviceFeature`.

    prompts   fit for each prompt
    step      pack, launched, commit
    row       left when a sequence gives it back
    between   weights_changed, memory_leaves

Some features have more hooks, by what they are:

    RequestFeature   requests ask for it
    VariantFeature   rows run with variants of the weights, which have to be there first
    AheadPlanner     rows take more than one token in a step
    CommandFeature   it has commands of its own (`command_feature`)
    PageMirror       it has data for each page of KV (`kv/tier`)
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import ClassVar, TypeVar

from rollout.engine.kv.allocator import PageAllocator
from rollout.engine.messages.statuses import StatusFields
from rollout.engine.messages.to_engine import Prefetch
from rollout.engine.messages.to_service import DeltaFields, DoneFields, Rejected
from rollout.engine.schedule.plan import Plan
from rollout.engine.sequence.sequence import Group, Sequence
from rollout.engine.upload import StepOutput, UploadStaging

F = TypeVar("F")


class RefusalError(ValueError):
    """A command cannot be carried out; the message says why, `field` names the wrong part of the request."""

    def __init__(self, message: str, field: str = "name") -> None:
        super().__init__(message)
        self.field = field


class StepFeature:
    """One feature of an engine. A hook that is not overridden does nothing."""

    name: ClassVar[str]  # equal to the name of its device feature
    #: False: it is called only for requests that ask for it, and in steps only while there are any.
    in_every_step: ClassVar[bool] = True

    # --- plan ---------------------------------------------------------------------------------------------------------

    def fit(self, seq: Sequence, start: int, length: int, first: bool) -> int:
        """Called for each prompt: return how many of `length` tokens from position `start` on the step has room for.

        `first`: it is the first prompt of a step. With fewer than `length` the step takes no further prompt.
        """
        return length

    # --- upload -------------------------------------------------------------------------------------------------------

    def pack(self, plan: Plan, staging: UploadStaging) -> None:
        """Called when a step is packed, after its other sections: put the feature's sections, facts and extras."""

    # --- launch and commit --------------------------------------------------------------------------------------------

    def launched(self, plan: Plan) -> None:
        """Called when a step is in flight: note what it will change."""

    def commit(self, plan: Plan, output: StepOutput) -> None:
        """Called when the outputs of a step have arrived, before its tokens are taken: take the feature's outputs."""

    def left(self, seq: Sequence) -> None:
        """Called when no step in flight uses a sequence that ended or was preempted: give back what it took.

        Its pages are given back next.
        """

    # --- between the steps --------------------------------------------------------------------------------------------

    def weights_changed(self, version: int, names: Collection[str]) -> None:
        """Called between two steps, when an update has written the tensors `names`: note the new version."""

    def memory_leaves(self) -> None:
        """Called before a sleep gives the device's memory back, when no sequence has a row: forget what is there."""

    # --- books --------------------------------------------------------------------------------------------------------

    def gauges(self) -> Mapping[str, float | None]:
        """Called before each report: return the values of the feature's metrics by name; None is left out."""
        return {}

    def check(self) -> None:
        """Called when the engine is drained: assert that nothing leaked."""


class RequestFeature(StepFeature):
    """A feature that requests ask for, by a field that names it (`EngineFields`)."""

    in_every_step = False

    def enter(self, group: Group) -> Rejected | None:
        """Called for each new request, before its sequences are made: set the feature's fields of the group.

        Return why the feature cannot serve it, or None if it can.
        """
        return None

    def delta_fields(self, seq: Sequence) -> DeltaFields:
        """Called for each `Delta`: return the feature's fields of it, and note nothing: a fault may come after it.

        `seq.finish` is set for the last delta of a sequence.
        """
        return {}

    def delta_made(self, seq: Sequence) -> None:
        """Called when a `Delta` is made: its fields count as sent. Must not fail."""

    def done_fields(self, group: Group) -> DoneFields:
        """Called for each `RequestDone`: return the feature's fields of it, and forget the group."""
        return {}


class VariantFeature(RequestFeature):
    """A feature by which rows run with variants of the weights."""

    in_every_step = True  # each row says which variant it runs with

    def edition(self, prefetch: Prefetch) -> int:
        """Called for each prefetch: return the edition of the variant that it names, or 0. Raises RefusalError."""
        return 0

    def ready(self, heads: list[Sequence]) -> list[Sequence]:
        """Called before a row is given, with the first waiting sequence of each variant, in their order.

        Return the sequences that can have a row now.
        """
        return heads

    def admitted(self, seq: Sequence) -> None:
        """Called when a sequence has got pages and gets a row: take what the row needs."""

    def tick(self, wait: bool) -> None:
        """Called at every tick, before a step is planned: look at the feature's own work.

        Called again with `wait` when no step is in flight and none can be planned: wait for work that delays admission.
        """

    def status(self) -> StatusFields:
        """Called by any thread, also while the loop hangs: return the feature's fields of the status."""
        return {}


class AheadPlanner(StepFeature, ABC):
    """A feature by which rows take more than one token in a step; an engine has one at most."""

    @abstractmethod
    def plan_decode(self, seqs: list[Sequence], version: int, allocator: PageAllocator, kept: int) -> Plan | None:
        """Called for each step of decode rows: return a plan if a row takes more than one token, or None.

        `version` is the weights'. The hook may give rows more pages, but must leave `kept` pages free.
        """

    def committed(self, plan: Plan, output: StepOutput, tokens: int, seconds: float) -> None:
        """Called when the tokens of a step are taken and `tokens` of them were kept: do the work that depends on them.

        The step took `seconds` on the device, the wait for masks included.
        """


def of_kind(features: Collection[object], kind: type[F]) -> list[F]:
    """The features of this class, in their order."""
    return [feature for feature in features if isinstance(feature, kind)]


def find_feature(features: Collection[object], kind: type[F]) -> F | None:
    """The feature of this class; None if the worker lacks it. Raises ValueError if there are two."""
    found = of_kind(features, kind)
    if len(found) > 1:
        names = " and ".join(type(feature).__name__ for feature in found)
        raise ValueError(f"{names} are both of class {kind.__name__}: an engine takes one such feature")
    return found[0] if found else None
