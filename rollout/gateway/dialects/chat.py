"""`/v1/chat/completions` and its `/render`: conversations with tools, reasoning and images."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from rollout.gateway.answers.text_pieces import from_worker, text_pieces
from rollout.gateway.answers.views import Demand, Views
from rollout.gateway.dialects.answer_facts import end_facts, now, prompt_facts, usage, version_runs
from rollout.gateway.dialects.call import Call, StreamedChunk
from rollout.gateway.dialects.handling import Gateway, HttpRequest
from rollout.gateway.formats.choice import Cut, Formats
from rollout.gateway.formats.segments import Segments
from rollout.gateway.http.http_errors import bad_request
from rollout.gateway.prompts.chat_messages import Rendering, render_chat
from rollout.gateway.prompts.sampling import MAX_TOKEN_ID, MAX_TOP, OpenAiBody
from rollout.gateway.prompts.tool_choice import Tool, ToolChoice, call_constraint, demands_call, named_tool
from rollout.gateway.workers.workers import TokenRequest
from trainer_bridge.client.results import Completion


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
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool = True
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False

    @property
    def calls_wanted(self) -> bool:
        """True if the gateway looks for calls in the answer."""
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

    @property
    def demand(self) -> Demand | None:
        """The calls that a constraint demands; None without such a constraint."""
        return Demand(named_tool(self.tool_choice)) if demands_call(self.tool_choice) else None


async def render(request: HttpRequest[ChatBody]) -> dict[str, Any]:
    """Return the prompt of a conversation as token ids; generate nothing."""
    body, model = request.body, request.gateway.model
    chat = await render_chat(model, body.messages, body.rendering)
    return {
        "request_id": request.id("render-", body.request_id),
        "model": body.model or model.names[0],
        "token_ids": chat.token_ids,
        "features": None,
    }


async def complete_chat(request: HttpRequest[ChatBody]) -> Any:
    """Answer a conversation."""
    body, gateway, model = request.body, request.gateway, request.gateway.model
    session, place = request.placement()
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise bad_request("'max_tokens' and 'max_completion_tokens' differ; send one of them", "max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise bad_request("'top_logprobs' needs 'logprobs': true", "top_logprobs")
    if body.stream and body.prompt_logprobs is not None:
        raise bad_request("a stream has no log-probs of the prompt; remove 'stream'", "stream")
    fields = await gateway.openai_fields(body) | place
    if body.max_completion_tokens is not None:
        fields["max_tokens"] = body.max_completion_tokens
    demanded = call_constraint(body.tool_choice, body.tools or (), body.parallel_tool_calls)
    if body.calls_wanted and demanded is None and model.formats.tools is None:
        raise bad_request(
            "this gateway knows no format of tool calls for this model: start it with --tool-parser, or set "
            "'tool_choice' to 'none' or 'required'",
            "tools",
        )
    if demanded is not None:
        if fields["constraint"] is not None:
            raise bad_request("a 'tool_choice' that demands a call is a constraint; send no other", "tool_choice")
        fields["constraint"] = demanded
    chat = await render_chat(model, body.messages, body.rendering)
    cut = model.formats.cuts[body.calls_wanted and demanded is None]
    if fields["constraint"] is not None:
        after = _answer_after(gateway, cut, chat.begun)
        if after is None:  # the constraint holds from the first token on: there is no reasoning
            cut = cut.without_reasoning()
        else:
            fields["constraint"] = fields["constraint"] | {"after": after}
    fields |= {"return_text": from_worker(model.text, body, cut.shown), "logprobs": body.top_logprobs}
    prompt = TokenRequest(chat.token_ids, fields, body.n, body.worker_names("messages"), chat.media)
    call = Call(gateway, request.id("chatcmpl-", body.request_id), [prompt], session)

    def views() -> Views:
        pieces = text_pieces(model.text, body, body.include_stop_str_in_output, cut.shown)
        most_calls = None if body.parallel_tool_calls else 1
        return Views(pieces, cut.regions, body.tools or (), chat.begun, body.demand, most_calls)

    answer = _Answer(call, body, views)
    return answer.events() if body.stream else await answer.whole()


def _answer_after(gateway: Gateway, cut: Cut, begun: str) -> str | None:
    """The mark after which a constraint begins; None if it holds from the first token on."""
    if gateway.settings.constrain_reasoning or not Segments(cut.regions, begun=begun).may_reason:
        return None
    return gateway.model.formats.answer_after


class _Answer:
    """The answer to a call. `views` makes the views of one completion."""

    def __init__(self, call: Call, body: ChatBody, views: Callable[[], Views]) -> None:
        gateway = call.gateway
        (self._request,) = call.requests
        self._call = call
        self._gateway = gateway
        self._body = body
        self._views = views
        self._head = {"id": call.id, "created": now(), "model": body.model or gateway.model.names[0]}
        self._logprobs = gateway.logprob_format(body.top_logprobs, body.return_tokens_as_token_ids)
        self._cut = gateway.model.formats != Formats()  # text may wait, and then its event has none

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
            if self._gateway.model.formats.reasoning is not None:
                shown["reasoning_content"] = shown["reasoning"] = piece.reasoning or None
            if piece.calls:
                shown["tool_calls"] = [call.shown() for call in piece.calls]
            choices.append({"index": completion.index, "message": shown, **self._facts(completion, views, 0)})
        answer = self._head | {"object": "chat.completion", "choices": choices, "usage": usage([result])}
        body, prompt = self._body, self._request.prompt
        return answer | await prompt_facts(
            self._gateway, prompt, result, body.prompt_logprobs, body.return_weight_versions, body.return_token_ids
        )

    def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The events of the stream."""
        views = [self._views() for _ in range(self._request.n)]
        begun: set[int] = set()

        def event(each: StreamedChunk) -> dict[str, Any]:
            chunk, index = each.chunk, each.chunk.index
            delta = self._delta(views[index], chunk.part)
            found: dict[str, Any] = {"choices": [{"index": index, "delta": delta}]}
            if index not in begun:
                begun.add(index)
                delta["role"] = "assistant"
                if self._body.return_token_ids and index == 0:
                    found["prompt_token_ids"] = self._request.prompt
            found["choices"][0] |= self._facts(chunk.part, views[index], chunk.offset)
            return found

        head = self._head | {"object": "chat.completion.chunk"}
        return self._call.events(head, self._body.stream_options, event)

    def _delta(self, views: Views, part: Completion) -> dict[str, Any]:
        """The part of the message that new tokens add."""
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
        """The fields of a choice, or of its new tokens, apart from its text."""
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
