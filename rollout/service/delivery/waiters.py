"""Who waits for a request, and how far the stream of each has come.

Every waiter has a place of its own in every completion. So a stream that is taken up again on another connection goes
on behind what the first one brought, and two streams of one request do not disturb each other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import msgpack

from rollout.service.connections import Connections, ReplyAddress
from rollout.service.delivery.replies import chunk_reply
from rollout.service.errors import bad_request
from trainer_bridge.wire.codec import encode

logger = logging.getLogger(__name__)

StreamMode = Literal[False, "tokens", "completions"]


class Position(NamedTuple):
    """A place in a completion: so many tokens, and so many characters of its text, lie before it."""

    tokens: int
    chars: int


class Streamed(Protocol):
    """A completion that chunks are taken from."""

    index: int
    start: Position  # where its first chunk begins: behind the tokens of `continue_from`

    @property
    def end(self) -> Position:
        """Where the next chunk ends."""

    @property
    def ended(self) -> bool:
        """True if nothing is added any more."""

    def part(self, start: Position) -> dict[str, Any]:
        """The fields of a chunk that begins at `start`."""


@dataclass(slots=True, eq=False)
class Waiter:
    """One message that is answered with a request's result. `stream` is false when that is all it wants."""

    peer: ReplyAddress
    stream: StreamMode = False
    every: int = 1  # tokens of a chunk, at the least
    received: dict[int, Position | None] = field(default_factory=dict)  # by index; None: the whole completion

    def due(self, completion: Streamed) -> bool:
        """True if a chunk should be sent."""
        start = self.received.get(completion.index, completion.start)
        if not self.stream or start is None:
            return False
        return completion.ended or (self.stream == "tokens" and completion.end.tokens - start.tokens >= self.every)

    def take(self, completion: Streamed) -> dict[str, Any]:
        """The fields of the next chunk."""
        start = self.received.get(completion.index, completion.start)
        assert start is not None, "a completion ends once"
        self.received[completion.index] = None if completion.ended else completion.end
        return completion.part(start)


def received_positions(
    offsets: Mapping[int, int | None], text_chars: Mapping[int, int], completions: Sequence[Streamed]
) -> dict[int, Position | None]:
    """Where a stream goes on that was taken up again; None for what its reader has as a whole.

    Raises `ServiceError` for a place that the completion does not have, or has not reached.
    """
    received: dict[int, Position | None] = {}
    for index, tokens in offsets.items():
        if index >= len(completions):
            raise bad_request(f"the request has {len(completions)} completions", f"offsets.{index}")
        if tokens is None:
            received[index] = None
            continue
        start, end = completions[index].start, completions[index].end
        received[index] = position = Position(tokens, text_chars.get(index, start.chars))
        for name, have, first, last in zip(("offsets", "text_chars"), position, start, end, strict=True):
            if not first <= have <= last:
                raise bad_request(
                    f"a stream of this completion can go on from {first} to {last}, not from {have}", f"{name}.{index}"
                )
    return received


class Delivery:
    """Sends waiters what they are due."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def chunks(self, waiters: Iterable[Waiter], completions: Iterable[Streamed]) -> None:
        """Send the chunks that are due. A stream whose connection has no room left ends."""
        waiters = [waiter for waiter in waiters if waiter.stream]
        for completion in completions if waiters else ():
            for waiter in waiters:
                if waiter.due(completion):
                    frames = encode(chunk_reply(waiter.peer.id, waiter.take(completion)))
                    if not self._connections.send(waiter.peer, frames, stream=waiter):
                        waiter.stream = False
                        self._connections.drop_stream(waiter.peer.connection, waiter)
                        logger.warning("a stream is dropped: its client does not read", extra=waiter.peer.about)

    def last(self, waiters: Iterable[Waiter], frames: list[bytes], request_id: str | None) -> None:
        """Send the reply that ends a request, each waiter under the id that it asked with.

        `request_id` is the one that the frames have, None if that is not known.
        """
        for waiter in waiters:
            named = frames if waiter.peer.id == request_id else with_id(frames, waiter.peer.id)
            if not self._connections.send(waiter.peer, named):
                logger.error("a reply is not delivered: its client does not read", extra=waiter.peer.about)


def with_id(frames: list[bytes], request_id: str) -> list[bytes]:
    """The same reply under another id."""
    header = msgpack.unpackb(frames[0])
    return [msgpack.packb(header | {"id": request_id}, use_bin_type=True), *frames[1:]]
