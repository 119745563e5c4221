"""A picture of when host and device work.

    blocking     red, light green, red, light green ...    they take turns
    pipelined    green, light green, green ...             the host works while the device does

The host works from the arrival of a step's outputs until it has launched the next step. It waits between a launch and
the arrival of the outputs that it commits next. The style follows Hugging Face's "Unlocking asynchronicity in
continuous batching". matplotlib is in the extra `plot`; it is imported when a picture is drawn.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout.extras import install
from rollout.metrics.samples import percent
from rollout.metrics.step_timing import Interval, StepTiming


@dataclass(frozen=True, slots=True)
class Colour:
    """The meaning of one colour of the picture."""

    hexadecimal: str
    name: str
    title: str
    meaning: str


COLOURS: Mapping[str, Colour] = {
    "both": Colour("#2e8b57", "green", "host and device", "the host works while the device runs a step"),
    "device": Colour("#b5e2c4", "light green", "device alone", "the device runs a step and the host waits for it"),
    "host": Colour("#d6453d", "red", "host alone", "the device waits for the host (a bubble)"),
    "neither": Colour("#ffffff", "white", "neither", "there was no work, or another process had the core"),
}


def device_intervals(records: Sequence[StepTiming]) -> list[Interval]:
    """The intervals in which the compute stream ran a step: disjoint and in order."""
    return merged([interval for record in records for interval in record.busy])


def host_intervals(records: Sequence[StepTiming]) -> list[Interval]:
    """The intervals in which the host worked: disjoint and in order.

    The records need `planned_at_s` and `committed_at_s`.
    """
    launches, commits, masks, idle_from = [], [], [], set()
    for record in records:
        assert record.planned_at_s is not None and record.committed_at_s is not None, (
            "a step without planned_at_s or committed_at_s"
        )
        launches.append((record.planned_at_s, record.planned_at_s + record.plan_s + record.launch_s))
        done_s = record.committed_at_s + record.commit_s
        handed_over_s = done_s if record.finalized_at_s is None else max(done_s, record.finalized_at_s)
        commits.append((record.committed_at_s, handed_over_s))
        if record.mask_wait is not None:  # the device waits for the host, which makes masks
            masks.append(record.mask_wait)
        if record.idle_after:
            idle_from.add(record.committed_at_s)
    intervals = sorted(launches + commits)
    began = {begin for begin, _ in launches}
    # The host works from a commit to the launch that follows it, unless there was nothing to launch.
    waiting = began | idle_from
    turns = [
        (a[0], b[1]) for a, b in zip(intervals, intervals[1:], strict=False) if b[0] in began and a[0] not in waiting
    ]
    return merged(intervals + turns + masks)


def merged(intervals: Sequence[Interval]) -> list[Interval]:
    """The union of intervals as disjoint intervals in order."""
    result: list[Interval] = []
    for begin, end in sorted(intervals):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((begin, end))
    return result


def clipped(intervals: Sequence[Interval], begin: float, end: float) -> list[Interval]:
    """The parts of the intervals that lie between two moments."""
    return [(max(a, begin), min(b, end)) for a, b in intervals if b > begin and a < end]


def overlap(device: Sequence[Interval], host: Sequence[Interval]) -> list[tuple[Interval, str]]:
    """Adjacent stretches from the first interval to the last, each with a key of `COLOURS`.

    The intervals of one side are disjoint.
    """
    # Intervals that were read from JSON are lists.
    device, host = (sorted((begin, end) for begin, end in intervals) for intervals in (device, host))
    moments = sorted({moment for interval in (*device, *host) for moment in interval})
    stretches: list[tuple[Interval, str]] = []
    for begin, end in zip(moments, moments[1:], strict=False):
        middle = (begin + end) / 2
        who = _WHO[_covers(device, middle), _covers(host, middle)]
        if stretches and stretches[-1][1] == who:
            stretches[-1] = ((stretches[-1][0][0], end), who)
        else:
            stretches.append(((begin, end), who))
    return stretches


_WHO = {(True, True): "both", (True, False): "device", (False, True): "host", (False, False): "neither"}


def _covers(intervals: Sequence[Interval], moment: float) -> bool:
    """True if the moment lies in one of the intervals, which are in order."""
    place = bisect_right(intervals, (moment, math.inf)) - 1
    return place >= 0 and moment < intervals[place][1]


def shares(stretches: Sequence[tuple[Interval, str]]) -> dict[str, float]:
    """Percent of the whole time by key of `COLOURS`."""
    seconds = dict.fromkeys(COLOURS, 0.0)
    for (begin, end), who in stretches:
        seconds[who] += end - begin
    wall_s = sum(seconds.values())
    return {who: percent(spent_s, wall_s) for who, spent_s in seconds.items()}


def write_overlap(
    tracks: Mapping[str, tuple[Sequence[Interval], Sequence[Interval]]], path: str | Path, title: str
) -> None:
    """Draw tracks of (device intervals, host intervals) into a PNG, top to bottom; each track begins at its first
    interval.

    Raises:
        ValueError: a track is empty, or matplotlib is not installed.
        OSError: the file cannot be written.
    """
    if not all(device or host for device, host in tracks.values()):  # one side may be empty
        raise ValueError("nothing to draw: each track needs at least one step")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ValueError(f"a picture of the overlap needs matplotlib: {install('plot')}") from error
    figure = Figure(figsize=(14, 1.4 + 0.9 * len(tracks)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for track, (device, host) in enumerate(tracks.values()):
        stretches = overlap(device, host)
        origin = stretches[0][0][0]
        for who in ("both", "device", "host"):
            colour = COLOURS[who].hexadecimal
            bars = [(1e3 * (b - origin), 1e3 * (e - b)) for (b, e), of in stretches if of == who]
            # Without edges: they would widen bars that are shorter than a pixel.
            axes.broken_barh(bars, (track - 0.38, 0.76), facecolors=colour, linewidth=0, snap=False)
    axes.set_yticks(range(len(tracks)), list(tracks))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(tracks) - 0.5, -0.5)
    axes.set_xlabel("ms")
    axes.margins(x=0.005)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize=11)
    patches = [
        Patch(facecolor=colour.hexadecimal, edgecolor="#bbbbbb", label=f"{colour.title}: {colour.meaning}")
        for colour in COLOURS.values()
    ]
    figure.legend(handles=patches, loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, format="png")
