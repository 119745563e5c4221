"""The body of `/v1/chat/completions`, into which the other dialects of chats translate theirs.

`ChatBuilder` makes OpenAI's messages of their blocks and items, and remembers where each came from:

    text, image, reasoning, call, result --> messages, and the client's name of each of their fields, for errors
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from rollout_gateway.answers.views import DemandedCalls
from rollout_gateway.http.http_errors import HttpError, Names, bad_request
from rollout_gateway.prompts.chat_messages import Rendering
from rollout_gateway.prompts.sampling import MAX_TOKEN_ID, CacheSalt, Int32, OpenAiBody, SamplerFields
from trainer_bridge.wire.request_fields import MAX_TOP_LOGPROBS


def _tool(value: dict[str, Any]) -> dict[str, Any]:
    """A tool as OpenAI declares it. Raises ValueError for another value."""
    function = value.get("function")
    if value.get("type", "function") != "function" or not isinstance(function, dict):
        raise ValueError('a tool is {"type": "function", "function": {"name": ..., "parameters": ...}}')
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError("the function of a tool needs a 'name' (a string)")
    if not isinstance(function.get("parameters"), dict | None):
        raise ValueError("the 'parameters' of a function must be a JSON schema (an object)")
    return value


Tool = Annotated[dict[str, Any], AfterValidator(_tool)]
ToolChoice = Literal["none", "auto", "required"] | dict[str, Any] | None


def demands_call(choice: ToolChoice) -> bool:
    """Whether the answer must be a call, or several."""
    return choice not in (None, "none", "auto")


def named_tool(choice: ToolChoice) -> str | None:
    """The function that must be called, if the choice names one. Raises `HttpError`."""
    if not isinstance(choice, dict):
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise bad_request('send {"type": "function", "function": {"name": ...}}', "tool_choice")
    return name


def call_constraint(choice: ToolChoice, tools: Sequence[dict[str, Any]], several: bool) -> dict[str, Any] | None:
    """The worker's `constraint` of a choice that demands a call; None for another choice. Raises `HttpError`.

    The completion is the arguments of the named function, or a list of calls, with one call unless `several`.
    """
    if not demands_call(choice):
        return None
    if not tools:
        raise bad_request("'tool_choice' needs 'tools'; add them or remove it", "tool_choice")
    declared = [tool["function"] for tool in tools]
    functions = {each["name"]: each.get("parameters") or {"type": "object", "properties": {}} for each in declared}
    if choice != "required":
        name = named_tool(choice)
        if name not in functions:
            raise bad_request("'tool_choice' must name a function of 'tools'", "tool_choice")
        return {"json_schema": json.dumps(functions[name])}
    # A reference in a function's schema starts at the root of that schema.
    schemas = {
        f"tool{position}": _moved(schema, f"#/$defs/tool{position}")
        for position, schema in enumerate(functions.values())
    }
    kinds = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{position}"}},
            "required": ["name", "parameters"],
        }
        for name, position in zip(functions, schemas, strict=True)
    ]
    most = {} if several else {"maxItems": 1}
    return {
        "json_schema": json.dumps({"type": "array", "minItems": 1, "items": {"anyOf": kinds}, **most, "$defs": schemas})
    }


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references to itself start at a new root."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: root + value[1:]
        if name == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, root)
        for name, value in schema.items()
    }


def _from_digit(value: Any) -> Any:
    """False and true for 0 and 1: vLLM takes these too, and Agent Lightning sends 1."""
    return value == 1 if type(value) is int and value in (0, 1) else value


class ChatBody(OpenAiBody):
    """The body of `/v1/chat/completions`."""

    ignored: ClassVar = OpenAiBody.ignored | dict.fromkeys(
        ("separate_reasoning", "stream_reasoning"), "reasoning is always separate"
    )
    switched_off: ClassVar = OpenAiBody.switched_off | {
        "audio": (None,),
        "include_reasoning": (None, True),
        "mm_processor_kwargs": (None, {}),
        "modalities": (None, ["text"]),
        "prediction": (None,),
        "web_search_options": (None,),
        "functions": (None,),
        "function_call": (None,),
        "echo": (None, False),
    }

    messages: list[Any]
    logprobs: Annotated[bool, BeforeValidator(_from_digit)] = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    max_completion_tokens: int | None = Field(None, ge=0, le=MAX_TOKEN_ID)
    tools: list[Tool] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool = True
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    keep_tokens: bool = True

    @property
    def calls_wanted(self) -> bool:
        """True if the gateway looks for calls in the answer."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def rendering(self) -> Rendering:
        options: dict[str, Any] = {"enable_thinking": False} if self.reasoning_effort == "none" else {}
        for name in ("reasoning_effort", "verbosity"):
            if (value := getattr(self, name)) is not None:
                options[name] = value
        options |= self.chat_template_kwargs
        if self.documents is not None:
            options["documents"] = self.documents
        if self.continue_final_message:
            options["continue_final_message"] = True
        if self.add_generation_prompt is not None:
            options["add_generation_prompt"] = self.add_generation_prompt
        return Rendering(self.tools or None, options, self.chat_template, self.add_special_tokens)

    def worker_names(self, prompt: str, within: str = "") -> dict[str, str]:
        names = super().worker_names(prompt, within)
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names if self.demand is None else names | {"constraint": "tools", "constraint.json_schema": "tools"}

    @property
    def demand(self) -> DemandedCalls | None:
        """The calls that a constraint demands; None without such a constraint."""
        return DemandedCalls(named_tool(self.tool_choice)) if demands_call(self.tool_choice) else None


class ExtraFields(SamplerFields):
    """Fields of vLLM that `/v1/messages` and `/v1/responses` take besides their own."""

    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    priority: Int32 = 0
    cache_salt: CacheSalt | None = None
    keep_tokens: bool = True
    request_id: str | None = Field(None, min_length=1, max_length=128)

    def extras(self) -> dict[str, Any]:
        """The fields of these that the request has."""
        return {name: getattr(self, name) for name in ExtraFields.model_fields if name in self.model_fields_set}


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
        self._position(f"{self._last}.content.{len(content)}", field)
        content.append(part)

    def text(self, role: str, text: str, field: str) -> None:
        """Add a text. An empty line separates texts of the system."""
        further = role == "system" and len(self.messages) > self._first and self.messages[-1]["role"] == role
        self.say(role, {"type": "text", "text": f"\n\n{text}" if further else text}, field)

    def think(self, text: str, field: str) -> None:
        message = self._message("assistant", field)
        message["reasoning_content"] = message.get("reasoning_content", "") + text

    def call(self, call_id: str, name: str, arguments: Any, field: str) -> None:
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
        for position in range(len(content)):
            self._position(f"{self._last}.content.{position}", f"{parts}.{position}")

    def built(self) -> list[dict[str, Any]]:
        """The messages; the system's content, and any of one part, is a text."""
        for message in self.messages[self._first :]:
            content = message.get("content")
            if not isinstance(content, list) or any(part["type"] != "text" for part in content):
                continue
            if len(content) < 2 or message["role"] == "system":
                message["content"] = "".join(part["text"] for part in content)
        return self.messages

    def _position(self, name: str, field: str) -> None:
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


def text_part(part: dict[str, Any], field: str, name: str = "text") -> dict[str, Any]:
    """OpenAI's part of a text, which the client's part has as `name`. Raises `HttpError`."""
    return {"type": "text", "text": named(part, field, name)[name]}


#: By the type of a part, what makes OpenAI's part of it and of its field.
PartReaders = Mapping[str, Callable[[dict[str, Any], str], dict[str, Any]]]


def content_parts(content: Any, field: str, readers: PartReaders) -> list[tuple[dict[str, Any], str]]:
    """OpenAI's parts of a content, a text or a list, each with its field. Raises `HttpError`."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, field)]
    found = []
    for position, part in enumerate(listed(content, field)):
        name = f"{field}.{position}"
        kind = named(part, name, "type")["type"]
        if kind not in readers:
            known = ", ".join(readers)
            raise bad_request(f"no part of the type {kind!r:.80} may stand here; use {known}", f"{name}.type")
        found.append((readers[kind](part, name), name))
    return found


def not_offered(name: str, field: str) -> HttpError:
    """The error of a field or value that other servers have."""
    return bad_request(f"this gateway does not offer {name!r:.80}; remove it", field)


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
