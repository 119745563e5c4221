"""Finds what a chat template writes around messages, by rendering short conversations.

    <|im_start|>user QUESTION <|im_end|> <|im_start|>assistant ANSWER <|im_end|> <|im_start|>user ...
                                         header, then `begun`         `after` begins here, or after the end of the turn

Only what a template renders is known of it: fine-tunes change templates and keep their names.
"""

import json
import os.path
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_gateway.formats.known_formats import REASONING
from rollout_gateway.formats.regions import compile_regions
from trainer_bridge.wire.errors import RolloutError

Message = dict[str, Any]
Tools = Sequence[Mapping[str, Any]] | None
#: Renders messages with tools and options. Raises `RolloutError` for messages that the template refuses.
Render = Callable[[list[Message], Tools, Mapping[str, Any]], str]

_MARK = f"mark{uuid.uuid4().hex}"  # no template and no message has it
_MOST_ROLES = 64
_SIGNS_OF_A_LIST = ("'type': 'text'", '"type": "text"')
PROBE_NAME = "probe_weather"
PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
        "description": "the weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form of tool calls in a template: ids, arguments as JSON text or as a map, and the content next to them."""

    call_id: str
    as_text: bool
    content: str | None  # the content of a message that has calls alone


#: Some templates ask for an id of nine characters, other templates for an id with the function's name.
_CALL_FORMS = tuple(
    CallForm(call_id, as_text, content)
    for content in ("", None)
    for as_text in (False, True)
    for call_id in (f"functions.{PROBE_NAME}:0", "a1b2c3d4e")
)


def probe_call(arguments: Mapping[str, Any], form: CallForm) -> Message:
    """A message with a call of `PROBE_TOOL`."""
    given: Any = json.dumps(arguments, ensure_ascii=False) if form.as_text else dict(arguments)
    call = {"id": form.call_id, "type": "function", "function": {"name": PROBE_NAME, "arguments": given}}
    return {"role": "assistant", "content": form.content, "tool_calls": [call]}


class ChatTurns:
    """Facts about a chat template, found by rendering it. One thread at a time may call it."""

    def __init__(self, render: Render, special: Sequence[str] = ()) -> None:
        self._render = render
        self._special = re.compile(f"({'|'.join(map(re.escape, sorted(special, key=len, reverse=True))) or '(?!)'})")
        self._content_forms: dict[str, tuple[bool, bool]] = {}
        self._call_form: CallForm | None | bool = False  # False: not looked for
        self._header: str | None = None

    def text(self, messages: list[Message], tools: Tools, options: Mapping[str, Any]) -> str:
        """The text that the template writes for messages. Raises `RolloutError` if it refuses them."""
        return self._render(messages, tools, options)

    # --- content and calls of messages -------------------------------------------------------------------------------

    def takes(self, role: str) -> tuple[bool, bool]:
        """Whether messages of a role may have a text as content, and whether a list of parts."""
        found = self._content_forms.get(role)
        if found is None:
            parts = [{"type": "text", "text": _MARK}]
            found = self._shows(role, _MARK), self._shows(role, parts)
            if len(self._content_forms) < _MOST_ROLES:  # clients may invent roles
                self._content_forms[role] = found
        return found

    def call_form(self) -> CallForm | None:
        """The form of tool calls in messages; None if the template does not show calls."""
        if isinstance(self._call_form, bool):
            self._call_form = next(filter(self._shows_call, _CALL_FORMS), None)
        return self._call_form

    def question(self) -> Message:
        """A message of a user, in the form that the template takes."""
        text, parts = self.takes("user")
        return {"role": "user", "content": [{"type": "text", "text": "?"}] if parts and not text else "?"}

    def _shows(self, role: str, content: Any) -> bool:
        """True if the template writes the text of such a content, and not the list itself."""
        message: Message = {"role": role, "content": content}
        messages, tools = [message], None
        if role in ("assistant", "tool"):
            messages = [self.question(), message]
        elif role in ("system", "developer"):
            messages = [message, self.question()]
        if role == "tool" and (form := self.call_form()) is not None:
            tools = [PROBE_TOOL]
            messages.insert(1, probe_call({"city": "?"}, form))
            message |= {"tool_call_id": form.call_id, "name": PROBE_NAME}
        text = self.render(messages, tools)
        return text is not None and _MARK in text and not any(sign in text for sign in _SIGNS_OF_A_LIST)

    def _shows_call(self, form: CallForm) -> bool:
        text = self.render([self.question(), probe_call({"city": _MARK}, form)], [PROBE_TOOL])
        return text is not None and _MARK in text and f'\\"{_MARK}' not in text  # else the text is quoted once more

    def render(self, messages: list[Message], tools: Tools = None, **options: Any) -> str | None:
        """The text that the template writes for messages, without asking for an answer; None if it refuses them."""
        try:
            return self._render(messages, tools, {"add_generation_prompt": False, **options})
        except RolloutError:
            return None

    # --- where an answer begins and ends -----------------------------------------------------------------------------

    def header(self) -> str:
        """The text with which a prompt asks for an answer, without thoughts that it opens; may be empty."""
        if self._header is None:
            bare = self.render([self.question()])
            asking = self.render([self.question()], add_generation_prompt=True)
            opening = "" if bare is None or asking is None else asking[len(self._common(bare, asking)) :]
            self._header = opening[: _thoughts_in(opening)]
        return self._header

    def answer(self, message: Message, tools: Tools = None) -> str | None:
        """The text that the template writes for an answer, after its header; None if it refuses the answer."""
        bare, text = self.render([self.question()], tools), self.render([self.question(), message], tools)
        if bare is None or text is None:
            return None
        answer, header = text[len(self._common(bare, text)) :], self.header()
        return answer[answer.find(header) + len(header) :] if header in answer else answer

    def begun(self, prompt: str) -> str:
        """The part of the answer that a prompt has, such as an open `<think>`."""
        header = self.header()
        position = prompt.rfind(header) if header.strip() else -1
        return prompt[position + len(header) :] if position >= 0 else ""

    def after(
        self, messages: list[Message], position: int, stop: str, tools: Tools, options: Mapping[str, Any]
    ) -> str | None:
        """The text of a conversation after the answer at `position`, which the model ended with the token `stop`.

        `stop` is its text, "" for an answer without one. What the token stands for is not repeated, so a prompt that
        goes on with this text has each turn's end once. None if the template does not show where the answer ends.
        """
        alone = dict(options) | {"add_generation_prompt": False, "continue_final_message": False}
        for marked, name in _marked(messages[position]):
            whole = self._behind_mark([*messages[:position], marked, *messages[position + 1 :]], tools, options)
            last = self._behind_mark([*messages[:position], marked], tools, alone)
            if whole is not None and last is not None:
                return self._rest(whole, last, stop, [*messages[:position]], tools, alone).replace(_MARK, name)
        return None

    def _rest(
        self, whole: str, last: str, stop: str, before: list[Message], tools: Tools, alone: Mapping[str, Any]
    ) -> str:
        """The text of `whole` after an answer. `last`: the text of the conversation if it ended with the answer."""
        said = self._common(whole, last)  # the rest of the answer, such as its calls, and the end of its turn
        rest = whole[len(said) :]
        if stop and (position := said.rfind(stop)) >= 0:
            return whole[position + len(stop) :]
        if stop and rest.lstrip().startswith(stop):  # the beginning of the next turn ends this one
            return rest[rest.index(stop) + len(stop) :]
        if stop and last[len(said) :].startswith(stop) and (other := self._special.match(rest)) is not None:
            return rest[other.end() :]  # the turn ends with another token if more turns follow
        end = self._behind_mark([*before, {"role": "assistant", "content": _MARK}], tools, alone) or ""
        return whole[len(said) - _overlap(said, end) :]

    def _behind_mark(self, messages: list[Message], tools: Tools, options: Mapping[str, Any]) -> str | None:
        try:
            text = self._render(messages, tools, options)
        except RolloutError:
            return None
        position = text.find(_MARK)
        return None if position < 0 else text[position + len(_MARK) :]

    def _common(self, one: str, other: str) -> str:
        """The common beginning of two texts. A special token is never cut."""
        same: list[str] = []
        for mine, theirs in zip(self._special.split(one), self._special.split(other), strict=False):
            if mine != theirs:
                if not self._special.fullmatch(mine) and not self._special.fullmatch(theirs):
                    same.append(os.path.commonprefix([mine, theirs]))
                break
            same.append(mine)
        return "".join(same)


def _thoughts_in(text: str) -> int:
    """The position of the first mark of reasoning in any format; the end of the text without one."""
    regions = [region for fields in REASONING.values() for region in compile_regions(fields)]
    marks = [mark for region in regions for mark in (region.open, region.close) if mark is not None]
    found = [mark.pattern.search(text) for mark in marks]
    return min((match.start() for match in found if match is not None and match[0]), default=len(text))


def _overlap(text: str, other: str) -> int:
    """The length of the longest end of a text with which the other text begins."""
    lengths = range(min(len(text), len(other)), 0, -1)
    return next((length for length in lengths if text.endswith(other[:length])), 0)


def _marked(message: Message) -> Iterator[tuple[Message, str]]:
    """The message with a mark before the calls and the end of its answer, and what the mark stands for there.

    Templates may write the content after the calls, or leave it out, and may name the first function once more.
    """
    if calls := message.get("tool_calls"):
        function = calls[0]["function"]
        yield (
            message | {"tool_calls": [calls[0] | {"function": function | {"name": _MARK}}, *calls[1:]]},
            function["name"],
        )
    parts = isinstance(message.get("content"), list)
    yield message | {"content": [{"type": "text", "text": _MARK}] if parts else _MARK}, ""
