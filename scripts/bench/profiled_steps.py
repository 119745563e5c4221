"""Decode steps in a profiler's trace: from the begin of the first kernel to the end of the last one.

A captured step is one graph launch; all its kernels have the correlation id of the launch. Kernels outside of graphs
(prefill, copies) are left out.
"""

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollout.metrics.overlap import device_intervals, merged
from rollout.metrics.step_timing import Interval, StepTiming


@dataclass(frozen=True, slots=True)
class ProfiledSteps:
    """Shares of the time from the first step's first kernel to the last step's last one."""

    steps: int
    active_share: float  # while a step ran: from the begin of its first kernel to the end of its last one
    kernel_share: float  # while a kernel ran
    kernels: float  # of one step
    step_s: float  # mean time from the begin of the first kernel to the end of the last one


def profile_steps(work: Callable[[], object]) -> list[dict[str, Any]]:
    """The kernel events of `work`, which must wait for its launches, as in a Chrome trace (microseconds)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("cat") == "kernel"]


def summarise(events: Sequence[Mapping[str, Any]], steps: int) -> ProfiledSteps:
    """Group the kernels of `steps` steps of one graph size by step.

    Raises ValueError if they do not divide into that number of steps.
    """
    groups = _by_launch(events)
    if len(groups) != steps:
        groups = _in_equal_parts(events, steps)
    intervals = merged([(group[0][0], max(end for _, end in group)) for group in groups])
    kernels = merged([interval for group in groups for interval in group])
    wall = intervals[-1][1] - intervals[0][0]
    return ProfiledSteps(
        steps,
        sum(end - begin for begin, end in intervals) / wall,
        sum(end - begin for begin, end in kernels) / wall,
        sum(map(len, groups)) / steps,
        sum(max(end for _, end in group) - group[0][0] for group in groups) / steps / 1e6,
    )


def _by_launch(events: Sequence[Mapping[str, Any]]) -> list[list[Interval]]:
    groups: dict[Any, list[Interval]] = defaultdict(list)
    for event in events:
        groups[event["args"].get("correlation")].append(interval_of(event))
    most = max((len(group) for group in groups.values()), default=0)
    return sorted(sorted(group) for group in groups.values() if len(group) == most > 1)


def _in_equal_parts(events: Sequence[Mapping[str, Any]], steps: int) -> list[list[Interval]]:
    """For a profiler that gives every kernel of a graph an id of its own."""
    intervals = sorted(map(interval_of, events))
    if not intervals or len(intervals) % steps:
        raise ValueError(f"{len(intervals)} kernels do not divide into {steps} equal steps")
    size = len(intervals) // steps
    return [intervals[i : i + size] for i in range(0, len(intervals), size)]


def interval_of(event: Mapping[str, Any]) -> Interval:
    """Begin and end of a kernel, microseconds."""
    return event["ts"], event["ts"] + event["dur"]


def active_share(records: Sequence[StepTiming]) -> float:
    """Share of the time from the first step's start to the last one's end in which the compute stream ran a step."""
    intervals = device_intervals(records)
    return sum(end - begin for begin, end in intervals) / (intervals[-1][1] - intervals[0][0])
