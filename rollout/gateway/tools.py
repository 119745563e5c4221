"""Tool calls in the text of a completion.

A parser cuts text as it comes into content and calls. A call is reported once, when it is complete; text that only
looks like one stays content, so nothing that the model wrote is lost. To add a format: a class with `stream`, and an
entry in `TOOL_PARSERS`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from rollout.gateway.reasoning import held_back

_MAX_CALL_CHARS = 1 << 20


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function; `arguments` is JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def shown(self) -> dict[str, Any]:
        """The call as OpenAI writes it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolStream(Protocol):
    """The cut of one completion."""

    def feed(self, text: str, last: bool) -> tuple[str, list[ToolCall]]:
        """New text as (content, complete calls); with `last` nothing waits any more."""


class ToolParser(Protocol):
    """A format of tool calls."""

    def stream(self) -> ToolStream:
        """The cut of one completion."""


def call_of(value: Any, *argument_names: str) -> ToolCall | None:
    """The call in a decoded JSON object, or None if it is another object."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    for name in argument_names:
        if isinstance(value.get(name), dict):
            return ToolCall(value["name"], json.dumps(value[name], ensure_ascii=False))
    return None


def _json(text: str) -> Any:
    """The value of a JSON text; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class HermesTools:
    """Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, after content or alone."""

    start, end = "<tool_call>", "</tool_call>"

    def stream(self) -> ToolStream:
        """The cut of one completion."""
        return _HermesStream()


class _HermesStream:
    def __init__(self) -> None:
        self._kept = ""
        self._inside = False

    def feed(self, text: str, last: bool) -> tuple[str, list[ToolCall]]:
        """New text as (content, complete calls)."""
        self._kept += text
        content: list[str] = []
        calls: list[ToolCall] = []
        while True:
            before, tag, rest = self._kept.partition(HermesTools.end if self._inside else HermesTools.start)
            if not tag:
                break
            self._kept = rest
            if self._inside:
                call = call_of(_json(before), "arguments", "parameters")
                if call is None:
                    content.append(HermesTools.start + before + HermesTools.end)
                else:
                    calls.append(call)
            else:
                content.append(before)
            self._inside = not self._inside
        if self._inside and (last or len(self._kept) > _MAX_CALL_CHARS):  # the end may be missing, its call complete
            call = call_of(_json(self._kept), "arguments", "parameters") if last else None
            if call is None:
                content.append(HermesTools.start + self._kept)
            else:
                calls.append(call)
            self._kept, self._inside = "", False
        elif not self._inside:
            wait = 0 if last else held_back(self._kept, HermesTools.start)
            content.append(self._kept[: len(self._kept) - wait])
            self._kept = self._kept[len(self._kept) - wait :]
        found = "".join(content)
        if calls or self._inside:  # the line breaks between content and calls, and between calls
            found = found.rstrip()
        return found, calls


class Llama3Tools:
    """Llama 3: the whole completion is `{"name": ..., "parameters": {...}}`, or several of these with `;` between."""

    tag = "<|python_tag|>"

    def stream(self) -> ToolStream:
        """The cut of one completion."""
        return _Llama3Stream()


class _Llama3Stream:
    def __init__(self) -> None:
        self._kept = ""
        self._plain = False  # it is no call

    def feed(self, text: str, last: bool) -> tuple[str, list[ToolCall]]:
        """New text as (content, complete calls)."""
        if self._plain:
            return text, []
        self._kept += text
        begun = self._kept.lstrip()
        possible = begun.startswith("{") or begun.startswith(Llama3Tools.tag) or Llama3Tools.tag.startswith(begun)
        if possible and not last and len(begun) <= _MAX_CALL_CHARS:
            return "", []
        calls = self._calls(begun.removeprefix(Llama3Tools.tag)) if possible else []
        if calls:
            return "", calls
        self._plain = True
        return self._kept, []

    @staticmethod
    def _calls(text: str) -> list[ToolCall]:
        """The calls that the text consists of; none if it is anything else."""
        decoder, calls, at = json.JSONDecoder(), [], 0
        while at < len(text):
            try:
                value, at = decoder.raw_decode(text, at)
            except (ValueError, RecursionError):
                return []
            call = call_of(value, "parameters", "arguments")
            if call is None:
                return []
            calls.append(call)
            while at < len(text) and text[at] in "; \t\r\n":
                at += 1
        return calls


#: The formats by name. `auto` chooses one by the chat template.
TOOL_PARSERS: Mapping[str, ToolParser] = MappingProxyType({"hermes": HermesTools(), "llama3": Llama3Tools()})


def tool_parser(name: str, template: str) -> ToolParser | None:
    """The parser of a name; for `auto` the one whose tags the chat template writes. Raises ValueError if unknown."""
    if name == "none":
        return None
    if name != "auto":
        if name not in TOOL_PARSERS:
            raise ValueError(f"--tool-parser {name} is unknown; use auto, none, {', '.join(TOOL_PARSERS)}")
        return TOOL_PARSERS[name]
    if HermesTools.start in template:
        return TOOL_PARSERS["hermes"]
    return TOOL_PARSERS["llama3"] if '"parameters"' in template and Llama3Tools.tag in template else None
