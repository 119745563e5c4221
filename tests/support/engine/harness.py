"""Drives a real engine in the test's own thread: no sockets, no mocks."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch

from rollout.config import EngineSettings, ModelSettings, ServiceSettings, Settings
from rollout.engine.build import build_engine, local_links, sleeping_memory
from rollout.engine.device.streams import CpuDevice, Device
from rollout.engine.features.all import FEATURES, MakeFeature
from rollout.engine.features.drafts.counts import DraftCounts
from rollout.engine.features.drafts.feature import DraftsFeature
from rollout.engine.inspect import Inspector
from rollout.engine.loop import Engine
from rollout.engine.messages.prompts import Prompt
from rollout.engine.messages.requests import Request, SamplingParams, StopParams
from rollout.engine.messages.statuses import EngineStatus
from rollout.engine.messages.to_engine import Submit
from rollout.engine.messages.to_service import Delta, Event, RequestDone
from rollout.engine.schedule.plan import Plan
from rollout.engine.schedule.step_feature import StepFeature, find_feature
from rollout.engine.step.device_feature import DeviceFeature, HostParts
from rollout.engine.step.pipeline import StepInFlight
from rollout.engine.upload import Header, StepOutput, UploadStaging
from rollout.models import load_model
from rollout.models.decoder import Decoder
from rollout.models.loader import MTP
from tests.support.engine.strict_pages import StrictPages
from tests.support.settings import settings_of
from trainer_bridge.wire.prompt_tops import PromptTops


class Completion:
    """What the deltas of one completion add up to."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.raw_logprobs: list[float] = []
        self.drawn_logprobs: list[float] = []
        self.versions: list[int] = []  # one a token
        self.routing: list[np.ndarray] = []  # one a delta
        self.finish: Any = None
        self.seed = 0
        self.deltas = 0
        self.recomputed: tuple[tuple[int, int], ...] = ()
        self.kv_versions: tuple[tuple[int, int, int], ...] = ()
        self.top_ids: list[list[int]] = []
        self.top_logprobs: list[list[float]] = []
        self.prompt_logprobs: np.ndarray | None = None
        self.prompt_tops: PromptTops | None = None

    def add(self, delta: Delta) -> None:
        assert self.finish is None, "nothing comes after the end"
        assert len(delta.token_ids) == len(delta.logprobs) == len(delta.raw_logprobs)
        self.token_ids += delta.token_ids.tolist()
        self.logprobs += delta.logprobs.tolist()
        self.raw_logprobs += delta.raw_logprobs.tolist()
        if delta.drawn_logprobs is not None:
            self.drawn_logprobs += delta.drawn_logprobs.tolist()
        if delta.top_ids is not None:
            assert delta.top_ids.shape == delta.top_logprobs.shape and len(delta.top_ids) == len(delta.token_ids)
            self.top_ids += delta.top_ids.tolist()
            self.top_logprobs += delta.top_logprobs.tolist()
        if delta.prompt_logprobs is not None:
            assert self.deltas == 0, "with the first delta"
            self.prompt_logprobs, self.prompt_tops = delta.prompt_logprobs, delta.prompt_tops
        if delta.routing is not None:
            self.routing.append(delta.routing)
        for version, count in delta.versions:
            self.versions += [version] * count
        assert len(self.versions) == len(self.token_ids)
        self.finish, self.seed = delta.finish, delta.seed
        assert delta.recomputed[: len(self.recomputed)] == self.recomputed
        self.recomputed = delta.recomputed
        assert delta.kv_versions[: len(self.kv_versions)] == self.kv_versions
        self.kv_versions = delta.kv_versions
        self.deltas += 1


class Observer(StepFeature, DeviceFeature[None]):
    """Calls functions of a test at each launch and each commit, as one more feature of the engine."""

    name = "observer"

    def __init__(self, engine: Callable[[], Engine]) -> None:
        self.at_launch: list[Callable[[Plan], object]] = []  # the step is packed
        self.at_commit: list[Callable[[StepInFlight, StepOutput], object]] = []  # its tokens are not taken yet
        self._engine = engine

    def host_part(self, engine: HostParts, before: StepFeature | None) -> "Observer":
        return self

    def pack(self, plan: Plan, staging: UploadStaging) -> None:
        for seen in self.at_launch:
            seen(plan)

    def commit(self, plan: Plan, output: StepOutput) -> None:
        step = self._engine().pipeline.oldest()
        assert step.plan is plan
        for seen in self.at_commit:
            seen(step, output)


class Bench:
    """An engine with its events collected. `tests/engine/conftest.py` closes those that a test leaves open."""

    opened: ClassVar[list["Bench"] | None] = None  # those of the test that runs

    def __init__(
        self,
        model: Decoder,
        device: Device | None = None,
        receiver=None,
        max_queue: int = 4096,
        features: Sequence[MakeFeature] = FEATURES,
        clock: Callable[[], float] = time.perf_counter,
        **engine: object,
    ) -> None:
        # A thread that makes masks may wait for a core longer than the usual second.
        defaults: dict = {"max_rows": 8, "page_size": 4, "kv_pages": 256, "prefill_chunk_tokens": 64, "mask_s": 200.0}
        self.settings = Settings(
            engine=settings_of(EngineSettings, **{**defaults, **engine}), service=ServiceSettings(max_queue=max_queue)
        )
        self.events: list[Event] = []
        self.device = device or CpuDevice()
        self.links = local_links(self.settings, self.emit, receiver)
        memory = sleeping_memory(self.settings, self.device, model, StrictPages)
        self.observer = Observer(lambda: self.engine)
        features = (*features, lambda site: self.observer)
        self.engine: Engine = build_engine(
            self.settings, self.device, model, self.links, memory=memory, features=features, clock=clock
        )
        self.completions: dict[tuple[str, int], Completion] = defaultdict(Completion)
        self.done: dict[str, RequestDone] = {}
        if Bench.opened is not None:
            Bench.opened.append(self)

    def emit(self, events: list[Event]) -> None:
        self.events += events
        for event in events:
            if isinstance(event, Delta):
                self.completions[event.key[1], event.index].add(event)
            elif isinstance(event, RequestDone):
                self.done[event.key[1]] = event

    def submit(
        self, name: str, prompt: Iterable[int] | Prompt, max_tokens: int = 16, client: str = "c", **fields
    ) -> None:
        sampling = SamplingParams(**fields.pop("sampling", {"temperature": 0.0}))
        stop = StopParams(**fields.pop("stop", {}))
        if not isinstance(prompt, Prompt):
            prompt = Prompt.of_tokens(np.array(list(prompt), dtype=np.int32))
        self.engine.inbox.put(
            Submit(Request((client, name), prompt, max_tokens, sampling=sampling, stop=stop, **fields))
        )

    def run(self, ticks: int = 100_000) -> None:
        """Tick until nothing is left to do."""
        self.engine.tick()
        for _ in range(ticks):
            if not self.engine.busy and self.engine.inbox.empty():
                return
            self.engine.tick()
        raise AssertionError(f"the engine is still busy after {ticks} ticks")

    def complete(self, name: str, prompt: Iterable[int], max_tokens: int = 16, **fields) -> None:
        """Submit a request, and tick until nothing is left to do."""
        self.submit(name, prompt, max_tokens, **fields)
        self.run()

    def ticks(self, count: int) -> None:
        for _ in range(count):
            self.engine.tick()

    def tick_until(self, reached: Callable[[], object]) -> None:
        while not reached():
            self.engine.tick()

    def tick_while(self, lasts: Callable[[], object]) -> None:
        while lasts():
            self.engine.tick()

    def finish(self) -> Self:
        """Tick until nothing is left to do, then close."""
        self.run()
        self.close()
        return self

    def status(self) -> EngineStatus:
        return Inspector(self.engine).status()

    @property
    def drafting(self) -> DraftsFeature:
        """The feature of an engine with speculation."""
        drafting = find_feature(self.engine.roster.features, DraftsFeature)
        assert drafting is not None
        return drafting

    @property
    def drafts(self) -> DraftCounts:
        """The totals of drafts; zeros without speculation."""
        drafting = find_feature(self.engine.roster.features, DraftsFeature)
        return DraftCounts() if drafting is None else drafting.counts

    def tokens(self, name: str, index: int = 0) -> list[int]:
        return self.completions[name, index].token_ids

    def close(self, check: bool = True) -> None:
        if Bench.opened is not None and self in Bench.opened:
            Bench.opened.remove(self)
        if check:
            self.engine.check_integrity()
        self.engine.executor.close()


def load(
    folder: Path, device: str = "cpu", draft: Path | None = None, mtp: MTP = "unused", images: bool = False
) -> Decoder:
    settings = ModelSettings(path=str(folder), dtype="float32", device=device, images=images)
    return load_model(settings, torch.device(device), draft=draft, mtp=mtp).model


def watch_plans(bench: Bench) -> list[Plan]:
    """A list that gets every plan from now on."""
    plans: list[Plan] = []
    bench.observer.at_launch.append(plans.append)
    return plans


def watch_headers(bench: Bench) -> list[Header]:
    """A list that gets the header of every step from now on, when it is committed."""
    headers: list[Header] = []
    bench.observer.at_commit.append(lambda step, output: headers.append(step.header))
    return headers


def watch_prefills(bench: Bench) -> list[int]:
    """A list that gets the input tokens of every prefill step from now on."""
    sizes: list[int] = []
    bench.observer.at_launch.append(lambda plan: plan.kind == "prefill" and sizes.append(plan.tokens))
    return sizes


VOCAB = 97


def prompt_of(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
