"""A picture of the last steps: what the host and the three streams did, and when the compute stream was idle.

    host     plan, launch and commit of each step
    h2d      upload of the step's packed inputs
    compute  the step itself; idle stretches between two steps are hatched
    d2h      download of its tokens

matplotlib is in the extra `plot`; it is imported when a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout.extras import install
from rollout.metrics.step_timing import StepTiming

LANES = ("host", "h2d", "compute", "d2h")
#: What each colour stands for, as the legend of the picture says it.
MEANINGS = {
    "plan": "plan: the host chooses rows and pages",
    "launch": "launch: the host enqueues the step",
    "commit": "commit: the host appends the step's tokens",
    "h2d": "h2d: inputs go to the device",
    "decode": "decode: a step of one token for each row",
    "prefill": "prefill: a step of prompt chunks",
    "d2h": "d2h: tokens come to the host",
    "bubble": "idle: the compute stream runs no step",
}
COLOURS = {
    "plan": "#7f7f7f",
    "launch": "#4c9f70",
    "commit": "#b07cc6",
    "h2d": "#e0a030",
    "decode": "#2f6db3",
    "prefill": "#66b3e6",
    "d2h": "#c98a3a",
    "bubble": "#d62728",
}

LANE_OF = {
    **dict.fromkeys(("plan", "launch", "commit"), "host"),
    **dict.fromkeys(("decode", "prefill", "bubble"), "compute"),
    "h2d": "h2d",
    "d2h": "d2h",
}

#: (begin, length) in seconds.
Bar = tuple[float, float]


def bars(records: Sequence[StepTiming]) -> dict[str, list[Bar]]:
    """The bars of the picture by colour name, in seconds of the records' clock.

    Without `planned_at_s` a launch is drawn to end where the upload begins; without `committed_at_s` a commit is drawn
    from the end of the download.
    """
    result: dict[str, list[Bar]] = {name: [] for name in COLOURS}
    busy_until = None
    for record in records:
        upload = record.h2d[0] if record.h2d else record.start_s
        download_end = record.d2h[1] if record.d2h else record.end_s
        planned = record.planned_at_s
        if planned is None:
            planned = upload - record.launch_s - record.plan_s
        committed = download_end if record.committed_at_s is None else record.committed_at_s
        result["plan"].append((planned, record.plan_s))
        result["launch"].append((planned + record.plan_s, record.launch_s))
        result["commit"].append((committed, record.commit_s))
        for name, interval in (("h2d", record.h2d), ("d2h", record.d2h)):
            if interval is not None:
                result[name].append((interval[0], interval[1] - interval[0]))
        for begin, end in record.busy:
            result["decode" if record.kind == "decode" else "prefill"].append((begin, end - begin))
            if busy_until is not None and begin > busy_until:
                result["bubble"].append((busy_until, begin - busy_until))
            busy_until = end if busy_until is None else max(busy_until, end)
    return result


def write_timeline(records: Sequence[StepTiming], path: str | Path, title: str) -> None:
    """Draw `records`, oldest first, into a PNG.

    Raises:
        ValueError: there are no records, or matplotlib is not installed.
        OSError: the file cannot be written.
    """
    if not records:
        raise ValueError("there are no steps to draw: the timeline needs at least one committed step")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"a timeline needs matplotlib: {install('plot')}") from error
    drawn = bars(records)
    origin = min(begin for intervals in drawn.values() for begin, _ in intervals)
    figure = Figure(figsize=(14, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw(axes, drawn, origin)
    axes.set_title(
        f"{title}   (compute idle {idle_pct(drawn):.1f} % over {len(records)} steps)", loc="left", fontsize=11
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, format="png")


def idle_pct(drawn: dict[str, list[Bar]]) -> float:
    """Share of idle stretches in the time from the first step's start to the last one's end, percent."""
    steps = drawn["decode"] + drawn["prefill"]
    wall_s = max(begin + length for begin, length in steps) - min(begin for begin, _ in steps)
    return 100.0 * sum(length for _, length in drawn["bubble"]) / wall_s if wall_s > 0 else 0.0


def _draw(axes: Any, drawn: dict[str, list[Bar]], origin: float) -> None:
    for name, intervals in drawn.items():
        lane = LANES.index(LANE_OF[name])
        # The edge keeps bars visible that are shorter than a pixel.
        look: dict[str, Any] = {"facecolors": COLOURS[name], "edgecolors": COLOURS[name], "linewidth": 0.8}
        if name == "bubble":
            look = {"facecolors": "none", "edgecolors": COLOURS[name], "hatch": "////", "linewidth": 0.5}
        elif name in ("decode", "prefill"):
            look |= {"edgecolors": "white", "linewidth": 0.6}
        milliseconds = [(1e3 * (begin - origin), 1e3 * length) for begin, length in intervals]
        axes.broken_barh(milliseconds, (lane - 0.38, 0.76), label=MEANINGS[name], **look)
    axes.set_yticks(range(len(LANES)), LANES)
    axes.set_ylim(len(LANES) - 0.5, -0.5)
    axes.set_xlabel("ms")
    axes.margins(x=0.005)
    axes.spines[["top", "right"]].set_visible(False)
    axes.figure.legend(loc="outside lower left", ncols=4, frameon=False, fontsize=9)
