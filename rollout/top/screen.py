"""The state of `rollout top` and the effect of its keys; it knows neither a terminal nor a connection.

    WorkerView   the last answer of one worker, or the error instead of it
    Screen       sorting, selection, and a cancel that waits for its confirmation; `press` handles every key

A row is identified by (endpoint, owner, id, index), so the selection stays with its row when the order changes.
"""

import os
import select
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

Sort = Literal["length", "age"]
#: The line of keys; it fits 80 columns.
HELP = "Press q to quit, l/a to sort, up/down to select, c to cancel, ? for the legend."


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker: its last `status` reply, the tokens per second at the last polls, and the last error."""

    endpoint: str
    status: Mapping[str, Any] | None = None
    rates: tuple[float, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One completion that holds a row."""

    endpoint: str
    owner: str
    id: str
    index: int
    state: str
    tokens: int
    max_tokens: int
    age_s: float
    version: int | None

    @property
    def key(self) -> tuple[str, str, str, int]:
        return (self.endpoint, self.owner, self.id, self.index)


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """A request whose completions should all end."""

    endpoint: str
    owner: str
    id: str


def rows_of(views: Sequence[WorkerView], sort: Sort) -> list[Row]:
    """The rows of all workers: the longest or the oldest first."""
    rows = [
        Row(
            view.endpoint,
            str(entry.get("owner", "")),
            str(entry.get("id", "")),
            int(entry.get("index", 0)),
            str(entry.get("state", "")),
            int(entry.get("tokens", 0)),
            int(entry.get("max_tokens", 0)),
            float(entry.get("age_s", 0.0)),
            entry.get("version"),
        )
        for view in views
        if view.status is not None
        for entry in view.status.get("sequences", ())
    ]
    if sort == "length":
        return sorted(rows, key=lambda row: (-row.tokens, row.key))
    return sorted(rows, key=lambda row: (-row.age_s, row.key))


@dataclass(slots=True)
class Screen:
    """The user's choices so far."""

    sort: Sort = "length"
    selected: tuple[str, str, str, int] | None = None
    asked: CancelRequest | None = None  # waits for confirmation
    message: str = ""
    legend: bool = False  # the legend is shown instead of the rows
    _places: list[tuple[str, str, str, int]] = field(default_factory=list)

    def arrange(self, views: Sequence[WorkerView]) -> list[Row]:
        """The rows in order. The selection stays with its row, or at its place if the row is gone."""
        rows = rows_of(views, self.sort)
        before, self._places = self._places, [row.key for row in rows]
        if self.selected is not None and self.selected not in self._places:
            place = before.index(self.selected) if self.selected in before else 0
            self.selected = self._places[min(place, len(rows) - 1)] if rows else None
        return rows

    def press(self, key: str) -> CancelRequest | Literal["quit"] | None:
        """Handle a key; returns what the caller has to do: a confirmed cancel, or `quit`."""
        asked, self.asked, self.message = self.asked, None, ""
        if asked is not None:
            if key == "y":
                self.message = f"Request {asked.id} is being cancelled."
                return asked
            self.message = f"Request {asked.id} was not cancelled."
            return None
        if key == "q":
            return "quit"
        if key in ("l", "a"):
            self.sort = "length" if key == "l" else "age"
        elif key == "s":
            self.sort = "age" if self.sort == "length" else "length"
        elif key in ("down", "j", "up", "k"):
            self._move(1 if key in ("down", "j") else -1)
        elif key == "c":
            self._ask()
        elif key == "?":
            self.legend = not self.legend
        return None

    def _move(self, by: int) -> None:
        if not self._places:
            self.selected = None
        elif self.selected not in self._places:
            self.selected = self._places[0 if by > 0 else -1]
        else:
            place = self._places.index(self.selected) + by
            self.selected = self._places[min(max(place, 0), len(self._places) - 1)]

    def _ask(self) -> None:
        if self.selected is None or self.selected not in self._places:
            self.message = "Select a row first, with the up and down keys."
            return
        endpoint, owner, request_id, _ = self.selected
        self.asked = CancelRequest(endpoint, owner, request_id)


_SEQUENCES = {"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down"}


def keys_in(text: str) -> list[str]:
    """The keys in a terminal's input: single characters, `up` and `down`; other escape sequences are ignored."""
    keys: list[str] = []
    while text:
        if text[0] == "\x1b" and len(text) > 1:
            if text[:3] in _SEQUENCES:
                keys.append(_SEQUENCES[text[:3]])
            end = 2  # a sequence ends with its first letter or tilde
            while end < len(text) and not (text[end].isalpha() or text[end] == "~"):
                end += 1
            text = text[end + 1 :]
        else:
            keys.append(text[0])
            text = text[1:]
    return keys


class Keys:
    """Reads typed keys."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def wait(self, seconds: float) -> list[str]:
        """The keys typed since the last call, or within `seconds`: none without a terminal, `q` when it is closed."""
        if self._descriptor is None:
            select.select([], [], [], seconds)
            return []
        ready, _, _ = select.select([self._descriptor], [], [], seconds)
        if not ready:
            return []
        data = os.read(self._descriptor, 1024)
        return keys_in(data.decode("utf-8", "replace")) if data else ["q"]


@contextmanager
def keyboard() -> Iterator[Keys]:
    """Keys of stdin, if it is a terminal. Its mode is restored at the end of the block."""
    if not sys.stdin.isatty():
        yield Keys(None)
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield Keys(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
