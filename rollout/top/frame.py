"""One picture of `rollout top`: lines of text that fit the terminal's width and height.

a block for each worker (one line where they are many), then the rows, then what the keys do
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from rollout.top.marks import bar, count, fit, parts, seconds, spark
from rollout.top.screen import HELP, Row, Screen, WorkerView

_BLOCK_LINES = 5
_LEAST_ROW_LINES = 6
_BAR = 14
#: Of the compute stream's time: key in the status, name, sign, style.
_CAUSES = (
    ("active", "active", "█", "green"),
    ("bubble", "bubble", "▓", "red"),
    ("prefill", "prefill", "▒", "cyan"),
    ("swap", "swap", "░", "magenta"),
    ("offload", "offload", "o", "yellow"),
    ("no_work", "no work", "·", "bright_black"),
)
_SHOWN_FROM_PCT = 0.05  # offloads, which most workers never do
_ASCII_SIGNS = {"█": "#", "▓": "!", "▒": "p", "░": "s", "·": "."}
_STATE_STYLES = {"serving": "green", "paused": "yellow", "asleep": "yellow", "draining": "yellow"}


def frame(
    views: Sequence[WorkerView], screen: Screen, width: int, height: int | None, ascii_only: bool = False
) -> list[Text]:
    """The lines, none wider than `width`, and at most `height` of them; without a height as many as there are."""
    rows = screen.arrange(views)
    compact = height is not None and _BLOCK_LINES * len(views) + _LEAST_ROW_LINES > height
    lines = [_title(views, rows, screen, width)]
    for view in views:
        lines += [_short(view, width, ascii_only)] if compact else _block(view, width, ascii_only)
    room = None if height is None else max(0, height - len(lines) - 2)
    lines += _table(rows, screen, width, room, ascii_only)
    shown = lines if height is None else lines[: max(0, height - 1)]
    return [*shown, _footer(screen, width)]


def _title(views: Sequence[WorkerView], rows: Sequence[Row], screen: Screen, width: int) -> Text:
    workers = "1 worker" if len(views) == 1 else f"{len(views)} workers"
    left = f"rollout top  {workers}  {len(rows)} rows shown, by {screen.sort}"
    return Text(fit(left, width - 9) + time.strftime(" %H:%M:%S"), "bold")


def _footer(screen: Screen, width: int) -> Text:
    if screen.asked is not None:
        return Text(fit(f"cancel request {screen.asked.id} of {_owner(screen.asked.owner)}? y/n", width), "reverse")
    return Text(fit(screen.message or HELP, width), "yellow" if screen.message else "bright_black")


# --- workers ----------------------------------------------------------------------------------------------------------


def _block(view: WorkerView, width: int, ascii_only: bool) -> list[Text]:
    status = view.status
    if status is None:
        said = textwrap.wrap(f"{view.endpoint}  {_error(view)}", width, subsequent_indent="  ")[:_BLOCK_LINES]
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
    return [head, load, _gpu(status, width, ascii_only), speed, Text(fit(f"  swaps {_swaps(status)}", width))]


def _gpu(status: Any, width: int, ascii_only: bool) -> Text:
    shares = _shares(status)
    causes = [cause for cause in _CAUSES if cause[0] != "offload" or shares["offload"] >= _SHOWN_FROM_PCT]
    digits = 1 if len(causes) < len(_CAUSES) else 0  # six with a digit more do not fit into 80 columns
    words = [f" {name} {shares[key]:.{digits}f}" for key, name, _, _ in causes]
    cells = max(6, width - 8 - sum(map(len, words)) - 3)
    line = Text("  gpu   ")
    used = 0
    filled_cells = parts([shares[key] / 100 for key, *_ in causes], cells)
    for (_, _, sign, style), filled in zip(causes, filled_cells, strict=True):
        line.append((_ASCII_SIGNS.get(sign, sign) if ascii_only else sign) * filled, style)
        used += filled
    line.append(" " * (cells - used + 1))
    for (_, _, _, style), word in zip(causes, words, strict=True):
        line.append(word, style)
    line.append(" %")
    line.truncate(width, pad=True)
    return line


def _shares(status: Any) -> dict[str, float]:
    idle = status.get("idle_pct", {})
    return {"active": status["gpu_active_pct"]} | {key: idle.get(key, 0.0) for key, *_ in _CAUSES[1:]}


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
    """Of the last second: the rows are those of now."""
    running = status["rows"]["running"]
    rate = view.rates[-1] if view.rates else status["tokens_per_s"]
    return f"{rate / running:.1f} a row" if running else "no rows"


def _error(view: WorkerView) -> str:
    """What went wrong, without the address that stands before it anyway."""
    return (view.error or "waiting for an answer").removeprefix(view.endpoint).lstrip(": ")


def _swaps(status: Any) -> str:
    swaps = status.get("swaps", ())
    told = [f"v{swap['version']} {seconds(swap['age_s'])} ago, {1e3 * swap['pause_s']:.1f} ms" for swap in swaps[:4]]
    return " | ".join(told) or "none"


# --- rows -------------------------------------------------------------------------------------------------------------


def _table(rows: Sequence[Row], screen: Screen, width: int, room: int | None, ascii_only: bool) -> list[Text]:
    """The rows that there is room for, around the selected one; the bars are to the longest of all."""
    client, name = (16 if width >= 100 else 0), 24
    cells = max(4, width - 62 - client)
    head = fit("  request", name) + "  #  " + fit("client", client) + fit("state", 8) + " tokens    max "
    lines = [Text(fit(f"{head}{fit('length', cells)} {'age':>6} v", width), "bold underline")]
    longest = max((row.tokens for row in rows), default=0)
    for row in _visible(rows, screen, room):
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


def _visible(rows: Sequence[Row], screen: Screen, room: int | None) -> Sequence[Row]:
    if room is None or len(rows) <= room:
        return rows
    place = next((i for i, row in enumerate(rows) if row.key == screen.selected), 0)
    first = min(max(0, place - room // 2), len(rows) - room)
    return rows[first : first + room]


def _name(model: str) -> str:
    """The last part of a model's path or hub id."""
    return str(model).rstrip("/").rpartition("/")[2]


def _owner(owner: str) -> str:
    """A client's name; one without a name is its connection."""
    return owner.removeprefix("client:").removeprefix("connection:")
