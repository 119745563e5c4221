"""What a request in flight needs before the engine can have it: its prompt's token ids, its constraint made ready.

What waits for its turn holds the request's key and nothing else of it, so that a request that is forgotten meanwhile
takes no memory, and no time either.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import numpy as np

from rollout.engine.messages import RequestKey
from rollout.service.delivery.in_flight import InFlight
from rollout.service.errors import ServiceError
from rollout.service.requests.background_work import Preparer
from rollout.service.requests.constraint import Constraints
from rollout.service.requests.intake import Intake, Prepared
from rollout.service.text.codec import PromptSource

#: Told on the service thread what came of a request that is still wanted.
Then = Callable[[InFlight, Callable[[], Prepared]], None]


class Preparation:
    """Begins on the service thread, works on the preparer's threads. `find` may be called from any."""

    def __init__(
        self,
        preparer: Preparer[Prepared | None],
        intake: Intake,
        prompts: PromptSource | None,
        constraints: Constraints,
        find: Callable[[RequestKey], InFlight | None],
    ) -> None:
        self._preparer = preparer
        self._intake = intake
        self._prompts = prompts
        self._constraints = constraints
        self._find = find

    @property
    def waiting(self) -> int:
        """Requests that have not continued yet."""
        return self._preparer.waiting

    def begin(self, entry: InFlight, then: Then) -> None:
        """Have `then` called with the request and what gives or raises its outcome, in the order of its client."""
        client, key, message = entry.name[0], entry.key, entry.message
        go_on = partial(self._go_on, key, then)
        if message.constraint is not None:
            self._preparer.constraint(client, partial(self._encode, key), partial(self._constrain, key), go_on)
        elif isinstance(message.prompt, np.ndarray):
            self._preparer.now(client, None, go_on)
        else:
            self._preparer.prompt(client, partial(self._encode, key), go_on)

    def _go_on(self, key: RequestKey, then: Then, future: Future[Prepared | None]) -> None:
        entry = self._find(key)
        if entry is None:
            return
        entry.frames = []
        then(entry, lambda: future.result() or _as_it_is(entry))

    def _encode(self, key: RequestKey) -> Prepared:
        entry = self._wanted(key)
        if isinstance(entry.message.prompt, np.ndarray):
            return _as_it_is(entry)
        assert self._prompts is not None, "text without a tokenizer was refused"
        return Prepared(self._prompts.encode_prompt(entry.frames))

    def _constrain(self, key: RequestKey, prepared: Prepared | None) -> Prepared:
        message = self._wanted(key).message
        assert message.constraint is not None and prepared is not None
        prior = [] if message.continue_from is None else message.continue_from.token_ids.tolist()
        spec, stop_ids = message.constraint.to_spec(), self._intake.stop_ids(message)
        return Prepared(prepared.prompt, self._constraints.prepare(spec, stop_ids, prior))

    def _wanted(self, key: RequestKey) -> InFlight:
        entry = self._find(key)
        if entry is None:
            raise ServiceError("unavailable", "the request was given up before its prompt was prepared")
        return entry


def _as_it_is(entry: InFlight) -> Prepared:
    """Token ids, which need no work."""
    assert isinstance(entry.message.prompt, np.ndarray)
    return Prepared(entry.message.prompt)
