"""Tool calls: what transformers reads in a region of calls, checked, as OpenAI shows it.

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

from rollout.gateway.formats.regions import AnswerRegion
from rollout.gateway.formats.values import MOST_NESTED

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
        """The arguments."""
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
