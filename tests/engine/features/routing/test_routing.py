"""Experts that tokens took, as the engine tells them: transformers' own, whatever the scheduler does."""

import functools

import numpy as np
import pytest
import torch

from rollout.constraints.matcher import ANYTHING, AllowList
from rollout.engine.build import rebuild_engine
from rollout.engine.features.all import FEATURES
from rollout.engine.features.routing.feature import RoutingFeature
from rollout.engine.features.scores.feature import ScoresFeature
from rollout.engine.kv.pool import DUMP_PAGE
from rollout.engine.messages.requests import Prior
from rollout.engine.messages.to_engine import EndSession
from rollout.engine.schedule.completion_events import make_delta
from rollout.engine.schedule.step_feature import find_feature
from tests.support.engine.faults import fail_a_step
from tests.support.engine.harness import Bench, load
from tests.support.engine.harness import prompt_of as any_prompt
from tests.support.engine.routing import assert_routed, router_logits, routing_of
from tests.support.engine.streams import random_delays
from tests.support.engine.updates import Mailbox, Update
from tests.support.kernels.grids import nightly
from tests.support.models.families import make_checkpoint

SPARSE = ("qwen3_moe", "mixtral", "olmoe")

prompt_of = functools.partial(any_prompt, vocab=71)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """By family: folder and transformers' model; two of one shape for the first."""
    torch.set_num_threads(1)
    made = {}
    for family, seed in [*((family, 0) for family in SPARSE), ("qwen3_moe", 1)]:
        folder = tmp_path_factory.mktemp(f"{family}{seed}")
        made[family, seed] = folder, make_checkpoint(family, folder, seed)
    return made


@pytest.fixture(scope="module", params=["qwen3_moe", "olmoe", *nightly("mixtral")])
def family(request, checkpoints):
    folder, hf_model = checkpoints[request.param, 0]
    return load(folder), hf_model


@pytest.fixture
def moe(checkpoints):
    """A fresh model, to be swapped."""
    folder, hf_model = checkpoints["qwen3_moe", 0]
    return load(folder), hf_model


@pytest.mark.parametrize(
    ("pages", "host_kv_gib"),
    [(75, 0.0), (75, 0.01), *nightly((600, 0.0))],
    ids=["with preemptions", "offloaded", "roomy"],
)
def test_routing_is_that_of_transformers(family, pages, host_kv_gib):
    """Chunks, a group, mixed batches with rows that don't ask, deltas, preemptions."""
    model, hf_model = family
    offload = {"host_kv_gib": host_kv_gib, "host_kv_piece_mib": 0.01}
    bench = Bench(model, max_rows=5, kv_pages=pages, prefill_chunk_tokens=23, routing=True, **offload)
    prompts = {f"r{i}": prompt_of(length, i) for i, length in enumerate((3, 50, 17, 31, 4, 8))}
    for i, (name, prompt) in enumerate(prompts.items()):
        wanted = {0: 0, 1: len(prompt), 2: None}[i % 3]
        bench.submit(name, prompt, 60 + 5 * i, n=2 if i == 1 else 1, routing_from=wanted, stream_every=7 * (i % 2))
        for _ in range(3):
            bench.engine.tick()  # the batch changes as they come and go
    bench.run()
    assert (bench.engine.roster.counters.preemptions > 0) == (pages == 75)
    assert (bench.status().offload.restored > 0) == (host_kv_gib > 0)
    for i, (name, prompt) in enumerate(prompts.items()):
        for index in range(2 if i == 1 else 1):
            done = bench.completions[name, index]
            if i % 3 == 2:
                assert done.routing == []
            else:
                first = 0 if i % 3 == 0 else len(prompt)
                assert_routed(hf_model, prompt, done.token_ids, routing_of(bench, name, index), first)


def test_a_group_shares_the_experts_of_its_prompt(family):
    """Its followers compute no prompt token but the last, whose page is copied."""
    model, hf_model = family
    bench = Bench(model, prefill_chunk_tokens=16, routing=True, prefix_cache=False)
    prompt = prompt_of(39, 3)
    bench.complete("g", prompt, 20, n=3, routing_from=0, sampling={"temperature": 1.0, "seed": 5})
    for index in range(3):
        assert_routed(hf_model, prompt, bench.tokens("g", index), routing_of(bench, "g", index), 0)
    assert len({tuple(bench.tokens("g", index)) for index in range(3)}) > 1


def test_a_prefix_hit_has_the_experts_of_the_cached_tokens(family):
    """Also for a prompt that was computed for a request without routing."""
    model, hf_model = family
    bench = Bench(model, routing=True)
    prompt = prompt_of(40, 4)
    bench.complete("first", prompt, 12)
    longer = prompt + bench.tokens("first")[:8] + prompt_of(5, 9)
    bench.complete("second", longer, 10, routing_from=0)
    assert bench.done["second"].cached_tokens >= 44
    assert_routed(hf_model, longer, bench.tokens("second"), routing_of(bench, "second"), 0)


def test_a_turn_has_the_experts_of_the_turns_before(family):
    """Pages that its session holds are shared, and the one in which the tokens begin to differ is copied."""
    model, hf_model = family
    bench = Bench(model, routing=True, prefix_cache=False)
    session, prompt = ("c", "talk"), prompt_of(21, 4)
    for turn in range(3):
        bench.complete(f"t{turn}", prompt, 14, routing_from=0, session=session, session_lease_s=60.0)
        tokens = bench.tokens(f"t{turn}")
        assert (bench.done[f"t{turn}"].cached_tokens > 0) == (turn > 0), "only the session can have it"
        assert_routed(hf_model, prompt, tokens, routing_of(bench, f"t{turn}"), 0)
        prompt = prompt + tokens[: 14 - 5 * turn] + prompt_of(6, turn)
    bench.engine.inbox.put(EndSession("c"))
    bench.run()


def test_constrained_rows_tell_theirs_after_the_draw(family):
    model, hf_model = family
    bench = Bench(model, routing=True)
    allowed = AllowList(tuple(range(3, 40)), model.spec.vocab)
    prompts = {"free": prompt_of(9, 1), "bound": prompt_of(12, 2)}
    for name, prompt in prompts.items():
        constraint = allowed if name == "bound" else ANYTHING
        bench.submit(name, prompt, 20, routing_from=0, constraint=constraint, sampling={"temperature": 1.0, "seed": 4})
    bench.run()
    assert set(bench.tokens("bound")) <= set(range(3, 40))
    for name, prompt in prompts.items():
        assert_routed(hf_model, prompt, bench.tokens(name), routing_of(bench, name), 0)


def test_pages_that_came_back_from_the_host_have_their_experts_for_others_too(family):
    """A prefix hit on pages that a sequence got back, whose entries were never reported."""
    model, hf_model = family
    bench = Bench(model, kv_pages=40, routing=True, host_kv_gib=0.01)
    prompts = [prompt_of(10, i) for i in range(6)]
    for i, prompt in enumerate(prompts):
        bench.submit(f"r{i}", prompt, 60)
    bench.run()
    assert bench.done["r5"].preemptions > 0 and bench.status().offload.bytes_in > 0
    longer = prompts[5] + bench.tokens("r5")[:40]
    bench.complete("again", longer, 10, routing_from=0)
    assert bench.done["again"].cached_tokens == 48
    assert_routed(hf_model, longer, bench.tokens("again"), routing_of(bench, "again"), 0)


def test_an_evicted_page_is_not_read_for_another_prompt(family):
    model, hf_model = family
    bench = Bench(model, kv_pages=20, routing=True)
    for salt in range(6):
        prompt = prompt_of(30, salt % 4)
        bench.complete(f"r{salt}", prompt, 12, routing_from=0)
        assert_routed(hf_model, prompt, bench.tokens(f"r{salt}"), routing_of(bench, f"r{salt}"), 0)


def test_a_continued_completion_tells_from_where_it_is_asked_to(family):
    model, hf_model = family
    bench = Bench(model, routing=True)
    prompt = prompt_of(20, 5)
    bench.complete("a", prompt, 30)
    tokens = bench.tokens("a")
    for first in (0, 20, 20 + 9):
        prior = Prior(np.array(tokens[:10], np.int32))
        bench.complete(f"b{first}", prompt, 30, prior=prior, routing_from=first)
        assert tokens[10:] == bench.tokens(f"b{first}")
        assert_routed(hf_model, prompt, tokens, routing_of(bench, f"b{first}"), first)


@pytest.mark.parametrize("kv_on_swap", ["keep", "recompute"])
def test_entries_are_of_the_forwards_that_made_the_tokens(moe, checkpoints, kv_on_swap):
    """With recompute, new weights compute the KV of earlier tokens again; their reported routing stays."""
    model, old = moe
    folder, new = checkpoints["qwen3_moe", 1]
    mailbox = Mailbox()
    bench = Bench(model, receiver=mailbox, kv_on_swap=kv_on_swap, routing=True)
    prompt = prompt_of(25, 6)
    bench.submit("a", prompt, 40, routing_from=0)
    bench.ticks(15)
    mailbox.ready = Update(1, load(folder), model)
    bench.run()
    done = bench.completions["a", 0]
    before = done.versions.index(1)  # tokens of the old weights
    assert 5 < before < 35
    routing, consumed = routing_of(bench, "a"), len(prompt) + before - 1
    assert_routed(old, prompt, done.token_ids[:before], routing[:consumed], 0)
    if kv_on_swap == "recompute":
        assert_routed(new, prompt, done.token_ids, routing[consumed:], consumed)
        again = router_logits(new, prompt + done.token_ids)[:consumed].topk(3).indices.numpy()
        assert (again != routing[:consumed]).any(), "the new weights choose others, or this shows nothing"
    assert len(routing) == len(prompt) + len(done.token_ids) - 1


def test_kv_that_was_recomputed_before_the_first_token_is_reported_as_recomputed(moe, checkpoints):
    """No token was made by the first forwards of a prompt whose prefill begins anew."""
    model, _ = moe
    folder, new = checkpoints["qwen3_moe", 1]
    mailbox = Mailbox()
    bench = Bench(model, receiver=mailbox, kv_on_swap="recompute", prefill_chunk_tokens=8, routing=True)
    prompt = prompt_of(60, 7)
    bench.submit("a", prompt, 10, routing_from=0)
    bench.ticks(4)
    mailbox.ready = Update(1, load(folder), model)
    bench.run()
    done = bench.completions["a", 0]
    assert set(done.versions) == {1}
    assert_routed(new, prompt, done.token_ids, routing_of(bench, "a"), 0)


@pytest.mark.parametrize("pages", [256, 40], ids=["running", "preempted"])
def test_a_rescued_completion_has_the_experts_of_its_tokens(family, pages):
    model, hf_model = family
    bench = Bench(model, kv_pages=pages, max_rows=4, routing=True)
    prompts = {f"r{i}": prompt_of(20 + i, i) for i in range(4)}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, 90, routing_from=0)
    bench.ticks(60)
    assert (bench.engine.roster.counters.preemptions > 0) == (pages == 40)
    bench.emit(bench.engine.roster.rescue("a fault"))
    for name, prompt in prompts.items():
        done = bench.completions[name, 0]
        assert done.finish.reason == "error" and done.token_ids
        assert_routed(hf_model, prompt, done.token_ids, routing_of(bench, name), 0)
    bench.close(check=False)


@pytest.mark.parametrize("features", [FEATURES, FEATURES[::-1]], ids=["in order", "reversed"])
def test_a_delta_that_could_not_be_made_takes_no_entries_along(family, features):
    class Full:
        def event_fields(self):
            raise MemoryError

    model, hf_model = family
    bench = Bench(model, routing=True, features=features)
    prompt = prompt_of(20, 1)
    bench.submit("a", prompt, 30, routing_from=0, prompt_logprobs=True)
    bench.ticks(12)
    roster = bench.engine.roster
    (seq,) = roster.decoding
    prompts = find_feature(roster.features, ScoresFeature).prompts
    known, prompts[seq.group] = prompts[seq.group], Full()
    with pytest.raises(MemoryError):
        make_delta(seq, roster.asked_by(seq.group))
    prompts[seq.group] = known
    bench.emit(roster.rescue("a fault"))
    assert_routed(hf_model, prompt, bench.tokens("a"), routing_of(bench, "a"), 0)
    bench.close(check=False)


@pytest.mark.parametrize("depth", [2, *nightly(1)])
def test_late_streams_change_nothing(family, depth):
    """A record belongs to its step until that is committed, whatever is late."""
    model, hf_model = family
    bench = Bench(model, random_delays(depth, 0.0005), max_rows=4, pipeline_depth=depth, kv_pages=40, routing=True)
    prompts = {f"r{i}": prompt_of(12 + i, i) for i in range(5)}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, 40, routing_from=0, sampling={"temperature": 1.0, "seed": 3})
    bench.run()
    for name, prompt in prompts.items():
        assert_routed(hf_model, prompt, bench.tokens(name), routing_of(bench, name), 0)


def test_a_rebuilt_engine_reports_its_own_choice_of_experts(family):
    model, hf_model = family
    bench = Bench(model, routing=True)
    prompt = prompt_of(30, 2)
    bench.submit("a", prompt, 60, routing_from=0)
    bench.ticks(20)
    fail_a_step(bench)
    done = bench.completions["a", 0]
    assert_routed(hf_model, prompt, done.token_ids, routing_of(bench, "a"), 0)
    rebuild_engine(bench.engine, bench.settings)
    bench.complete("b", prompt, 20, routing_from=0)
    assert_routed(hf_model, prompt, bench.tokens("b"), routing_of(bench, "b"), 0)


def test_a_completion_without_a_token_has_no_entries(family):
    model, _ = family
    bench = Bench(model, prefill_chunk_tokens=8, routing=True)
    bench.submit("a", prompt_of(60, 1), 5, routing_from=0)
    bench.ticks(3)
    bench.engine.roster.end(("c", "a"), "cancelled")
    bench.run()
    assert bench.tokens("a") == [] and len(routing_of(bench, "a")) == 0


def test_a_prompt_that_is_scored_without_a_token_has_the_entries_before_its_last(family):
    model, hf_model = family
    bench = Bench(model, prefill_chunk_tokens=8, routing=True)
    prompt = prompt_of(30, 1)
    bench.submit("all", prompt, 0, routing_from=0, prompt_logprobs=True)
    bench.submit("none", prompt, 0, routing_from=len(prompt))
    bench.submit("one", prompt[:1], 0, routing_from=0)
    prior = Prior(np.array(prompt_of(5, 2), np.int32))
    bench.complete("known", prompt, 5, routing_from=0, prior=prior)
    assert_routed(hf_model, prompt, [], routing_of(bench, "all"), 0)
    assert_routed(hf_model, prompt, prompt_of(5, 2), routing_of(bench, "known"), 0)
    assert len(routing_of(bench, "none")) == len(routing_of(bench, "one")) == 0


def test_without_the_setting_nothing_is_recorded(family):
    model, _ = family
    bench = Bench(model)
    assert find_feature(bench.engine.roster.features, RoutingFeature) is None
    bench.complete("a", prompt_of(9, 0), 5)
    assert bench.completions["a", 0].routing == []


def test_a_dense_model_is_refused_the_setting(tmp_path):
    make_checkpoint("qwen3", tmp_path)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM of this checkpoint has no experts"):
        Bench(load(tmp_path), routing=True)


def test_more_than_256_experts_are_reported_in_16_bits(tmp_path):
    hf_model = make_checkpoint("qwen3_moe", tmp_path, num_experts=300, moe_intermediate_size=4)
    bench = Bench(load(tmp_path), routing=True)
    prompt = prompt_of(50, 2)
    bench.complete("a", prompt, 20, routing_from=0)
    routing = routing_of(bench, "a")
    assert routing.dtype == np.uint16 and routing.max() > 255
    chosen = router_logits(hf_model, prompt + bench.tokens("a")).topk(3).indices.numpy()
    assert (chosen == routing).mean() > 0.995


def test_experts_that_are_fetched_beside_the_last_step_are_not_left_over(moe):
    bench = Bench(moe[0], routing=True, host_kv_gib=0.01)
    routing = find_feature(bench.engine.roster.features, RoutingFeature)
    bench.submit("r", prompt_of(9, 1), 5)
    while "r" not in bench.done:
        if bench.engine.pipeline.in_flight:
            routing.fetched([0], [DUMP_PAGE])
        bench.engine.tick()
    bench.run()
