"""Builds OpenAI's chat messages from the blocks and items of other dialects, and remembers where each came from.

text, image, reasoning, call, result --> messages, and the client's name of each of their fields, for errors
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollout.gateway.http.http_errors import HttpError, Names, bad_request


class ChatBuilder:
    """The messages of one request. Consecutive parts of the assistant are one message.

    `joins_users`: so is what a user says. `messages`: those before, of an earlier request. `image`: the client's field
    of an image's URL.
    """

    def __init__(self, joins_users: bool, image: str, messages: list[dict[str, Any]] | None = None) -> None:
        self.messages = list(messages or ())
        self.names: dict[str, str] = {}
        self._joins = ("system", "assistant", "user") if joins_users else ("system", "assistant")
        self._image = image
        self._first = len(self.messages)
        self._functions = {
            call["id"]: call["function"]["name"] for message in self.messages for call in message.get("tool_calls", ())
        }

    def say(self, role: str, part: dict[str, Any], field: str) -> None:
        """Add a part of content: a text or an image."""
        content = self._message(role, field).setdefault("content", [])
        self._place(f"{self._last}.content.{len(content)}", field)
        content.append(part)

    def text(self, role: str, text: str, field: str) -> None:
        """Add a text. An empty line separates texts of the system."""
        further = role == "system" and len(self.messages) > self._first and self.messages[-1]["role"] == role
        self.say(role, {"type": "text", "text": f"\n\n{text}" if further else text}, field)

    def think(self, text: str, field: str) -> None:
        """Add reasoning."""
        message = self._message("assistant", field)
        message["reasoning_content"] = message.get("reasoning_content", "") + text

    def call(self, call_id: str, name: str, arguments: Any, field: str) -> None:
        """Add a call of a function."""
        calls = self._message("assistant", field).setdefault("tool_calls", [])
        self.names[f"{self._last}.tool_calls.{len(calls)}.function"] = field
        self._functions[call_id] = name
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def result(self, call_id: str, content: list[dict[str, Any]], field: str, parts: str) -> None:
        """Add what a function has returned: the `content`, in the field `parts`.

        Raises `HttpError` if no call before has this id.
        """
        if call_id not in self._functions:
            raise bad_request(f"no earlier call has the id {call_id!r:.200}; send the call, too", field)
        message = {"role": "tool", "tool_call_id": call_id, "name": self._functions[call_id], "content": content}
        self.messages.append(message)
        self.names[self._last] = field
        for place in range(len(content)):
            self._place(f"{self._last}.content.{place}", f"{parts}.{place}")

    def built(self) -> list[dict[str, Any]]:
        """The messages; the system's content, and any of one part, is a text."""
        for message in self.messages[self._first :]:
            content = message.get("content")
            if not isinstance(content, list) or any(part["type"] != "text" for part in content):
                continue
            if len(content) < 2 or message["role"] == "system":
                message["content"] = "".join(part["text"] for part in content)
        return self.messages

    def _place(self, name: str, field: str) -> None:
        """Remember the client's names of a part and of its image's URL."""
        self.names[name] = field
        self.names[f"{name}.image_url.url"] = f"{field}.{self._image}"

    @property
    def _last(self) -> str:
        return f"messages.{len(self.messages) - 1}"

    def _message(self, role: str, field: str) -> dict[str, Any]:
        """The message that a part of this role belongs to."""
        new = len(self.messages) == self._first or role not in self._joins or self.messages[-1]["role"] != role
        if new:
            self.messages.append({"role": role})
            self.names[self._last] = field
        return self.messages[-1]


def named(value: Any, field: str, *names: str) -> dict[str, Any]:
    """An object with texts of these names. Raises `HttpError` for another value."""
    if not isinstance(value, dict):
        raise bad_request(f"'{field}' is an object", field)
    for name in names:
        if not isinstance(value.get(name), str):
            raise bad_request(f"'{field}.{name}' is a text", f"{field}.{name}")
    return value


def listed(value: Any, field: str) -> list[Any]:
    """A list. Raises `HttpError` for another value."""
    if not isinstance(value, list):
        raise bad_request(f"'{field}' is a list", field)
    return value


@contextmanager
def client_names(names: Names) -> Iterator[None]:
    """Errors of the block name fields as the client does."""
    try:
        yield
    except HttpError as error:
        raise error.renamed(names) from error
