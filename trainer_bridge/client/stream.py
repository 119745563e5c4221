"""What a stream is to both clients, apart from waiting."""

from __future__ import annotations

from typing import Any

from trainer_bridge.client.call import Call
from trainer_bridge.client.core import ClientCore
from trainer_bridge.client.generate_request import StreamKind
from trainer_bridge.client.results import Chunk, Completion, GenerateResult


class StreamView:
    """One streamed request: its id, its endpoint, what it has brought."""

    def __init__(self, core: ClientCore, call: Call, kind: StreamKind) -> None:
        self._core = core
        self._call = call
        self._kind = kind

    @property
    def id(self) -> str:
        """The request's id."""
        return self._call.target or self._call.id

    @property
    def endpoint(self) -> str:
        """Where it runs."""
        return self._core.endpoints[self._call.place]

    @property
    def result(self) -> GenerateResult | None:
        """The whole result, once it has come."""
        return self._call.result

    def partials(self) -> list[Completion]:
        """The completions as far as they have come, each put together from its chunks."""
        assert self._call.assembler is not None
        return self._call.assembler.partials()

    def close(self) -> None:
        """Take no more; the worker stops if it still runs, but not what is detached or was attached to."""
        self._core.abandon(self._call)

    def _item(self, chunk: Chunk) -> Any:
        """What the stream yields for a chunk: the chunk, or the whole completion that it ends."""
        return chunk if self._kind == "tokens" else self._call.joined(chunk.index)
