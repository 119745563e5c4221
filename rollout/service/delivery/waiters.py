"""Waiters: the messages that are answered with a request's result, and the position of each one's stream.

Every waiter has its own position in every completion. So a stream that is resumed on another connection continues after
the tokens that arrived, and two streams of one request do not disturb each other.
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
    """A position in a completion: the number of tokens, and of characters of text, before it."""

    tokens: int
    chars: int


class Streamed(Protocol):
    """A completion that can be streamed."""

    index: int
    start: Position  # of its first chunk: after the tokens of `continue_from`

    @property
    def end(self) -> Position:
        """End of the next chunk."""

    @property
    def ended(self) -> bool:
        """True if no token follows."""

    def part(self, start: Position) -> dict[str, Any]:
        """The fields of a chunk that begins at `start`."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A message that is answered with a request's result, and with chunks if `stream` is set."""

    peer: ReplyAddress
    stream: StreamMode = False
    every: int = 1  # fewest tokens of a chunk
    received: dict[int, Position | None] = field(
        default_factory=dict
    )  # what the client has, by index; None: the whole completion

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
    """Positions at which a resumed stream continues; None for a completion that the client has as a whole.

    Raises `ServiceError` for a position that the completion has not reached.
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
    """Sends chunks and results to waiters."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def chunks(self, waiters: Iterable[Waiter], completions: Iterable[Streamed]) -> None:
        """Send all due chunks. A stream ends if its connection has no room."""
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
        """Send the final reply of a request, to each waiter under the id of its message.

        `request_id`: the id in `frames`, or None if unknown.
        """
        for waiter in waiters:
            named = frames if waiter.peer.id == request_id else with_id(frames, waiter.peer.id)
            if not self._connections.send(waiter.peer, named):
                logger.error("a reply is not delivered: its client does not read", extra=waiter.peer.about)


def with_id(frames: list[bytes], request_id: str) -> list[bytes]:
    """The same reply with another id."""
    header = msgpack.unpackb(frames[0])
    return [msgpack.packb(header | {"id": request_id}, use_bin_type=True), *frames[1:]]
