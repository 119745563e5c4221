"""The tokens of a resuming client's own requests, so that a fork outlives the worker of its source.

A sent request is known: its prompt, if the client has its token ids, and the received tokens. Tokens of ended requests
are known until they take too much memory; then the oldest are forgotten.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trainer_bridge.client.generate_request import RequestPlan
from trainer_bridge.client.journal import JournaledRequest
from trainer_bridge.client.media import MediaItem, MediaPrompt
from trainer_bridge.client.resumed_call import ResumedCall, Source
from trainer_bridge.expiring_cache import ExpiringCache

_MOST_BYTES = 64 << 20
_OVERHEAD_BYTES = 1024  # memory of a request besides its tokens and pixels


@dataclass(frozen=True, slots=True)
class _Ended:
    """A request that has ended."""

    prompt: MediaPrompt
    completions: tuple[np.ndarray, ...]  # int32 [tokens] each
    salt: str | None
    session: str | None

    @property
    def size(self) -> int:
        """Bytes of memory."""
        pixels = sum(item.pixel_values.nbytes for item in self.prompt.media)
        return _OVERHEAD_BYTES + self.prompt.token_ids.nbytes + pixels + sum(each.nbytes for each in self.completions)


class KnownTokens:
    """The sources that requests of one client can continue.

    `running` are the requests in flight, in the order of their beginning; `saved` reads requests of earlier processes.
    """

    def __init__(self, running: Mapping[str, ResumedCall], saved: Callable[[str], JournaledRequest | None]) -> None:
        self._running, self._saved = running, saved
        self._ended: ExpiringCache[str, _Ended] = ExpiringCache(_MOST_BYTES, dropped=self._forget)
        self._turns: dict[str, str] = {}  # the last ended turn of each session

    def source(self, plan: RequestPlan) -> Source | None:
        """The source of a request; None if it continues nothing, or tokens that are not known here."""
        fork = plan.fields.get("fork")
        further = plan.fields.get("prompt")
        if fork is None or isinstance(further, str):
            return None
        name, index = fork.get("request"), fork.get("index", 0)
        if fork.keys() <= {"session", "offset"}:
            name = self._turn(fork.get("session"))
        elif not fork.keys() <= {"request", "index", "offset"}:
            return None  # the worker says what is wrong
        found = self._tokens(name, index) if isinstance(name, str) else None
        if found is None:
            return None
        prompt, salt = found
        length = len(prompt.token_ids)
        offset = fork.get("offset", length)
        beginning = _beginning(prompt, offset) if _is_index(offset, length + 1) and offset else None
        if beginning is None:  # the worker says what is wrong, or has more tokens
            return None
        named = {"request": name, "index": index, "offset": offset}
        whole = beginning if further is None else beginning.followed_by(further)
        return Source(named, whole, plan.fields.get("cache_salt", salt))

    def keep(self, call: ResumedCall) -> None:
        """Note that a request has ended with a result."""
        assert call.result is not None
        self._ended.drop(call.id)
        prompt, ids = call.prompt, call.result.prompt_token_ids
        if prompt is None and ids is not None:
            prompt = MediaPrompt(ids)
        session = call.plan.session
        if session is not None:
            self._turns.pop(session, None)
        if prompt is None:
            return
        completions = tuple(completion.token_ids for completion in call.result.completions)
        ended = _Ended(prompt, completions, call.salt, session)
        self._ended.put(call.id, ended, ended.size)
        kept = self._ended.get(call.id) is not None  # it may be too large
        if kept and session is not None and not call.plan.fields.get("end_of_session"):
            self._turns[session] = call.id

    def end_session(self, session: str) -> None:
        """Forget the name of a session."""
        self._turns.pop(session, None)

    def _turn(self, session: Any) -> str | None:
        """The id of a session's last turn. If several are in flight: the first, as a worker refuses the others."""
        running = (name for name, call in self._running.items() if call.plan.session == session)
        return next(running, self._turns.get(session)) if isinstance(session, str) else None

    def _tokens(self, name: str, index: Any) -> tuple[MediaPrompt, str | None] | None:
        """A request's prompt with a completion, and the request's salt."""
        call = self._running.get(name)
        if call is not None:
            if call.prompt is None or not _is_index(index, len(call.parts)):
                return None
            drawn = call.assembler.tokens(index)
            return call.prompt.followed_by(drawn), call.salt
        ended = self._ended.get(name) or self._of_journal(name)
        if ended is None or not _is_index(index, len(ended.completions)):
            return None
        return ended.prompt.followed_by(ended.completions[index]), ended.salt

    def _of_journal(self, name: str) -> _Ended | None:
        saved = self._saved(name)
        prompt = None if saved is None else saved.fields.get("prompt")
        if saved is None or saved.result is None or "fork" in saved.fields or not isinstance(prompt, np.ndarray):
            return None
        drawn: dict[int, list[np.ndarray]] = {}
        for chunk in saved.chunks:
            drawn.setdefault(chunk.index, []).append(chunk.token_ids)
        if "media" in saved.fields or "continue_from" in saved.fields or drawn.keys() != set(range(len(drawn))):
            return None
        completions = tuple(np.concatenate(drawn[index]) for index in range(len(drawn)))
        return _Ended(MediaPrompt(prompt), completions, saved.fields.get("cache_salt"), saved.fields.get("session"))

    def _forget(self, name: str, ended: _Ended) -> None:
        if ended.session is not None and self._turns.get(ended.session) == name:
            del self._turns[ended.session]


def continued_prompt(plan: RequestPlan, source: Source | None) -> MediaPrompt | None:
    """The prompt of a request, with what it continues; None if its token ids are not known here."""
    prompt = plan.fields.get("prompt")
    if source is not None:
        return source.prompt
    if "fork" in plan.fields or not isinstance(prompt, np.ndarray):
        return None
    return MediaPrompt(prompt, tuple(_item(fields) for fields in plan.fields.get("media", ())))


def _item(fields: Mapping[str, Any]) -> MediaItem:
    frames, height, width = fields["grid_thw"]
    pixels, seconds = fields["pixel_values"], fields.get("seconds_per_frame")
    return MediaItem(fields["offset"], fields["length"], (frames, height, width), pixels, seconds, fields["hash"])


def _beginning(prompt: MediaPrompt, offset: int) -> MediaPrompt | None:
    """The first tokens of a prompt; None if an image would be cut."""
    media = tuple(item for item in prompt.media if item.offset < offset)
    if any(item.offset + item.length > offset for item in media):
        return None
    return replace(prompt, token_ids=prompt.token_ids[:offset], media=media)


def _is_index(index: Any, count: int) -> bool:
    return isinstance(index, int) and not isinstance(index, bool) and 0 <= index < count
