"""`/v1/chat/completions` and its `/render`: conversations with tools, reasoning and images."""

from collections.abc import AsyncGenerator
from typing import Any

from rollout_gateway.answers.answer_facts import choice_facts, now, prompt_facts, usage
from rollout_gateway.answers.views import CompletionViews
from rollout_gateway.formats.format_chooser import Formats
from rollout_gateway.http.http_errors import bad_request
from rollout_gateway.requests.call import StreamedChunk, check_stream
from rollout_gateway.requests.chat_body import ChatBody
from rollout_gateway.requests.conversation import Conversation, begin, prompt_of
from rollout_gateway.requests.http_request import POST, Endpoint, HttpRequest
from trainer_bridge.client.results import Completion


async def render(request: HttpRequest[ChatBody]) -> dict[str, Any]:
    """Return the prompt of a conversation as token ids; generate nothing."""
    body, model = request.body, request.gateway.model
    prompt = await prompt_of(request, body)
    return {
        "request_id": request.id("render-", body.request_id),
        "model": body.model or model.names[0],
        "token_ids": prompt.chat.token_ids,
        "features": None,
    }


async def complete_chat(request: HttpRequest[ChatBody]) -> Any:
    """Answer a conversation."""
    body = request.body
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise bad_request("'max_tokens' and 'max_completion_tokens' differ; send only one", "max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise bad_request("'top_logprobs' needs 'logprobs': true", "top_logprobs")
    check_stream(body.stream, body.prompt_logprobs is not None)
    answer = _Answer(await begin(request, body, request.id("chatcmpl-", body.request_id)))
    return answer.events() if body.stream else await answer.whole()


class _Answer:
    """The answer to a conversation."""

    def __init__(self, asked: Conversation) -> None:
        call, body, gateway = asked.call, asked.body, asked.call.gateway
        (self._request,) = call.requests
        self._call = call
        self._gateway = gateway
        self._body = body
        self._views = asked.views
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
        body, text = self._body, self._gateway.model.text
        return answer | await prompt_facts(text, self._request.prompt, result, body, body.prompt_logprobs)

    def events(self) -> AsyncGenerator[dict[str, Any], None]:
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

    def _delta(self, views: CompletionViews, part: Completion) -> dict[str, Any]:
        """The part of the message that new tokens add."""
        earlier = views.calls
        piece = views.take(part)
        delta: dict[str, Any] = {}
        if piece.content or not self._cut or (part.finish_reason is not None and views.empty):
            delta["content"] = piece.content
        if piece.reasoning:
            delta["reasoning_content"] = delta["reasoning"] = piece.reasoning
        if piece.calls:
            delta["tool_calls"] = [{"index": earlier + i, **call.shown()} for i, call in enumerate(piece.calls)]
        return delta

    def _facts(self, part: Completion, views: CompletionViews, start: int) -> dict[str, Any]:
        """The fields of a choice, or of its new tokens, apart from its text."""
        facts: dict[str, Any] = {
            "logprobs": self._logprobs.content(part) if self._body.logprobs else None,
            **choice_facts(part, self._body, self._body, start),
            **views.facts(part),
        }
        if facts["finish_reason"] == "stop" and views.calls:
            facts["finish_reason"] = "tool_calls"
        return facts


ENDPOINTS = (
    Endpoint(POST, "/v1/chat/completions", "OpenAI", complete_chat, ChatBody, for_client=True),
    Endpoint(POST, "/v1/chat/completions/render", "vLLM", render, ChatBody),
)
