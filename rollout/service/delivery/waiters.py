"""Waiters: the messages that are answered with a request's result, and the position of each one's stream.

Every waiter has its own position in every completion. So a stream that is resumed on another connection continues after
the tokens that arrived, and two streams of one request do not disturb each other.

Chunks of waiters with `joins` wait until `Delivery.flush`, and for one connection travel in one message: the chunks of
many streams that a step has made reach the client together, and are cheaper to write and to read.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import msgpack

from rollout.service.connections import Connections, ReplyAddress
from rollout.service.delivery.replies import chunk_reply, chunks_reply
from trainer_bridge.wire.codec import encode
from trainer_bridge.wire.errors import BadRequest

logger = logging.getLogger(__name__)

StreamMode = Literal[False, "tokens", "completions"]


class Position(NamedTuple):
    """A position in a completion: the number of tokens, and of characters of text, before it."""

    tokens: int
    chars: int


class Streamed(Protocol):
    """A completion that can be streamed."""

    index: int
    start: Position  # start of its first chunk: after the tokens of `continue_from`

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
    joins: bool = False  # chunks may share messages with chunks of other streams
    received: dict[int, Position | None] = field(
        default_factory=dict
    )  # the client's position by index; None: it has the whole completion

    def is_due(self, completion: Streamed) -> bool:
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

    Raises `RolloutError` for a position that the completion has not reached.
    """
    received: dict[int, Position | None] = {}
    for index, tokens in offsets.items():
        if index >= len(completions):
            raise BadRequest(f"the request has {len(completions)} completions", field=f"offsets.{index}")
        if tokens is None:
            received[index] = None
            continue
        start, end = completions[index].start, completions[index].end
        received[index] = position = Position(tokens, text_chars.get(index, start.chars))
        for name, have, first, last in zip(("offsets", "text_chars"), position, start, end, strict=True):
            if not first <= have <= last:
                raise BadRequest(
                    f"a stream of this completion can go on from {first} to {last}, not from {have}",
                    field=f"{name}.{index}",
                )
    return received


class Delivery:
    """Sends chunks and results to waiters."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._joined: dict[tuple[bytes, bool], list[tuple[Waiter, dict[str, Any]]]] = defaultdict(list)

    def chunks(self, waiters: Iterable[Waiter], completions: Iterable[Streamed]) -> None:
        """Send all due chunks, or keep them for `flush`. A stream ends if its connection has no room."""
        waiters = [waiter for waiter in waiters if waiter.stream]
        for completion in completions if waiters else ():
            for waiter in waiters:
                if not waiter.is_due(completion):
                    continue
                fields = waiter.take(completion)
                if waiter.joins:
                    self._joined[waiter.peer.connection, waiter.peer.delimiter].append((waiter, fields))
                else:
                    self._send([waiter], chunk_reply(waiter.peer.id, fields))

    def flush(self) -> None:
        """Send the chunks that were kept to be joined."""
        joined, self._joined = self._joined, defaultdict(list)
        for kept in joined.values():
            waiters = [waiter for waiter, _ in kept]
            if len(kept) == 1:
                self._send(waiters, chunk_reply(waiters[0].peer.id, kept[0][1]))
            else:
                self._send(waiters, chunks_reply([(waiter.peer.id, fields) for waiter, fields in kept]))

    def _send(self, waiters: list[Waiter], reply: dict[str, Any]) -> None:
        peer, streams = waiters[0].peer, frozenset(waiters)
        if self._connections.send(peer, encode(reply), streams):
            return
        for dropped in self._connections.drop_streams(peer.connection, streams):
            assert isinstance(dropped, Waiter)
            dropped.stream = False
            logger.warning("a stream is dropped: its client does not read", extra=dropped.peer.request_fields)

    def last(self, waiters: Iterable[Waiter], frames: list[bytes], request_id: str | None) -> None:
        """Send the final reply of a request, to each waiter under the id of its message.

        `request_id`: the id in `frames`, or None if unknown.
        """
        self.flush()  # sends the chunks before the result
        for waiter in waiters:
            named = frames if waiter.peer.id == request_id else with_id(frames, waiter.peer.id)
            if not self._connections.send(waiter.peer, named):
                logger.error("a reply is not delivered: its client does not read", extra=waiter.peer.request_fields)


def with_id(frames: list[bytes], request_id: str) -> list[bytes]:
    header = msgpack.unpackb(frames[0])
    return [msgpack.packb(header | {"id": request_id}, use_bin_type=True), *frames[1:]]
