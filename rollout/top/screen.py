"""What `rollout top` shows and what its keys do, without a terminal or a worker in it.

    WorkerView   the last answer of one worker, or why there is none
    Screen       sorting, selection, and a cancel that waits for its confirmation; `press` is the whole keyboard

Rows are identified by (endpoint, owner, id, index), so that the selection stays with its row however they move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Sort = Literal["length", "age"]
HELP = "q quit  l by length  a by age  up/down select  c cancel"


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker: its last `status` reply, the tokens per second of the last polls, and what went wrong."""

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
        """What it is known by."""
        return (self.endpoint, self.owner, self.id, self.index)


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """End this request, all its completions."""

    endpoint: str
    owner: str
    id: str


def rows_of(views: Sequence[WorkerView], sort: Sort) -> list[Row]:
    """The rows of all workers: the longest first, or the oldest."""
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
    """What the user has chosen so far."""

    sort: Sort = "length"
    selected: tuple[str, str, str, int] | None = None
    asked: CancelRequest | None = None  # waits for y
    message: str = ""
    _places: list[tuple[str, str, str, int]] = field(default_factory=list)

    def arrange(self, views: Sequence[WorkerView]) -> list[Row]:
        """The rows in order; keeps the selection on its row, or where it was when that is gone."""
        rows = rows_of(views, self.sort)
        before, self._places = self._places, [row.key for row in rows]
        if self.selected is not None and self.selected not in self._places:
            place = before.index(self.selected) if self.selected in before else 0
            self.selected = self._places[min(place, len(rows) - 1)] if rows else None
        return rows

    def press(self, key: str) -> CancelRequest | Literal["quit"] | None:
        """Take a key; gives what is to be done beyond the screen: a cancel that was confirmed, or the end."""
        asked, self.asked, self.message = self.asked, None, ""
        if asked is not None:
            if key == "y":
                self.message = f"cancelling {asked.id} ..."
                return asked
            self.message = "not cancelled"
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
            self.message = "select a row first: up, down"
            return
        endpoint, owner, request_id, _ = self.selected
        self.asked = CancelRequest(endpoint, owner, request_id)
