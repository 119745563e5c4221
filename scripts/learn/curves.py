"""Draws the runs of `scripts.learn.compare`: reward and held-out accuracy by time, steps and tokens.

python -m scripts.learn.curves learn.json learn.svg
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.lines import Curves, Run, draw_lines

#: What a plot shows, the part of a run, and its field.
_SHOWN = (("reward", "points", "reward"), ("right, held out", "held_out", "accuracy"))
#: By what, its unit, and its field in each part.
_PLACES = (
    ("time", "s", {"points": "wall_s", "held_out": "wall_s"}),
    ("steps", "", {"points": "step", "held_out": "evaluated"}),
    ("tokens drawn", "", {"points": "tokens_total", "held_out": "tokens_total"}),
)


def draw_runs(title: str, rows: Sequence[Mapping[str, Any]], names: Sequence[str] = ()) -> str:
    """The text of an SVG file; runs of one name and several seeds are a line with a band.

    `names` says which of them are shown, all if it is empty.
    """
    shown = list(names) or list(dict.fromkeys(row["name"] for row in rows))
    plots = []
    for what, part, field in _SHOWN:
        line = []
        for by, unit, places in _PLACES:
            found = {name: _runs(rows, name, part, places[part], field) for name in shown}
            line.append(Curves(f"{what}, by {by}", unit, {name: runs for name, runs in found.items() if runs}))
        if any(plot.series for plot in line):  # not, if no run was evaluated
            plots.append(line)
    return draw_lines(title, plots)


def _runs(rows: Sequence[Mapping[str, Any]], name: str, part: str, places: str, field: str) -> list[Run]:
    found = [_run(row[part], places, field) for row in rows if row["name"] == name]
    return [run for run in found if run is not None]


def _run(part: Mapping[str, Sequence[float]], places: str, field: str) -> Run | None:
    """The points of a run; smoothed rewards, since a step has few problems."""
    values = list(part.get(field, ()))
    if not values:
        return None
    if field == "reward":
        values = [statistics.fmean(values[max(0, i - 2) : i + 1]) for i in range(len(values))]
    return list(part[places]), values


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, help="what scripts.learn.compare wrote")
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    arguments = parser.parse_args()
    rows = json.loads(arguments.json.read_text())["rows"]
    arguments.picture.write_text(draw_runs(arguments.json.stem, rows))


if __name__ == "__main__":
    main()
