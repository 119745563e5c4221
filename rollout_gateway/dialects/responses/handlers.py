"""The handlers of `/v1/responses`: an answer, which may go on from a stored answer, and stored answers."""

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from rollout_gateway.answers.answer_facts import finish_reason, now
from rollout_gateway.answers.views import CompletionViews
from rollout_gateway.dialects.responses.input_items import ResponsesBody
from rollout_gateway.dialects.responses.output_items import Event, OutputItems
from rollout_gateway.history.trajectories import StoredResponse
from rollout_gateway.http.event_stream import NamedEvents
from rollout_gateway.http.http_errors import HttpError, Names, bad_request
from rollout_gateway.http.json_text import json_text
from rollout_gateway.requests.chat_body import client_names
from rollout_gateway.requests.conversation import Conversation, begin
from rollout_gateway.requests.http_request import DELETE, GET, POST, Endpoint, Gateway, HttpRequest
from trainer_bridge.client.results import Completion, GenerateResult

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
        self._items = OutputItems(body.declared)

    async def whole(self) -> dict[str, Any]:
        """The answer without streaming."""
        (result,) = await self._asked.call.whole()
        (completion,) = result.completions
        views = self._asked.views()
        for _ in (*self._items.add(views.take(completion)), *self._items.end(_is_whole(completion))):
            pass
        return await self._ended(completion, views, result)

    async def events(self) -> AsyncGenerator[Event, None]:
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
        code = "rate_limit_exceeded" if error.status == 429 else "invalid_prompt"
        if error.status >= 500:
            code = "server_error"
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


ENDPOINTS = (
    Endpoint(POST, "/v1/responses", "OpenAI", respond, ResponsesBody, for_client=True),
    Endpoint(GET, "/v1/responses/{response_id}", "OpenAI", read),
    Endpoint(DELETE, "/v1/responses/{response_id}", "OpenAI", delete),
)
