"""Drives an engine in the caller's thread, without a service or sockets, and collects its tokens."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rollout.config import Settings
from rollout.engine.build import build_engine, local_links
from rollout.engine.device.streams import Device
from rollout.engine.loop import Engine
from rollout.engine.messages.prompts import Prompt
from rollout.engine.messages.requests import Request, SamplingParams, StopParams
from rollout.engine.messages.to_engine import Cancel, Pause, Resume, Submit
from rollout.engine.messages.to_service import Delta, Event, Rejected
from rollout.engine.parts import Receiver
from rollout.models.language_model import LanguageModel
from rollout.process.progress import stage

_CLIENT = "bench"


@dataclass(slots=True)
class Completion:
    """Tokens of one request so far, and their log-probs."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str | None = None


def random_prompt(vocab: int, length: int, seed: int) -> list[int]:
    """Token ids; the same for the same arguments."""
    return np.random.default_rng((length, seed)).integers(0, vocab, length).tolist()


class Driver:
    """An engine, ticked by hand."""

    def __init__(
        self, settings: Settings, device: Device, model: LanguageModel, receiver: Receiver | None = None
    ) -> None:
        with stage("preparing decode steps") as advance:
            self.engine: Engine = build_engine(
                settings, device, model, local_links(settings, self._take, receiver), progress=advance
            )
        self.completions: dict[str, Completion] = defaultdict(Completion)

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams,
        stop_ids: tuple[int, ...] = (),
        stream_every: int = 0,
    ) -> None:
        """Request one completion."""
        request = Request(
            (_CLIENT, name),
            Prompt.of_tokens(np.asarray(prompt, dtype=np.int32)),
            max_tokens,
            sampling=sampling,
            stop=StopParams(token_ids=stop_ids),
            stream_every=stream_every,
        )
        self.engine.inbox.put(Submit(request))

    def finish(self) -> None:
        """Tick until every request has ended and no step is in flight."""
        self.engine.tick()
        while self.engine.busy or not self.engine.inbox.empty():
            self.engine.tick()

    def tick_until(self, reached: Callable[[], bool]) -> None:
        """Tick until `reached`. Raises RuntimeError if all requests end before."""
        while not reached():
            self.engine.tick()
            if not self.engine.busy and self.engine.inbox.empty() and not reached():
                raise RuntimeError("the requests ended before the awaited step; make them longer")

    def depth(self, depth: int) -> None:
        """Use another pipeline depth. No step may be in flight."""
        assert self.engine.pipeline.in_flight == 0
        self.engine.pipeline.depth = depth

    def pause(self) -> None:
        """Stop launching, and commit the steps in flight."""
        self.engine.inbox.put(Pause("keep", 0))
        self.engine.tick()
        while self.engine.pipeline.in_flight:
            self.engine.tick()

    def resume(self) -> None:
        """Continue after `pause`."""
        self.engine.inbox.put(Resume(0))

    def drop_all(self) -> None:
        """Cancel every request and drop all tokens."""
        for key in list(self.engine.roster.groups):
            self.engine.inbox.put(Cancel(key))
        self.resume()
        self.finish()
        self.completions.clear()

    def close(self) -> None:
        """Check that nothing leaked, and end the streams."""
        self.engine.check_integrity()
        self.engine.executor.close()

    def _take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Rejected):
                raise ValueError(f"{event.key[1]}: {event.message}")
            if isinstance(event, Delta):
                completion = self.completions[event.key[1]]
                completion.tokens += event.token_ids.tolist()
                completion.logprobs += event.logprobs.tolist()
                if event.finish is not None:
                    completion.reason = event.finish.reason
