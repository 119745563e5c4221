"""A client's request on its way through the workers: its prompts, and their results or their streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

from rollout.gateway.answers import merged
from rollout.gateway.errors import Names, from_worker
from rollout.gateway.gateway import Gateway, fault
from rollout.gateway.workers import ChunkStream, TokenRequest
from trainer_bridge.client.results import Chunk, GenerateResult
from trainer_bridge.wire.errors import RolloutError


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
    #: The client's fields by the workers' names for them, for errors.
    names: Names
    #: Of streams that have ended, by the place of their prompt.
    results: dict[int, GenerateResult] = field(default_factory=dict)

    async def whole(self) -> list[GenerateResult]:
        """The results, prompt by prompt. Raises `HttpError`, also if faults have ended all."""
        with self._named_errors():
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
        request = self.requests[place]
        with self._named_errors():
            async with self.gateway.workers.stream(self.id, request, every, self.session) as stream:
                while chunks := await stream.arrived():
                    for chunk in chunks:
                        failed = fault(chunk.part)
                        if failed is not None and sum(request.n for request in self.requests) == 1:
                            raise failed
                        yield StreamedChunk(place, chunk, stream)
                assert stream.result is not None
                self.results[place] = stream.result

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Workers' errors as `HttpError` with the client's name of the field."""
        try:
            yield
        except RolloutError as error:
            raise from_worker(error, self.names) from error
