"""A client's request on its way through the workers: its prompts, and their results or their streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from rollout.gateway.answers import merged
from rollout.gateway.gateway import Gateway, fault
from rollout.gateway.workers import ChunkStream, TokenRequest
from trainer_bridge.client.results import Chunk, GenerateResult


@dataclass(frozen=True, slots=True)
class StreamedChunk:
    """New tokens of one completion. `place`: of its prompt in the call."""

    place: int
    chunk: Chunk
    stream: ChunkStream


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a client. `id` is what the client knows it by; every dialect shows its answer in its own form."""

    gateway: Gateway
    id: str
    requests: list[TokenRequest]  # one for each prompt
    session: str | None
    #: Of streams that have ended, by the place of their prompt.
    results: dict[int, GenerateResult] = field(default_factory=dict)

    async def whole(self) -> list[GenerateResult]:
        """The results, prompt by prompt. Raises `RolloutError`, and `HttpError` if faults have ended all."""
        results = await self.gateway.workers.generate_all(self.id, self.requests, self.session)
        faults = [fault(completion) for result in results for completion in result.completions]
        if faults[0] is not None and all(faults):
            raise faults[0]
        return results

    async def chunks(self, least_every: int = 1) -> AsyncGenerator[StreamedChunk, None]:
        """The chunks of all prompts as they come, of `least_every` tokens or more; then `results` are there."""
        sources = [self._stream(place, least_every) for place in range(len(self.requests))]
        async with aclosing(merged(sources)) as found:
            async for each in found:
                yield each

    async def _stream(self, place: int, least_every: int) -> AsyncGenerator[StreamedChunk, None]:
        every = max(least_every, self.gateway.settings.stream_every)
        async with self.gateway.workers.stream(self.id, self.requests[place], every, self.session) as stream:
            while chunks := await stream.arrived():
                for chunk in chunks:
                    failed = fault(chunk.part)
                    if failed is not None and sum(request.n for request in self.requests) == 1:
                        raise failed
                    yield StreamedChunk(place, chunk, stream)
            assert stream.result is not None
            self.results[place] = stream.result
