"""Draws panels of curves as SVG text: a line for each series, with a band from its least to its largest run.

    draw_lines("title", [[Curves("reward", "s", {"sync": [([0, 1], [0.1, 0.3]), ([0, 1], [0.2, 0.4])]})]])

The runs of a series are interpolated at the same places, as far as the shortest of them goes; the line is their median.
"""

import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from scripts.bench.bars import WIDTH
from scripts.bench.summaries import figure

#: Places and values of one run, in the order of places.
Run = tuple[Sequence[float], Sequence[float]]
_COLOURS = ("#4b83d6", "#e0a458", "#3f9a52", "#b9568a", "#7d6bc4", "#8a929b")
_HEAD, _TITLE, _PLOT, _FOOT, _MARGIN, _LEFT = 52, 30, 170, 42, 14, 34
_PLACES = 60
_TEXT = 'font-family="system-ui,sans-serif" font-size="12" fill="#1f2328"'
_SMALL = 'font-size="10.5" fill="#57606a"'
_GRID = 'stroke="#e3e7ea"'


@dataclass(frozen=True)
class Curves:
    """One plot from zero on both axes: a title, the unit of its places, and runs by the name of their series."""

    title: str
    unit: str
    series: Mapping[str, Sequence[Run]]


def draw_lines(title: str, rows: Sequence[Sequence[Curves]]) -> str:
    """The text of an SVG file: rows of plots of equal width, and one legend."""
    names = list(dict.fromkeys(name for row in rows for plot in row for name in plot.series))
    tall = _TITLE + _PLOT + _FOOT
    height = _HEAD + tall * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(title)}" {_TEXT}>',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_MARGIN}" y="20" font-weight="600">{escape(title)}</text>',
    ]
    left: float = _MARGIN
    for name, colour in zip(names, _COLOURS, strict=False):
        parts.append(f'<rect x="{left:.1f}" y="31.0" width="11.0" height="11.0" fill="{colour}"/>')
        parts.append(f'<text x="{left + 16:.1f}" y="41.0">{escape(name)}</text>')
        left += 40 + 7 * len(name)
    for index, row in enumerate(rows):
        width = (WIDTH - _MARGIN * (len(row) + 1)) / len(row)
        for place, plot in enumerate(row):
            parts += _plot(plot, names, _MARGIN + place * (width + _MARGIN), _HEAD + tall * index, width)
    return "\n".join([*parts, "</svg>", ""])


def at(run: Run, place: float) -> float:
    """A run's value at a place, between its neighbours; the first or last value outside."""
    places, values = run
    after = bisect_right(places, place)
    if after in (0, len(places)):
        return values[min(after, len(places) - 1)]
    share = (place - places[after - 1]) / (places[after] - places[after - 1])
    return values[after - 1] + share * (values[after] - values[after - 1])


def band(runs: Sequence[Run]) -> list[tuple[float, float, float, float]]:
    """Place, least, median and largest value of some runs, from the last beginning to the first end."""
    begin, end = max(run[0][0] for run in runs), min(run[0][-1] for run in runs)
    places = [begin + (end - begin) * i / (_PLACES - 1) for i in range(_PLACES)]
    found = [(place, [at(run, place) for run in runs]) for place in places]
    return [(place, min(values), statistics.median(values), max(values)) for place, values in found]


def _plot(plot: Curves, names: Sequence[str], left: float, top: float, width: float) -> list[str]:
    bands = {name: band(runs) for name, runs in plot.series.items()}
    farthest = max(found[-1][0] for found in bands.values()) or 1.0
    most = max([value for found in bands.values() for *_, value in found])
    most = next(step for step in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 100.0, float("inf")) if step >= most)
    base, origin, room = top + _TITLE + _PLOT, left + _LEFT, width - _LEFT

    def x(place: float) -> str:
        return f"{origin + room * place / farthest:.1f}"

    def y(value: float) -> str:
        return f"{base - (_PLOT - 8) * value / most:.1f}"

    parts = [f'<text x="{left:.1f}" y="{top + 16:.1f}" font-weight="600">{escape(plot.title)}</text>']
    for i in range(5):
        value = most * i / 4
        parts.append(f'<line x1="{origin:.1f}" x2="{origin + room:.1f}" y1="{y(value)}" y2="{y(value)}" {_GRID}/>')
        style = f'{_SMALL} text-anchor="end"'
        parts.append(f'<text x="{origin - 4:.1f}" y="{float(y(value)) + 4:.1f}" {style}>{value:g}</text>')
    for i, anchor in ((0, "start"), (1, "middle"), (2, "end")):
        place = farthest * i / 2
        shown = f"{figure(place)} {plot.unit}" if i == 2 else figure(place)
        parts.append(f'<text x="{x(place)}" y="{base + 16:.1f}" {_SMALL} text-anchor="{anchor}">{shown}</text>')
    for name, found in bands.items():
        colour = _COLOURS[names.index(name) % len(_COLOURS)]
        if len(plot.series[name]) > 1:
            edge = [f"{x(place)},{y(high)}" for place, _, _, high in found]
            edge += [f"{x(place)},{y(low)}" for place, low, _, _ in reversed(found)]
            parts.append(f'<polygon points="{" ".join(edge)}" fill="{colour}" fill-opacity="0.18"/>')
        middle = " ".join(f"{x(place)},{y(value)}" for place, _, value, _ in found)
        parts.append(f'<polyline points="{middle}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
    return parts
