"""One frame of `rollout top`: lines of text that fit the terminal.

A block for each worker, or one line if the blocks don't fit; then the rows, or the legend; then the line of keys. The
lines of metrics and the legend are made from the declarations in `rollout.metrics.definitions`. A worker that has
verified drafts has lines for these.
"""

import textwrap
import time
from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from rollout.metrics.definitions import METRICS, TOP_METRICS, Metric
from rollout.metrics.idle import IDLE_CAUSES
from rollout.top.screen import HELP, Row, Screen, WorkerView

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


_ERROR_LINES = 6
_DRAFTS, _DRAFT_LINES = "Speculation", 3
_LEAST_ROW_LINES = 6
_BAR = 14
#: Parts of the compute stream's time, in the order of the bar: (sign, style).
_PARTS = {
    "active": ("█", "green"),
    "bubble": ("▓", "red"),
    "prefill": ("▒", "cyan"),
    "swap": ("░", "magenta"),
    "offload": ("o", "yellow"),
    "no_work": ("·", "bright_black"),
}
_SHOWN_FROM_PCT = 0.05  # most workers never offload
_ASCII_SIGNS = {"█": "#", "▓": "!", "▒": "p", "░": "s", "·": "."}
_STATE_STYLES = {"serving": "green", "paused": "yellow", "asleep": "yellow", "draining": "yellow"}


def frame(
    views: Sequence[WorkerView], screen: Screen, width: int, height: int | None, ascii_only: bool = False
) -> list[Text]:
    """The lines: none wider than `width`, at most `height` of them, or all without a height."""
    rows = screen.arrange(views)
    lines = [_title(views, rows, screen, width)]
    blocks = [line for view in views for line in _block(view, width, ascii_only)]
    if height is not None and len(blocks) + _LEAST_ROW_LINES > height:
        blocks = [_short(view, width, ascii_only) for view in views]
    lines += blocks
    most_lines = None if height is None else max(0, height - len(lines) - 2)
    lines += _legend(width, ascii_only) if screen.legend else _table(rows, screen, width, most_lines, ascii_only)
    shown = lines if height is None else lines[: max(0, height - 1)]
    return [*shown, _footer(screen, width)]


def _title(views: Sequence[WorkerView], rows: Sequence[Row], screen: Screen, width: int) -> Text:
    workers = "1 worker" if len(views) == 1 else f"{len(views)} workers"
    shown = "1 row" if len(rows) == 1 else f"{len(rows)} rows"
    left = f"rollout top: {workers}, {shown} sorted by {screen.sort}"
    return Text(fit(left, width - 9) + time.strftime(" %H:%M:%S"), "bold")


def _footer(screen: Screen, width: int) -> Text:
    if screen.asked is not None:
        asked = f"Cancel request {screen.asked.id} of {_owner(screen.asked.owner)}? Press y to cancel it, n to keep it."
        return Text(fit(asked, width), "reverse")
    return Text(fit(screen.message or HELP, width), "yellow" if screen.message else "bright_black")


# --- workers ----------------------------------------------------------------------------------------------------------


def _block(view: WorkerView, width: int, ascii_only: bool) -> list[Text]:
    status = view.status
    if status is None:
        said = textwrap.wrap(f"{view.endpoint}  {_error(view)}", width, subsequent_indent="  ")[:_ERROR_LINES]
        return [Text(fit(line, width), "red" if view.error else "yellow") for line in said]
    rows, queue, pages = status["rows"], status["queue"], status["pages"]
    used = pages["used"] / max(1, pages["total"])
    state = str(status["state"])
    head = Text(fit(view.endpoint, 28) + " ", "bold")
    head.append(fit(state, 9), _STATE_STYLES.get(state, "red"))
    facts = f"v{status['weights_version']}  up {seconds(status['uptime_s'])}  {_name(status['model'])}"
    head.append(fit(facts if view.error is None else _error(view), width - 38), "" if view.error is None else "red")
    load = Text("  rows  ")
    load.append(bar(rows["running"] / max(1, rows["max"]), _BAR, ascii_only), "blue")
    load.append(fit(f" {rows['running']}/{rows['max']}", 11) + "pages ")
    load.append(bar(used, _BAR, ascii_only), "blue")
    load.append(fit(f" {100 * used:.1f}%  queue {count(queue['waiting'])}", width - 8 - 2 * _BAR - 17))
    speed = Text(f"  tok/s {count(status['tokens_per_s']):>6} ")
    speed.append(spark(view.rates, 30, ascii_only), "green")
    speed.append(fit(f"  {_per_row(view, status)}", width - 45))
    swaps = Text(fit(f"  swaps {_swaps(status)}", width))
    last = Text(fit(f"  last  {_metrics(status)}", width))
    return [head, load, _gpu(status, width, ascii_only), speed, last, *_drafts(status, width), swaps]


def _gpu(status: Any, width: int, ascii_only: bool) -> Text:
    shares = _shares(status)
    shown = [part for part in _PARTS if part != "offload" or shares["offload"] >= _SHOWN_FROM_PCT]
    digits = 1 if len(shown) < len(_PARTS) else 0  # six parts with one more digit do not fit into 80 columns
    words = [f" {_words(part)} {shares[part]:.{digits}f}" for part in shown]
    cells = max(6, width - 8 - sum(map(len, words)) - 3)
    line = Text("  gpu   ")
    used = 0
    for part, filled in zip(shown, parts([shares[part] / 100 for part in shown], cells), strict=True):
        line.append(_sign(part, ascii_only) * filled, _PARTS[part][1])
        used += filled
    line.append(" " * (cells - used + 1))
    for part, word in zip(shown, words, strict=True):
        line.append(word, _PARTS[part][1])
    line.append(" %")
    line.truncate(width, pad=True)
    return line


def _shares(status: Any) -> dict[str, float]:
    idle = status.get("idle_pct", {})
    return {"active": status["gpu_active_pct"]} | {cause: idle.get(cause, 0.0) for cause in IDLE_CAUSES}


def _sign(part: str, ascii_only: bool) -> str:
    sign, _ = _PARTS[part]
    return _ASCII_SIGNS.get(sign, sign) if ascii_only else sign


def _words(part: str) -> str:
    return part.replace("_", " ")


def _metrics(status: Any) -> str:
    """The values of the last report that `rollout top` shows, without drafts."""
    return ", ".join(_values(status, of_drafts=False)) or "no report yet"


def _drafts(status: Any, width: int) -> list[Text]:
    """The line of drafts, if any."""
    values = status.get("metrics", {})
    if not (values.get("speculation/accepted_pct") or values.get("speculation/saved_s")):
        return []
    words = "draft " + ", ".join(value.replace(" ", "\xa0") for value in _values(status, of_drafts=True))
    said = textwrap.wrap(words, max(20, width - 2), subsequent_indent="      ")[:_DRAFT_LINES]
    return [Text(fit(f"  {line}".replace("\xa0", " "), width)) for line in said]


def _values(status: Any, of_drafts: bool) -> list[str]:
    values = status.get("metrics", {})
    shown = [m for m in TOP_METRICS if m.name in values and _is_of_drafts(m) == of_drafts]
    return [f"{m.top} {_value(values[m.name], m.unit)}" for m in shown]


def _is_of_drafts(metric: Metric[Any]) -> bool:
    return metric.panel is not None and metric.panel.section == _DRAFTS


def _value(value: float, unit: str) -> str:
    return count(value) if unit == "count" else f"{value:.1f}{unit if unit == '%' else f' {unit}'}"


def _legend(width: int, ascii_only: bool) -> list[Text]:
    """The legend of the `gpu` bar and the `last` line."""
    active = next(metric.meaning for metric in METRICS if metric.name == "gpu/active_pct")
    meanings = {"active": active} | {
        cause: f"share of those seconds in which {IDLE_CAUSES[cause].meaning}" for cause in _PARTS if cause != "active"
    }
    entries = [("gpu", f"{_sign(part, ascii_only)} {_words(part)}", meanings[part]) for part in _PARTS]
    for of_drafts, line_name in ((False, "last"), (True, "draft")):
        declared = [metric for metric in TOP_METRICS if _is_of_drafts(metric) == of_drafts]
        entries += [(line_name, str(metric.top), f"{metric.meaning}; {metric.unit}") for metric in declared]
    title = "  Legend: `gpu` covers the last 10 s, `last` and `draft` come from the last report."
    lines = [Text(fit(title, width), "bold underline")]
    for line_name, word, meaning in entries:
        said = textwrap.wrap(meaning, max(20, width - 22)) or [""]
        for i, part in enumerate(said):
            lines.append(Text(fit(f"  {line_name if i == 0 else '':<5} {word if i == 0 else '':<12}  {part}", width)))
    return lines


def _short(view: WorkerView, width: int, ascii_only: bool) -> Text:
    status = view.status
    if status is None or view.error is not None:
        return Text(fit(f"{view.endpoint}  {_error(view)}", width), "red")
    rows, shares = status["rows"], _shares(status)
    line = Text(fit(view.endpoint, 22) + " " + fit(str(status["state"]), 8) + " ")
    line.append(bar(rows["running"] / max(1, rows["max"]), 8, ascii_only), "blue")
    used = 100 * status["pages"]["used"] / max(1, status["pages"]["total"])
    facts = (
        f" {rows['running']:>4} q{count(status['queue']['waiting']):<4} kv{used:3.0f}% gpu{shares['active']:3.0f}% "
        f"{count(status['tokens_per_s']):>6}/s v{status['weights_version']}"
    )
    line.append(fit(facts, width - 40))
    return line


def _per_row(view: WorkerView, status: Any) -> str:
    """Tokens per second of one row: the tokens of the last second over the current rows."""
    running = status["rows"]["running"]
    rate = view.rates[-1] if view.rates else status["tokens_per_s"]
    return f"{rate / running:.1f} a row" if running else "no rows"


def _error(view: WorkerView) -> str:
    """The error without the address, which the line has already."""
    return (view.error or "waiting for an answer").removeprefix(view.endpoint).lstrip(": ")


def _swaps(status: Any) -> str:
    swaps = status.get("swaps", ())
    told = [f"v{swap['version']} {seconds(swap['age_s'])} ago, {1e3 * swap['pause_s']:.1f} ms" for swap in swaps[:4]]
    return " | ".join(told) or "none"


# --- rows -------------------------------------------------------------------------------------------------------------


def _table(rows: Sequence[Row], screen: Screen, width: int, most_lines: int | None, ascii_only: bool) -> list[Text]:
    """The rows that fit, around the selected one. Bars are relative to the longest row of all."""
    client, name = (16 if width >= 100 else 0), 24
    cells = max(4, width - 62 - client)
    head = fit("  request", name) + "  #  " + fit("client", client) + fit("state", 8) + " tokens    max "
    lines = [Text(fit(f"{head}{fit('length', cells)} {'age':>6} v", width), "bold underline")]
    longest = max((row.tokens for row in rows), default=0)
    for row in _visible(rows, screen, most_lines):
        selected = row.key == screen.selected
        line = Text("> " if selected else "  ")
        line.append(fit(row.id, name - 2) + f"{row.index:>3}  ")
        line.append(fit(_owner(row.owner), max(0, client - 1)).ljust(client))
        line.append(fit(row.state, 8))
        line.append(f"{count(row.tokens):>7} {count(row.max_tokens):>6} ")
        line.append(bar(row.tokens / longest if longest else 0.0, cells, ascii_only), "blue")
        age = f" {seconds(row.age_s):>6} v{'-' if row.version is None else row.version}"
        line.append(fit(age, width - 52 - client - cells))
        if selected:
            line.stylize("reverse")
        lines.append(line)
    return lines


def _visible(rows: Sequence[Row], screen: Screen, most_lines: int | None) -> Sequence[Row]:
    if most_lines is None or len(rows) <= most_lines:
        return rows
    place = next((i for i, row in enumerate(rows) if row.key == screen.selected), 0)
    first = min(max(0, place - most_lines // 2), len(rows) - most_lines)
    return rows[first : first + most_lines]


def _name(model: str) -> str:
    """The last part of a model's path or hub id."""
    return str(model).rstrip("/").rpartition("/")[2]


def _owner(owner: str) -> str:
    """The client's name, or its connection if it has no name."""
    return owner.removeprefix("client:").removeprefix("connection:")
