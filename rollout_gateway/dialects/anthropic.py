"""Anthropic's Messages API: `/v1/messages` and its `/count_tokens`, on the way of every chat."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from hashlib import blake2b
from typing import Any, ClassVar

from pydantic import Field

from rollout_gateway.answers.answer_facts import end_facts
from rollout_gateway.answers.views import CompletionViews
from rollout_gateway.formats.answer_segments import AnswerPiece
from rollout_gateway.formats.format_chooser import Formats
from rollout_gateway.formats.tool_calls import ToolCall
from rollout_gateway.http.event_stream import NamedEvents
from rollout_gateway.http.http_errors import HttpError, Names, bad_request
from rollout_gateway.prompts.sampling import MAX_TOKEN_ID, Int32, Number
from rollout_gateway.requests.chat_body import (
    ChatBody,
    ChatBuilder,
    ExtraFields,
    client_names,
    content_parts,
    listed,
    named,
    not_offered,
    text_part,
)
from rollout_gateway.requests.conversation import Conversation, begin, prompt_of
from rollout_gateway.requests.http_request import POST, Endpoint, HttpRequest
from trainer_bridge.client.results import Completion, GenerateResult

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
        for position, message in enumerate(self.messages):
            _add_message(builder, message, f"messages.{position}")
        fields = self.extras() | self._more() | {"model": self.model, "messages": builder.built()}
        if not builder.messages:
            raise bad_request("send at least one message", "messages")
        prefill = builder.messages[-1]
        if prefill["role"] == "assistant":
            if "tool_calls" in prefill:
                raise bad_request("send the results of these calls in a message of the user", "messages")
            fields["continue_final_message"] = True
        if self.tools:
            fields["tools"] = [_tool(tool, f"tools.{position}") for position, tool in enumerate(self.tools)]
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
                f"'{field}.disable_parallel_tool_use' must be true or false", f"{field}.disable_parallel_tool_use"
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
        for name in config.keys() - {"format", "effort"}:
            raise not_offered(name, f"output_config.{name:.80}")
        given, field = config.get("format"), "output_config.format"
        if given is None:
            given, field = self.output_format, "output_format"
        if given is None:
            return {}
        match given:
            case {"type": "json_schema", "schema": dict(schema)}:
                return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
        raise bad_request('send {"type": "json_schema", "schema": {...}}', field)

    def _thinking(self, formats: Formats) -> dict[str, Any]:
        """The thinking options that the request names, for the chat template, and the budget."""
        budgeted: dict[str, Any] = {}
        options = dict(self.chat_template_kwargs)
        effort = (self.output_config or {}).get("effort")
        if effort is not None:
            if not isinstance(effort, str):
                raise bad_request("'output_config.effort' must be a string", "output_config.effort")
            options.setdefault("reasoning_effort", effort)
        if self.thinking is not None:
            kind = self.thinking.get("type")
            if kind not in ("enabled", "adaptive", "disabled"):
                raise bad_request("use enabled, adaptive or disabled", "thinking.type")
            if kind == "enabled" and formats.reasoning is None:
                raise bad_request(
                    "this gateway does not know this model's format of reasoning: start it with --reasoning-parser, or "
                    "send no 'thinking'",
                    "thinking",
                )
            budget = self.thinking.get("budget_tokens", 1)
            if type(budget) is not int or not 1 <= budget <= MAX_TOKEN_ID:
                raise bad_request("'thinking.budget_tokens' must be an integer of at least 1", "thinking.budget_tokens")
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
    for position, block in enumerate(listed(content, field)):
        _add_block(builder, role, named(block, f"{field}.{position}", "type"), f"{field}.{position}")


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
            call_id, name = named(block, field, "tool_use_id")["tool_use_id"], f"{field}.content"
            given = [] if block.get("content") in (None, "") else block["content"]
            parts = content_parts(given, name, {"text": text_part, "image": _image})
            builder.result(call_id, [part for part, _ in parts], field, name)
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
    texts = [part["text"] for part, _ in content_parts(content, field, {"text": text_part})]
    if texts:
        builder.text(role, "\n\n".join(texts), field)


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
        raise bad_request(f"'{field}.input_schema' must be a JSON schema (an object)", f"{field}.input_schema")
    for name in tool.keys() - _TOOL_FIELDS:
        if tool[name]:
            raise not_offered(name, f"{field}.{name:.80}")
    function = {"name": tool["name"], "parameters": schema}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


Event = dict[str, Any]


async def count_tokens(request: HttpRequest[CountBody]) -> dict[str, Any]:
    """Count the tokens of a prompt; generate nothing."""
    body, names = request.body.chat(request.gateway.model.formats)
    with client_names(names):
        await request.gateway.adapter_of(body.model)
        return {"input_tokens": len((await prompt_of(request, body)).chat.token_ids)}


async def answer(request: HttpRequest[MessagesBody]) -> Any:
    """Answer a conversation."""
    body, names = request.body.chat(request.gateway.model.formats)
    with client_names(names):
        asked = await begin(request, body, request.id("msg_", request.body.request_id), at_most=True)
        found = _Answer(asked, request.body, names)
        if body.stream:
            return NamedEvents(found.events(), _error)
        return await found.whole()


def _error(error: HttpError) -> Event:
    return error.body("/v1/messages")


class _Answer:
    """The answer to a conversation."""

    def __init__(self, asked: Conversation, body: MessagesBody, names: Names) -> None:
        self._asked = asked
        self._body = body
        self._names = names
        self._prompt_tokens = len(asked.prompt.chat.token_ids)

    async def whole(self) -> dict[str, Any]:
        """The answer without streaming."""
        (result,) = await self._asked.call.whole()
        (completion,) = result.completions
        views = self._asked.views()
        blocks = [self._block(kind, value) for kind, value in views.take(completion).parts]
        return self._message(blocks) | self._end(completion, views, result) | views.facts(completion)

    async def events(self) -> AsyncGenerator[Event, None]:
        call, views, blocks = self._asked.call, self._asked.views(), _Blocks(self._body.shows_thinking)
        begun = False
        with client_names(self._names):
            async with aclosing(call.chunks()) as chunks:
                async for each in chunks:
                    if not begun:
                        begun = True
                        yield {"type": "message_start", "message": self._message([])}
                        yield {"type": "ping"}
                    last = each.chunk.part
                    for event in blocks.add(views.take(last)):
                        yield event
        for event in blocks.end():
            yield event
        end = self._end(last, views, call.results[0])
        delta = {name: value for name, value in end.items() if name != "usage"} | {"container": None}
        yield {"type": "message_delta", "delta": delta, "usage": end["usage"], **views.facts(last)}
        yield {"type": "message_stop"}

    def _message(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._asked.call.id,
            "type": "message",
            "role": "assistant",
            "model": self._body.model,
            "content": blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": _usage(self._prompt_tokens, 0, 0),
        }

    def _block(self, kind: str, value: str | ToolCall) -> dict[str, Any]:
        if isinstance(value, ToolCall):
            return {"type": "tool_use", "id": value.id, "name": value.name, "input": value.decoded()}
        if kind == "content":
            return {"type": "text", "text": value, "citations": None}
        return {
            "type": "thinking",
            "thinking": value if self._body.shows_thinking else "",
            "signature": _signature(value),
        }

    def _end(self, last: Completion, views: CompletionViews, result: GenerateResult) -> dict[str, Any]:
        """The end of the message. The completion, or its last part, has a finish reason."""
        tokens = len(result.completions[0])
        facts, reason, sequence = end_facts(last, self._asked.body), "end_turn", None
        match facts["finish_reason"]:
            case "length":
                full = self._prompt_tokens + tokens >= self._asked.call.gateway.model.context_tokens
                reason = (
                    "max_tokens" if tokens >= self._body.max_tokens or not full else "model_context_window_exceeded"
                )
            case "abort":
                reason = "pause_turn"  # sent back as it is, the message goes on
            case "repetition":
                pass  # Anthropic has no word for it
            case _ if views.calls:
                reason = "tool_use"
            case _ if isinstance(facts["stop_reason"], str):
                reason, sequence = "stop_sequence", facts["stop_reason"]
        usage = _usage(self._prompt_tokens, result.cached_tokens, tokens)
        return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None, "usage": usage}


class _Blocks:
    """The events of content blocks, in turn."""

    def __init__(self, shows_thinking: bool) -> None:
        self._shows_thinking = shows_thinking
        self._index = -1
        self._kind = ""  # type of the open block
        self._text = ""

    def add(self, piece: AnswerPiece) -> Iterator[Event]:
        """The events of new parts."""
        for kind, value in piece.parts:
            if isinstance(value, ToolCall):
                yield from self.end()
                yield self._start({"type": "tool_use", "id": value.id, "name": value.name, "input": {}})
                yield self._delta({"type": "input_json_delta", "partial_json": value.arguments})
                yield self._stop()
                continue
            if kind != self._kind:
                yield from self.end()
                self._kind, self._text = kind, ""
                empty = (
                    {"type": "text", "text": "", "citations": None}
                    if kind == "content"
                    else {"type": "thinking", "thinking": "", "signature": ""}
                )
                yield self._start(empty)
            self._text += value
            if kind == "content":
                yield self._delta({"type": "text_delta", "text": value})
            elif self._shows_thinking:
                yield self._delta({"type": "thinking_delta", "thinking": value})

    def end(self) -> Iterator[Event]:
        """The end of the open block."""
        if self._kind == "reasoning":
            yield self._delta({"type": "signature_delta", "signature": _signature(self._text)})
        if self._kind:
            self._kind = ""
            yield self._stop()

    def _start(self, block: dict[str, Any]) -> Event:
        self._index += 1
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _stop(self) -> Event:
        return {"type": "content_block_stop", "index": self._index}


def _usage(prompt: int, cached: int, drawn: int) -> dict[str, Any]:
    """Anthropic counts the cached tokens of a prompt apart from the others."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": drawn,
    }


def _signature(text: str) -> str:
    """A signature of reasoning, which clients ask for and send back; nothing is read from it."""
    return blake2b(text.encode(errors="replace"), digest_size=16).hexdigest()


ENDPOINTS = (
    Endpoint(POST, "/v1/messages", "Anthropic", answer, MessagesBody, for_client=True),
    Endpoint(POST, "/v1/messages/count_tokens", "Anthropic", count_tokens, CountBody),
)
