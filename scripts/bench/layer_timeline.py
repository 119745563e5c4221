"""The kernels of one layer of a captured decode step in order: their begin, and the time that each adds to the step.

Kernels that are launched early overlap with their predecessor, so durations add up to more than the step. A kernel adds
the time from the end of all its predecessors to its own end. These times add up to the time of the layer.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.bench.profiled_steps import interval_of

#: Layers at both ends of a step that are left out, since other kernels overlap with them.
_ENDS = 2


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Medians over layers and steps, microseconds."""

    name: str
    gap_us: float  # from the end of all predecessors to its begin; below 0 if it began before
    duration_us: float
    adds_us: float  # from the end of all predecessors to its own end; 0 if it ended earlier


def layer_timeline(events: Sequence[Mapping[str, Any]], steps: int, marker: str) -> list[KernelTime]:
    """The kernels of a layer of `steps` equal steps, from one named `marker`, which each layer has once, to the next.

    `events` are kernels as of a Chrome trace. Raises ValueError if the kernels are not the kernels of so many equal
    steps, or if layers differ.
    """
    ordered = sorted(events, key=interval_of)
    if not ordered or len(ordered) % steps:
        raise ValueError(f"{len(ordered)} kernels do not divide into {steps} equal steps")
    size = len(ordered) // steps
    layers = [layer for i in range(steps) for layer in _layers(ordered[i * size : (i + 1) * size], marker)]
    names = {tuple(event["name"] for event in layer) for layer, _ in layers}
    if len(names) != 1:
        raise ValueError(f"the layers differ in their kernels: {sorted(names)}")
    times = [_times(layer, before) for layer, before in layers]
    return [
        KernelTime(name, *(statistics.median(values) for values in zip(*(layer[i] for layer in times), strict=True)))
        for i, name in enumerate(names.pop())
    ]


def _layers(step: Sequence[Mapping[str, Any]], marker: str) -> list[tuple[Sequence[Mapping[str, Any]], float]]:
    """The inner layers of a step, each with the end of all kernels before it."""
    starts = [i for i, event in enumerate(step) if event["name"] == marker][_ENDS:-_ENDS]
    pairs = zip(starts, starts[1:], strict=False)
    return [(step[a:b], max(interval_of(event)[1] for event in step[:a])) for a, b in pairs]


def _times(layer: Sequence[Mapping[str, Any]], end: float) -> list[tuple[float, float, float]]:
    times = []
    for event in layer:
        begin, finish = interval_of(event)
        times.append((begin - end, finish - begin, max(0.0, finish - end)))
        end = max(end, finish)
    return times
