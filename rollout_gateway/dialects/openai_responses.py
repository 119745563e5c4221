"""OpenAI's Responses API: `/v1/responses`, on the way of every chat, and stored responses."""

import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field

from rollout_gateway.answers.answer_facts import finish_reason, now
from rollout_gateway.answers.views import CompletionViews
from rollout_gateway.formats.calls import ToolCall
from rollout_gateway.formats.segments import AnswerPiece
from rollout_gateway.history.trajectories import StoredResponse
from rollout_gateway.http.event_stream import NamedEvents
from rollout_gateway.http.http_errors import HttpError, Names, bad_request
from rollout_gateway.http.json_text import json_text
from rollout_gateway.prompts.sampling import MAX_TOKEN_ID, OPENAI_ACCOUNTING, Int32, Number
from rollout_gateway.requests.chat_body import ChatBody, ChatBuilder, ExtraFields, client_names, listed, named
from rollout_gateway.requests.conversation import Conversation, begin
from rollout_gateway.requests.http_request import DELETE, GET, POST, Endpoint, Gateway, HttpRequest
from trainer_bridge.client.results import Completion, GenerateResult

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXTS = ("input_text", "output_text", "text")
_INCLUDED = ("reasoning.encrypted_content",)  # reasoning is in answers as plain text
#: What a chat's function has as its parameters that stands for a tool whose input is a text.
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
        for place, name in enumerate(self.include):
            if name not in _INCLUDED:
                raise bad_request(f"this gateway does not offer {name!r:.80}; remove it", f"include.{place}")
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
        for place, tool in enumerate(self.tools):
            field = f"tools.{place}"
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
            for place, item in enumerate(self.input):
                _add_item(builder, item, f"input.{place}")
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
            raise bad_request(f"this gateway does not offer {name!r:.80}; remove it", f"text.{name:.80}")
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
                raise bad_request(f"this gateway does not offer {name!r:.80}; remove it", f"reasoning.{name:.80}")
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
            for part, name in _parts(item.get("content"), f"{field}.content"):
                builder.say(_ROLES[role], part, name) if part["type"] != "text" else builder.text(
                    _ROLES[role], part["text"], name
                )
        case "reasoning":
            text = _reasoning_text(item, field)
            if text:
                builder.think(text, field)
        case "function_call" | "custom_tool_call" as kind:
            freeform = kind == "custom_tool_call"
            given = named(item, field, "call_id", "name", "input" if freeform else "arguments")
            if item.get("namespace") is not None:
                named(item, field, "namespace")
            function = DeclaredTool(item["name"], item.get("namespace")).function
            builder.call(
                item["call_id"], function, {"input": given["input"]} if freeform else given["arguments"], field
            )
        case "function_call_output" | "custom_tool_call_output":
            call_id = named(item, field, "call_id")["call_id"]
            parts = [part for part, _ in _parts(item.get("output"), f"{field}.output")]
            builder.result(call_id, parts, field, f"{field}.output")
        case kind:
            raise bad_request(
                f"this gateway has no item of the type {kind!r:.80}; use message, reasoning, function_call, "
                "custom_tool_call and their outputs",
                f"{field}.type",
            )


def _parts(content: Any, field: str) -> list[tuple[dict[str, Any], str]]:
    """The parts of a content, each with its field."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, field)]
    found = []
    for place, part in enumerate(listed(content, field)):
        name = f"{field}.{place}"
        match named(part, name, "type")["type"]:
            case kind if kind in _TEXTS:
                shown: dict[str, Any] = {"type": "text", "text": named(part, name, "text")["text"]}
            case "refusal":
                shown = {"type": "text", "text": named(part, name, "refusal")["refusal"]}
            case "input_image":
                shown = {"type": "image_url", "image_url": {"url": named(part, name, "image_url")["image_url"]}}
            case kind:
                raise bad_request(
                    f"this gateway takes no part of the type {kind!r:.80}; use input_text, output_text and input_image",
                    f"{name}.type",
                )
        found.append((shown, name))
    return found


def _reasoning_text(item: dict[str, Any], field: str) -> str:
    """The text of a reasoning item."""
    texts = []
    for place, part in enumerate(listed(item.get("content") or [], f"{field}.content")):
        texts.append(named(part, f"{field}.content.{place}", "text")["text"])
    if not texts and item.get("encrypted_content"):
        raise bad_request("encrypted reasoning cannot be read here; remove the item", f"{field}.encrypted_content")
    return "".join(texts)


def _function(tool: dict[str, Any], declared: DeclaredTool, field: str) -> dict[str, Any]:
    """The function that stands for a tool, as chats declare it."""
    if tool.get("defer_loading"):
        raise bad_request("this gateway does not offer 'defer_loading'; remove it", f"{field}.defer_loading")
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


Event = dict[str, Any]
_STORED_BYTES, _MESSAGE_BYTES = 4096, 512  # memory of a stored response and of a message, without their texts


async def respond(request: HttpRequest[ResponsesBody]) -> Any:
    """Answer a conversation, which may go on from a stored response."""
    body, gateway = request.body, request.gateway
    earlier: StoredResponse | None = None
    if body.previous_response_id is not None:
        earlier = gateway.responses.get(body.previous_response_id)
        if earlier is None:
            raise bad_request(
                f"the previous response {body.previous_response_id!r:.200} is not stored (any more); send its items as "
                "'input'",
                "previous_response_id",
            )
    chat, names, messages = body.chat([] if earlier is None else earlier.messages)
    with client_names(names):
        known_id = request.id("resp_", body.request_id)
        if gateway.responses.get(known_id) is not None:  # clients may send one X-Request-Id for all requests of a task
            known_id = f"{known_id}-{uuid.uuid4().hex}"
        kept_as = request.placement()[0] or (earlier.trajectory if earlier is not None else known_id)
        stores = body.store and gateway.trajectories.keeps
        named = request.placement()[0] is not None or earlier is not None or stores
        asked = await begin(request, chat, known_id, kept_as if named else None, at_most=True)
        found = _Answer(asked, body, names, messages, kept_as if stores else None, earlier)
        if body.stream:
            return NamedEvents(found.events(), found.failed)
        return await found.whole()


async def read(request: HttpRequest[Any]) -> dict[str, Any]:
    """Return a stored response."""
    return _stored(request).shown


async def delete(request: HttpRequest[Any]) -> dict[str, Any]:
    """Forget a stored response. Its tokens stay."""
    found = _stored(request).shown["id"]
    request.gateway.responses.drop(found)
    return {"id": found, "object": "response", "deleted": True}


def _stored(request: HttpRequest[Any]) -> StoredResponse:
    name = request.parts["response_id"]
    found = request.gateway.responses.get(name)
    if found is None:
        raise HttpError(404, f"the response {name!r:.200} is not stored (any more)", "response_id")
    return found


class _Answer:
    """The answer to a conversation. `messages`: without instructions. `kept_as`: its trajectory, if it is stored.

    `earlier`: the response that it goes on from.
    """

    def __init__(
        self,
        asked: Conversation,
        body: ResponsesBody,
        names: Names,
        messages: list[dict[str, Any]],
        kept_as: str | None,
        earlier: StoredResponse | None,
    ) -> None:
        self._asked = asked
        self._body = body
        self._names = names
        self._messages = messages
        self._kept_as = kept_as
        self._before, self._before_bytes = (0, 0) if earlier is None else (len(earlier.messages), earlier.size)
        self._gateway: Gateway = asked.call.gateway
        self._created = now()
        self._items = _Items(body.declared)

    async def whole(self) -> dict[str, Any]:
        """The answer without streaming."""
        (result,) = await self._asked.call.whole()
        (completion,) = result.completions
        views = self._asked.views()
        for _ in self._items.add(views.take(completion)):
            pass
        for _ in self._items.end(_is_whole(completion)):
            pass
        return await self._ended(completion, views, result)

    async def events(self) -> AsyncGenerator[Event, None]:
        """The events of the stream."""
        call, views, items = self._asked.call, self._asked.views(), self._items
        begun = False
        with client_names(self._names):
            async with aclosing(call.chunks()) as chunks:
                async for each in chunks:
                    if not begun:
                        begun = True
                        for name in ("response.created", "response.in_progress"):
                            yield items.numbered({"type": name, "response": self._response("in_progress", [])})
                    last = each.chunk.part
                    for event in items.add(views.take(last)):
                        yield event
        for event in items.end(_is_whole(last)):
            yield event
        response = await self._ended(last, views, call.results[0])
        yield items.numbered({"type": f"response.{response['status']}", "response": response})

    def failed(self, error: HttpError) -> Event:
        """The event of an error. Before the response has begun, clients raise it as they do an error's body."""
        code = (
            "server_error"
            if error.status >= 500
            else "rate_limit_exceeded"
            if error.status == 429
            else "invalid_prompt"
        )
        if not self._items.count:
            event = {"type": "error", "code": code, "message": str(error), "param": error.param}
            return self._items.numbered(event | {"error": error.body()["error"]})
        response = self._response("failed", self._items.done) | {"error": {"code": code, "message": str(error)}}
        return self._items.numbered({"type": "response.failed", "response": response})

    async def _ended(self, last: Completion, views: CompletionViews, result: GenerateResult) -> dict[str, Any]:
        """The response at its end; it is stored."""
        reason = finish_reason(last)
        response = self._response("completed" if _is_whole(last) else "incomplete", self._items.done)
        if not _is_whole(last):
            response["incomplete_details"] = {"reason": "max_output_tokens" if reason == "length" else reason}
        else:
            response["completed_at"] = now()
        response["usage"] = await self._usage(result)
        response |= views.facts(last)
        if self._kept_as is not None:
            messages = [*self._messages, self._items.message()]
            new = messages[self._before :]
            size = self._before_bytes + _STORED_BYTES + _MESSAGE_BYTES * len(new) + 2 * len(json_text([response, new]))
            stored = StoredResponse(response, messages, self._kept_as, size)
            self._gateway.responses.put(response["id"], stored, size)
        return response

    async def _usage(self, result: GenerateResult) -> dict[str, Any]:
        """Tokens; reasoning is counted by tokenizing its text again."""
        drawn, reasoning = len(result.completions[0]), self._items.reasoning
        thought = len(await self._gateway.model.text.encode(reasoning, special=False)) if reasoning else 0
        return {
            "input_tokens": result.prompt_tokens,
            "input_tokens_details": {"cached_tokens": result.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": drawn,
            "output_tokens_details": {"reasoning_tokens": min(thought, drawn)},
            "total_tokens": result.prompt_tokens + drawn,
        }

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body
        return {
            "id": self._asked.call.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": body.model or self._gateway.model.names[0],
            "output": list(output),
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None} | (body.reasoning or {}),
            "service_tier": "default",
            "store": self._kept_as is not None,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}} | (body.text or {}),
            "tool_choice": body.tool_choice,
            "tools": body.tools,
            "top_logprobs": 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _is_whole(last: Completion) -> bool:
    """True if the model has ended its answer itself, or a stop string has."""
    return finish_reason(last) == "stop"


class _Items:
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
            extra: dict[str, Any] = {} if kind == "reasoning" else {"logprobs": []}
            yield self._told(f"response.{self._name}.delta", **self._place, delta=text, **extra)

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        extra: dict[str, Any] = {} if self._open["type"] == "reasoning" else {"logprobs": []}
        yield self._told(f"response.{self._name}.done", **self._place, text=self._text, **extra)
        part = self._part(self._text)
        yield self._told("response.content_part.done", **part)
        item = self._open | {"content": [part["part"]], "status": status}
        yield self._told("response.output_item.done", item=item)
        self.done.append(item)
        self._open = None

    def _call(self, call: ToolCall) -> Iterator[Event]:
        tool = self._declared.get(call.name, DeclaredTool(call.name))
        kind, name, part, prefix = "function_call", "arguments", "function_call_arguments", "fc"
        if tool.freeform:
            kind, name, part, prefix = "custom_tool_call", "input", "custom_tool_call_input", "ctc"
        text = _freeform_input(call) if tool.freeform else call.arguments
        item = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}
        item |= {"call_id": call.id, "name": tool.name, name: ""}
        if tool.namespace is not None:
            item["namespace"] = tool.namespace
        place = {"item_id": item["id"]}
        yield self._told("response.output_item.added", item=item)
        yield self._told(f"response.{part}.delta", **place, delta=text)
        whole = {name: text} if tool.freeform else {"name": tool.name, name: text}
        yield self._told(f"response.{part}.done", **place, **whole)
        item = item | {"status": "completed", name: text}
        yield self._told("response.output_item.done", item=item)
        self.done.append(item)
        self._calls.append(call)

    @property
    def _name(self) -> str:
        assert self._open is not None
        return "reasoning_text" if self._open["type"] == "reasoning" else "output_text"

    @property
    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "content_index": 0}

    def _part(self, text: str) -> dict[str, Any]:
        extra: dict[str, Any] = {} if self._name == "reasoning_text" else {"annotations": [], "logprobs": []}
        return self._place | {"part": {"type": self._name, "text": text, **extra}}

    def _told(self, name: str, /, **fields: Any) -> Event:
        return self.numbered({"type": name, "output_index": len(self.done), **fields})


def _freeform_input(call: ToolCall) -> str:
    """The text that a call gives to a tool; all arguments, if the model has written others than this one."""
    given = call.decoded().get("input")
    return given if isinstance(given, str) else call.arguments


def _item(kind: str) -> dict[str, Any]:
    """A new item of this type."""
    if kind == "reasoning":
        head: dict[str, Any] = {"id": f"rs_{uuid.uuid4().hex}", "type": kind, "summary": []}
    else:
        head = {"id": f"msg_{uuid.uuid4().hex}", "type": kind, "role": "assistant"}
    return head | {"status": "in_progress", "content": []}


ENDPOINTS = (
    Endpoint(POST, "/v1/responses", "OpenAI", respond, ResponsesBody, for_client=True),
    Endpoint(GET, "/v1/responses/{response_id}", "OpenAI", read),
    Endpoint(DELETE, "/v1/responses/{response_id}", "OpenAI", delete),
)
