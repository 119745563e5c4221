"""What a step gives back, on the host: plain data. `step` reads it from its slot, the scheduler commits it.

Legend: C rows with tops, K tops (MAX_TOP_LOGPROBS, or the vocabulary if that is smaller), N scored positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of one step, on the host."""

    places: tuple[int, ...]  # of the rows with tops, among those that sample
    top_ids_CK: np.ndarray  # int32, likeliest first
    top_logprobs_CK: np.ndarray  # float32
    prompt_N: np.ndarray  # float32, of the prompt tokens that the step's spans score, in their order
    prompt_ranks_N: np.ndarray | None = None  # int32, in a step that ranks them
    prompt_ids_NK: np.ndarray | None = None  # int32, in a step that has their likeliest tokens
    prompt_logprobs_NK: np.ndarray | None = None  # float32, the same


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step sampled, one entry for each row that drew a token, in the order of the plan."""

    tokens: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    drawn_logprobs: list[float]
    scores: Scores | None = None  # where the step has any
    accepted: list[int] | None = None  # of a step with drafts: at the place of a row's own draw, how many of its drafts
    #: Guesses of the device after the step for each row that draws, in their order. Others may follow them.
    guesses: list[list[int]] | None = None
    of_features: Mapping[str, Any] = field(default_factory=dict)  # what features give to their part on the host
