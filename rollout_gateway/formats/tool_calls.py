"""Tool calls: where their values end, and what transformers reads in a region of calls, checked, as OpenAI shows it.

A call is a view of text that a model wrote. If there is none in the text, `NotACall` says why, and the text stays as it
is.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_gateway.formats.regions import AnswerRegion

#: Levels of lists and maps in a call. Python's parser fails at some hundreds, depending on the depth of its caller.
MOST_NESTED = 200
_BETWEEN = " \t\r\n;,"  # values
_PYTHON_QUOTES: Mapping[str, str] = {'"': '"', "'": "'"}


class ValueScan:
    """The lists and maps in a text from a position on, found while the text arrives. Nothing is parsed.

    `quotes`: the ends of quoted strings by their beginnings.
    """

    def __init__(self, start: int, quotes: Mapping[str, str]) -> None:
        self.spans: list[tuple[int, int]] = []  # positions of the whole values
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


_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class NotACall(Exception):  # noqa: N818 -- no error: a model may write any text
    """A text is no call; the message says why."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function; `arguments` is JSON text of a map."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def decoded(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.arguments)
        return value

    def shown(self) -> dict[str, Any]:
        """The call as OpenAI writes it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def calls_in(region: AnswerRegion, texts: Sequence[str], tools: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
    """The calls in texts of a region, each with the mark that opens it. Raises `NotACall`.

    Arguments without quotes have the types of the function's schema in `tools`.
    """
    from transformers.utils.chat_parsing import parse_response

    calls: list[ToolCall] = []
    for text in texts:
        try:
            found = parse_response(text, region.alone, prefix="", tools=[dict(tool) for tool in tools]).get(
                "tool_calls"
            )
        # The parser raises errors of many types, for texts of models and for wrong schemas.
        except Exception as error:
            raise NotACall(f"it cannot be read ({type(error).__name__})") from error
        calls += [call for value in (found if isinstance(found, list) else [found]) for call in _calls(value)]
    if not calls:
        raise NotACall("it names no function")
    return calls


def demanded_calls(text: str, function: str | None) -> list[ToolCall]:
    """The calls of an answer that is constrained to be calls: the arguments of `function`, or a list of calls.

    Raises `NotACall`, as for an answer that was cut short.
    """
    try:
        value = json.loads(text)
        named = [(function, value)] if function is not None else [(call["name"], call["parameters"]) for call in value]
    except (ValueError, RecursionError) as error:
        raise NotACall("it is not JSON") from error
    except (TypeError, KeyError) as error:
        raise NotACall("it is not a list of calls") from error
    return [_checked(name, arguments) for name, arguments in named]


def _calls(value: Any) -> list[ToolCall]:
    """The calls in a value of a response template's field."""
    functions = value.get("function") if isinstance(value, dict) else None
    calls = []
    for function in functions if isinstance(functions, list) else [functions]:
        if not isinstance(function, dict):
            raise NotACall("it is no map")
        arguments = function.get("arguments", function.get("parameters"))
        calls.append(_checked(function.get("name"), arguments, value.get("id")))
    return calls


def _checked(name: Any, arguments: Any, call_id: Any = None) -> ToolCall:
    if not isinstance(name, str) or not name.strip():
        raise NotACall("it names no function")
    if not isinstance(arguments, dict):
        raise NotACall(f"the arguments of {name!r:.80} are not a map")
    if nesting(arguments) > MOST_NESTED:
        raise NotACall(f"its arguments have more than {MOST_NESTED} levels")
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError) as error:  # NaN, an infinite number, an integer with thousands of digits
        raise NotACall(f"its arguments are not JSON: {error!s:.200}") from error
    known = {"id": _whole_text(call_id)} if isinstance(call_id, str) and call_id else {}
    return ToolCall(_whole_text(name.strip()), _whole_text(text), **known)


def _whole_text(text: str) -> str:
    """A text that can be encoded: half of a surrogate pair becomes U+FFFD, as bytes that form no character do."""
    return _LONE_SURROGATE.sub("\ufffd", text)


def nesting(value: Any) -> int:
    """Levels of lists and maps in a value; counting ends above the limit."""
    level, values = 0, [value]
    while level <= MOST_NESTED:
        values = (
            [
                item
                for each in values
                if isinstance(each, (dict, list))
                for item in (each.values() if isinstance(each, dict) else each)
            ]
            if any(isinstance(each, (dict, list)) for each in values)
            else []
        )
        if not values:
            return level + 1
        level += 1
    return level
