"""Prepares a request for the engine: the tokens that it continues, prompt, images and constraint.

A prompt of token ids without images and without a constraint needs no preparation, unless an earlier request of its
client still waits: requests of one client reach the engine in the order in which they came.

Waiting work holds the request's key only. A request that is dropped meanwhile costs neither memory nor time.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np

from rollout.engine.messages.prompts import Prompt
from rollout.engine.messages.requests import RequestKey
from rollout.service.delivery.in_flight import InFlight
from rollout.service.fork_sources import joined
from rollout.service.requests.background_work import BackgroundWork
from rollout.service.requests.constraint import Constraints
from rollout.service.requests.intake import Intake, PreparedPrompt
from rollout.service.requests.request_media import MediaFields, MediaStore
from rollout.service.requests.schema import GenerateMessage
from rollout.text.codec import PromptSource
from trainer_bridge.wire.errors import Unavailable

_PROMPT_END = 512  # tokens at the end of a prompt that are searched for a marker: longer than any marker
#: Called on the service thread with a request and its outcome: None if the message alone is enough for the engine.
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
        self._entries: dict[RequestKey, InFlight] = {}  # requests in preparation; background threads read it
        self._asked: dict[RequestKey, Future[PreparedPrompt | None]] = {}  # wait for the tokens of their source

    @property
    def waiting(self) -> int:
        return self._background.waiting

    def needed(self, entry: InFlight) -> bool:
        """False if a request may go on at once."""
        return not _only_tokens(entry.message) or self._background.waits(entry.name[0])

    def begin(self, entry: InFlight, then: Then, ask: Callable[[InFlight], None]) -> None:
        """Prepare a request, then call `then`, in the order of the client's requests.

        `ask` is called in that order, too, for a request that continues others' tokens, and leads to `answer`.
        """
        client, key, message = entry.name[0], entry.key, entry.message
        self._entries[key] = entry
        go_on = partial(self._go_on, key, then)
        if message.fork is not None:
            self._background.in_order(client, partial(self._ask, key, ask), go_on)
        elif _only_tokens(message):
            self._background.after_client(client, None, go_on)
        else:
            self._work(entry, self._background.queue(client, go_on))

    def answer(self, entry: InFlight, find: Callable[[], Prompt]) -> None:
        """Go on with the tokens that a request continues: `find` returns them, or raises `RolloutError`."""
        outcome = self._asked.pop(entry.key, None)
        if outcome is None:
            return
        try:
            source = find()
            if entry.message.constraint is not None or isinstance(entry.message.prompt, str):
                self._work(entry, outcome, source)
            else:
                outcome.set_result(self._encode(entry.key, source))
        # `then` answers the request with it; a fault of ours must not end the service, nor hold the client's requests.
        except Exception as error:
            outcome.set_exception(error)

    def drop(self, key: RequestKey) -> None:
        """Note the end of a request: its preparation, if it is not over, ends without a call."""
        self._entries.pop(key, None)
        asked = self._asked.pop(key, None)
        if asked is not None:
            asked.set_result(None)  # the client's next requests go on

    def keep(
        self, client: str, media: Sequence[MediaFields], then: Callable[[Future[PreparedPrompt | None]], None]
    ) -> None:
        """Keep images for later requests, then call `then`, in the order of the client's requests."""

        def kept() -> None:
            self.media.add(media)

        self._background.prompt(client, self._background.queue(client, then), kept)

    def _work(self, entry: InFlight, outcome: Future[PreparedPrompt | None], source: Prompt | None = None) -> None:
        """Have the background threads prepare a request. `source` has the tokens that it continues, if any."""
        client, key, encode = entry.name[0], entry.key, partial(self._encode, entry.key, source)
        if entry.message.constraint is not None:
            self._background.constraint(client, outcome, encode, partial(self._constrain, key))
        else:
            self._background.prompt(client, outcome, encode)

    def _go_on(self, key: RequestKey, then: Then, outcome: Future[PreparedPrompt | None]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            then(entry, outcome)

    def _ask(self, key: RequestKey, ask: Callable[[InFlight], None], outcome: Future[PreparedPrompt | None]) -> None:
        entry = self._entries.get(key)
        if entry is None:
            outcome.set_result(None)
        else:
            self._asked[key] = outcome
            ask(entry)

    def _encode(self, key: RequestKey, source: Prompt | None = None) -> PreparedPrompt:
        entry = self._wanted(key)
        message, tower = entry.message, self._intake.tower
        if source is not None:
            return PreparedPrompt(joined(source, self._further(entry)))
        if message.media is not None and tower is not None:
            assert message.prompt is not None, "checked by the intake"
            return PreparedPrompt(self.media.prompt(message.prompt, message.media, tower))
        if isinstance(message.prompt, np.ndarray):
            return PreparedPrompt.of_message(message)
        assert self._prompts is not None, "text without a tokenizer was refused"
        return PreparedPrompt(Prompt.of_tokens(self._prompts.encode_prompt(entry.frames)))

    def _further(self, entry: InFlight) -> np.ndarray:
        """Token ids after the tokens that a request continues."""
        prompt = entry.message.prompt
        if isinstance(prompt, str):
            assert self._prompts is not None, "text without a tokenizer was refused"
            return self._prompts.encode_prompt(entry.frames)
        return np.zeros(0, np.int32) if prompt is None else prompt

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
    plain = message.constraint is None and message.media is None and message.fork is None
    return plain and isinstance(message.prompt, np.ndarray)
