"""Prepares a request for the engine: the token ids of its prompt, its images, its compiled constraint.

A prompt of token ids without images and without a constraint needs no preparation, unless an earlier request of its
client still waits: requests of one client reach the engine in the order in which they came.

Waiting work holds the request's key only. A request that is dropped meanwhile costs neither memory nor time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np

from rollout.engine.messages.prompts import Prompt
from rollout.engine.messages.requests import RequestKey
from rollout.service.delivery.in_flight import InFlight
from rollout.service.requests.background_work import BackgroundWork
from rollout.service.requests.constraint import Constraints
from rollout.service.requests.intake import Intake, PreparedPrompt
from rollout.service.requests.request_media import MediaFields, MediaStore
from rollout.service.requests.schema import GenerateMessage
from rollout.service.text.codec import PromptSource
from trainer_bridge.wire.errors import Unavailable

_PROMPT_END = 512  # tokens of a prompt in which a constraint's marker is looked for: more than one can have
#: Called on the service thread with a request and its outcome: None if its message has all that the engine needs.
Then = Callable[[InFlight, Future[PreparedPrompt | None]], None]


class Preparation:
    """Begins on the service thread, works on background threads; their outcome continues on the service thread."""

    def __init__(
        self,
        background: BackgroundWork[PreparedPrompt | None],
        intake: Intake,
        prompts: PromptSource | None,
        constraints: Constraints,
        media: MediaStore,
    ) -> None:
        self.media = media
        self._background = background
        self._intake = intake
        self._prompts = prompts
        self._constraints = constraints
        self._entries: dict[RequestKey, InFlight] = {}  # in preparation; background threads read it

    @property
    def waiting(self) -> int:
        """Requests in preparation."""
        return self._background.waiting

    def needed(self, entry: InFlight) -> bool:
        """False if a request may go on at once."""
        return not _only_tokens(entry.message) or self._background.waits(entry.name[0])

    def begin(self, entry: InFlight, then: Then) -> None:
        """Prepare a request, then call `then`, in the order of the client's requests."""
        client, key, message = entry.name[0], entry.key, entry.message
        self._entries[key] = entry
        go_on = partial(self._go_on, key, then)
        if message.constraint is not None:
            self._background.constraint(client, partial(self._encode, key), partial(self._constrain, key), go_on)
        elif _only_tokens(message):
            self._background.after_client(client, None, go_on)
        else:
            self._background.prompt(client, partial(self._encode, key), go_on)

    def drop(self, key: RequestKey) -> None:
        """A request has ended: its preparation, if it is not over, ends without a call."""
        self._entries.pop(key, None)

    def keep(
        self, client: str, media: Sequence[MediaFields], then: Callable[[Future[PreparedPrompt | None]], None]
    ) -> None:
        """Keep images for later requests, then call `then`, in the order of the client's requests."""

        def kept() -> None:
            self.media.add(media)

        self._background.prompt(client, kept, then)

    def _go_on(self, key: RequestKey, then: Then, outcome: Future[PreparedPrompt | None]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            then(entry, outcome)

    def _encode(self, key: RequestKey) -> PreparedPrompt:
        entry = self._wanted(key)
        message, tower = entry.message, self._intake.tower
        if message.media is not None and tower is not None:
            assert message.prompt is not None, "checked by the intake"
            return PreparedPrompt(self.media.prompt(message.prompt, message.media, tower))
        if isinstance(message.prompt, np.ndarray):
            return PreparedPrompt.of_message(message)
        assert self._prompts is not None, "text without a tokenizer was refused"
        return PreparedPrompt(Prompt.of_tokens(self._prompts.encode_prompt(entry.frames)))

    def _constrain(self, key: RequestKey, prepared: PreparedPrompt | None) -> PreparedPrompt:
        message = self._wanted(key).message
        assert message.constraint is not None and prepared is not None
        prior = [] if message.continue_from is None else message.continue_from.token_ids.tolist()
        spec, stop_ids, prompt = message.constraint.to_spec(), self._intake.stop_ids(message), prepared.prompt
        end = prompt.token_ids[-_PROMPT_END:].tolist()
        return PreparedPrompt(prompt, self._constraints.prepare(spec, stop_ids, prior, end))

    def _wanted(self, key: RequestKey) -> InFlight:
        entry = self._entries.get(key)
        if entry is None:
            raise Unavailable("the request was dropped before its prompt was prepared")
        return entry


def _only_tokens(message: GenerateMessage) -> bool:
    """True if the engine can take the prompt as it is."""
    return message.constraint is None and isinstance(message.prompt, np.ndarray) and message.media is None
