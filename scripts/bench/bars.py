"""Draws panels of bars as SVG text: the same figures give the same text on every machine.

    draw("title", [[Panel("8B, ms a step", ["1 row", "8 rows"], {"here": [3.9, 4.1], "vLLM": [5.3, 5.6]}, [3.3, 3.4])]])

Each group has a bar for each series, and a line across its bars for the floor. A missing figure has no bar.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from scripts.bench.summaries import figure

WIDTH = 920
_HEAD, _TITLE, _BARS, _FOOT, _MARGIN = 52, 34, 150, 40, 12
_COLOURS = ("#4b83d6", "#e0a458", "#3f9a52", "#b9568a")
_TEXT = 'font-family="system-ui,sans-serif" font-size="12" fill="#1f2328"'
#: Pixels above a bar that its figure needs.
_TEXT_ROOM = 14
_FLOOR, _AXIS = 'stroke="#1f2328" stroke-width="2"', 'stroke="#8a929b"'
_SMALL = 'font-size="10.5" fill="#57606a" text-anchor="middle"'


@dataclass(frozen=True)
class Panel:
    """One scale from zero.

    `groups` are the names below the bars, in lines that a line feed separates. `series` has a figure for each group,
    `floor` too, or nothing.
    """

    title: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    floor: Sequence[float | None] = ()


def draw(title: str, lines: Sequence[Sequence[Panel]]) -> str:
    """The text of an SVG file: panels in `lines`, as wide as they have groups, and a legend of all series.

    Raises:
        ValueError: a panel has a series or a floor with another number of figures than groups.
    """
    panels = [panel for line in lines for panel in line]
    names = list(dict.fromkeys(name for panel in panels for name in panel.series))
    tall = _TITLE + _BARS + _FOOT
    height = _HEAD + tall * len(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(title)}" {_TEXT}>',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(title, _MARGIN, 20, 'font-weight="600"'),
        *_legend(names, any(panel.floor for panel in panels)),
    ]
    for index, line in enumerate(lines):
        left: float = _MARGIN
        room = WIDTH - _MARGIN * (len(line) + 1)
        for panel in line:
            width = room * len(panel.groups) / sum(len(other.groups) for other in line)
            parts += _panel(panel, names, left, _HEAD + tall * index, width)
            left += width + _MARGIN
    return "\n".join([*parts, "</svg>", ""])


def _text(text: str, x: float, y: float, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'.replace(" >", ">")


def _line(x1: float, x2: float, y: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y:.1f}" y2="{y:.1f}" {style}/>'


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def _legend(names: Sequence[str], floor: bool) -> list[str]:
    parts, left = [], _MARGIN
    for name, colour in zip(names, _COLOURS, strict=False):
        parts += [_box(left, 31, 11, 11, colour), _text(name, left + 16, 41)]
        left += 40 + 7 * len(name)
    if floor:
        parts += [_line(left, left + 18, 37, _FLOOR), _text("floor", left + 23, 41)]
    return parts


def _panel(panel: Panel, names: Sequence[str], left: float, top: float, width: float) -> list[str]:
    figures = [*panel.series.values(), *([panel.floor] if panel.floor else [])]
    if any(len(found) != len(panel.groups) for found in figures):
        raise ValueError(f"{panel.title}: not every series has {len(panel.groups)} figures")
    most = max(number for found in figures for number in found if number is not None)
    base, scale = top + _TITLE + _BARS, (_BARS - 14) / most
    parts = [_text(panel.title, left, top + 14, 'font-weight="600"'), _line(left, left + width, base, _AXIS)]
    group = width / len(panel.groups)
    bar = min(34.0, group * 0.9 / len(panel.series))
    for index, label in enumerate(panel.groups):
        middle = left + group * (index + 0.5)
        shown = [(name, found[index]) for name, found in panel.series.items() if found[index] is not None]
        first = middle - bar * len(shown) / 2
        floor = panel.floor[index] if panel.floor else None
        for place, (name, number) in enumerate(shown):
            assert number is not None
            x, tall = first + bar * place, scale * number
            parts.append(_box(x, base - tall, bar - 2, tall, _COLOURS[names.index(name)]))
            over = floor is not None and 0 <= scale * floor - tall < _TEXT_ROOM
            above = scale * floor if over and floor is not None else tall
            parts.append(_text(figure(number), x + bar / 2 - 1, base - above - 3, _SMALL))
        if floor is not None:
            parts.append(_line(first - 3, first + bar * len(shown) + 1, base - scale * floor, _FLOOR))
        parts += [_text(text, middle, base + 14 + 12 * line, _SMALL) for line, text in enumerate(label.split("\n"))]
    return parts
