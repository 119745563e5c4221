"""Newer versions of an adapter amid a run: which tokens and which KV are of which version."""

import pytest
import torch

from rollout.constraints.marker import AfterMarker, IdMarker
from rollout.constraints.matcher import AllowList
from rollout.engine.messages.to_engine import Cancel, PutAdapter
from rollout.engine.messages.to_service import Done
from tests.support.engine.adapted import bench_of, greedy_is, versions_of
from tests.support.engine.drafting import drafting
from tests.support.engine.harness import VOCAB, prompt_of
from tests.support.kernels.grids import nightly


@pytest.mark.parametrize(("kv_on_swap", "age"), [("keep", 0), ("keep", 9), ("recompute", 0)])
def test_a_newer_version_is_applied_during_the_run_and_stamped(model, base, adapters, kv_on_swap, age):
    """The age of KV counts weights versions: KV of another edition of an adapter is never used."""
    bench = bench_of(model, adapters, 1, kv_on_swap=kv_on_swap, max_kv_age=age)
    prompt = prompt_of(10)
    bench.submit("r", prompt, 40, stream_every=1, adapter="a0")
    bench.submit("other", prompt, 40)
    bench.tick_while(lambda: len(bench.tokens("r")) < 9)
    bench.engine.inbox.put(PutAdapter("a0", adapters[1][0], token=7, version=5))
    bench.run()
    assert Done(7) in bench.events
    versions, got = versions_of(bench, "r"), bench.tokens("r")
    before = versions.count(0)
    assert versions == [0] * before + [5] * (40 - before) and 9 <= before <= 12
    greedy_is(adapters[0][1], prompt, got[:before])
    if kv_on_swap == "recompute":  # all KV has the new version then
        greedy_is(adapters[1][1], prompt + got[:before], got[before:])
    greedy_is(base, prompt, bench.tokens("other"))
    bench.complete("again", prompt, 8, adapter="a0")
    greedy_is(adapters[1][1], prompt, bench.tokens("again"))
    whole = 8 if kv_on_swap == "recompute" else 0
    assert bench.done["again"].cached_tokens == whole, "KV of the old version, or of both, is no prefix"
    assert versions_of(bench, "again") == [5] * 8


@pytest.mark.parametrize("depth", [1, 2])
def test_the_version_changes_at_the_stamped_token(model, adapters, depth):
    """Tokens in flight have the previous version."""
    said = []
    for newer in (False, True):
        bench = bench_of(model, adapters, 1, pipeline_depth=depth)
        bench.submit("r", prompt_of(10), 40, stream_every=1, adapter="a0")
        while len(bench.tokens("r")) < 9:
            bench.engine.tick()
        if newer:
            bench.engine.inbox.put(PutAdapter("a0", adapters[1][0]))
        bench.run()
        said.append(bench.tokens("r"))
        versions = versions_of(bench, "r")
        bench.close()
    same = next(i for i, (old, new) in enumerate(zip(*said, strict=True)) if old != new)
    assert same >= 9 and versions == [0] * same + [1] * (40 - same)


@pytest.mark.parametrize("drafts", [4, *nightly(0)])
def test_the_version_changes_at_the_stamped_token_where_tokens_are_drawn_again(model, adapters, drafts):
    """Tokens in flight, and accepted drafts, do not count after a marker; a newer version comes in any tick."""
    sampling = {"temperature": 1.0, "seed": 3, "logit_bias": ((7, 3.0),)}
    constraint = AfterMarker(AllowList(tuple(range(20, 60)), VOCAB), IdMarker((7,)))
    recorded: dict = {}
    stamped = set()
    for ticks in range(26):
        more = {"speculation_tokens": drafts} if drafts else {"speculation": "off"}
        bench, _ = drafting(model, recorded, 0.0, adapter_slots=8, adapter_rank=16, **more)
        bench.engine.inbox.put(PutAdapter("a0", adapters[0][0]))
        drew = watch_versions(bench)
        bench.submit("r", prompt_of(10), 30, adapter="a0", sampling=sampling, constraint=constraint)
        bench.ticks(ticks)
        if ticks:
            bench.engine.inbox.put(PutAdapter("a0", adapters[1][0]))
        bench.run()
        tokens = bench.tokens("r")
        recorded = recorded or {("r", 0): tokens}
        if 7 in tokens:
            assert all(20 <= token < 60 for token in tokens[tokens.index(7) + 1 :])
        assert versions_of(bench, "r") == drew
        stamped.add(drew.index(1) - tokens.index(7) if 1 in drew and 7 in tokens else None)
        bench.close()
    assert stamped >= {0, 1}, "right before the marker and right after it"


def watch_versions(bench) -> list[int]:
    """A list that gets the adapter's version at the launch of the step of each token that counts."""
    scheduler, drew, at_launch = bench.engine.scheduler, [], {}
    launched, commit = scheduler.launched, scheduler.commit

    def note(plan):
        at_launch[id(plan)] = plan, [(seq, seq.variant_use.adapter.version) for seq, *_ in plan.spans]
        launched(plan)

    def count(plan, output):
        (_, versions), before = at_launch.pop(id(plan)), [len(seq.tokens) for seq, *_ in plan.spans]
        commit(plan, output)
        for (seq, version), known in zip(versions, before, strict=True):
            drew.extend([version] * (len(seq.tokens) - known))

    scheduler.launched, scheduler.commit = note, count
    return drew


def test_members_of_a_group_that_start_later_take_no_kv_of_the_older_version(model, adapters):
    bench = bench_of(model, adapters, 1, max_rows=2)
    prompt = prompt_of(15)
    bench.submit("g", prompt, 24, n=4, adapter="a0")
    bench.tick_while(lambda: len(bench.engine.roster.decoding) < 2)
    assert bench.engine.roster.allocator.sharing, "the others are to take the prompt of the first"
    bench.engine.inbox.put(PutAdapter("a0", adapters[1][0]))
    bench.run()
    for index in (2, 3):
        greedy_is(adapters[1][1], prompt, bench.tokens("g", index))
        assert versions_of(bench, "g", index) == [1] * 24


def test_a_newer_version_of_an_adapter_that_rests_is_loaded_when_it_is_wanted(model, adapters):
    bench = bench_of(model, adapters, 1)
    for version in range(2):
        bench.complete(f"r{version}", prompt_of(10), 6, adapter="a0")
        greedy_is(adapters[version][1], prompt_of(10), bench.tokens(f"r{version}"))
        bench.engine.inbox.put(PutAdapter("a0", adapters[1][0]))
        bench.run()
    assert bench.status().adapters[0].version == 2


def test_a_turn_during_which_its_adapter_changed_leaves_nothing(model, adapters):
    bench = bench_of(model, adapters, 1, prefix_cache=False)
    session = {"session": ("c", "s"), "session_lease_s": 100.0, "adapter": "a0"}
    bench.submit("1", prompt_of(14), 30, **session)
    bench.tick_while(lambda: not bench.engine.roster.decoding or len(bench.engine.roster.decoding[0].tokens) < 5)
    bench.engine.inbox.put(PutAdapter("a0", adapters[1][0]))
    bench.run()
    prompt = [*prompt_of(14), *bench.tokens("1"), 3]
    bench.complete("2", prompt, 6, **session)
    assert bench.done["2"].cached_tokens == 0
    greedy_is(adapters[1][1], prompt, bench.tokens("2"))


def test_a_turn_whose_last_step_is_of_the_version_before_leaves_nothing(model, adapters):
    """It has ended and its adapter has changed, but the step in flight still writes KV of the old adapter."""
    bench = bench_of(model, adapters, 1, prefix_cache=False)
    session = {"session": ("c", "s"), "session_lease_s": 100.0, "adapter": "a0"}
    bench.submit("1", prompt_of(14), 30, **session)
    decoding = bench.engine.roster.decoding
    bench.tick_while(lambda: not decoding or len(decoding[0].tokens) < 5 or not decoding[0].inflight_refs)
    bench.engine.inbox.put(Cancel(("c", "1")))
    bench.engine.inbox.put(PutAdapter("a0", adapters[1][0]))
    bench.run()
    assert bench.engine.roster.allocator.sessions.pages == 0
    prompt = [*prompt_of(14), *bench.tokens("1"), 3]
    bench.complete("2", prompt, 6, **session)
    assert bench.done["2"].cached_tokens == 0
    greedy_is(adapters[1][1], prompt, bench.tokens("2"))


def test_a_prompt_of_two_versions_is_not_shared(model, adapters):
    bench = bench_of(model, adapters, 1, prefill_chunk_tokens=8)
    prompt = prompt_of(30)
    bench.submit("g", prompt, 8, n=2, adapter="a0")
    bench.tick_until(lambda: any(seq.kv.length for seq in bench.engine.roster.prefilling))
    bench.engine.inbox.put(PutAdapter("a0", adapters[1][0]))
    bench.run()
    greedy_is(adapters[1][1], prompt, bench.tokens("g", 1))


def test_a_row_that_has_launched_nothing_keeps_no_kv_of_the_older_version(model, adapters):
    bench = bench_of(model, adapters, 1, prefill_chunk_tokens=8)
    prompt = prompt_of(30)
    bench.complete("before", prompt, 2, adapter="a0")
    bench.submit("first", prompt_of(30, 1), 2)
    bench.submit("r", prompt, 8, adapter="a0")
    bench.engine.tick()
    seq = bench.engine.roster.prefilling[-1]
    assert seq.kv.length == 29 and not seq.row_ready, "it is admitted, with pages of the first"
    bench.engine.inbox.put(PutAdapter("a0", adapters[1][0]))
    bench.run()
    greedy_is(adapters[1][1], prompt, bench.tokens("r"))


@pytest.mark.parametrize("max_tokens", [0, 8])
def test_log_probs_of_a_prompt_are_of_one_version(model, adapters, max_tokens):
    bench = bench_of(model, adapters, 1, prefill_chunk_tokens=8)
    prompt = prompt_of(30)
    bench.submit("r", prompt, max_tokens, adapter="a0", prompt_logprobs=True)
    bench.tick_until(lambda: any(seq.kv.length for seq in bench.engine.roster.prefilling))
    bench.engine.inbox.put(PutAdapter("a0", adapters[1][0]))
    bench.run()
    with torch.no_grad():
        exact = adapters[1][1](torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    expected = exact[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    told = torch.from_numpy(bench.completions["r", 0].prompt_logprobs)
    assert torch.allclose(told[1:], expected, atol=1e-3)
