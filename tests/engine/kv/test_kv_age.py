"""KV of older weights in the prefix cache, in sessions and groups: used within `max_kv_age`, told, never older."""

import random

import pytest
from pydantic import ValidationError

from rollout.config import EngineSettings
from rollout.engine.inspect import Inspector
from rollout.engine.kv.pool import PagePool
from rollout.engine.kv.tiers.host_pages import HostPageBooks
from rollout.engine.kv.tiers.offload import OffloadBooks, OffloadedKV, OffloadedPage
from rollout.engine.sequence.sequence_kv import PrefixKeys
from tests.support.engine.conversation import Conversation
from tests.support.engine.harness import load, watch_prefills
from tests.support.engine.offloading import counts, offloading
from tests.support.engine.streams import random_delays
from tests.support.engine.updated import Load, Updated
from tests.support.engine.updates import Update, boundary, swap_in_the_middle
from tests.support.kernels.grids import nightly
from tests.support.settings import settings_of


@pytest.fixture(scope="module")
def sources(folders):
    return [load(folder) for folder in folders]


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("age", [0, 1])
def test_a_turn_after_an_update_gives_the_tokens_of_a_row_that_never_left(
    folders, sources, prompt_of, greedy, age, cache
):
    prompt = prompt_of(21)
    row = Updated(load(folders[0]), sources)
    row.bench.submit("a", prompt, 40)
    swap_in_the_middle(row.bench, row.mailbox, Update(1, sources[1], row.model), ticks=20)
    before, whole = boundary(row.bench, "a"), row.bench.tokens("a")
    row.bench.close()

    agent = Updated(load(folders[0]), sources, max_kv_age=age, prefix_cache=cache)
    talk = Conversation(agent.bench, "s", prompt_of)
    talk.said = prompt
    assert talk.say(0, before) == whole[:before]
    agent.update(1)
    again = talk.say(0, 40 - before)
    known = len(prompt) + before - 1
    if age:
        assert talk.reused == known and again == whole[before:]
        assert agent.bench.completions[talk.turn, 0].kv_versions == ((0, 0, known),)
    else:
        assert talk.reused == 0 and again == greedy(prompt + whole[:before], 40 - before, which=1)
        assert agent.bench.completions[talk.turn, 0].kv_versions == ()
    agent.bench.close()


@pytest.mark.parametrize("session", [True, False])
def test_a_turn_in_whose_middle_weights_change_leaves_kv_that_others_use(model, sources, hf_models, prompt_of, session):
    run = Updated(model, sources, max_kv_age=1)
    talk = Conversation(run.bench, "s", prompt_of, session)
    talk.submit(20, 40)
    for _ in range(12):
        run.bench.engine.tick()
    run.ready(1)
    run.bench.run()
    talk.ended()
    assert set(run.bench.completions[talk.turn, 0].versions) == {0, 1}
    talk.say(5)
    known = 59
    assert talk.reused == known and run.bench.completions[talk.turn, 0].kv_versions == ((0, 0, known),)
    assert run.follows(hf_models, talk.turn, talk.said[:-9])
    run.update(2)
    talk.say(5)
    assert talk.reused == 0, "all of it is as old as its beginning"
    run.bench.close()


@pytest.mark.parametrize(("age", "expected"), [(0, {}), (1, {1: 0}), (2, {1: 0, 5: 3}), (4, {1: 0, 3: 0})])
def test_the_age_is_the_difference_of_the_version_numbers(model, sources, hf_models, prompt_of, age, expected):
    """KV that is computed after older KV is as old as that. `expected` has what is found, by the weights' version."""
    run, prompt = Updated(model, sources, max_kv_age=age), prompt_of(22)
    run.say("v0", prompt)
    for version in (1, 3, 5):
        run.update(version)
        told = ((0, expected[version], 21),) if version in expected else ()
        assert run.say(f"v{version}", prompt) == (21 if told else 0, told)
        assert run.follows(hf_models * 3, f"v{version}", prompt)
    Inspector(run.bench.engine).set_gauges()
    assert run.bench.engine.roster.counters.older_tokens == 21 * len(expected) == run.shadow.older
    run.bench.close()


def test_a_request_may_ask_for_newer_kv_than_the_engine_would_use(model, sources, hf_models, prompt_of):
    run, prompt = Updated(model, sources, max_kv_age=2), prompt_of(24)
    run.say("old", prompt)
    run.update(1)
    assert run.say("eval", prompt, max_kv_age=0) == (0, ())
    assert run.follows([None, hf_models[1]], "eval", prompt)
    assert run.say("next", prompt) == (23, ((0, 1, 23),)), "its newer pages are known by the keys now"
    run.update(2)
    assert run.say("any", prompt, max_kv_age=7) == (23, ((0, 1, 23),))
    run.update(4)
    assert run.say("late", prompt) == (0, ())
    run.bench.close()


def test_prompts_with_logprobs_use_no_known_kv(model, sources, prompt_of):
    run, prompt = Updated(model, sources, max_kv_age=3), prompt_of(24)
    run.say("old", prompt)
    run.update(1)
    assert run.say("scored", prompt, prompt_logprobs=True) == (0, ())
    assert run.bench.done["scored"].prompt_version == 1
    run.bench.close()


@pytest.mark.parametrize(
    ("age", "asked", "prefills", "told"),
    [(0, None, 2, ()), (1, None, 1, ((0, 0, 29),)), (1, 0, 2, ((0, 1, 29),))],
)
def test_members_of_a_group_share_a_prompt_across_an_update(
    model, sources, hf_models, prompt_of, age, asked, prefills, told
):
    run, prompt = Updated(model, sources, max_kv_age=age, max_rows=2), prompt_of(30)
    sizes = watch_prefills(run.bench)
    run.bench.submit("g", prompt, 12, n=6, max_kv_age=asked)
    for _ in range(6):
        run.bench.engine.tick()
    run.update(1)
    run.bench.run()
    assert sum(sizes) == prefills * 30 + (6 - prefills)
    first, last = run.bench.completions["g", 0], run.bench.completions["g", 5]
    assert first.versions[0] == 0 and last.versions[0] == 1
    assert first.kv_versions == () and last.kv_versions == told
    assert all(run.follows(hf_models, "g", prompt, i) for i in range(6))
    run.bench.close()


@pytest.mark.parametrize(
    ("version", "computed", "told"),
    [
        pytest.param(1, 64 + 3, ((0, 0, 63),), id="it goes on"),
        pytest.param(3, 64 + 64 + 2, ((0, 3, 63),), id="its KV is too old"),
    ],
)
def test_a_prefill_that_others_wait_for_goes_on_across_an_update_unless_its_kv_is_too_old(
    model, sources, hf_models, prompt_of, version, computed, told
):
    run, prompt = Updated(model, sources, max_kv_age=1, prefill_chunk_tokens=8), prompt_of(64)
    sizes = watch_prefills(run.bench)
    for i in range(4):
        run.bench.submit(f"r{i}", prompt, 6)
    while sum(sizes) < 24:
        run.bench.engine.tick()
    run.update(version)
    run.bench.run()
    assert sum(sizes) == computed
    for i in range(4):
        assert run.follows(hf_models * 2, f"r{i}", prompt)
    assert run.bench.completions["r3", 0].kv_versions == told
    run.bench.close()


def test_turns_that_have_pages_and_no_step_keep_what_they_found(model, sources, hf_models, prompt_of):
    """Without a prefix cache what a session had would be lost otherwise."""
    run = Updated(model, sources, max_kv_age=1, prefix_cache=False, prefill_chunk_tokens=4)
    talks = [Conversation(run.bench, "s" * (i + 1), prompt_of) for i in range(3)]
    for talk in talks:
        talk.say(13)
    for talk in talks:
        talk.submit(15)
    while len(run.bench.engine.roster.prefilling) < 3:
        run.bench.engine.tick()
    assert any(not seq.row_ready for seq in run.bench.engine.roster.prefilling)
    run.update(1)
    run.bench.run()
    for talk in talks:
        talk.ended()
        assert talk.reused == 21
        assert run.bench.completions[talk.turn, 0].kv_versions == ((0, 0, 21),)
        assert run.follows(hf_models, talk.turn, talk.said[:-9])
    run.bench.close()


def test_an_update_drops_what_is_too_old_and_nothing_else(model, sources, prompt_of):
    run = Updated(model, sources, max_kv_age=1)
    sessions = run.bench.engine.roster.allocator.sessions
    first, second = Conversation(run.bench, "a", prompt_of), Conversation(run.bench, "bb", prompt_of)
    first.say(16)
    run.say("old", prompt_of(16, 5))
    run.update(1)
    second.say(16)
    run.say("new", prompt_of(16, 6))
    assert sessions.status().holding == 2
    run.update(2)
    assert sessions.status().holding == 1
    assert run.say("new2", prompt_of(16, 6))[0] == 15 and run.say("old2", prompt_of(16, 5))[0] == 0
    run.update(9)
    assert sessions.status().holding == 0 == run.say("new9", prompt_of(16, 6))[0]
    run.bench.close()


def test_a_page_with_newer_kv_takes_the_place_of_an_older_one():
    pool = PagePool(6)
    old, new, third = (pool.allocate() for _ in range(3))
    pool.remember(b"key", old, 1)
    pool.remember_tail(b"tail", old, 1)
    pool.release(old)
    pool.remember(b"key", new, 3)
    assert (pool.find(b"key", 1), pool.find_tail(b"tail", 1), pool.cached, pool.oldest_of(old, 9)) == (new, 0, 0, 9)
    pool.remember(b"key", third, 2)
    assert pool.find(b"key", 3) == new and not pool.find(b"key", 4) and pool.oldest_of(third, 9) == 9
    pool.remember_tail(b"tail", third, 2)
    pool.release(new)
    assert pool.cached == 1 and pool.find_tail(b"tail", 2) == third and not pool.find_tail(b"tail", 3)
    pool.check()


def test_older_kv_needs_kept_kv_and_no_determinism():
    for more, named in (({"kv_on_swap": "recompute"}, "kv_on_swap = keep"), ({"deterministic": True}, "deterministic")):
        with pytest.raises(ValidationError, match=named):
            settings_of(EngineSettings, max_kv_age=1, **more)
    with pytest.raises(ValidationError, match="max_kv_age"):
        settings_of(EngineSettings, max_kv_age=-1)


# --- under load ---


_SEEDS = nightly(*[(seed, age) for seed in range(1, 6) for age in (1, 2, 9)])


@pytest.mark.parametrize(("seed", "age"), [(0, 1), *_SEEDS])
def test_no_kv_older_than_the_bound_is_used_under_a_hundred_updates(model, sources, hf_models, prompt_of, seed, age):
    """Few pages, so rows are preempted and sessions give way."""
    rng = random.Random(seed)
    run = Updated(model, sources, max_kv_age=age, kv_pages=41, max_rows=6, prefill_chunk_tokens=rng.choice((5, 64)),
                  speculation=rng.choice(("off", "suffix")), speculation_tokens=2)  # fmt: skip
    load = Load(run, rng, prompt_of, 100)
    load.go_on()
    assert run.bench.engine.roster.counters.preemptions > 0
    load.check(hf_models)
    run.bench.close()


@pytest.mark.parametrize(("seed", "age"), [(0, 2), *nightly((1, 1), (2, 4))])
def test_offloaded_rows_go_on_beside_kv_of_other_versions(model, sources, hf_models, prompt_of, seed, age):
    """A page that a restored row needs may be known by its key with KV of other weights."""
    rng = random.Random(seed)
    run = Updated(model, sources, make=offloading, max_kv_age=age, kv_pages=50, max_rows=5,
                  device=random_delays(seed, 0.001))  # fmt: skip
    load = Load(run, rng, prompt_of, 30)
    load.go_on()
    assert counts(run.bench).restored + run.bench.engine.parts.tier.known.host.counts.fetched > 0
    load.check(hf_models)
    run.bench.close()


def test_a_restored_row_takes_a_known_page_only_if_its_kv_is_the_same():
    """A key may be known with KV of newer weights than the row's."""
    pool, keys = PagePool(4), PrefixKeys.begin(0)
    books, page = OffloadBooks(pool, 4, HostPageBooks(2), HostPageBooks(0)), pool.allocate()
    keys.append(keys.next_key(b"content"))
    pool.remember(keys[0], page, 1)
    on_host = [OffloadedPage(pool_page=0, host_page=0)]
    assert books.pool_pages(OffloadedKV(4, 0, 0, keys, on_host), 1) == [0], "the page has newer KV"
    assert books.pool_pages(OffloadedKV(4, 1, 0, keys, on_host), 1) == [page]
    assert books.pool_pages(OffloadedKV(4, 1, 0, keys, on_host), 2) == [0], "it may have KV of version 2, too"


def test_the_shadow_sees_kv_that_is_too_old(model, sources, prompt_of):
    run = Updated(model, sources, max_kv_age=1)
    run.bench.engine.roster.allocator.prefixes.oldest_for = lambda group, version: 0
    run.say("old", prompt_of(20))
    run.update(3)
    with pytest.raises(AssertionError, match="is used under version 3"):
        run.say("new", prompt_of(20))
    run.bench.close(check=False)
