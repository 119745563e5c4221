"""A picture of who works when: green where host and device both do, light green the device alone, red the host alone.

    blocking     red, light green, red, light green ...    they take turns
    pipelined    green, light green, green ...             the host works underneath the device

The host works from the moment at which a step's outputs have arrived until it has launched the next step; it waits
between a launch and the outputs that it commits next. In the style of Hugging Face's "Unlocking asynchronicity in
continuous batching". matplotlib is in the extra `plot`; it is imported when a picture is drawn.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollout.metrics.meter import StepRecord

#: (begin, end), seconds.
Span = tuple[float, float]

COLOURS = {"both": "#2e8b57", "device": "#b5e2c4", "host": "#d6453d", "neither": "#ffffff"}
_LABELS = {"both": "host and device", "device": "device alone", "host": "host alone"}


def device_spans(records: Sequence[StepRecord]) -> list[Span]:
    """When the compute stream ran a step, merged, in order."""
    return merged([span for record in records for span in record.busy])


def host_spans(records: Sequence[StepRecord]) -> list[Span]:
    """When the host did not wait, merged, in order. Records need their moments `planned_at_s` and `committed_at_s`."""
    launches, commits, masks, idle_from = [], [], [], set()
    for record in records:
        assert record.planned_at_s is not None and record.committed_at_s is not None, "a record without moments"
        launches.append((record.planned_at_s, record.planned_at_s + record.plan_s + record.launch_s))
        done_s = record.committed_at_s + record.commit_s
        handed_over_s = done_s if record.finalized_at_s is None else max(done_s, record.finalized_at_s)
        commits.append((record.committed_at_s, handed_over_s))
        if record.held is not None:  # the device waits for what the host makes
            masks.append(record.held)
        if record.idle_after:
            idle_from.add(record.committed_at_s)
    spans = sorted(launches + commits)
    began = {begin for begin, _ in launches}
    # Nothing waits between a commit and the launch that follows it, unless there was nothing to launch.
    waiting = began | idle_from
    turns = [(a[0], b[1]) for a, b in zip(spans, spans[1:], strict=False) if b[0] in began and a[0] not in waiting]
    return merged(spans + turns + masks)


def active_share(records: Sequence[StepRecord]) -> float:
    """Share of the time from the first step's start to the last one's end in which the compute stream ran a step."""
    spans = device_spans(records)
    return sum(end - begin for begin, end in spans) / (spans[-1][1] - spans[0][0])


def merged(spans: Sequence[Span]) -> list[Span]:
    """The union of spans as disjoint spans in order."""
    result: list[Span] = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((begin, end))
    return result


def clipped(spans: Sequence[Span], begin: float, end: float) -> list[Span]:
    """What of the spans lies between two moments."""
    return [(max(a, begin), min(b, end)) for a, b in spans if b > begin and a < end]


def overlap(device: Sequence[Span], host: Sequence[Span]) -> list[tuple[Span, str]]:
    """Adjacent stretches with who works in them, from the first of both to the last. The spans of each are disjoint."""
    # What was read from JSON has lists for spans.
    device, host = (sorted((begin, end) for begin, end in spans) for spans in (device, host))
    moments = sorted({moment for span in (*device, *host) for moment in span})
    stretches: list[tuple[Span, str]] = []
    for begin, end in zip(moments, moments[1:], strict=False):
        middle = (begin + end) / 2
        who = _WHO[_covers(device, middle), _covers(host, middle)]
        if stretches and stretches[-1][1] == who:
            stretches[-1] = ((stretches[-1][0][0], end), who)
        else:
            stretches.append(((begin, end), who))
    return stretches


_WHO = {(True, True): "both", (True, False): "device", (False, True): "host", (False, False): "neither"}


def _covers(spans: Sequence[Span], moment: float) -> bool:
    """True if one of the spans, which are in order, has the moment in it."""
    place = bisect_right(spans, (moment, math.inf)) - 1
    return place >= 0 and moment < spans[place][1]


def shares(stretches: Sequence[tuple[Span, str]]) -> dict[str, float]:
    """Percent of the whole time in which both, the device alone, the host alone, and neither worked."""
    seconds = dict.fromkeys(COLOURS, 0.0)
    for (begin, end), who in stretches:
        seconds[who] += end - begin
    wall_s = sum(seconds.values())
    return {who: 100.0 * spent_s / wall_s if wall_s else 0.0 for who, spent_s in seconds.items()}


def write_overlap(lanes: Mapping[str, tuple[Sequence[Span], Sequence[Span]]], path: str | Path, title: str) -> None:
    """Draw (device spans, host spans) of each lane, top to bottom, each from its own beginning, into a PNG.

    Raises:
        ValueError: a lane is empty, or matplotlib is not installed.
        OSError: the file cannot be written.
    """
    if not all(device or host for device, host in lanes.values()):  # of a single step the host's part is outside
        raise ValueError("no steps to draw: each lane needs at least one step")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ValueError("a picture of the overlap needs matplotlib: pip install 'rollout-engine[plot]'") from error
    figure = Figure(figsize=(14, 0.9 + 0.9 * len(lanes)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for lane, (device, host) in enumerate(lanes.values()):
        stretches = overlap(device, host)
        origin = stretches[0][0][0]
        for who in ("both", "device", "host"):
            bars = [(1e3 * (b - origin), 1e3 * (e - b)) for (b, e), of in stretches if of == who]
            axes.broken_barh(bars, (lane - 0.38, 0.76), facecolors=COLOURS[who], edgecolors=COLOURS[who], linewidth=0.3)
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlabel("ms")
    axes.margins(x=0.005)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize=11)
    patches = [Patch(color=COLOURS[who], label=label) for who, label in _LABELS.items()]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, format="png")
