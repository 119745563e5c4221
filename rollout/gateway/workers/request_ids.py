"""The sources of forks: requests of this gateway, by the id that the client knows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rollout.gateway.http.http_errors import HttpError, bad_request

_MOST = 16_384  # ids at workers that are known; a worker knows as many
#: Prefixes that the gateway adds to a client's id of a request.
PREFIXES = ("cmpl-", "chatcmpl-", "msg_", "resp_")

#: Ids at the workers, and the number of completions of each, in the order of the prompts.
Parts = tuple[tuple[str, int], ...]


class RequestIds:
    """Ids at the workers, by the id that the client knows; the oldest is forgotten first."""

    def __init__(self) -> None:
        self._parts: OrderedDict[str, Parts] = OrderedDict()
        self._count = 0  # ids at workers

    @contextmanager
    def note(self, known_id: str, parts: Sequence[tuple[str, int]]) -> Iterator[None]:
        """A request is sent in this block. If it is refused, an earlier one with its id is known again."""
        earlier, mine = self._parts.get(known_id), tuple(parts)
        self._keep(known_id, mine)
        try:
            yield
        except HttpError as error:
            if earlier is not None and error.status < 500 and self._parts.get(known_id) is mine:
                self._keep(known_id, earlier)
            raise

    def worker_fork(self, fork: Mapping[str, Any]) -> Mapping[str, Any]:
        """A fork as the workers know it: `index` counts the choices of an answer. Raises `HttpError`."""
        known_id = fork.get("request")
        if known_id is None:
            return fork
        parts, index = self._find(known_id), fork["index"]
        for request_id, n in parts:
            if index < n:
                return {**fork, "request": request_id, "index": index}
            index -= n
        count = sum(n for _, n in parts)
        raise bad_request(f"the request has {count} choices; use an index below that", "fork.index")

    def _keep(self, known_id: str, parts: Parts) -> None:
        self._count += len(parts) - len(self._parts.pop(known_id, ()))
        self._parts[known_id] = parts
        while self._count > _MOST and len(self._parts) > 1:
            self._count -= len(self._parts.popitem(last=False)[1])

    def _find(self, known_id: str) -> Parts:
        """The parts of a request; its id may lack the prefix that the gateway put in front."""
        for name in (known_id, *(f"{prefix}{known_id}" for prefix in PREFIXES)):
            if name in self._parts:
                return self._parts[name]
        raise HttpError(
            404,
            f"this gateway does not know the request {known_id!r} (any more): send the tokens as a prompt",
            "fork.request",
        )
