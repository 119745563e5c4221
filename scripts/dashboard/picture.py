"""Draws the dashboard of an offline W&B run as a PNG, without W&B, a network or an account.

    python -m scripts.dashboard.picture RUN_FOLDER dashboard.png

It needs the extra `plot` (matplotlib). The layout is in `scripts/dashboard/layout.py`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout.extras import install
from scripts.dashboard.layout import COLUMNS, LAYOUT, Panel, Section
from scripts.dashboard.offline_run import OfflineRun, read_offline_run

COLOURS = ("#2f6db3", "#e0a030", "#4c9f70", "#d62728", "#b07cc6", "#7f7f7f")
_PANEL_INCHES = (3.6, 1.9)
_DPI = 88
_COLOURS_KEPT = 255  # saves two thirds of the bytes without a visible difference
#: Below this value the axis of a histogram is linear, above it logarithmic; by unit.
_LINEAR_UP_TO = {"tokens": 16.0, "s": 0.01}

Row = dict[str, Any]


def series(rows: Sequence[Row], panel: Panel) -> dict[str, tuple[list[float], list[Any]]]:
    """(xs, ys) of each metric of a panel that the rows have; x is seconds since the first row, or a weights version."""
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
        raise ValueError("the run has no rows to draw; take a run with at least one report")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from PIL import Image
    except ImportError as error:
        raise ValueError(f"a picture needs matplotlib: {install('plot')}") from error
    width, height = _PANEL_INCHES
    rows = [section.rows for section in LAYOUT]
    size = width * COLUMNS, (height + 0.5) * sum(rows)
    figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    parts: Any = figure.subfigures(len(LAYOUT), 1, height_ratios=rows)
    for section, part in zip(LAYOUT, parts, strict=True):
        _draw_section(part, section, run.rows)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.draw()
    picture = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba()).convert("RGB")
    picture.quantize(_COLOURS_KEPT, Image.Quantize.FASTOCTREE).save(path, format="PNG", optimize=True)


def _draw_section(figure: Any, section: Section, rows: Sequence[Row]) -> None:
    figure.suptitle(section.name, x=0.01, ha="left", fontsize=10, fontweight="bold")
    for axes, panel in zip(figure.subplots(section.rows, COLUMNS, squeeze=False).flat, section.panels, strict=False):
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
        _draw_histogram(axes, *found[panel.metrics[0]], _LINEAR_UP_TO[panel.unit])
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


def _draw_histogram(axes: Any, xs: list[float], histograms: list[dict[str, list[float]]], linear_up_to: float) -> None:
    """A column for each report with samples; darker cells have more of them."""
    most = max(max(histogram["values"]) for histogram in histograms)
    width = min((b - a for a, b in zip(xs, xs[1:], strict=False)), default=1.0)
    for x, histogram in zip(xs, histograms, strict=True):
        edges = histogram["bins"]
        for count, low, high in zip(histogram["values"], edges, edges[1:], strict=False):
            if count:
                axes.bar(x, high - low, width, low, color=COLOURS[0], alpha=min(1.0, 0.2 + 0.8 * count / most))
    axes.set_yscale("symlog", linthresh=linear_up_to)


def _labels(names: list[str]) -> list[str]:
    """The names without their common prefix."""
    parts = [name.split("/") for name in names]
    same = 0
    while all(len(part) > same + 1 for part in parts) and len({part[same] for part in parts}) == 1:
        same += 1
    return ["/".join(part[same:]) for part in parts]


def main(arguments: list[str]) -> int:
    """Draw the picture."""
    parser = argparse.ArgumentParser(prog="python -m scripts.dashboard.picture", description=__doc__.splitlines()[0])
    parser.add_argument("run", metavar="RUN_FOLDER", help="folder of an offline run (offline-run-...)")
    parser.add_argument("png", metavar="FILE", type=Path, help="picture to write")
    given = parser.parse_args(arguments)
    try:
        run = read_offline_run(given.run)
        write_dashboard(run, given.png, f"Rollout workers: {run.name or run.project}, {len(run.rows)} rows")
    except (OSError, ValueError) as error:
        print(f"picture: {error}", file=sys.stderr)
        return 1
    print(given.png)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
