"""The dashboard as a PNG, drawn from what an offline run wrote; for machines and pages without W&B.

matplotlib is in the extra `plot`; it is imported when a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout.metrics.dashboard import LAYOUT, Panel, Section
from rollout.metrics.wandb_file import OfflineRun

COLOURS = ("#2f6db3", "#e0a030", "#4c9f70", "#d62728", "#b07cc6", "#7f7f7f")
_COLUMNS = 4
_PANEL_INCHES = (3.6, 1.9)
_DPI = 88
_COLOURS_KEPT = 255  # a third of the bytes, and nobody sees it

Row = dict[str, Any]


def series(rows: Sequence[Row], panel: Panel) -> dict[str, tuple[list[float], list[Any]]]:
    """X and y of each metric of a panel, as far as the rows have it; x is seconds since the first row, or versions."""
    if not rows:
        return {}
    origin = rows[0]["_timestamp"]
    found: dict[str, tuple[list[float], list[Any]]] = {}
    for name in panel.metrics:
        held = [row for row in rows if name in row]
        if held:
            over = [row["weights/version"] if panel.over == "version" else row["_timestamp"] - origin for row in held]
            found[name] = over, [row[name] for row in held]
    return found


def write_dashboard(run: OfflineRun, path: str | Path, title: str) -> None:
    """Draw all sections into a PNG.

    Raises:
        ValueError: the run has no rows, or matplotlib is not installed.
        OSError: the file cannot be written.
    """
    if not run.rows:
        raise ValueError("the run has no rows to draw: it ended before its first report")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from PIL import Image
    except ImportError as error:
        raise ValueError("a picture needs matplotlib: pip install 'rollout-engine[plot]'") from error
    width, height = _PANEL_INCHES
    size = width * _COLUMNS, (height + 0.5) * len(LAYOUT)
    figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    parts: Any = figure.subfigures(len(LAYOUT), 1)
    for section, part in zip(LAYOUT, parts, strict=True):
        _draw_section(part, section, run.rows)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.draw()
    picture = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba()).convert("RGB")
    picture.quantize(_COLOURS_KEPT, Image.Quantize.FASTOCTREE).save(path, format="PNG", optimize=True)


def _draw_section(figure: Any, section: Section, rows: Sequence[Row]) -> None:
    figure.suptitle(section.name, x=0.01, ha="left", fontsize=10, fontweight="bold")
    for axes, panel in zip(figure.subplots(1, _COLUMNS), section.panels, strict=False):
        _draw_panel(axes, panel, series(rows, panel))
    for axes in figure.axes[len(section.panels) :]:
        axes.set_axis_off()


def _draw_panel(axes: Any, panel: Panel, found: dict[str, tuple[list[float], list[Any]]]) -> None:
    axes.set_title(f"{panel.title}, {panel.unit}", fontsize=8, loc="left")
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("weights version" if panel.over == "version" else "s", fontsize=7, labelpad=1)
    if not found:
        axes.text(0.5, 0.5, "not reported", ha="center", va="center", fontsize=8, transform=axes.transAxes)
        return
    if panel.kind == "histogram":
        _draw_histogram(axes, *found[panel.metrics[0]])
        return
    labels = _labels(list(found))
    if panel.kind == "stacked":
        (xs, _), *_rest = found.values()
        axes.stackplot(xs, *(ys for _, ys in found.values()), labels=labels, colors=COLOURS)
    else:
        mark = "o-" if panel.over == "version" else "-"
        for (xs, ys), label, colour in zip(found.values(), labels, COLOURS, strict=False):
            axes.plot(xs, ys, mark, markersize=3, linewidth=1.1, label=label, color=colour)
    values = [value for _, ys in found.values() for value in ys]
    if panel.kind == "line" and min(values) >= 0:
        axes.set_ylim(0.0, 1.08 * max(values) or 1.0)
    axes.margins(x=0.01)
    if len(found) > 1:
        axes.legend(fontsize=6, frameon=False, loc="best")


def _draw_histogram(axes: Any, xs: list[float], histograms: list[dict[str, list[float]]]) -> None:
    """A column for each report that had completions; darker where more of them ended."""
    most = max(max(histogram["values"]) for histogram in histograms)
    width = min((b - a for a, b in zip(xs, xs[1:], strict=False)), default=1.0)
    for x, histogram in zip(xs, histograms, strict=True):
        edges = histogram["bins"]
        for count, low, high in zip(histogram["values"], edges, edges[1:], strict=False):
            if count:
                axes.bar(x, high - low, width, low, color=COLOURS[0], alpha=min(1.0, 0.2 + 0.8 * count / most))
    axes.set_yscale("symlog", linthresh=16)


def _labels(names: list[str]) -> list[str]:
    """The names without what all of them begin with."""
    parts = [name.split("/") for name in names]
    same = 0
    while all(len(part) > same + 1 for part in parts) and len({part[same] for part in parts}) == 1:
        same += 1
    return ["/".join(part[same:]) for part in parts]
