"""The results of a step on the host: plain data. `step` reads them from its slot, the scheduler commits them.

Legend: C rows with tops, K tops (MAX_TOP_LOGPROBS, or the vocabulary if that is smaller), N scored positions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

Of = TypeVar("Of")


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The samples of a step, one entry for each row that drew a token, in the order of the plan."""

    tokens: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    drawn_logprobs: list[float]
    #: In a step with tokens ahead: the number of accepted ones, at the index of the row's own draw.
    accepted: list[int] = field(default_factory=list)
    of_features: Mapping[str, object] = field(default_factory=dict)  # results that features pass to their host part

    def of(self, feature: str, kind: type[Of]) -> Of:
        """The result of a feature that has one in this step."""
        found = self.of_features[feature]
        assert isinstance(found, kind)
        return found
