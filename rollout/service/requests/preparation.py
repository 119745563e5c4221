"""Prepares a request for the engine: the token ids of its prompt, its images, its compiled constraint.

A prompt of token ids without images and without a constraint needs no preparation and goes on at once, unless an
earlier request of the same client still waits: requests of one client reach the engine in the order in which they came.

Waiting work holds the request's key only. A request that is dropped meanwhile costs neither memory nor time.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import numpy as np

from rollout.engine.messages import Prompt, RequestKey
from rollout.service.delivery.in_flight import InFlight
from rollout.service.requests.background_work import BackgroundWork
from rollout.service.requests.constraint import Constraints
from rollout.service.requests.intake import Intake, PreparedPrompt
from rollout.service.requests.media import MediaStore
from rollout.service.text.codec import PromptSource
from trainer_bridge.wire.errors import Unavailable

_PROMPT_END = 512  # tokens of a prompt in which a constraint's marker is looked for: more than one can have
#: Called on the service thread with a request and a function that returns or raises the outcome.
Then = Callable[[InFlight, Callable[[], PreparedPrompt]], None]


class Preparation:
    """Begins on the service thread, works on background threads. `find` may be called from any."""

    def __init__(
        self,
        background: BackgroundWork[PreparedPrompt | None],
        intake: Intake,
        prompts: PromptSource | None,
        constraints: Constraints,
        find: Callable[[RequestKey], InFlight | None],
        media: MediaStore,
    ) -> None:
        self._background = background
        self._intake = intake
        self._prompts = prompts
        self._constraints = constraints
        self._find = find
        self._media = media

    @property
    def waiting(self) -> int:
        """Requests in preparation."""
        return self._background.waiting

    def begin(self, entry: InFlight, then: Then) -> None:
        """Prepare a request, then call `then`, in the order of the client's requests."""
        client, key, message = entry.name[0], entry.key, entry.message
        plain = message.constraint is None and isinstance(message.prompt, np.ndarray) and message.media is None
        if plain and not self._background.waits(client):
            entry.frames = []
            then(entry, partial(_token_ids, entry))
            return
        go_on = partial(self._go_on, key, then)
        if message.constraint is not None:
            self._background.constraint(client, partial(self._encode, key), partial(self._constrain, key), go_on)
        elif plain:
            self._background.after_client(client, None, go_on)
        else:
            self._background.prompt(client, partial(self._encode, key), go_on)

    def _go_on(self, key: RequestKey, then: Then, future: Future[PreparedPrompt | None]) -> None:
        entry = self._find(key)
        if entry is None:
            return
        entry.frames = []
        then(entry, lambda: future.result() or _token_ids(entry))

    def _encode(self, key: RequestKey) -> PreparedPrompt:
        entry = self._wanted(key)
        message, tower = entry.message, self._intake.tower
        if message.media is not None and tower is not None:
            assert message.prompt is not None, "checked by the intake"
            return PreparedPrompt(self._media.prompt(message.prompt, message.media, tower))
        if isinstance(message.prompt, np.ndarray):
            return _token_ids(entry)
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
        entry = self._find(key)
        if entry is None:
            raise Unavailable("the request was dropped before its prompt was prepared")
        return entry


def _token_ids(entry: InFlight) -> PreparedPrompt:
    """A prompt that came as token ids."""
    assert isinstance(entry.message.prompt, np.ndarray)
    return PreparedPrompt(Prompt.of_tokens(entry.message.prompt))
