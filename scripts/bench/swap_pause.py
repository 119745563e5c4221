"""The pause of generation by a weight swap, from the times of the worker's steps.

    step, version 7   |-------|-|-------|      |-------|-|-------|   step, version 8
                              typical   |<-pause->|

The pause is the time from the end of the last step under the old weights to the end of the first one under the new
weights, minus the usual time between the ends of two steps. It includes the copy, the loop's work around it, and the
extra time of the first step.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rollout.metrics.recording import Recording
from rollout.metrics.step_timing import StepTiming

_USUAL_STEPS = 64  # steps before an update; their median is the usual time


@dataclass(frozen=True, slots=True)
class Pause:
    """One swap, in seconds."""

    version: int
    pause_s: float
    during_s: float  # median time between the ends of two steps during the transfer, as far as the recording goes
    steps_during: int


def usual_step(recording: Recording) -> float:
    """Median seconds between the ends of two consecutive decode steps with equal rows.

    Raises ValueError without such steps.
    """
    intervals = [seconds for _, seconds in _intervals(recording.steps)][-_USUAL_STEPS:]
    if not intervals:
        raise ValueError("the recording has no two decode steps in a row with equal rows; run longer completions")
    return statistics.median(intervals)


def pause_of(recording: Recording, version: int, usual_s: float, published_unix_s: float) -> Pause:
    """The pause of the swap to `version`, which was published at this Unix time; `usual_s` is `usual_step` before that.

    Raises ValueError unless the recording has it between two decode steps with equal rows.
    """
    steps, published_s = recording.steps, published_unix_s - recording.origin_s
    first = next((i for i, step in enumerate(steps) if step.version == version), 0)
    if first == 0:
        raise ValueError(f"the swap to version {version} is not among the last {len(steps)} steps")
    before, after = steps[first - 1], steps[first]
    if not _decoding(before, after):
        raise ValueError(f"rows came or went at the swap to version {version}; run longer completions")
    during = [seconds for end_s, seconds in _intervals(steps[:first]) if end_s > published_s]
    return Pause(
        version,
        pause_s=after.end_s - before.end_s - usual_s,
        during_s=statistics.median(during) if during else usual_s,
        steps_during=len(during),
    )


def _intervals(steps: Sequence[StepTiming]) -> list[tuple[float, float]]:
    """(end of the later step, seconds between the ends) for each pair of consecutive decode steps."""
    return [(b.end_s, b.end_s - a.end_s) for a, b in pairwise(steps) if _decoding(a, b)]


def _decoding(a: StepTiming, b: StepTiming) -> bool:
    return a.kind == b.kind == "decode" and a.rows == b.rows
