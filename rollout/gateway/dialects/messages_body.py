"""The body of `/v1/messages` (Anthropic's Messages API), and the chat that it stands for."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from rollout.gateway.dialects.chat_body import ChatBody, ExtraFields
from rollout.gateway.dialects.chat_builder import ChatBuilder, listed, named
from rollout.gateway.formats.format_chooser import Formats
from rollout.gateway.http.http_errors import HttpError, Names, bad_request
from rollout.gateway.prompts.sampling import MAX_TOKEN_ID, Int32, Number

_ROLES = ("user", "assistant", "system")
#: Fields of tools that say how Anthropic's server treats them.
_TOOL_FIELDS = {"name", "description", "input_schema", "type", "strict", "cache_control", "eager_input_streaming"}

#: Claude Code sends this: all thoughts stay, as they do here.
_KEEPS_THOUGHTS = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}


class CountBody(ExtraFields):
    """The body of `/v1/messages/count_tokens`."""

    ignored: ClassVar = dict.fromkeys(
        ("metadata", "service_tier", "inference_geo", "user_profile_id", "workspace_id", "diagnostics"),
        "Anthropic's accounting",
    ) | {"cache_control": "the prefix cache needs no marks"}
    switched_off: ClassVar = {
        "container": (None,),
        "context_management": (None, {}, {"edits": []}, _KEEPS_THOUGHTS),
        "mcp_servers": (None, []),
        "prefill": (None,),
        "speed": (None, "standard"),
    }

    model: str
    messages: list[Any]
    system: str | list[Any] | None = None
    thinking: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    thread: dict[str, Any] | None = None

    def chat(self, formats: Formats) -> tuple[ChatBody, Names]:
        """The same as a chat, and the names of this body's fields by the names of the chat's. Raises `HttpError`."""
        if self.thread is not None:  # these details tell a client to send all messages
            details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
            raise HttpError(400, "this gateway holds no threads; send all messages", "thread", details=details)
        builder = ChatBuilder(joins_users=True, image="source")
        if self.system is not None:
            _say(builder, "system", self.system, "system")
        for place, message in enumerate(self.messages):
            _add_message(builder, message, f"messages.{place}")
        fields = self.extras() | self._more() | {"model": self.model, "messages": builder.built()}
        if not builder.messages:
            raise bad_request("send at least one message", "messages")
        prefill = builder.messages[-1]
        if prefill["role"] == "assistant":
            if "tool_calls" in prefill:
                raise bad_request("send the results of these calls in a message of the user", "messages")
            fields["continue_final_message"] = True
        if self.tools:
            fields["tools"] = [_tool(tool, f"tools.{place}") for place, tool in enumerate(self.tools)]
        fields |= self._tool_choice() | self._format() | self._thinking(formats)
        names = {
            **builder.names,
            "messages": "messages",
            "stop": "stop_sequences",
            "thinking_token_budget": "thinking.budget_tokens",
            "response_format": "output_config.format",
            "response_format.json_schema": "output_config.format",
        }
        return ChatBody.take(fields), names

    def _more(self) -> dict[str, Any]:
        return {}

    def _tool_choice(self) -> dict[str, Any]:
        choice, field = self.tool_choice, "tool_choice"
        if choice is None:
            return {}
        one = choice.get("disable_parallel_tool_use", False)
        if not isinstance(one, bool):
            raise bad_request(
                f"'{field}.disable_parallel_tool_use' is true or false", f"{field}.disable_parallel_tool_use"
            )
        found: dict[str, Any] = {"parallel_tool_calls": not one}
        match choice.get("type"):
            case "auto" | "none" as kind:
                return found | {"tool_choice": kind}
            case "any":
                return found | {"tool_choice": "required"}
            case "tool":
                name = named(choice, field, "name")["name"]
                return found | {"tool_choice": {"type": "function", "function": {"name": name}}}
        raise bad_request("use auto, any, tool or none", f"{field}.type")

    def _format(self) -> dict[str, Any]:
        """The constraint of the answer."""
        config = self.output_config or {}
        known = {"format", "effort"}
        for name in config.keys() - known:
            raise bad_request(f"this gateway does not offer {name!r:.80}; remove it", f"output_config.{name:.80}")
        given, field = config.get("format"), "output_config.format"
        if given is None:
            given, field = self.output_format, "output_format"
        if given is None:
            return {}
        if (
            not isinstance(given, dict)
            or given.get("type") != "json_schema"
            or not isinstance(given.get("schema"), dict)
        ):
            raise bad_request('send {"type": "json_schema", "schema": {...}}', field)
        return {"response_format": {"type": "json_schema", "json_schema": {"schema": given["schema"]}}}

    def _thinking(self, formats: Formats) -> dict[str, Any]:
        """The thinking options that the request names, for the chat template, and the budget."""
        budgeted: dict[str, Any] = {}
        options = dict(self.chat_template_kwargs)
        effort = (self.output_config or {}).get("effort")
        if effort is not None:
            if not isinstance(effort, str):
                raise bad_request("'output_config.effort' is a text", "output_config.effort")
            options.setdefault("reasoning_effort", effort)
        if self.thinking is not None:
            kind = self.thinking.get("type")
            if kind not in ("enabled", "adaptive", "disabled"):
                raise bad_request("use enabled, adaptive or disabled", "thinking.type")
            if kind == "enabled" and formats.reasoning is None:
                raise bad_request(
                    "this gateway knows no format of reasoning for this model: start it with --reasoning-parser, or "
                    "send no 'thinking'",
                    "thinking",
                )
            budget = self.thinking.get("budget_tokens", 1)
            if type(budget) is not int or not 1 <= budget <= MAX_TOKEN_ID:
                raise bad_request("'thinking.budget_tokens' is an integer of at least 1", "thinking.budget_tokens")
            if kind == "enabled" and "budget_tokens" in self.thinking and formats.thoughts is not None:
                budgeted["thinking_token_budget"] = budget
            if self.thinking.get("display") not in (None, "summarized", "omitted"):
                raise bad_request("use summarized or omitted", "thinking.display")
            options.setdefault("enable_thinking", kind != "disabled")
        return budgeted | ({"chat_template_kwargs": options} if options else {})

    @property
    def shows_thinking(self) -> bool:
        """False if the text of the reasoning is left out."""
        return (self.thinking or {}).get("display") != "omitted"


class MessagesBody(CountBody):
    """The body of `/v1/messages`."""

    max_tokens: int = Field(ge=0, le=MAX_TOKEN_ID)
    stop_sequences: list[str] = []
    stream: bool = False
    temperature: Number = 1.0
    top_p: Number = 1.0
    top_k: Int32 = 0

    def _more(self) -> dict[str, Any]:
        names = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        return {name: getattr(self, name) for name in names} | {"stop": self.stop_sequences}


def _add_message(builder: ChatBuilder, message: Any, field: str) -> None:
    role = named(message, field, "role")["role"]
    if role not in _ROLES:
        raise bad_request("use user, assistant or system", f"{field}.role")
    content, field = message.get("content"), f"{field}.content"
    if role == "system" or isinstance(content, str):
        _say(builder, role, content, field)
        return
    for place, block in enumerate(listed(content, field)):
        _add_block(builder, role, named(block, f"{field}.{place}", "type"), f"{field}.{place}")


def _add_block(builder: ChatBuilder, role: str, block: dict[str, Any], field: str) -> None:
    match role, block["type"]:
        case "assistant", "thinking":
            builder.think(named(block, field, "thinking")["thinking"], field)
        case "assistant", "tool_use":
            named(block, field, "id", "name")
            if not isinstance(block.get("input"), dict):
                raise bad_request(f"'{field}.input' is an object", f"{field}.input")
            builder.call(block["id"], block["name"], block["input"], field)
        case "user", "tool_result":
            call_id = named(block, field, "tool_use_id")["tool_use_id"]
            builder.result(call_id, _result(block.get("content"), f"{field}.content"), field, f"{field}.content")
        case _, "text":
            builder.text(role, named(block, field, "text")["text"], field)
        case "user", "image":
            builder.say(role, _image(block, field), field)
        case _, kind:
            raise bad_request(
                f"this gateway takes no block of the type {kind!r:.80} from the {role}; use text, image and "
                "tool_result of the user, and text, thinking and tool_use of the assistant",
                f"{field}.type",
            )


def _say(builder: ChatBuilder, role: str, content: Any, field: str) -> None:
    """Add a text, or a list of text blocks."""
    if isinstance(content, str):
        builder.text(role, content, field)
        return
    texts = []
    for place, block in enumerate(listed(content, field)):
        if named(block, f"{field}.{place}", "type", "text")["type"] != "text":
            raise bad_request("use blocks of the type text here", f"{field}.{place}.type")
        texts.append(block["text"])
    if texts:
        builder.text(role, "\n\n".join(texts), field)


def _result(content: Any, field: str) -> list[dict[str, Any]]:
    """The parts of a tool's result."""
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    parts = []
    for place, block in enumerate(listed(content, field)):
        name = f"{field}.{place}"
        match named(block, name, "type")["type"]:
            case "text":
                parts.append({"type": "text", "text": named(block, name, "text")["text"]})
            case "image":
                parts.append(_image(block, name))
            case kind:
                raise bad_request(f"a result has text and images, not {kind!r:.80}", f"{name}.type")
    return parts


def _image(block: dict[str, Any], field: str) -> dict[str, Any]:
    """An image as OpenAI writes it."""
    source = named(block.get("source"), f"{field}.source", "type")
    match source["type"]:
        case "base64":
            named(source, f"{field}.source", "media_type", "data")
            url = f"data:{source['media_type']};base64,{source['data']}"
        case "url":
            url = named(source, f"{field}.source", "url")["url"]
        case kind:
            raise bad_request(f"use base64 or url; this gateway has no {kind!r:.80}", f"{field}.source.type")
    return {"type": "image_url", "image_url": {"url": url}}


def _tool(tool: Any, field: str) -> dict[str, Any]:
    """A tool as OpenAI declares it."""
    kind = named(tool, field).get("type", "custom")
    if kind not in ("custom", None):
        raise bad_request(
            f"this gateway has no tool of the type {kind!r:.80}; declare a tool with name and input_schema",
            f"{field}.type",
        )
    schema = named(tool, field, "name").get("input_schema")
    if not isinstance(schema, dict):
        raise bad_request(f"'{field}.input_schema' is a JSON schema, an object", f"{field}.input_schema")
    for name in tool.keys() - _TOOL_FIELDS:
        if tool[name]:
            raise bad_request(f"this gateway does not offer {name!r:.80}; remove it", f"{field}.{name:.80}")
    function = {"name": tool["name"], "parameters": schema}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}
