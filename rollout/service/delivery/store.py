"""Keeps results after they were sent, for clients that lost their connection.

A result stays until its client acknowledges it or the store reaches a limit. At the limit of number or of bytes, the
client with the most loses its oldest result, so no client can push out another client's results. The store of results
keeps the frames of the reply.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from rollout.config import ServiceSettings
from rollout.process.logs import request_fields
from rollout.service.delivery.completion import forced_field, marks_between, runs_between
from rollout.service.delivery.expert_records import last_entries
from rollout.service.delivery.waiters import Position
from trainer_bridge.wire.codec import REPLY_LIMITS, decode
from trainer_bridge.wire.columns import COLUMNS, MARKS
from trainer_bridge.wire.prompt_tops import PROMPT_FIELDS

logger = logging.getLogger(__name__)

Name = tuple[str, str]  # (client, id)
_OVERHEAD_BYTES = 1024  # memory of an entry besides its frames; a generous estimate


@dataclass(frozen=True, slots=True)
class Stored:
    """The result of a request. `content` is the digest of its message."""

    frames: list[bytes]
    content: bytes
    ended_s: float
    start: Position  # first position of every stream

    @property
    def size(self) -> int:
        return _OVERHEAD_BYTES + sum(len(frame) for frame in self.frames)

    def completions(self) -> list[StoredCompletion]:
        """The completions, which can be streamed."""
        result = decode(self.frames, REPLY_LIMITS)
        completions = [StoredCompletion(fields, self.start) for fields in result["completions"]]
        completions[0].prompt_scores = {name: result[name] for name in PROMPT_FIELDS if name in result}
        return completions


class StoredCompletion:
    """A completion of a stored result that can be streamed."""

    ended = True

    def __init__(self, fields: dict[str, Any], start: Position) -> None:
        self.index: int = fields["index"]
        self.start = start
        self.end = Position(len(fields["token_ids"]), len(fields.get("text", "")))
        self.prompt_scores: dict[str, Any] = {}  # fields of the first chunk
        self._fields = fields

    def part(self, start: Position) -> dict[str, Any]:
        """The fields of a chunk that begins at `start`."""
        part = self._fields | {"offset": start.tokens}
        for name in COLUMNS:
            if name in part:
                part[name] = part[name][start.tokens :]
        if "routing" in part:
            part["routing"] = last_entries(part["routing"], start.tokens, self.end.tokens)
        part["versions"] = [list(run) for run in runs_between(part["versions"], start.tokens, self.end.tokens)]
        for name in MARKS:
            if marks := marks_between(part.pop(name, ()), start.tokens, self.end.tokens):
                part[name] = marks
        part |= forced_field(part.pop("forced", ()), start.tokens)
        if "text" in part:
            part["text"] = part["text"][start.chars :]
        if start.tokens == self.start.tokens:
            part |= self.prompt_scores
        return part


class StoreEntry(Protocol):
    """A store's entry for a request."""

    @property
    def ended_s(self) -> float:
        """The time of its end, by the store's clock."""

    @property
    def size(self) -> int:
        """Bytes of memory."""


Entry = TypeVar("Entry", bound=StoreEntry)


class Store(Generic[Entry]):
    """Entries of ended requests, by (client, id), in order of arrival. Times are of `clock`."""

    def __init__(self, max_count: int, max_bytes: int, max_age_s: float, clock: Callable[[], float]) -> None:
        self.size = 0  # bytes
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._results: dict[Name, Entry] = {}
        self._ids: dict[str, dict[str, None]] = {}  # ids of each client, oldest first
        self._sizes: dict[str, int] = {}  # bytes of each client

    def __len__(self) -> int:
        return len(self._results)

    def keep(self, name: Name, stored: Entry) -> bool:
        """Keep an entry, as long as the limits allow. False if they do not allow it at all."""
        assert name not in self._results, "an id is taken until its result is forgotten"
        if stored.size > self._max_bytes:
            return False
        self._results[name] = stored
        self._ids.setdefault(name[0], {})[name[1]] = None
        self._sizes[name[0]] = self._sizes.get(name[0], 0) + stored.size
        self.size += stored.size
        while len(self._results) > self._max_count:
            self._forget_oldest_of(max(self._ids, key=lambda client: len(self._ids[client])))
        while self.size > self._max_bytes:
            self._forget_oldest_of(max(self._sizes, key=lambda client: self._sizes[client]))
        self.expire()
        return name in self._results

    def get(self, name: Name) -> Entry | None:
        """The entry of this request, or None."""
        self.expire()
        return self._results.get(name)

    def forget(self, name: Name) -> None:
        """Drop an entry. An unknown name is ignored."""
        stored = self._results.pop(name, None)
        if stored is not None:
            client, request_id = name
            self.size -= stored.size
            self._sizes[client] -= stored.size
            del self._ids[client][request_id]
            if not self._ids[client]:
                del self._ids[client], self._sizes[client]

    def _forget_oldest_of(self, client: str) -> None:
        self.forget((client, next(iter(self._ids[client]))))

    def forget_client(self, client: str) -> None:
        """Drop all results of a client that cannot return."""
        for request_id in list(self._ids.get(client, ())):
            self.forget((client, request_id))

    def expire(self) -> None:
        """Drop results that are too old."""
        while self.wait_s() == 0.0:
            self.forget(next(iter(self._results)))

    def wait_s(self) -> float | None:
        """Seconds until the next result expires, or None."""
        oldest = next(iter(self._results.values()), None)
        return None if oldest is None else max(0.0, oldest.ended_s + self._max_age_s - self._clock())


class ResultStore(Store[Stored]):
    """Results, for clients that lost their connection."""

    def __init__(self, settings: ServiceSettings, clock: Callable[[], float]) -> None:
        limits = settings.constants
        super().__init__(limits.max_results, limits.max_results_bytes, limits.max_results_age_s, clock)

    def add(self, name: Name, frames: list[bytes], content: bytes, start: Position) -> None:
        """Keep a result, as long as the limits allow. A result that is larger than the store is not kept."""
        stored = Stored(frames, content, self._clock(), start)
        if not self.keep(name, stored):
            facts = request_fields(*name) | {"bytes": stored.size, "max_results_bytes": self._max_bytes}
            logger.warning("a result is too large to keep", extra=facts)
