"""`POST /v1/chat/completions`, `.../render`, `/tokenize` and `/detokenize`: conversations, tools and reasoning."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from rollout.gateway.answers import EventStream, json_answer, unless_gone
from rollout.gateway.bodies import Body
from rollout.gateway.call import Call
from rollout.gateway.errors import bad_request
from rollout.gateway.formats.choice import Cut, Formats
from rollout.gateway.formats.segments import Segments
from rollout.gateway.gateway import Gateway, end_facts, new_id, now, scores_version, usage, version_runs
from rollout.gateway.logprobs import prompt_entries
from rollout.gateway.messages import Rendering, render_chat
from rollout.gateway.sampling import MAX_TOKEN_ID, MAX_TOP, OpenAiBody, TokenId
from rollout.gateway.views import Demand, Views
from rollout.gateway.workers import TokenRequest
from trainer_bridge.client.results import Completion


def _from_digit(value: Any) -> Any:
    """False and true for 0 and 1, which vLLM takes, too: Agent Lightning sends 1."""
    return value == 1 if type(value) is int and value in (0, 1) else value


def _tool(value: dict[str, Any]) -> dict[str, Any]:
    """A tool as OpenAI declares it. Raises ValueError for another."""
    function = value.get("function")
    if value.get("type", "function") != "function" or not isinstance(function, dict):
        raise ValueError('a tool is {"type": "function", "function": {"name": ..., "parameters": ...}}')
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError("the function of a tool has a 'name', a text")
    if not isinstance(function.get("parameters"), dict | None):
        raise ValueError("the 'parameters' of a function are a JSON schema, an object")
    return value


Tool = Annotated[dict[str, Any], AfterValidator(_tool)]


class ChatBody(OpenAiBody):
    """The body of `/v1/chat/completions`."""

    ignored: ClassVar = OpenAiBody.ignored | dict.fromkeys(
        ("separate_reasoning", "stream_reasoning"), "reasoning is always apart from the answer; routers add the field"
    )
    switched_off: ClassVar = OpenAiBody.switched_off | {
        "audio": (None,),
        "include_reasoning": (None, True),
        "mm_processor_kwargs": (None, {}),
        "modalities": (None, ["text"]),
        "prediction": (None,),
        "web_search_options": (None,),
        "reasoning_effort": (None,),
        "verbosity": (None,),
        "functions": (None,),
        "function_call": (None,),
        "echo": (None, False),
    }

    messages: list[Any]
    logprobs: Annotated[bool, BeforeValidator(_from_digit)] = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP)
    max_completion_tokens: int | None = Field(None, ge=0, le=MAX_TOKEN_ID)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False

    @property
    def calls_wanted(self) -> bool:
        """True if calls are looked for in the text of the answer."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def rendering(self) -> Rendering:
        """How the messages are rendered."""
        options = dict(self.chat_template_kwargs)
        if self.documents is not None:
            options["documents"] = self.documents
        if self.continue_final_message:
            options["continue_final_message"] = True
        if self.add_generation_prompt is not None:
            options["add_generation_prompt"] = self.add_generation_prompt
        return Rendering(self.tools or None, options, self.chat_template, self.add_special_tokens)

    def worker_names(self, prompt: str, place: str = "") -> dict[str, str]:
        """As for `SamplingBody`."""
        names = super().worker_names(prompt, place)
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names if self.demand is None else names | {"constraint": "tools", "constraint.json_schema": "tools"}

    def tool_constraint(self) -> dict[str, Any] | None:
        """The constraint of a `tool_choice` that demands a call: the arguments of the function, or a list of calls."""
        if self.tool_choice in (None, "none", "auto"):
            return None
        functions = self._functions()
        if self.tool_choice == "required":
            # References inside of a function's schema begin at its own root.
            schemas = {
                f"tool{place}": _moved(schema, f"#/$defs/tool{place}")
                for place, schema in enumerate(functions.values())
            }
            kinds = [
                {
                    "type": "object",
                    "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{place}"}},
                    "required": ["name", "parameters"],
                }
                for name, place in zip(functions, schemas, strict=True)
            ]
            most = {} if self.parallel_tool_calls else {"maxItems": 1}
            calls = {"type": "array", "minItems": 1, "items": {"anyOf": kinds}, **most, "$defs": schemas}
            return {"json_schema": json.dumps(calls)}
        name = self.named_tool()
        if name not in functions:
            raise bad_request("'tool_choice' names a function of 'tools'", "tool_choice")
        return {"json_schema": json.dumps(functions[name])}

    @property
    def demand(self) -> Demand | None:
        """The calls that the completion is constrained to be; None if it is not."""
        return None if self.tool_choice in (None, "none", "auto") else Demand(self.named_tool())

    def named_tool(self) -> str | None:
        """The function that must be called, if `tool_choice` names one."""
        if not isinstance(self.tool_choice, dict):
            return None
        function = self.tool_choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise bad_request('send {"type": "function", "function": {"name": ...}}', "tool_choice")
        return name

    def _functions(self) -> dict[str, dict[str, Any]]:
        if not self.tools:
            raise bad_request("'tool_choice' needs 'tools'; add them or remove it", "tool_choice")
        functions = [tool["function"] for tool in self.tools]
        return {each["name"]: each.get("parameters") or {"type": "object", "properties": {}} for each in functions}


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references to itself go to a new root."""
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


class Chat:
    """Answers chat requests."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, request: Request) -> Response:
        """Answer one request."""
        body = ChatBody.take(await self._gateway.body(request))
        return await unless_gone(request, self._answer(request, body))

    async def render(self, request: Request) -> Response:
        """`/v1/chat/completions/render`: the prompt of a conversation as token ids, without generating."""
        body = ChatBody.take(await self._gateway.body(request))
        chat = await render_chat(self._gateway, body.messages, body.rendering)
        return json_answer(
            {
                "request_id": new_id("render-", request, body.request_id),
                "model": body.model or self._gateway.names[0],
                "token_ids": chat.token_ids,
                "features": None,
            }
        )

    async def _answer(self, request: Request, body: ChatBody) -> Response:
        gateway = self._gateway
        session, place = gateway.placement(request)
        if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
            raise bad_request("'max_tokens' and 'max_completion_tokens' differ; send one of them", "max_tokens")
        if body.top_logprobs and not body.logprobs:
            raise bad_request("'top_logprobs' needs 'logprobs': true", "top_logprobs")
        if body.stream and body.prompt_logprobs is not None:
            raise bad_request("a stream has no log-probs of the prompt; remove 'stream'", "stream")
        fields = await gateway.openai_fields(body) | place
        if body.max_completion_tokens is not None:
            fields["max_tokens"] = body.max_completion_tokens
        demanded = body.tool_constraint()
        if body.calls_wanted and demanded is None and gateway.formats.tools is None:
            raise bad_request(
                "this gateway knows no format of tool calls for this model: start it with --tool-parser, or set "
                "'tool_choice' to 'none' or 'required'",
                "tools",
            )
        if demanded is not None:
            if fields["constraint"] is not None:
                raise bad_request("a 'tool_choice' that demands a call is a constraint; send no other", "tool_choice")
            fields["constraint"] = demanded
        chat = await render_chat(gateway, body.messages, body.rendering)
        cut = gateway.formats.cuts[body.calls_wanted and demanded is None]
        if fields["constraint"] is not None:
            after = self._answer_after(cut, chat.begun)
            if after is None:  # it holds from the first token on: there are no thoughts
                cut = cut.without_reasoning()
            else:
                fields["constraint"] = fields["constraint"] | {"after": after}
        fields |= {"return_text": gateway.text.from_worker(body, cut.shown), "logprobs": body.top_logprobs}
        prompt = TokenRequest(chat.token_ids, fields, body.n, media=chat.media)
        call = Call(
            gateway, new_id("chatcmpl-", request, body.request_id), [prompt], session, body.worker_names("messages")
        )

        def views() -> Views:
            pieces = gateway.text.pieces(body, body.include_stop_str_in_output, cut.shown)
            most_calls = None if body.parallel_tool_calls else 1
            return Views(pieces, cut.regions, body.tools or (), chat.begun, body.demand, most_calls)

        answer = _Answer(call, body, views)
        if body.stream:
            return EventStream(answer.events(), gateway.settings.send_s)
        return json_answer(await answer.whole())

    def _answer_after(self, cut: Cut, begun: str) -> str | None:
        """The mark after which a constraint begins; None if it holds from the first token on."""
        if self._gateway.settings.constrain_reasoning or not Segments(cut.regions, begun=begun).may_reason:
            return None
        return self._gateway.formats.answer_after


class _Answer:
    """How the answer to a call looks. `views` makes those of a completion."""

    def __init__(self, call: Call, body: ChatBody, views: Callable[[], Views]) -> None:
        gateway = call.gateway
        (self._request,) = call.requests
        self._call = call
        self._gateway = gateway
        self._body = body
        self._views = views
        self._head = {"id": call.id, "created": now(), "model": body.model or gateway.names[0]}
        self._logprobs = gateway.logprob_format(body.top_logprobs, body.return_tokens_as_token_ids)
        self._cut = gateway.formats != Formats()  # events may have no text, as it waits

    async def whole(self) -> dict[str, Any]:
        """The answer without streaming."""
        (result,) = await self._call.whole()
        choices = []
        for completion in result.completions:
            views = self._views()
            piece = views.take(completion)
            shown: dict[str, Any] = {
                "role": "assistant",
                "content": piece.content if piece.content or views.empty else None,
            }
            if self._gateway.formats.reasoning is not None:
                shown["reasoning_content"] = shown["reasoning"] = piece.reasoning or None
            if piece.calls:
                shown["tool_calls"] = [call.shown() for call in piece.calls]
            choices.append({"index": completion.index, "message": shown, **self._facts(completion, views, 0)})
        answer = self._head | {"object": "chat.completion", "choices": choices, "usage": usage([result])}
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = self._request.prompt
        if self._body.prompt_logprobs is not None:
            most, token_bytes = self._body.prompt_logprobs, self._gateway.text.token_bytes
            answer["prompt_logprobs"] = await prompt_entries(self._request.prompt, result, most, token_bytes)
        if self._body.return_weight_versions:
            answer |= scores_version(result)
        return answer

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The events of the stream."""
        head = self._head | {"object": "chat.completion.chunk"}
        n = self._request.n
        views = [self._views() for _ in range(n)]
        begun = [False] * n
        async with aclosing(self._call.chunks()) as found:
            async for each in found:
                chunk = each.chunk
                delta = self._delta(views[chunk.index], chunk.part)
                event: dict[str, Any] = head | {"choices": [{"index": chunk.index, "delta": delta}]}
                if not begun[chunk.index]:
                    begun[chunk.index] = True
                    delta["role"] = "assistant"
                    if self._body.return_token_ids and chunk.index == 0:
                        event["prompt_token_ids"] = self._request.prompt
                event["choices"][0] |= self._facts(chunk.part, views[chunk.index], chunk.offset)
                yield event | self._body.stream_options.usage_so_far(len(self._request.prompt), chunk)
        if self._body.stream_options.include_usage:
            yield head | {"choices": [], "usage": usage(list(self._call.results.values()))}

    def _delta(self, views: Views, part: Completion) -> dict[str, Any]:
        """The message that new tokens add."""
        earlier = views.calls
        piece = views.take(part)
        delta: dict[str, Any] = {}
        if piece.content or not self._cut or (part.finish_reason is not None and views.empty):
            delta["content"] = piece.content
        if piece.reasoning:
            delta["reasoning_content"] = delta["reasoning"] = piece.reasoning
        if piece.calls:
            delta["tool_calls"] = [{"index": earlier + place, **call.shown()} for place, call in enumerate(piece.calls)]
        return delta

    def _facts(self, part: Completion, views: Views, start: int) -> dict[str, Any]:
        """What a choice, or the new tokens of one, has beside its text."""
        facts: dict[str, Any] = {
            "logprobs": self._logprobs.content(part) if self._body.logprobs else None,
            **end_facts(part, self._body),
            **views.facts(part),
        }
        if facts["finish_reason"] == "stop" and views.calls:
            facts["finish_reason"] = "tool_calls"
        if self._body.return_token_ids:
            facts["token_ids"] = part.token_ids.tolist()
        if self._body.return_weight_versions:
            facts["weight_versions"] = version_runs(part, start)
        return facts


class TokenizeBody(Body):
    """The body of `/tokenize`: a text, or a conversation."""

    switched_off: ClassVar = {"return_token_strs": (None, False)}

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    tools: list[Tool] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class DetokenizeBody(Body):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: list[TokenId]


async def tokenize(gateway: Gateway, request: Request) -> Response:
    """`/tokenize`: token ids of a text or a conversation."""
    body = TokenizeBody.take(await gateway.body(request))
    await gateway.adapter_of(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("send exactly one of 'prompt' and 'messages'", "prompt")
    if body.prompt is not None:
        ids = await gateway.text.encode(body.prompt, body.add_special_tokens is not False)
    else:
        options = dict(body.chat_template_kwargs) | {"add_generation_prompt": body.add_generation_prompt}
        if body.continue_final_message:
            options["continue_final_message"] = True
        how = Rendering(body.tools or None, options, body.chat_template, bool(body.add_special_tokens))
        ids = (await render_chat(gateway, body.messages or [], how)).token_ids
    return json_answer({"count": len(ids), "max_model_len": gateway.context_tokens, "tokens": ids, "token_strs": None})


async def detokenize(gateway: Gateway, request: Request) -> Response:
    """`/detokenize`: the text of token ids, special tokens included."""
    body = DetokenizeBody.take(await gateway.body(request))
    await gateway.adapter_of(body.model)
    return json_answer({"prompt": await gateway.text.decode(body.tokens)})
