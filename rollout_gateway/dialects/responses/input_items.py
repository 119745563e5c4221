"""Makes a chat from the body of `/v1/responses`: items become messages, tools functions."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from pydantic import Field

from rollout_gateway.http.http_errors import Names, bad_request
from rollout_gateway.prompts.sampling import MAX_TOKEN_ID, OPENAI_ACCOUNTING, Int32, Number
from rollout_gateway.requests.chat_body import (
    ChatBody,
    ChatBuilder,
    ExtraFields,
    PartReaders,
    content_parts,
    listed,
    named,
    not_offered,
    text_part,
)

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_INCLUDED = ("reasoning.encrypted_content",)  # reasoning is in answers as plain text
#: Parameters of the function that stands for a tool whose input is a text.
_FREEFORM = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class DeclaredTool:
    """A tool as the client declares it. `freeform`: its input is a text, not a JSON object."""

    name: str
    namespace: str | None = None
    freeform: bool = False

    @property
    def function(self) -> str:
        """The name of the function that stands for it in a chat."""
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"


class ResponsesBody(ExtraFields):
    """The body of `/v1/responses`."""

    ignored: ClassVar = OPENAI_ACCOUNTING | {
        "client_metadata": "Codex's accounting",
        "stream_options": "OpenAI's padding of events",
    }
    switched_off: ClassVar = {
        "background": (None, False),
        "background_options": (None,),
        "access_programs": (None,),
        "context_management": (None, []),
        "conversation": (None,),
        "image": (None,),
        "max_tool_calls": (None,),
        "moderation": (None,),
        "prompt": (None,),
        "service_tier": (None, "auto", "default"),
        "top_logprobs": (None, 0),
        "truncation": (None, "disabled"),
    }

    input: str | list[Any]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    tools: list[Any] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: int | None = Field(None, ge=0, le=MAX_TOKEN_ID)
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: list[str] = []
    metadata: dict[str, str] = {}
    temperature: Number = 1.0
    top_p: Number = 1.0
    top_k: Int32 = 0
    stop: str | list[str] = []

    def chat(self, before: list[dict[str, Any]]) -> tuple[ChatBody, Names, list[dict[str, Any]]]:
        """The same as a chat, the names of this body's fields by the names of the chat's, and the chat's messages.

        `before`: the messages of earlier responses. The messages that are returned lack the instructions. Raises
        `HttpError`.
        """
        for position, name in enumerate(self.include):
            if name not in _INCLUDED:
                raise not_offered(name, f"include.{position}")
        own, builder = self._messages(before, None), self._messages(before, self.instructions)
        if not builder.messages:
            raise bad_request("send a text or at least one item", "input")
        names = ("stream", "temperature", "top_p", "top_k", "stop", "parallel_tool_calls", "model")
        fields = self.extras() | {name: getattr(self, name) for name in names} | {"messages": builder.messages}
        if self.max_output_tokens is not None:
            fields["max_tokens"] = self.max_output_tokens
        if self.tools:
            fields["tools"] = [_function(tool, declared, field) for tool, declared, field in self._declared()]
            fields["tool_choice"] = self._tool_choice()
        fields |= self._format() | self._template_options()
        known = {
            **builder.names,
            "messages": "input",
            "max_tokens": "max_output_tokens",
            "response_format": "text.format",
            "response_format.json_schema": "text.format",
        }
        return ChatBody.take(fields), known, own.messages

    @property
    def declared(self) -> dict[str, DeclaredTool]:
        """The tools by the names of the functions that stand for them. Raises `HttpError`."""
        return {declared.function: declared for _, declared, _ in self._declared()}

    def _declared(self) -> Iterator[tuple[dict[str, Any], DeclaredTool, str]]:
        """All tools, also the tools of namespaces, each with its field."""
        seen = set()
        for tool, namespace, field in self._flat_tools():
            kind = named(tool, field, "type")["type"]
            if kind not in ("function", "custom"):
                raise bad_request(
                    f"this gateway runs no tool of the type {kind!r:.80}; declare tools of the types function, custom "
                    "and namespace",
                    f"{field}.type",
                )
            declared = DeclaredTool(named(tool, field, "name")["name"], namespace, kind == "custom")
            if declared.function in seen:
                raise bad_request(f"two tools have the name {declared.function!r:.200}", f"{field}.name")
            seen.add(declared.function)
            yield tool, declared, field

    def _flat_tools(self) -> Iterator[tuple[Any, str | None, str]]:
        for position, tool in enumerate(self.tools):
            field = f"tools.{position}"
            if named(tool, field, "type")["type"] != "namespace":
                yield tool, None, field
                continue
            for number, each in enumerate(listed(named(tool, field, "name").get("tools"), f"{field}.tools")):
                yield each, tool["name"], f"{field}.tools.{number}"

    def _messages(self, before: list[dict[str, Any]], instructions: str | None) -> ChatBuilder:
        if instructions is not None and before:
            head = before[0]["content"] if before[0]["role"] == "system" else None
            text = instructions if head is None else f"{instructions}\n\n{head}"
            before = [{"role": "system", "content": text}, *before[head is not None :]]
        builder = ChatBuilder(joins_users=False, image="image_url", messages=before)
        if instructions is not None and not before:
            builder.text("system", instructions, "instructions")
        if isinstance(self.input, str):
            builder.text("user", self.input, "input")
        else:
            for position, item in enumerate(self.input):
                _add_item(builder, item, f"input.{position}")
        builder.built()
        return builder

    def _tool_choice(self) -> Any:
        choice = self.tool_choice
        if isinstance(choice, str):
            if choice not in ("auto", "none", "required"):
                raise bad_request("use auto, none, required or a function", "tool_choice")
            return choice
        if choice.get("type") not in ("function", "custom"):
            raise bad_request(
                f"this gateway offers no choice of the type {choice.get('type')!r:.80}; use auto, none, required "
                'or {"type": "function", "name": ...}',
                "tool_choice.type",
            )
        return {"type": "function", "function": {"name": named(choice, "tool_choice", "name")["name"]}}

    def _format(self) -> dict[str, Any]:
        """The constraint of the answer."""
        given = dict(self.text or {})
        form, verbosity = given.pop("format", None), given.pop("verbosity", None)
        if verbosity not in (None, "low", "medium", "high"):
            raise bad_request("use low, medium or high", "text.verbosity")
        for name in given:
            raise not_offered(name, f"text.{name:.80}")
        if form is None:
            return {}
        match named(form, "text.format", "type")["type"]:
            case "text" | "json_object" as kind:
                return {"response_format": {"type": kind}}
            case "json_schema":
                if not isinstance(form.get("schema"), dict):
                    raise bad_request("'text.format.schema' must be a JSON schema (an object)", "text.format.schema")
                return {"response_format": {"type": "json_schema", "json_schema": {"schema": form["schema"]}}}
        raise bad_request("use text, json_object or json_schema", "text.format.type")

    def _template_options(self) -> dict[str, Any]:
        """The options of reasoning and of verbosity that the request names, for the chat template."""
        given = dict(self.reasoning or {})
        effort = given.pop("effort", None)
        for name in ("summary", "generate_summary"):  # the whole text is shown instead
            if given.pop(name, None) not in (None, "auto", "concise", "detailed"):
                raise bad_request("use auto, concise or detailed", f"reasoning.{name}")
        for name, value in given.items():
            if value is not None:
                raise not_offered(name, f"reasoning.{name:.80}")
        if not isinstance(effort, str | None):
            raise bad_request("'reasoning.effort' must be a string", "reasoning.effort")
        return {"reasoning_effort": effort, "verbosity": (self.text or {}).get("verbosity")}


def _add_item(builder: ChatBuilder, item: Any, field: str) -> None:
    named(item, field)
    match item.get("type", "message"):
        case "message":
            role = named(item, field, "role")["role"]
            if role not in _ROLES:
                raise bad_request("use user, assistant, system or developer", f"{field}.role")
            for part, name in content_parts(item.get("content"), f"{field}.content", _PARTS):
                if part["type"] == "text":
                    builder.text(_ROLES[role], part["text"], name)
                else:
                    builder.say(_ROLES[role], part, name)
        case "reasoning":
            if text := _reasoning_text(item, field):
                builder.think(text, field)
        case "function_call" | "custom_tool_call" as kind:
            text = "input" if kind == "custom_tool_call" else "arguments"
            given = named(
                item, field, "call_id", "name", text, *([] if item.get("namespace") is None else ["namespace"])
            )
            function = DeclaredTool(given["name"], given.get("namespace")).function
            builder.call(given["call_id"], function, {text: given[text]} if text == "input" else given[text], field)
        case "function_call_output" | "custom_tool_call_output":
            call_id = named(item, field, "call_id")["call_id"]
            parts = [part for part, _ in content_parts(item.get("output"), f"{field}.output", _PARTS)]
            builder.result(call_id, parts, field, f"{field}.output")
        case kind:
            raise bad_request(
                f"this gateway has no item of the type {kind!r:.80}; use message, reasoning, function_call, "
                "custom_tool_call and their outputs",
                f"{field}.type",
            )


def _image(part: dict[str, Any], field: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": named(part, field, "image_url")["image_url"]}}


_PARTS: PartReaders = {
    **dict.fromkeys(("input_text", "output_text", "text"), text_part),
    "refusal": partial(text_part, name="refusal"),
    "input_image": _image,
}


def _reasoning_text(item: dict[str, Any], field: str) -> str:
    """The text of a reasoning item."""
    parts = listed(item.get("content") or [], f"{field}.content")
    texts = [named(part, f"{field}.content.{position}", "text")["text"] for position, part in enumerate(parts)]
    if not texts and item.get("encrypted_content"):
        raise bad_request("encrypted reasoning cannot be read here; remove the item", f"{field}.encrypted_content")
    return "".join(texts)


def _function(tool: dict[str, Any], declared: DeclaredTool, field: str) -> dict[str, Any]:
    """The function that stands for a tool, as chats declare it."""
    if tool.get("defer_loading"):
        raise not_offered("defer_loading", f"{field}.defer_loading")
    texts = [tool["description"]] if isinstance(tool.get("description"), str) else []
    if declared.freeform:
        parameters: Any = _FREEFORM
        texts += _grammar(tool.get("format"), f"{field}.format")
    else:
        parameters = tool.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(parameters, dict):
            raise bad_request(f"'{field}.parameters' must be a JSON schema (an object)", f"{field}.parameters")
    function = {"name": declared.function, "parameters": parameters}
    return {"type": "function", "function": function | ({"description": "\n\n".join(texts)} if texts else {})}


def _grammar(form: Any, field: str) -> list[str]:
    """The text that describes the grammar of a tool's input to a model; empty without a grammar."""
    kind = "text" if form is None else named(form, field, "type")["type"]
    if kind == "text":
        return []
    if kind != "grammar":
        raise bad_request("use text or grammar", f"{field}.type")
    named(form, field, "syntax", "definition")
    return [f"The input has this grammar ({form['syntax']}):\n{form['definition']}"]
