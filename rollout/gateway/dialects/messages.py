"""`/v1/messages` and its `/count_tokens`: conversations in Anthropic's form, on the way of every chat."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from hashlib import blake2b
from typing import Any

from rollout.gateway.answers.views import CompletionViews
from rollout.gateway.dialects.answer_facts import end_facts
from rollout.gateway.dialects.chat_builder import client_names
from rollout.gateway.dialects.conversation import Conversation, begin, prompt_of
from rollout.gateway.dialects.handling import HttpRequest
from rollout.gateway.dialects.messages_body import CountBody, MessagesBody
from rollout.gateway.formats.calls import ToolCall
from rollout.gateway.formats.segments import AnswerPiece
from rollout.gateway.http.event_stream import NamedEvents
from rollout.gateway.http.http_errors import HttpError, Names
from trainer_bridge.client.results import Completion, GenerateResult

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
        """The events of the stream."""
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
    """The events of content blocks, one after the other."""

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
