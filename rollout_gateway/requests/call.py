"""One request of a client on its way through the workers: prompts, and results or streams."""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, field
from typing import Any

from rollout_gateway.answers.answer_facts import fault, usage
from rollout_gateway.http.event_stream import merged
from rollout_gateway.http.http_errors import bad_request
from rollout_gateway.prompts.kv_hints import ForkField
from rollout_gateway.prompts.sampling import RequestFields, StreamOptions
from rollout_gateway.requests.http_request import Gateway
from rollout_gateway.workers.workers import TokenRequest
from trainer_bridge.client.asynchronous import AsyncStream
from trainer_bridge.client.results import Chunk, GenerateResult


def check_stream(stream: bool, whole_only: bool) -> None:
    """Refuse a stream of what only a whole answer has. Raises `HttpError`."""
    if stream and whole_only:
        raise bad_request("a stream can return neither experts nor log-probs of the prompt; remove 'stream'", "stream")


def fork_fields(body: ForkField, returns_ids: bool, of_prompt: Mapping[str, bool]) -> dict[str, Any]:
    """The arguments of `generate` for a request that continues other tokens; empty for another request.

    `returns_ids`: the answer shows the ids of its prompt. `of_prompt`: fields that need the prompt's text or positions,
    which are not known before its end, and whether the request has them. Raises `HttpError`.
    """
    if body.fork is None:
        return {}
    if isinstance(body, RequestFields) and body.stream:
        usage_so_far = body.stream_options.continuous_usage_stats
        of_prompt = {
            **of_prompt,
            "return_token_ids": body.return_token_ids,
            "stream_options.continuous_usage_stats": usage_so_far,
        }
    for name, asked in of_prompt.items():
        if asked:
            raise bad_request(
                "this field needs the prompt's tokens, which a fork knows only at its end; remove it or 'fork'", name
            )
    return {"return_prompt_ids": returns_ids}


@dataclass(frozen=True, slots=True)
class StreamedChunk:
    """New tokens of one completion. `position`: the position of its prompt in the call."""

    position: int
    chunk: Chunk
    stream: AsyncStream[Chunk]


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a client, with the `id` that the client knows. Each dialect shows the answer in its own form."""

    gateway: Gateway
    id: str
    requests: list[TokenRequest]  # one for each prompt
    session: str | None
    #: The results of the streams that have ended, by the position of their prompt.
    results: dict[int, GenerateResult] = field(default_factory=dict)

    async def whole(self) -> list[GenerateResult]:
        """The results, prompt by prompt. Raises `HttpError`, also if faults ended every completion."""
        with self._noted():
            results = await self.gateway.workers.generate_all(self.id, self.requests, self.session)
        faults = [fault(completion) for result in results for completion in result.completions]
        if faults[0] is not None and all(faults):
            raise faults[0]
        return results

    async def chunks(self, least_every: int = 1) -> AsyncGenerator[StreamedChunk, None]:
        """The chunks of all prompts as they come, of `least_every` tokens or more. At the end `results` is complete."""
        sources = [self._stream(position, least_every) for position in range(len(self.requests))]
        with self._noted():
            async with aclosing(merged(sources)) as found:
                async for each in found:
                    yield each

    async def events(
        self, head: dict[str, Any], options: StreamOptions, event: Callable[[StreamedChunk], dict[str, Any]]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a stream as OpenAI has them: `event` makes an event of a chunk; the last event has the usage.

        Every event has the fields of `head`.
        """
        async with aclosing(self.chunks()) as found:
            async for each in found:
                yield head | event(each) | options.usage_so_far(len(self.requests[each.position].prompt), each.chunk)
        if options.include_usage:
            yield head | {"choices": [], "usage": usage(list(self.results.values()))}

    def _noted(self) -> AbstractContextManager[None]:
        """Other requests may continue this one."""
        return self.gateway.workers.request_ids.note(self.id, [(each.request_id, each.n) for each in self.requests])

    async def _stream(self, position: int, least_every: int) -> AsyncGenerator[StreamedChunk, None]:
        every = max(least_every, self.gateway.settings.stream_every)
        request = self.requests[position]
        async with self.gateway.workers.stream(self.id, request, every, self.session) as stream:
            while chunks := await stream.arrived():
                for chunk in chunks:
                    failed = fault(chunk.part)
                    if failed is not None and sum(request.n for request in self.requests) == 1:
                        raise failed
                    yield StreamedChunk(position, chunk, stream)
            assert stream.result is not None
            self.results[position] = stream.result
