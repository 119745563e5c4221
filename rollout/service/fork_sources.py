"""Tokens of requests in flight and of recently ended ones, which a request may continue by name (`fork`).

The newest tokens of a running completion are in the engine until a delta brings them, so the service first asks for
them (`Flush`). A stop string that the service has found cuts a completion here, too.

A client continues its own requests only. Tokens of ended requests are kept within limits; beyond these the client with
the most kept requests loses its oldest one, as in the store of results. An acknowledgement drops the result, not the
tokens.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from rollout.config import ServiceSettings
from rollout.engine.messages.prompts import Prompt, PromptItem, TokenIds
from rollout.engine.messages.requests import RequestKey
from rollout.service.delivery.in_flight import InFlight
from rollout.service.delivery.store import Name, Store
from rollout.service.requests.request_media import MediaStore
from rollout.service.requests.schema import Fork
from trainer_bridge.wire.errors import BadRequest, NotFound

_OVERHEAD_BYTES = 1024  # memory of an entry besides its tokens; a generous estimate


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """The tokens of a request that has ended."""

    key: RequestKey
    prompt: Prompt  # images have no pixels here
    completions: tuple[np.ndarray, ...]  # int32 [tokens] each
    session: str | None  # the session that the turn belongs to
    ended_s: float

    @property
    def size(self) -> int:
        return _OVERHEAD_BYTES + self.prompt.token_ids.nbytes + sum(array.nbytes for array in self.completions)


class ForkSources(Store[EndedRequest]):
    """The sources of each client's requests. `by_name` and `by_client` have the requests in flight."""

    def __init__(
        self,
        settings: ServiceSettings,
        by_name: Mapping[Name, InFlight],
        by_client: Mapping[str, Mapping[RequestKey, InFlight]],
        media: MediaStore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limits = settings.constants
        super().__init__(limits.max_histories, limits.max_history_bytes, limits.max_results_age_s, clock)
        self._by_name = by_name
        self._by_client = by_client
        self._media = media
        self._turns: dict[tuple[str, str], str] = {}  # ids of the last ended turns, by client and session

    def add(self, entry: InFlight) -> None:
        """Keep the tokens of a request that has ended, and whose client knows them."""
        assert entry.request is not None
        self.forget(entry.name)  # an earlier request with this id
        client, session = entry.name[0], entry.message.session
        completions = tuple(completion.tokens() for completion in entry.completions)
        history = EndedRequest(entry.key, entry.request.prompt.without_pixels, completions, session, self._clock())
        kept = self.keep(entry.name, history)
        if session is not None:
            self._turns.pop((client, session), None)
            if kept:
                self._turns[client, session] = entry.name[1]

    def forget(self, name: Name) -> None:
        """Drop the tokens of a request. An unknown name is ignored."""
        history = self._results.get(name)
        super().forget(name)
        if history is not None and history.session is not None:
            self.end_session(name[0], history.session, name[1])

    def end_session(self, client: str, session: str, turn: str | None = None) -> None:
        """Forget the name of a session; with `turn` only if that is its last turn."""
        if turn is None or self._turns.get((client, session)) == turn:
            self._turns.pop((client, session), None)

    def running(self, client: str, fork: Fork) -> InFlight | None:
        """The request in flight that this client's `fork` names; None if it has ended, or is unknown.

        If several turns of a session are in flight, it is the oldest: the engine refuses a turn while another one runs.
        """
        if fork.request is not None:
            entry = self._by_name.get((client, fork.request))
            return None if entry is None or entry.request is None else entry
        turns = [
            entry
            for entry in self._by_client.get(client, {}).values()
            if entry.request is not None and entry.message.session == fork.session
        ]
        return turns[0] if turns else None

    def prompt(self, client: str, fork: Fork, asked: RequestKey | None = None) -> Prompt:
        """The tokens that this client's `fork` continues. Raises `RolloutError` that names the field.

        `asked` is the source that was in flight when the fork came. If that request was refused, no earlier request
        with its id takes its place.
        """
        prompt, completions = self._source(client, fork, asked, f"fork.{_kind(fork)}")
        if (pixels := self._media.with_pixels(prompt)) is None:
            raise NotFound(
                "this worker no longer has all images of these tokens: send the whole prompt with its images",
                field=f"fork.{_kind(fork)}",
            )
        if fork.index >= len(completions):
            raise BadRequest(
                f"the request has {len(completions)} completions; use an index below that", field="fork.index"
            )
        prompt, drawn = pixels, completions[fork.index]()
        length = len(prompt) + len(drawn)
        offset = length if fork.offset is None else fork.offset
        if offset > length:
            raise BadRequest(
                f"the prompt has {len(prompt)} tokens and the completion {len(drawn)}: use at most {length}",
                field="fork.offset",
            )
        return beginning(prompt, drawn, offset)

    def last_turn(self, client: str, session: str) -> Prompt:
        """The tokens of a session's last turn; images may lack their pixels. Raises `NotFound`."""
        prompt, completions = self._source(client, Fork(session=session), None, "session")
        return joined(prompt, completions[0]())

    def _source(
        self, client: str, fork: Fork, asked: RequestKey | None, field: str
    ) -> tuple[Prompt, list[Callable[[], np.ndarray]]]:
        """The prompt, perhaps without pixels, and a function for each completion's tokens. `field` is for errors."""
        entry = self.running(client, fork)
        if entry is not None and entry.request is not None:
            return entry.request.prompt, [completion.tokens for completion in entry.completions]
        target = fork.request if fork.session is None else self._turns.get((client, fork.session))
        ended = None if target is None else self.get((client, target))
        if ended is None or (fork.request is not None and asked not in (None, ended.key)):
            kind = _kind(fork)
            raise NotFound(
                f"this worker does not know this client's {kind} {getattr(fork, kind)!r} (any more): send the tokens "
                "as 'prompt'",
                field=field,
            )
        return ended.prompt, [drawn.copy for drawn in ended.completions]


def _kind(fork: Fork) -> str:
    return "request" if fork.session is None else "session"


def beginning(prompt: Prompt, drawn: np.ndarray, offset: int) -> Prompt:
    """The first `offset` tokens of a prompt and its completion, as a prompt. Raises `BadRequest` within an image."""
    if not prompt.media:
        kept = [prompt.token_ids[:offset], drawn[: max(offset - len(prompt), 0)]]
        return replace(Prompt.of_tokens(np.concatenate(kept)), salt=prompt.salt)
    items: list[PromptItem] = []
    start = 0
    for item in (*prompt.items, *((TokenIds(drawn),) if len(drawn) else ())):
        end = min(start + len(item.token_ids), offset)
        if start >= end:
            break
        if isinstance(item, TokenIds):
            items.append(TokenIds(item.token_ids[: end - start]))
        elif end - start == len(item.token_ids):
            items.append(item)
        else:
            last = start + len(item.token_ids)
            raise BadRequest(
                f"an image takes the places {start} to {last - 1}: use at most {start}, or at least {last}",
                field="fork.offset",
            )
        start = end
    return Prompt(tuple(items), salt=prompt.salt)


def joined(prompt: Prompt, more: np.ndarray) -> Prompt:
    """A prompt and further tokens, int32, as one prompt."""
    if not len(more):
        return prompt
    if not prompt.media:
        return replace(Prompt.of_tokens(np.concatenate([prompt.token_ids, more])), salt=prompt.salt)
    return Prompt((*prompt.items, TokenIds(more)), salt=prompt.salt)
