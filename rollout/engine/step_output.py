"""What a step gives back, on the host: plain data. `step` reads it from its slot, the scheduler commits it.

Legend: C rows with tops, K tops (MAX_TOP_LOGPROBS, or the vocabulary if that is smaller), N scored positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step sampled, one entry for each row that drew a token, in the order of the plan."""

    tokens: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    drawn_logprobs: list[float]
    #: Of a step with drafts: at the place of a row's own draw, how many of its drafts.
    accepted: list[int] = field(default_factory=list)
    of_features: Mapping[str, Any] = field(default_factory=dict)  # what features give to their part on the host
