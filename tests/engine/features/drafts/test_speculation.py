"""Completions with drafts are the completions without, whatever was drafted and however much of it was accepted."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from rollout.engine.inspect import Inspector
from rollout.engine.messages.to_engine import PutAdapter
from rollout.engine.messages.to_service import Delta
from rollout.metrics.definitions import DRAFT_AGES
from tests.engine.test_invariants import run_watched
from tests.support.engine.adapted import bench_of, versions_of
from tests.support.engine.constraints import SIZE, Cycle, CyclePlace, X, Y
from tests.support.engine.conversation import Conversation
from tests.support.engine.drafting import drafting, fixed_costs, row_by_row
from tests.support.engine.harness import Bench, Completion, load, prompt_of, watch_headers, watch_plans
from tests.support.engine.routing import assert_routed, routing_of
from tests.support.engine.updates import Mailbox, Update, swap_in_the_middle
from tests.support.kernels.grids import nightly
from tests.support.models.families import make_checkpoint

SAMPLED = {"temperature": 1.0, "seed": 7}
RULES = [
    SAMPLED,
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"temperature": 1.0, "seed": 5, "logit_bias": ((5, 3.0), (9, -4.0))},
]


def submit_free(bench: Bench, stop: int = 31) -> None:
    """Groups, all kinds of sampling, stops and tops."""
    for i, sampling in enumerate(RULES):
        bench.submit(f"rules{i}", prompt_of(5 + 3 * i, i), 18 + i, sampling=sampling, n=1 + i % 2)
    bench.submit("stops", prompt_of(9, 20), 60, sampling=SAMPLED, stop={"token_ids": (stop, 32), "min_tokens": 6}, n=3)
    bench.submit("tops", prompt_of(6, 21), 15, sampling=SAMPLED, logprobs=3, stream_every=2)
    bench.submit("one", prompt_of(6, 22), 1, sampling=SAMPLED)
    bench.submit("two", prompt_of(6, 22), 2, sampling=SAMPLED)


def submit_all(bench: Bench) -> None:
    """The same, and a constraint."""
    submit_free(bench)
    bench.submit("cycle", prompt_of(8, 23), 12, sampling=SAMPLED, constraint=Cycle([X, Y, SIZE]))


def recorded(completions: dict[tuple[str, int], Completion]) -> dict[tuple[str, int], list[int]]:
    return {key: completion.token_ids for key, completion in completions.items()}


def assert_same(mine: Bench, theirs: Bench, exact: bool = False) -> None:
    assert mine.completions.keys() == theirs.completions.keys()
    for key, one in mine.completions.items():
        other = theirs.completions[key]
        assert one.token_ids == other.token_ids, key
        assert (one.finish.reason, one.finish.stop) == (other.finish.reason, other.finish.stop), key
        assert one.versions == other.versions
        for name in ("logprobs", "raw_logprobs", "drawn_logprobs", "top_logprobs"):
            ours, expected = np.array(getattr(one, name)), np.array(getattr(other, name))
            np.testing.assert_allclose(ours, expected, rtol=0, atol=0 if exact else 1e-4, err_msg=f"{key} {name}")
        assert one.top_ids == other.top_ids


@pytest.fixture(scope="module")
def plain(folders) -> Bench:
    bench = Bench(load(folders[0]))
    submit_all(bench)
    return bench.finish()


@pytest.mark.parametrize(
    ("wrong", "ragged", "depth"),
    [(0.0, False, 2), (1.0, False, 2), (0.3, True, 1), (0.1, True, 2)],
)
def test_any_drafts_give_the_same_completions(model, plain, wrong, ragged, depth):
    fields = {"speculation_tokens": 3 if ragged else 5, "pipeline_depth": depth}
    bench, drafter = drafting(model, recorded(plain.completions), wrong, depth, ragged, **fields)
    submit_all(bench)
    run_watched(bench)
    bench.close()
    assert_same(bench, plain)
    counters = bench.engine.roster.counters
    drafts = bench.drafts
    kept = sum(len(completion.token_ids) for completion in bench.completions.values())
    assert counters.tokens == kept, "tokens after a stop are no tokens"
    assert drafts.drafted > 50
    assert drafts.accepted == 0 if wrong == 1.0 else drafts.accepted > 20


def test_with_rows_computed_one_by_one_all_bits_are_equal(model, monkeypatch):
    row_by_row(monkeypatch)
    plain = Bench(model, max_rows=32)
    submit_free(plain)
    plain.finish()
    bench, _ = drafting(model, recorded(plain.completions), 0.2, ragged=True, max_rows=32)
    submit_free(bench)
    bench.finish()
    assert bench.drafts.accepted > 20
    assert_same(bench, plain, exact=True)


@pytest.mark.parametrize("depth", [1, 2])
def test_right_drafts_make_as_few_steps_as_they_can(model, depth):
    plain = Bench(model)
    plain.complete("a", prompt_of(9), 101, sampling=SAMPLED)
    fields = {"speculation_tokens": 4, "pipeline_depth": depth}
    bench, drafter = drafting(model, recorded(plain.completions), 0.0, **fields)
    bench.complete("a", prompt_of(9), 101, sampling=SAMPLED)
    assert bench.tokens("a") == plain.tokens("a")
    Inspector(bench.engine).set_gauges()
    report = bench.engine.meter.report()
    assert report["speculation/drafted"] == report["speculation/accepted"] == 80
    assert report["speculation/tokens_a_step"] == 5
    assert bench.engine.roster.counters.decode_rows == 20 and plain.engine.roster.counters.decode_rows == 100
    bench.complete("b", prompt_of(3), 2)
    assert drafter.ends == [("a", 0)], "told with the next plan"
    assert drafter.told["a", 0] == 101, "its last tokens, too"


@pytest.mark.parametrize("most", [1, 3, 5])
def test_a_step_has_no_more_drafts_than_it_may(model, six, most):
    """Also with more rows than that."""
    bench, _ = drafting(model, recorded(six.completions), 0.2, speculation_rows=most, kv_pages=600)
    plans = watch_plans(bench)
    submit_six(bench)
    bench.finish()
    assert_same(bench, six)
    assert max(sum(draft.length for draft in plan.ahead) for plan in plans) == most


def test_drafts_leave_a_free_page_for_each_running_row(model, six):
    bench, _ = drafting(model, recorded(six.completions), 0.9, speculation_tokens=16, kv_pages=80)
    choose, short = bench.drafting.plan_decode, 0

    def watch(seqs, version, allocator, kept):
        nonlocal short
        pool, roster = allocator.pool, bench.engine.roster
        rows = len(roster.decoding) + len(roster.prefilling)
        before, choice = pool.available, choose(seqs, version, allocator, kept)
        assert pool.available >= min(before, rows)
        short += pool.available == rows < before
        return choice

    bench.drafting.plan_decode = watch
    submit_six(bench)
    bench.finish()
    assert_same(bench, six)
    assert short, "they took all that they may"


def test_two_slots_stay_full_with_drafts(model):
    plain = Bench(model)
    plain.complete("a", prompt_of(9), 60, sampling=SAMPLED)
    bench, _ = drafting(model, recorded(plain.completions), 0.2)
    bench.submit("a", prompt_of(9), 60, sampling=SAMPLED)
    assert run_watched(bench).most == 2
    assert bench.tokens("a") == plain.tokens("a")


def test_a_step_without_drafts_is_a_plain_step(model, plain):
    """A drafter without paths leaves nothing in plans and uploads."""
    bench, drafter = drafting(model, {}, 0.0, speculation_rows=8)
    drafter.path = lambda *_: []
    headers = watch_headers(bench)
    submit_all(bench)
    bench.run()
    assert_same(bench, plain, exact=True)
    assert not any({"drafts", "pages", "verified", "paths"} & header.sections.keys() for header in headers)


def test_refused_drafts_leave_no_kv_that_others_find(model, plain):
    bench, _ = drafting(model, recorded(plain.completions), 0.5)
    again = Bench(model, prefix_cache=False)
    for each in (bench, again):
        submit_all(each)
        each.run()
        for name in ("stops", "tops", "rules0"):
            each.submit(f"{name} on", prompt_of(9, 20) + plain.tokens(name, 0), 12, sampling=SAMPLED)
        each.finish()
    assert bench.done["stops on"].cached_tokens > 8
    assert_same(bench, again)


def test_turns_of_a_session_go_on_after_drafts(model):
    plain = Conversation(Bench(model, prefix_cache=False), "s", prompt_of, session=False)
    said = [plain.say(new, 14) for new in (11, 5, 3)]
    answers = {(f"s{turn}", 0): tokens for turn, tokens in enumerate(said, 1)}
    for wrong in (0.0, 0.5, 1.0):
        bench, _ = drafting(model, answers, wrong)
        talk = Conversation(bench, "s", prompt_of)
        assert [talk.say(new, 14) for new in (11, 5, 3)] == said
        assert talk.reused >= len(talk.said) - 14 - 4
        bench.close()


# --- pages run short, weights change, requests end ---


def submit_six(bench: Bench) -> None:
    for i in range(6):
        prompt = [token % 83 for token in prompt_of(10, i)]  # as other models have fewer tokens
        bench.submit(f"r{i}", prompt, 60, sampling={"temperature": 1.0, "seed": i})


@pytest.fixture(scope="module")
def six(folders) -> Bench:
    bench = Bench(load(folders[0]), kv_pages=600)
    submit_six(bench)
    return bench.finish()


def test_a_completion_that_may_span_no_version_ends_whole(model, folders, six):
    mailbox = Mailbox()
    bench, _ = drafting(model, recorded(six.completions), 0.0, receiver=mailbox)
    prompt = [token % 83 for token in prompt_of(10, 0)]
    bench.submit("r0", prompt, 60, sampling={"temperature": 1.0, "seed": 0}, max_version_span=0)
    swap_in_the_middle(bench, mailbox, Update(1, load(folders[1]), model), 5)
    bench.close()
    done = bench.completions["r0", 0]
    assert done.finish.reason == "stale" and set(done.versions) == {0}
    assert bench.engine.roster.counters.tokens == len(done.token_ids), "the accepted drafts after it are dropped"
    assert done.token_ids == six.tokens("r0")[: len(done.token_ids)]


# --- constraints ---

STOP = 5


BAD = X[3]


class Fragile(CyclePlace):
    """Fails or hangs at `BAD` after some tokens; or allows nothing after it."""

    def __init__(self, cycle: FragileCycle) -> None:
        super().__init__(cycle)
        self.cycle, self.said, self.hangs = cycle, [], False

    def at_bad(self, how: str, said: list[int]) -> bool:
        return self.cycle.how == how and len(said) > 4 and said[-1] == BAD

    def accept(self, token: int) -> bool:
        self.said.append(token)
        if self.at_bad("raise", self.said):
            raise RuntimeError("it breaks here")
        return super().accept(token)

    def fill(self, masks_RW, row: int) -> None:
        super().fill(masks_RW, row)
        if self.at_bad("hang", self.said):
            self.hangs = True
            self.cycle.let_go.wait()
        if self.at_bad("nothing", self.said):
            masks_RW[row] = 0

    def undo(self, tokens: int) -> None:
        super().undo(tokens)
        del self.said[len(self.said) - tokens :]


class FragileCycle(Cycle):
    def __init__(self, how: str) -> None:
        super().__init__([X, Y])
        self.how, self.let_go = how, threading.Event()

    def start(self) -> Fragile:
        return Fragile(self)


def submit_constrained(bench: Bench) -> None:
    for i in range(6):
        fields = {"stop": {"token_ids": (STOP,)}, "constraint": Cycle([X, Y, SIZE], STOP)} if i % 3 else {}
        bench.submit(f"r{i}", prompt_of(9, i), 40, sampling={**RULES[i % len(RULES)], "seed": i}, **fields)


# --- adapters ---


def adapted(bench: Bench, adapters, count: int = 2) -> Bench:
    for i in range(count):
        bench.engine.inbox.put(PutAdapter(f"a{i}", adapters[i][0], token=i))
    for i in range(6):
        adapter = None if i % 3 == 2 else f"a{i % 3}"
        fields = {"sampling": RULES[i % len(RULES)], "adapter": adapter, "n": 1 + i % 2}
        bench.submit(f"r{i}", prompt_of(9, i // 3), 40, **fields)
    return bench


@pytest.mark.parametrize("seed", [0, *nightly(*range(1, 6))])
def test_a_newer_adapter_is_stamped_at_its_first_token(model, adapters, seed):
    """With drafts in flight it is not known which one that is when the adapter changes."""
    slots = {"adapter_slots": 2, "adapter_rank": 16}
    old = bench_of(model, adapters, 1)
    old.complete("r", prompt_of(10), 60, adapter="a0")
    rng = random.Random(seed)
    bench, _ = drafting(model, recorded(old.completions), 0.3, seed, **slots)
    bench.engine.inbox.put(PutAdapter("a0", adapters[0][0]))
    bench.submit("r", prompt_of(10), 60, stream_every=1, adapter="a0")
    changes = 0
    while bench.engine.busy or not bench.engine.inbox.empty():
        if changes < 2 and len(bench.tokens("r")) > rng.randint(3, 12) + 20 * changes:
            changes += 1
            bench.engine.inbox.put(PutAdapter("a0", adapters[changes][0], version=changes))
        bench.engine.tick()
    bench.close()
    got, versions = bench.tokens("r"), versions_of(bench, "r")
    assert set(versions) == {0, 1, 2} and versions == sorted(versions)
    first, second = versions.index(1), versions.index(2)
    assert got[:first] == old.tokens("r")[:first]
    # KV of tokens before a change is kept: what was drawn after it is what an engine without drafts draws.
    steps, plain = [first, second], bench_of(model, adapters, 1, pipeline_depth=1)
    plain.submit("r", prompt_of(10), 60, stream_every=1, adapter="a0")
    plain.engine.tick()
    while plain.engine.busy:
        if steps and len(plain.tokens("r")) == steps[0]:
            at = 3 - len(steps)
            plain.engine.inbox.put(PutAdapter("a0", adapters[at][0], version=at))
            steps.pop(0)
        plain.engine.tick()
    assert versions_of(plain, "r") == versions and plain.tokens("r") == got
    marks = [event.adapter_versions for event in bench.events if isinstance(event, Delta)]
    assert all(later[: len(mark)] == mark for mark, later in zip(marks, marks[1:], strict=False)), "told marks stay"


# --- everything at once ---


# --- experts ---


def test_the_experts_of_accepted_tokens_are_told(tmp_path):
    hf_model = make_checkpoint("qwen3_moe", tmp_path, 0)
    model, prompt = load(tmp_path), prompt_of(11)
    plain = Bench(model, routing=True)
    plain.complete("a", prompt, 40, sampling=SAMPLED, routing_from=0, stream_every=3)
    for wrong in (0.0, 0.5):
        bench, _ = drafting(model, recorded(plain.completions), wrong, routing=True)
        bench.complete("a", prompt, 40, sampling=SAMPLED, routing_from=0, stream_every=3)
        bench.close()
        assert bench.tokens("a") == plain.tokens("a")
        assert bench.completions["a", 0].deltas == plain.completions["a", 0].deltas
        assert bench.drafts.accepted > 5
        assert_routed(hf_model, prompt, bench.tokens("a"), routing_of(bench, "a"), 0)


# --- the drafter of the product ---


@pytest.mark.parametrize("kept_tokens", [1_000_000, 0])
def test_the_suffix_drafter_speeds_a_second_epoch_up(model, six, kept_tokens):
    bench = Bench(model, kv_pages=600, speculation="suffix", speculation_kept_tokens=kept_tokens)
    steps = []
    for epoch in range(2):
        submit_six(bench)
        bench.run()
        counters = bench.engine.roster.counters
        steps.append(counters.decode_rows - sum(steps))
        for i in range(6):
            assert bench.completions.pop((f"r{i}", 0)).token_ids == six.tokens(f"r{i}"), epoch
    assert steps[1] < steps[0] / 2 if kept_tokens else steps[1] > 0.9 * steps[0]


@pytest.mark.parametrize(("version", "name"), [(0, "0"), (1, "1"), (3, "2_to_4"), (40, "5_up")])
def test_acceptance_is_told_by_the_age_of_what_is_drafted_from(model, folders, version, name):
    """A second epoch under other weights, whose number says how old the texts of the first are."""
    mailbox = Mailbox()
    bench = Bench(load(folders[0]), kv_pages=600, speculation="suffix", receiver=mailbox)
    submit_six(bench)
    bench.run()
    bench.completions.clear()
    before = list(bench.drafts.by_age)
    if version:
        mailbox.ready = Update(version, load(folders[0]), bench.engine.executor.step.model)
        bench.run()
    submit_six(bench)
    bench.finish()
    drafts = bench.drafts
    assert sum(drafted for drafted, _ in drafts.by_age) <= drafts.drafted
    which = list(DRAFT_AGES).index(name)
    drafted, accepted = (now - was for now, was in zip(drafts.by_age[which], before[which], strict=True))
    assert accepted > 200 and accepted / drafted > 0.8, (drafts.by_age, bench.completions["r0", 0].versions)
    Inspector(bench.engine).set_gauges()
    report = bench.engine.meter.report()
    assert report[f"speculation/accepted_pct/age_{name}"] > (50 if version == 0 else 80)
    assert report["speculation/accepted_older_pct"] > 80 if version else "accepted_older" not in f"{report}"


# --- what is told ---


def test_acceptance_and_time_saved_are_what_was_counted(model, six):
    bench, _ = drafting(model, recorded(six.completions), 0.4, **fixed_costs(), kv_pages=600)
    submit_six(bench)
    bench.finish()
    counters = bench.engine.roster.counters
    drafts = bench.drafts
    assert 0 < drafts.accepted < drafts.drafted
    drafted, accepted = drafts.by_drafter["suffix"]
    assert (drafted, accepted) == (drafts.drafted, drafts.accepted)
    assert 1 / 6 <= drafts.expected_saved_s / accepted <= 1 / 3, "steps of 1 s and six rows, fewer at the end"
    assert drafts.saved_s > drafts.expected_saved_s, "these steps take less than 1 s"
    Inspector(bench.engine).set_gauges()
    report = bench.engine.meter.report()
    assert report["speculation/saved_s"] == drafts.saved_s
    assert report["speculation/expected_saved_s"] == drafts.expected_saved_s
    for name in ("accepted_pct", "accepted_pct/by_suffix"):
        assert report[f"speculation/{name}"] == pytest.approx(100 * accepted / drafted)
    assert report["speculation/tokens_a_step"] == pytest.approx(1 + accepted / counters.decode_rows)
    assert "speculation/accepted_pct/by_heads" not in report, "no head drafted"


# --- only where it pays ---


@pytest.mark.parametrize(
    ("wrong", "costs", "drafts"),
    [(0.0, {1: 1.0, 72: 1.0}, True), (1.0, {1: 1.0, 72: 1.5}, False), (0.0, {1: 1.0, 72: 72.0}, False)],
)
def test_auto_drafts_while_it_pays(model, six, wrong, costs, drafts):
    fields = {**fixed_costs(costs), "kv_pages": 600, "speculation": "auto"}
    bench, _ = drafting(model, recorded(six.completions), wrong, **fields)
    submit_six(bench)
    run_watched(bench)
    assert_same(bench, six)
    if drafts:
        assert bench.drafts.accepted > 200 and bench.drafts.expected_saved_s > 0
    else:
        assert bench.drafts.drafted < 150


def test_auto_measures_the_device_and_leaves_nothing_behind(model, six):
    bench = Bench(model, kv_pages=600, speculation="auto")
    for _ in range(2):
        submit_six(bench)
        bench.run()
        for i in range(6):
            assert bench.completions.pop((f"r{i}", 0)).token_ids == six.tokens(f"r{i}")
