"""Bars, sparklines and words of a fixed width; in ASCII if the terminal has no more."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_HEIGHTS = "▁▂▃▄▅▆▇█"
_ASCII_HEIGHTS = "_.-=+*%#"


def bar(share: float, width: int, ascii_only: bool = False) -> str:
    """A bar that fills `share` of `width` cells, 0 to 1."""
    share = min(1.0, max(0.0, share))
    if ascii_only:
        return ("#" * round(share * width)).ljust(width)
    whole, eighths = divmod(round(share * width * 8), 8)
    return ("█" * whole + (_EIGHTHS[eighths] if eighths else "")).ljust(width)


def parts(shares: Sequence[float], width: int) -> list[int]:
    """Cells of each part of a stacked bar: `width` or fewer together, by the largest remainders."""
    total = max(sum(shares), 1.0)
    exact = [max(0.0, share) / total * width for share in shares]
    cells = [int(value) for value in exact]
    left = min(width, round(sum(exact))) - sum(cells)
    for place in sorted(range(len(exact)), key=lambda i: cells[i] - exact[i])[:left]:
        cells[place] += 1
    return cells


def spark(values: Sequence[float], width: int, ascii_only: bool = False) -> str:
    """The last `width` values as heights from 0 to the largest of them."""
    heights = _ASCII_HEIGHTS if ascii_only else _HEIGHTS
    shown = values[-width:]
    top = max(shown, default=0.0)
    levels = [round((len(heights) - 1) * value / top) if top > 0 else 0 for value in shown]
    return "".join(heights[level] for level in levels).rjust(width)


def fit(text: str, width: int) -> str:
    """`text` in exactly `width` cells. Characters that are not printable, such as escapes, become `?`."""
    clean = "".join(character if character.isprintable() else "?" for character in text)
    if cell_len(clean) <= width:
        return set_cell_size(clean, width)
    return set_cell_size(clean, max(0, width - 1)) + ("~" if width > 0 else "")


def count(value: float) -> str:
    """A number in at most six characters: 1204, 20.4k, 1.2M."""
    for limit, divisor, unit in ((99_999.5, 1, ""), (999_950, 1e3, "k"), (999_950_000, 1e6, "M")):
        if value < limit:
            return f"{value:.0f}" if divisor == 1 else f"{value / divisor:.1f}{unit}"
    return f"{value / 1e9:.1f}G"


def seconds(value: float) -> str:
    """A time in at most six characters: 12.3s, 4m05s, 2h07m, 3d04h."""
    if value < 99.95:
        return f"{value:.1f}s"
    minutes, rest = divmod(int(value), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 48 else f"{hours // 24}d{hours % 24:02d}h"
