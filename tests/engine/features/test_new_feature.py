"""A made-up feature: two classes and an entry in the list. The recipe is in docs/design/features.md."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, ClassVar, get_args, get_type_hints

import numpy as np
import pytest
import torch

from rollout.engine.build import rebuild_engine
from rollout.engine.device.streams import DeviceError
from rollout.engine.features.all import FEATURES, MakeFeature
from rollout.engine.kv.allocator import PageAllocator
from rollout.engine.messages.requests import OF_FEATURES
from rollout.engine.messages.to_service import DeltaFields, Rejected
from rollout.engine.schedule.plan import Plan
from rollout.engine.schedule.scheduler import Scheduler
from rollout.engine.schedule.step_feature import AheadPlanner, StepFeature, VariantFeature, find_feature
from rollout.engine.sequence.sequence import Group, Sequence
from rollout.engine.step.device_feature import (
    AheadFeature,
    BatchFields,
    Drawn,
    HostParts,
    LogitsFeature,
    Replays,
    Site,
)
from rollout.engine.step.row_state import LENGTH, RowState
from rollout.engine.upload import Header, StepInput, StepOutput, UploadStaging
from rollout.models.batch import KVCache
from tests.support.engine.faults import fail_a_step
from tests.support.engine.harness import Bench
from trainer_bridge.wire.request_fields import ENGINE_FIELDS, EngineArguments, EngineFields


class Margins(VariantFeature):
    """By how much each token's logit leads, of sequences whose prompt has an even number of tokens."""

    name = "margins"

    def __init__(self, total: int = 0) -> None:
        self.of: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.total = total
        self._open: set[Sequence] = set()
        self.entered: list[str] = []
        self.stages: Counter[str] = Counter()

    def enter(self, group: Group) -> None:
        self.entered.append(group.key[1])

    def admitted(self, seq: Sequence) -> None:
        self._open.add(seq)

    def left(self, seq: Sequence) -> None:
        self._open.discard(seq)

    def pack(self, plan: Plan, staging: UploadStaging) -> None:
        if wanted := [i for i, seq in enumerate(plan.sampled) if seq.prompt_len % 2 == 0]:
            staging.put("margins_at", np.array(wanted, dtype=np.int64))
            staging.facts[self.name] = [wanted]

    def launched(self, plan: Plan) -> None:
        self.stages["launched"] += 1

    def commit(self, plan: Plan, output: StepOutput) -> None:
        self.stages["commit"] += 1
        for place, margin in output.of(self.name, list) if self.name in output.of_features else ():
            seq = plan.sampled[place]
            if not (seq.finalized or seq.void):
                self.of[seq.group.key[1], seq.index].append(margin)
                self.total += 1

    def check(self) -> None:
        assert not self._open, "a sequence has not left"


class MarginTaker(LogitsFeature[torch.Tensor]):
    """Computes them where the logits are."""

    name = "margins"
    token_words = 2
    given: BatchFields = {}

    def __init__(self) -> None:
        self.begun = 0  # steps

    @classmethod
    def make(cls, site: Site) -> MarginTaker:
        return cls()

    def begin(self, rows: RowState, step: StepInput) -> None:
        self.begun += 1

    def prefill_fields(self, rows: RowState, step: StepInput, output: torch.Tensor) -> BatchFields:
        return self.given

    def host_part(self, engine: HostParts, before: StepFeature | None) -> Margins:
        return Margins(before.total if isinstance(before, Margins) else 0)

    def output_words(self, tokens: int) -> int:
        return tokens

    def output(self, words: torch.Tensor, rows: int, tokens: int) -> torch.Tensor:
        return words.view(torch.float32)

    def computed(self, step: StepInput, logits_SV: torch.Tensor, output: torch.Tensor) -> None:
        best = logits_SV.index_select(0, step["margins_at"]).topk(2, dim=1).values
        output[: len(best)] = best[:, 0] - best[:, 1]

    def read(self, words: np.ndarray, header: Header, output: torch.Tensor) -> list[tuple[int, float]]:
        (places,) = header.facts[self.name]
        return list(zip(places, words.view(np.float32)[: len(places)].tolist(), strict=True))


@pytest.mark.parametrize(
    ("pages", "features"), [(256, [*FEATURES, MarginTaker.make]), (40, [MarginTaker.make, *FEATURES[::-1]])]
)
def test_a_feature_of_two_classes_takes_part_in_every_stage(
    model: Any, prompt_of: Any, hf_models: Any, pages: int, features: Seq[MakeFeature]
) -> None:
    bench = Bench(model, kv_pages=pages, max_rows=6, prefill_chunk_tokens=8, features=features)
    margins = find_feature(bench.engine.roster.features, Margins)
    prompts = {f"r{i}": prompt_of(9 + i, i) for i in range(6)}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, 30, n=2, sampling={"temperature": 1.0, "seed": 3})
    bench.run()
    assert (bench.engine.roster.counters.preemptions > 0) == (pages == 40)
    assert sorted(margins.entered) == sorted(prompts)
    assert set(margins.of) == {(name, i) for name, prompt in prompts.items() for i in range(2) if len(prompt) % 2 == 0}
    for (name, index), found in margins.of.items():
        tokens = bench.tokens(name, index)
        logits = hf_models[0](torch.tensor([[*prompts[name], *tokens]])).logits[0, len(prompts[name]) - 1 : -1]
        best = logits.topk(2, dim=1).values
        np.testing.assert_allclose(found, (best[:, 0] - best[:, 1]).detach().numpy(), atol=1e-4)
    assert margins.total == 6 * 30
    taker = find_feature(bench.engine.executor.step.features, MarginTaker)
    assert set(margins.stages) == {"launched", "commit"}
    assert set(margins.stages.values()) == {taker.begun} and taker.begun > 30


def test_its_totals_go_on_after_a_fault(model: Any, prompt_of: Any) -> None:
    bench = Bench(model, features=[*FEATURES, MarginTaker.make])
    bench.submit("a", prompt_of(10), 60)
    bench.ticks(20)
    fail_a_step(bench)
    before = find_feature(bench.engine.roster.features, Margins)
    rebuild_engine(bench.engine, bench.settings)
    after = find_feature(bench.engine.roster.features, Margins)
    assert after is not before and after.total == before.total > 0
    bench.complete("b", prompt_of(10), 5)
    assert after.total == before.total + 5


class Asked(Margins):
    """Is called only for requests that ask for it, by a field that this worker has no other feature for."""

    name = "routing"
    in_every_step = False

    def admitted(self, seq: Sequence) -> None:
        """Called for all sequences, as for other variants of the weights."""

    def left(self, seq: Sequence) -> None:
        self.stages[f"{seq.group.key[1]} left"] += 1


class AskedTaker(MarginTaker):
    """Its part on the device."""

    name = "routing"

    def host_part(self, engine: HostParts, before: StepFeature | None) -> Asked:
        return Asked()


def test_a_feature_that_requests_ask_for_is_called_for_these_only(model: Any, prompt_of: Any) -> None:
    bench = Bench(model, features=[*FEATURES, AskedTaker.make])
    asked = find_feature(bench.engine.roster.features, Asked)
    bench.complete("alone", prompt_of(10), 5)
    assert not asked.entered and not asked.stages
    bench.submit("beside", prompt_of(10), 30)
    bench.submit("asks", prompt_of(12), 6, routing_from=0)
    bench.run()
    assert asked.entered == ["asks"]
    steps = {stage: asked.stages.pop(stage) for stage in ("launched", "commit")}
    assert all(6 <= count < 20 for count in steps.values()), steps
    assert asked.stages == {"asks left": 1}


class Claimant(MarginTaker):
    """Gives a field of a batch that a feature of the engine gives."""

    batch_fields = frozenset({"adapters"})


def test_two_features_that_give_the_same_field_of_a_batch_are_an_error_at_start(model: Any) -> None:
    features = [*FEATURES, Claimant.make]
    Bench(model, features=features)  # without adapters nobody else gives it
    with pytest.raises(ValueError, match="'adapters' and 'margins' both give 'adapters'"):
        Bench(model, features=features, adapter_slots=1, adapter_rank=8)


class Columned(MarginTaker):
    """Has a column of the row state, and so do adapters."""

    row_column = True


class Ahead(MarginTaker, AheadFeature[torch.Tensor]):
    """Makes tokens ahead of a row's draw, and so do drafts."""

    ended: ClassVar[Counter[int]] = Counter()  # steps by the tokens that they drew

    def begin_rows(self, rows: RowState) -> None:
        pass

    def decode_work(self, size: int, max_context: int, kv: KVCache) -> Mapping[str, Callable[[], None]]:
        return {}

    def step_ends(
        self, rows: RowState, step: StepInput, kv: KVCache, drawn: Drawn, output: torch.Tensor, replays: Replays
    ) -> None:
        assert (rows.ints[step["rows"][: step.header.rows], LENGTH] > 0).all()
        self.ended[step.header.draws] += 1


@pytest.mark.parametrize(
    ("kind", "beside", "message"),
    [
        (Columned, {"adapter_slots": 1, "adapter_rank": 8}, "only one feature .* adapters and margins do"),
        (Ahead, {"speculation": "ngram"}, "DraftVerifier and Ahead are both of class AheadFeature"),
    ],
)
def test_a_second_feature_of_which_there_is_one_at_most_is_an_error_at_start(
    model: Any, kind: type[MarginTaker], beside: dict[str, Any], message: str
) -> None:
    Bench(model, features=[*FEATURES, kind.make])
    with pytest.raises(ValueError, match=message):
        Bench(model, features=[*FEATURES, kind.make], **beside)


class PlansAhead(Margins, AheadPlanner):
    """A planner of drafts that has none."""

    kept = 0  # tokens

    def plan_decode(self, seqs: list[Sequence], version: int, allocator: PageAllocator, kept: int) -> None:
        return None

    def committed(self, plan: Plan, output: StepOutput, tokens: int, seconds: float) -> None:
        assert 0 <= tokens <= plan.draws and seconds >= 0
        self.kept += tokens


class PlansAheadTaker(Ahead):
    """Its part on the device."""

    def host_part(self, engine: HostParts, before: StepFeature | None) -> PlansAhead:
        return PlansAhead()


def test_a_feature_of_tokens_ahead_sees_the_end_of_each_step_and_its_kept_tokens(model: Any, prompt_of: Any) -> None:
    bench = Bench(model, features=[*FEATURES, PlansAheadTaker.make])
    Ahead.ended.clear()
    for index in range(3):
        bench.submit(f"r{index}", prompt_of(10 + index), 20)
    bench.run()
    planner = find_feature(bench.engine.roster.features, PlansAhead)
    assert planner.kept == 3 * 20 and planner.stages["commit"] == Ahead.ended.total()


def test_a_field_of_a_request_that_no_feature_takes_is_refused_by_its_name(model: Any, prompt_of: Any) -> None:
    taken: dict[str, Any] = {"logprobs": 1, "prompt_logprobs": True}
    untaken: dict[str, Any] = {"adapter": "a", "routing_from": 0}
    assert taken.keys() | untaken.keys() == {entry.name for entry in OF_FEATURES}
    bench = Bench(model)
    for name, value in {**taken, **untaken}.items():
        bench.submit(name, prompt_of(10), 2, **{name: value})
    bench.run()
    assert {event.field for event in bench.events if isinstance(event, Rejected)} == untaken.keys()
    assert bench.done.keys() == taken.keys()


def test_a_scheduler_takes_one_planner_of_tokens_ahead(model: Any, prompt_of: Any) -> None:
    bench = Bench(model)
    roster = bench.engine.roster
    roster.features = [PlansAhead()]
    Scheduler(bench.engine.scheduler.limits, roster)
    roster.features = [PlansAhead(), PlansAhead()]
    with pytest.raises(ValueError, match="PlansAhead and PlansAhead are both of class AheadPlanner"):
        Scheduler(bench.engine.scheduler.limits, roster)


class Undeclared(MarginTaker):
    """Gives a field of a batch that it does not declare."""

    given: BatchFields = {"own_chunks": (0,)}


def test_a_field_of_a_batch_that_is_not_declared_is_an_error(model: Any, prompt_of: Any) -> None:
    bench = Bench(model, features=[*FEATURES, Undeclared.make])
    bench.submit("a", prompt_of(10), 4)
    with pytest.raises(DeviceError, match="margins"):
        bench.ticks(3)
    bench.close(check=False)


class TopsAgain(Margins):
    """Gives a field of another feature."""

    def delta_fields(self, seq: Sequence) -> DeltaFields:
        return {"top_ids": np.zeros(0, np.int32)}


class TopsAgainTaker(MarginTaker):
    """Its part on the device."""

    def host_part(self, engine: HostParts, before: StepFeature | None) -> Margins:
        return TopsAgain()


def test_two_features_that_give_the_same_field_of_a_delta_are_an_error(model: Any, prompt_of: Any) -> None:
    bench = Bench(model, features=[*FEATURES, TopsAgainTaker.make])
    bench.submit("tops", prompt_of(10), 2, logprobs=1)
    with pytest.raises(AssertionError, match="margins"):
        bench.run()
    bench.close(check=False)


def test_a_made_up_field_goes_from_the_client_to_its_feature_and_back_by_its_entry_alone(folders: Any) -> None:
    """In a process of its own, which adds the entry before anything is made from the table."""
    command = [sys.executable, "-m", "tests.support.engine.made_up_field", str(folders[0])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["range", "needs", "lacks", "feature"]


def test_type_checkers_see_exactly_the_fields_of_the_table() -> None:
    kinds, seen = get_type_hints(EngineFields), get_type_hints(EngineArguments)
    assert list(seen) == [entry.name for entry in ENGINE_FIELDS]
    for name, kind in seen.items():  # None stands for an absent argument
        assert {*get_args(kinds[name]), kinds[name]} & {*get_args(kind), kind}, name
