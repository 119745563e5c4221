"""The answer of `/v1/responses`: its items, and their events while it arrives."""

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from rollout_gateway.dialects.responses.input_items import DeclaredTool
from rollout_gateway.formats.answer_segments import AnswerPiece
from rollout_gateway.formats.tool_calls import ToolCall

Event = dict[str, Any]


class OutputItems:
    """The items of an answer, and their events with consecutive numbers. `declared` comes from the body."""

    def __init__(self, declared: Mapping[str, DeclaredTool]) -> None:
        self.done: list[dict[str, Any]] = []
        self.count = 0  # number of events
        self._declared = declared
        self._calls: list[ToolCall] = []
        self._open: dict[str, Any] | None = None
        self._content: list[str] = []
        self._text = ""
        self._reasoning: list[str] = []

    @property
    def reasoning(self) -> str:
        """The reasoning of all items."""
        return "".join(self._reasoning)

    def numbered(self, event: Event) -> Event:
        """The event with its number."""
        self.count += 1
        return event | {"sequence_number": self.count - 1}

    def message(self) -> dict[str, Any]:
        """The items as one message of a chat."""
        answer: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if self.reasoning:
            answer["reasoning_content"] = self.reasoning
        return answer | {"tool_calls": [call.shown() for call in self._calls]} if self._calls else answer

    def add(self, piece: AnswerPiece) -> Iterator[Event]:
        """The events of new parts."""
        for kind, value in piece.parts:
            if isinstance(value, ToolCall):
                yield from self._close("completed")
                yield from self._call(value)
            else:
                yield from self._say("reasoning" if kind == "reasoning" else "message", value)

    def end(self, whole: bool) -> Iterator[Event]:
        """The end of the answer. An answer without any part is an empty message."""
        if self._open is None and not self.done:
            yield from self._say("message", "")
        yield from self._close("completed" if whole else "incomplete")

    def _say(self, kind: str, text: str) -> Iterator[Event]:
        if self._open is not None and self._open["type"] != kind:
            yield from self._close("completed")
        if self._open is None:
            self._text = ""
            self._open = _item(kind)
            yield self._told("response.output_item.added", item=self._open)
            yield self._told("response.content_part.added", **self._part(""))
        self._text += text
        (self._reasoning if kind == "reasoning" else self._content).append(text)
        if text:
            yield self._told(f"response.{self._name}.delta", **self._position, delta=text, **self._logprobs)

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        yield self._told(f"response.{self._name}.done", **self._position, text=self._text, **self._logprobs)
        part = self._part(self._text)
        yield self._told("response.content_part.done", **part)
        item = self._open | {"content": [part["part"]], "status": status}
        yield self._told("response.output_item.done", item=item)
        self.done.append(item)
        self._open = None

    def _call(self, call: ToolCall) -> Iterator[Event]:
        tool = self._declared.get(call.name, DeclaredTool(call.name))
        kind, name, prefix = "function_call", "arguments", "fc"
        if tool.freeform:
            kind, name, prefix = "custom_tool_call", "input", "ctc"
        text = _freeform_input(call) if tool.freeform else call.arguments
        item = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}
        item |= {"call_id": call.id, "name": tool.name, name: ""}
        if tool.namespace is not None:
            item["namespace"] = tool.namespace
        yield self._told("response.output_item.added", item=item)
        yield self._told(f"response.{kind}_{name}.delta", item_id=item["id"], delta=text)
        whole = {name: text} if tool.freeform else {"name": tool.name, name: text}
        yield self._told(f"response.{kind}_{name}.done", item_id=item["id"], **whole)
        item = item | {"status": "completed", name: text}
        yield self._told("response.output_item.done", item=item)
        self.done.append(item)
        self._calls.append(call)

    @property
    def _name(self) -> str:
        assert self._open is not None
        return "reasoning_text" if self._open["type"] == "reasoning" else "output_text"

    @property
    def _position(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "content_index": 0}

    @property
    def _logprobs(self) -> dict[str, Any]:
        """A field of texts; reasoning has none."""
        return {} if self._name == "reasoning_text" else {"logprobs": []}

    def _part(self, text: str) -> dict[str, Any]:
        extra = {"annotations": []} | self._logprobs if self._logprobs else {}
        return self._position | {"part": {"type": self._name, "text": text, **extra}}

    def _told(self, name: str, /, **fields: Any) -> Event:
        return self.numbered({"type": name, "output_index": len(self.done), **fields})


def _freeform_input(call: ToolCall) -> str:
    """The text that a call gives to a tool; all arguments, if the model has written more than this text."""
    given = call.decoded().get("input")
    return given if isinstance(given, str) else call.arguments


def _item(kind: str) -> dict[str, Any]:
    """A new item of this type."""
    prefix = "rs" if kind == "reasoning" else "msg"
    more: dict[str, Any] = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
    return {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, **more, "status": "in_progress", "content": []}
