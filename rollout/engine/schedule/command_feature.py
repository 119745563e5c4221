"""Features with commands of their own, which change between two steps what rows run with."""

from abc import ABC, abstractmethod

from rollout.engine.messages.to_engine import FeatureCommand
from rollout.engine.schedule.roster import Roster
from rollout.engine.schedule.step_feature import RefusalError, StepFeature
from rollout.engine.sequence.sequence import Sequence


class CommandFeature(StepFeature, ABC):
    """A feature that carries out `FeatureCommand`s."""

    @abstractmethod
    def carry_out(self, command: FeatureCommand, roster: Roster, recompute: bool) -> list[Sequence]:
        """Called for each command of the feature, and for its updates.

        Return the sequences whose KV must be computed again; with `recompute`, all sequences that the command changes.
        Raises RefusalError, and then nothing has changed.
        """


def carry_out(command: FeatureCommand, roster: Roster, recompute: bool) -> list[Sequence]:
    """Have the feature of a command carry it out; see `CommandFeature`."""
    for feature in roster.features:
        if feature.name == command.feature and isinstance(feature, CommandFeature):
            return feature.carry_out(command, roster, recompute)
    raise RefusalError(f"this worker has no {command.feature}; start it with {command.flag}")
