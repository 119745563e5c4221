"""What holds for drafts of the host and of a draft model, of a model with attention and of one with states."""

import random
import threading
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import pytest
import torch

from rollout.engine.messages.to_engine import Cancel, StopAt
from rollout.models.decoder import Decoder
from tests.engine.features.drafts.test_heads import HEADS, completions_by_seed
from tests.engine.features.drafts.test_speculation import (
    BAD,
    SAMPLED,
    FragileCycle,
    adapted,
    assert_same,
    recorded,
    submit_constrained,
    submit_free,
    submit_six,
)
from tests.engine.test_invariants import run_watched
from tests.support.engine.constraints import SIZE, Cycle, X, Y, only_hangs_are_late
from tests.support.engine.drafting import drafting, replayed_drafts
from tests.support.engine.harness import Bench, load, prompt_of
from tests.support.engine.offloading import PAGE
from tests.support.engine.replay import replayed
from tests.support.engine.updates import Mailbox, Update, swap_in_the_middle
from tests.support.kernels.grids import checkered, nightly
from tests.support.models.draft_heads import head_config, random_head, save_head


class Way:
    """A model, and what drafts for it."""

    def __init__(self, folders: list[Path], hf_models: list, draft: Path | None = None) -> None:
        self.folders, self.hf_models, self.draft = folders, hf_models, draft

    def load(self) -> Decoder:
        return load(self.folders[0], draft=self.draft)

    def plain(self, submit: Callable[[Bench], object], **fields) -> Bench:
        """An engine that has run this without drafts."""
        bench = Bench(self.load(), **fields)
        submit(bench)
        return bench.finish()

    @cached_property
    def six(self) -> Bench:
        return self.plain(submit_six, kv_pages=600)

    @cached_property
    def constrained(self) -> Bench:
        return self.plain(submit_constrained)

    def drafting(self, plain: Bench, wrong: float, seed: int = 0, ragged: bool = False, **fields) -> Bench:
        """An engine that drafts what another one has drawn, each token wrong with this probability."""
        if self.draft is None:
            return drafting(self.load(), recorded(plain.completions), wrong, seed, ragged, **fields)[0]
        replayed = replayed_drafts(completions_by_seed(plain), wrong, seed)
        return Bench(self.load(), **{**HEADS, **replayed, **fields})


@pytest.fixture(scope="module")
def way(request, folders, hf_models, tmp_path_factory) -> Way:
    if request.param == "states":
        made = request.getfixturevalue("hybrid")
        return Way(*map(list, zip(*(made(seed=seed) for seed in (0, 1)), strict=True)))
    if request.param == "host":
        return Way(folders, hf_models)
    config = head_config(hf_models[0].config)
    return Way(folders, hf_models, save_head(tmp_path_factory.mktemp("head"), config, random_head(config)))


every_way = pytest.mark.parametrize("way", ["host", "heads", "states"], indirect=True)
with_attention = pytest.mark.parametrize("way", ["host", "heads"], indirect=True)


# --- pages run short, weights change, requests end ---


@pytest.mark.parametrize(("way", "kept"), checkered(["host", "heads", "states"], [0, 1]), indirect=["way"])
def test_preempted_rows_come_back_as_they_were(way, kept):
    host, wrong = [(True, 0.4), (False, 0.0)][kept]
    spec = way.load().spec
    nbytes = max(512 * PAGE * spec.kv_bytes_per_token(torch.float32), 16 * spec.state_bytes(torch.float32))
    fields = {"kv_pages": 40, "page_size": PAGE, "host_kv_gib": host * nbytes / 2**30}
    bench = way.drafting(way.six, wrong, ragged=host, **fields)
    submit_six(bench)
    run_watched(bench)
    assert bench.engine.roster.counters.preemptions > 0 and bench.drafts.accepted > 100
    assert not host or bench.status().offload.restored > 0
    assert_same(bench, way.six)


@pytest.mark.parametrize(
    ("way", "kv_on_swap"), checkered(["host", "heads", "states"], ["recompute", "keep"]), indirect=["way"]
)
@pytest.mark.parametrize("seed", [0, *nightly(1, 2)])
def test_a_swap_between_verify_steps(way, kv_on_swap, seed):
    """Each token is the one that its version of the weights draws, over the KV that the completion says it has."""
    prompts = [[token % 83 for token in prompt_of(8 + i, i)] for i in range(3)]

    def submit(bench: Bench) -> None:
        for i, prompt in enumerate(prompts):
            bench.submit(f"r{i}", prompt, 50, sampling={"temperature": 0.0, "seed": i})

    mailbox = Mailbox()
    fields = {"receiver": mailbox, "kv_on_swap": kv_on_swap, "recompute_fraction": 1.0}
    bench = way.drafting(way.plain(submit), 0.3, seed, **fields)
    submit(bench)
    swap_in_the_middle(bench, mailbox, Update(1, load(way.folders[1]), bench.engine.executor.step.model), 6 + seed)
    assert bench.drafts.accepted > 5
    for i, prompt in enumerate(prompts):
        done = bench.completions[f"r{i}", 0]
        assert set(done.versions) == {0, 1} and done.versions == sorted(done.versions)
        assert bool(done.recomputed) == (kv_on_swap == "recompute")
        assert done.token_ids == replayed(way.hf_models, prompt, done)


@every_way
@pytest.mark.parametrize("seed", [0, *nightly(1)])
def test_cancels_and_stop_strings_amid_drafts_leave_nothing_behind(way, seed):
    bench, rng = way.drafting(way.six, 0.2, seed, kv_pages=60), random.Random(seed)
    submit_six(bench)
    for i in range(6):
        bench.ticks(rng.randint(1, 6))
        key = ("c", f"r{i}")
        bench.engine.inbox.put(Cancel(key) if i % 2 else StopAt(key, 0, 3, "end"))
    run_watched(bench)
    for (name, index), completion in bench.completions.items():
        assert completion.token_ids == way.six.tokens(name, index)[: len(completion.token_ids)]


# --- constraints ---


@with_attention
@pytest.mark.parametrize(
    ("wrong", "ragged", "depth"), [(0.0, False, 2), (0.3, True, 2), *nightly((0.2, True, 1), (1.0, False, 2))]
)
def test_rows_with_a_constraint_draft_too(way, wrong, ragged, depth):
    """Wrong drafts, and those that no mask allows, are refused."""
    plain = way.constrained
    bench = way.drafting(plain, wrong, depth, ragged, speculation_tokens=4, pipeline_depth=depth)
    submit_constrained(bench)
    run_watched(bench)
    assert_same(bench, plain)
    drafts = bench.drafts
    assert drafts.accepted == 0 if wrong == 1.0 else drafts.accepted > 60
    assert not wrong or drafts.accepted < drafts.drafted
    assert {completion.finish.reason for completion in plain.completions.values()} == {"stop", "length"}


@with_attention
def test_drafts_of_constrained_rows_save_steps(way):
    def submit(bench: Bench) -> None:
        bench.submit("a", prompt_of(9), 61, sampling=SAMPLED, constraint=Cycle([X, Y, SIZE]))

    plain = way.plain(submit)
    bench = way.drafting(plain, 0.0, speculation_tokens=3)
    submit(bench)
    bench.run()
    assert bench.tokens("a") == plain.tokens("a")
    assert bench.engine.roster.counters.decode_rows == 15 and plain.engine.roster.counters.decode_rows == 60


@with_attention
@pytest.mark.parametrize("how", ["raise", "hang", *nightly("nothing")])
def test_a_constraint_that_fails_along_drafts_changes_no_completion(way, how):
    """Paths lead to where the constraint breaks. A row that does not go there goes on; one that does, ends there."""
    fields = {"mask_s": 0.4} if how == "hang" else {}

    def run(bench: Bench, how: str) -> Bench:
        only_hangs_are_late(bench)
        constraint = FragileCycle(how)
        timer = threading.Timer(100, constraint.let_go.set)
        timer.start()
        for i in range(1 if how == "hang" else 4):
            bench.submit(f"r{i}", prompt_of(9, i), 60, sampling={**SAMPLED, "seed": i}, constraint=constraint)
        bench.run()
        timer.cancel()
        constraint.let_go.set()
        return bench

    paths = run(Bench(way.load(), **fields), "")
    for completion in paths.completions.values():
        completion.token_ids[6::2] = [BAD] * len(completion.token_ids[6::2])
    plain = run(Bench(way.load(), **fields), how)
    bench = run(way.drafting(paths, 0.0, **fields), how)
    assert_same(bench, plain)
    assert any(completion.finish.reason == "error" for completion in plain.completions.values())
    assert all(len(completion.token_ids) > 6 for completion in plain.completions.values())
    drafts = bench.drafts
    assert drafts.drafted > drafts.accepted > 0


# --- adapters, and everything at once ---


@with_attention
@pytest.mark.parametrize(("wrong", "ragged"), [(0.3, True), *nightly((0.0, False))])
def test_rows_with_adapters_and_turns_of_known_prompts_draft_too(way, adapters, wrong, ragged):
    slots = {"adapter_slots": 2, "adapter_rank": 16, "max_rows": 16}
    plain = adapted(Bench(way.load(), **slots), adapters)
    plain.run()
    bench = adapted(way.drafting(plain, wrong, ragged=ragged, **slots), adapters)
    run_watched(bench)
    assert_same(bench, plain)
    assert bench.drafts.accepted > 100
    assert len({tuple(bench.tokens(f"r{i}")) for i in (0, 1, 2)}) == 3, "adapters and the model say other things"
    for each in (plain, bench):
        submit_free(each)  # the prefix cache holds KV of the first ones
        each.complete("again", prompt_of(9, 20) + each.tokens("stops", 0), 12, sampling=SAMPLED)
    assert_same(bench, plain)
