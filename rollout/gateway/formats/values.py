"""Finds where the values of a call end, by their brackets outside of quoted strings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

#: Levels of lists and maps in a call. Python's parser fails at some hundreds, depending on the depth of its caller.
MOST_NESTED = 200
_BETWEEN = " \t\r\n;,"  # values
_PYTHON_QUOTES: Mapping[str, str] = {'"': '"', "'": "'"}


class ValueScan:
    """The lists and maps in a text from a place on, found while the text arrives. Nothing is parsed.

    `quotes`: the ends of quoted strings by their beginnings.
    """

    def __init__(self, start: int, quotes: Mapping[str, str]) -> None:
        self.spans: list[tuple[int, int]] = []  # places of the whole values
        self.most_nested = 0  # levels
        self.junk = False  # there is something else between the values
        self._at = self._begin = start
        self._depth = 0
        self._quote = ""  # the end of the open string
        self._quotes = quotes
        self._reach = max(map(len, quotes), default=1) - 1
        marks = sorted(quotes, key=len, reverse=True)
        self._outside = re.compile("|".join(map(re.escape, (*marks, *"[]{}"))))

    @classmethod
    def of(cls, content: str, arguments: Mapping[str, Any], start: int) -> ValueScan | None:
        """The scan for a parser of transformers; None for one whose values have no brackets."""
        if content == "json":
            return cls(start, {'"': '"', **dict(arguments.get("string_delims", ()))})
        return cls(start, _PYTHON_QUOTES) if content == "python-call-list" else None

    @property
    def in_string(self) -> bool:
        """True inside of a quoted string."""
        return bool(self._quote)

    @property
    def whole(self) -> bool:
        """True if there are values, and all of them are whole."""
        return bool(self.spans) and not (self._quote or self._depth or self.junk)

    def run(self, text: str, end: int, final: bool, values: int | None = None) -> None:
        """Go on to `end`, or until the number of whole values is `values`.

        Unless `final`, what may be the beginning of a mark at the end waits.
        """
        stop = end if final else end - self._reach
        before = -1
        while before < self._at < stop and not self.junk:  # a backslash waits for the character after it
            if self.most_nested > MOST_NESTED or (values is not None and len(self.spans) >= values):
                return
            before = self._at
            if self._quote:
                self._inside_string(text, end)
            else:
                self._to_next_mark(text, stop, end)

    def _inside_string(self, text: str, end: int) -> None:
        escapes = len(self._quote) == 1
        while True:
            close = text.find(self._quote, self._at, end)
            escape = text.find("\\", self._at, close if close >= 0 else end) if escapes else -1
            if escape < 0:
                break
            if escape + 1 >= end:
                self._at = escape
                return
            self._at = escape + 2
        if close < 0:
            self._at = max(self._at, end if escapes else end - len(self._quote) + 1)
        else:
            self._at, self._quote = close + len(self._quote), ""

    def _to_next_mark(self, text: str, stop: int, end: int) -> None:
        match = self._outside.search(text, self._at, end)
        found = match is not None and match.start() < stop
        before = match.start() if match is not None and found else stop
        if not self._depth and text[self._begin : before].strip(_BETWEEN):
            self.junk = True
        if match is None or not found:
            self._at = stop
            return
        mark, self._at = match[0], match.end()
        if mark in "[{":
            if not self._depth:
                self._begin = before
            self._depth += 1
            self.most_nested = max(self.most_nested, self._depth)
        elif not self._depth:
            self.junk = True
        elif mark in self._quotes:
            self._quote = self._quotes[mark]
        else:
            self._depth -= 1
            if not self._depth:
                self.spans.append((self._begin, self._at))
                self._begin = self._at
