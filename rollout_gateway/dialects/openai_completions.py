"""`/v1/completions`: text or token ids, one prompt or several, with `n`, `echo`, log-probs and streaming."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Any, ClassVar

from pydantic import Field

from rollout_gateway.answers.answer_facts import choice_facts, now, prompt_facts, prompt_ids, usage
from rollout_gateway.answers.logprobs import LogprobFormat, TextOffsets
from rollout_gateway.answers.text_pieces import text_pieces, worker_decodes
from rollout_gateway.answers.views import CompletionViews
from rollout_gateway.http.http_errors import bad_request
from rollout_gateway.prompts.kv_hints import ForkField
from rollout_gateway.prompts.sampling import OpenAiBody, TokenId
from rollout_gateway.requests.call import Call, StreamedChunk, check_stream, fork_fields
from rollout_gateway.requests.http_request import POST, Endpoint, HttpRequest
from rollout_gateway.workers.workers import TokenRequest
from trainer_bridge.client.results import Completion
from trainer_bridge.wire.request_fields import MAX_TOP_LOGPROBS

_MAX_PROMPTS = 4096


class CompletionBody(OpenAiBody, ForkField):
    """The body of `/v1/completions`."""

    switched_off: ClassVar = OpenAiBody.switched_off | {"logprobs_mode": (None,)}

    prompt: (
        str | list[TokenId] | Annotated[list[str | list[TokenId]], Field(min_length=1, max_length=_MAX_PROMPTS)] | None
    ) = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool = False

    @property
    def prompts(self) -> dict[str, str | list[int]]:
        """All prompts, by the names of their fields. Raises `HttpError`."""
        if self.prompt is None:
            if self.fork is None:
                raise bad_request("the field 'prompt' is missing; add it", "prompt")
            return {"prompt": []}
        if isinstance(self.prompt, str) or all(isinstance(part, int) for part in self.prompt):
            return {"prompt": self.prompt}  # type: ignore[dict-item]
        return {f"prompt.{position}": prompt for position, prompt in enumerate(self.prompt)}  # type: ignore[misc]


async def complete(request: HttpRequest[CompletionBody]) -> Any:
    """Complete texts or token ids."""
    body, gateway, text = request.body, request.gateway, request.gateway.model.text
    session, routing = request.placement()
    fields = await gateway.openai_fields(body) | routing
    scored = body.echo and body.logprobs is not None
    check_stream(body.stream, scored or body.prompt_logprobs is not None)
    fields |= fork_fields(body, body.return_token_ids or body.prompt_logprobs is not None, {"echo": body.echo})
    fields["logprobs"] = body.logprobs or 0
    if scored:
        fields["prompt_top_logprobs"] = max(body.logprobs or 0, body.prompt_logprobs or 0)
    fields["return_text"] = worker_decodes(text, body)
    requests = [
        TokenRequest(
            await text.encode(prompt, body.add_special_tokens and body.fork is None, name)
            if isinstance(prompt, str)
            else prompt,
            fields,
            body.n,
            body.worker_names(name),
        )
        for name, prompt in body.prompts.items()
    ]
    echoed = [await text.decode(each.prompt) if body.echo else "" for each in requests]
    call = Call(gateway, request.id("cmpl-", body.request_id), requests, session)
    answer = _Answer(call, body, echoed)
    return answer.events() if body.stream else await answer.whole()


class _Answer:
    """The answer to a call. `echoed`: the text before each completion, prompt by prompt."""

    def __init__(self, call: Call, body: CompletionBody, echoed: list[str]) -> None:
        gateway = call.gateway
        self._call = call
        self._gateway = gateway
        self._body = body
        self._echoed = echoed
        self._head = {
            "id": call.id,
            "object": "text_completion",
            "created": now(),
            "model": body.model or gateway.model.names[0],
        }
        self._logprobs: LogprobFormat | None = None
        if body.logprobs is not None:
            self._logprobs = gateway.logprob_format(body.logprobs, body.return_tokens_as_token_ids)

    async def whole(self) -> dict[str, Any]:
        """The answer without streaming."""
        results, body = await self._call.whole(), self._body
        choices: list[dict[str, Any]] = []
        for request, result, echoed in zip(self._call.requests, results, self._echoed, strict=True):
            for completion in result.completions:
                choice = self._choice(completion, self._views(), len(choices), 0, TextOffsets(len(echoed)))
                choice["text"] = echoed + choice["text"]
                if body.echo and self._logprobs is not None:
                    before = await asyncio.to_thread(self._logprobs.prompt_columns, request.prompt, result)
                    choice["logprobs"] = {name: before[name] + choice["logprobs"][name] for name in before}
                prompt, text = prompt_ids(request, result), self._gateway.model.text
                choices.append(choice | await prompt_facts(text, prompt, result, body, body.prompt_logprobs))
        return self._head | {"choices": choices, "usage": usage(results)}

    def events(self) -> AsyncGenerator[dict[str, Any], None]:
        requests, body = self._call.requests, self._body
        views = [[self._views() for _ in range(request.n)] for request in requests]
        offsets = [
            [TextOffsets(len(echoed)) for _ in range(request.n)]
            for request, echoed in zip(requests, self._echoed, strict=True)
        ]
        begun: set[tuple[int, int]] = set()

        def event(each: StreamedChunk) -> dict[str, Any]:
            position, chunk, index = each.position, each.chunk, each.chunk.index
            shown = position * requests[position].n + index
            choice = self._choice(chunk.part, views[position][index], shown, chunk.offset, offsets[position][index])
            if (position, index) not in begun:
                begun.add((position, index))
                choice["text"] = self._echoed[position] + choice["text"]
                if body.return_token_ids:
                    choice["prompt_token_ids"] = requests[position].prompt
            return {"choices": [choice]}

        return self._call.events(self._head, body.stream_options, event)

    def _choice(
        self, part: Completion, views: CompletionViews, index: int, start: int, offsets: TextOffsets
    ) -> dict[str, Any]:
        """A choice, or the new tokens of one."""
        return {
            "index": index,
            "text": views.take(part).content,
            "logprobs": None if self._logprobs is None else self._logprobs.columns(part, offsets),
            **choice_facts(part, self._body, self._body, start),
            **views.facts(part),
        }

    def _views(self) -> CompletionViews:
        return CompletionViews(text_pieces(self._gateway.model.text, self._body, self._body.include_stop_str_in_output))


ENDPOINTS = (Endpoint(POST, "/v1/completions", "OpenAI", complete, CompletionBody, for_client=True),)
