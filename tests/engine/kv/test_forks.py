"""Branches: requests whose prompt is another request's prompt and some of its tokens, at any time of that request."""

import random

import pytest

from rollout.engine.messages.to_engine import Cancel, Flush
from rollout.engine.messages.to_service import Delta, Flushed
from tests.support.engine.conversation import LEASE_S, Conversation
from tests.support.engine.harness import Bench, load
from tests.support.engine.offloading import offloading
from tests.support.engine.streams import random_delays
from tests.support.engine.updates import Mailbox, Update
from tests.support.models.hybrids import make_hybrid

SAMPLED = {"temperature": 1.0, "seed": 3}


def flush(bench: Bench, name: str) -> None:
    """Have the engine send what a request has, as the service does before it continues the request's tokens."""
    before = len(bench.events)
    bench.engine.inbox.put(Flush(("c", name), ("c", f"asks for {name}")))
    bench.engine.tick()
    answers = [i for i, event in enumerate(bench.events[before:]) if isinstance(event, Flushed)]
    assert len(answers) == 1
    early = bench.events[before:][: answers[0]]
    assert all(event.key == ("c", name) for event in early if isinstance(event, Delta) and event.finish is None)


def branch(bench: Bench, source: list[int], name: str, **fields) -> None:
    bench.submit(name, source, **{"max_tokens": 12, "sampling": SAMPLED} | fields)


def assert_fresh(bench: Bench, model, prompts: dict[str, list[int]], n: int = 1, max_tokens: int = 12) -> None:
    """Every branch has the tokens and log-probs of the same prompt in an engine that knows nothing."""
    for name, prompt in prompts.items():
        fresh = Bench(model, kv_pages=600)
        branch(fresh, prompt, name, n=n, max_tokens=max_tokens)
        fresh.run()
        for index in range(n):
            mine, theirs = bench.completions[name, index], fresh.completions[name, index]
            assert mine.token_ids == theirs.token_ids
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        fresh.close()


def test_asking_for_tokens_changes_no_token_and_sends_each_once(model, prompt_of):
    def run(ask: bool) -> dict:
        bench, rng = Bench(model, random_delays(5)), random.Random(1)
        for i in range(4):
            bench.submit(f"r{i}", prompt_of(9, i), 40, sampling=SAMPLED, n=2, stream_every=7 * (i % 2))
        for _ in range(60):
            if ask:
                flush(bench, f"r{rng.randrange(6)}")  # two of them are unknown
            bench.engine.tick()
        bench.finish()
        return {key: (each.token_ids, each.logprobs) for key, each in bench.completions.items()}

    assert run(True) == run(False)


@pytest.mark.parametrize("page_size", [4, 16])
def test_branches_of_a_running_source_share_its_pages_and_have_a_fresh_requests_tokens(model, prompt_of, page_size):
    bench = Bench(model, page_size=page_size)
    prompt, prompts = prompt_of(21), {}
    bench.submit("source", prompt, 80, sampling={"temperature": 1.0, "seed": 9})
    for i in range(6):
        bench.ticks(9)
        flush(bench, "source")
        drawn = bench.tokens("source")
        offset = 21 + max(len(drawn) - i, 0)
        name, source = f"b{i}", (prompt + drawn)[:offset] + prompt_of(i, 100 + i)
        prompts[name] = source
        branch(bench, source, name, n=3)
    bench.run()
    for name, source in prompts.items():
        same = len(source) - int(name[1:])
        least = min(same, len(source) - 1) // page_size * page_size
        # The KV of the newest token is written by the next step, and the page that it fills is known after that.
        assert bench.done[name].cached_tokens >= least - page_size * (same % page_size == 0)
    assert_fresh(bench, model, prompts, n=3)


def test_a_tree_of_branches_computes_little_but_what_is_new(model, prompt_of):
    bench = Bench(model)
    prompt = prompt_of(33)
    branch(bench, prompt, "root", n=2)
    bench.run()
    before, prompts, level = bench.engine.roster.counters.prefilled_tokens, {}, [("root", prompt)]
    for depth in range(3):
        level = [
            (f"{name}{index}", source + bench.tokens(name, index)[: 5 + depth])
            for name, source in level
            for index in range(2)
        ]
        for name, source in level:
            prompts[name] = source
            branch(bench, source, name, n=2)
        bench.run()
    count = len(prompts)
    assert count == 14
    assert bench.engine.roster.counters.prefilled_tokens - before <= count * (2 * 4 + 1)  # two pages at the most
    assert_fresh(bench, model, prompts, n=2)


@pytest.mark.parametrize("host_pages", [0, 512])
def test_branches_of_sources_that_are_preempted_cancelled_or_zombies(model, prompt_of, host_pages):
    """The pool is too small for all of them."""
    bench = offloading(model, host_pages=host_pages)
    rng, prompts = random.Random(host_pages), {}
    for i in range(5):
        bench.submit(f"r{i}", prompt_of(10, i), 50, sampling={"temperature": 1.0, "seed": i})
    for i in range(12):
        bench.ticks(rng.randrange(1, 14))
        which = rng.randrange(5)
        flush(bench, f"r{which}")
        if i % 4 == 3:
            bench.engine.inbox.put(Cancel(("c", f"r{which}")))
        source = prompt_of(10, which) + bench.tokens(f"r{which}")
        prompts[f"b{i}"] = source = source[: rng.randrange(3, len(source) + 1)] + prompt_of(rng.randrange(3), i)
        branch(bench, source, f"b{i}")
    bench.run()
    assert bench.engine.roster.counters.preemptions > 0
    assert_fresh(bench, model, prompts)


def test_a_branch_of_a_session_leaves_the_session_as_it_is_and_may_become_one(model, prompt_of):
    bench = Bench(model)
    talk = Conversation(bench, "s", prompt_of)
    talk.say(22, sampling=SAMPLED)
    said = talk.said
    branch(bench, [*said[:18], 7, 8, 9], "b", session=("c", "branch"), session_lease_s=LEASE_S)
    bench.run()
    assert bench.done["b"].cached_tokens == 16  # four pages
    assert bench.status().sessions.holding == 2
    talk.say(3, sampling=SAMPLED)
    assert talk.reused == len(said) - 1
    longer = [*said[:18], 7, 8, 9, *bench.tokens("b"), 5]
    branch(bench, longer, "b2", session=("c", "branch"), session_lease_s=LEASE_S)
    bench.run()
    assert bench.done["b2"].cached_tokens == len(longer) - 2
    assert_fresh(bench, model, {"b": [*said[:18], 7, 8, 9], "b2": longer})


def test_a_session_that_goes_back_keeps_the_tokens_up_to_there(model, prompt_of):
    """As if a tool call is tried again, or the history is cut behind a summary."""
    bench = Bench(model)
    talk = Conversation(bench, "s", prompt_of)
    talk.say(22, sampling=SAMPLED)
    back = [*talk.said[:17], 1, 2]
    talk.say(0, prompt=back, max_tokens=12, sampling=SAMPLED)
    assert talk.reused == 17
    assert_fresh(bench, model, {talk.turn: back})


@pytest.mark.parametrize("kv_on_swap", ["keep", "recompute"])
def test_a_branch_of_tokens_of_older_weights_is_one_of_the_present_weights(folders, prompt_of, kv_on_swap):
    """The tokens are those that were drawn; their KV is computed again, and all log-probs are of one version."""
    model, other, mailbox = load(folders[0]), load(folders[1]), Mailbox()
    bench = Bench(model, receiver=mailbox, kv_on_swap=kv_on_swap)
    prompt = prompt_of(18)
    bench.submit("source", prompt, 60, sampling={"temperature": 1.0, "seed": 9})
    bench.ticks(20)
    mailbox.ready = Update(1, other, model)
    bench.tick_until(lambda: mailbox.done)
    bench.ticks(10)
    flush(bench, "source")
    source = prompt + bench.tokens("source")
    assert set(bench.completions["source", 0].versions) == {0, 1}
    branch(bench, source, "b")
    bench.run()
    assert set(bench.completions["b", 0].versions) == {1}
    assert_fresh(bench, other, {"b": source})


def test_branches_of_a_model_with_states_go_on_from_a_snapshot(tmp_path, prompt_of):
    """A state is known at the end of a prompt, also of another branch; what comes after it is computed again."""
    make_hybrid("Qwen3_5", tmp_path, 0)
    model = load(tmp_path)
    bench = Bench(model)
    prompt = [token % 83 for token in prompt_of(21)]
    bench.submit("source", prompt, 40, sampling={"temperature": 1.0, "seed": 9})
    bench.ticks(24)
    flush(bench, "source")
    drawn = bench.tokens("source")
    assert len(drawn) > 8
    prompts = {"mid": prompt + drawn[:6], "end": [*prompt, *drawn, 5], "within": prompt[:11] + drawn[:2]}
    for name, source in prompts.items():
        branch(bench, source, name, n=2)
    bench.run()
    assert [bench.done[name].cached_tokens for name in ("mid", "end", "within")] == [20, 26, 0]
    assert_fresh(bench, model, prompts, n=2)


def test_a_session_of_a_model_with_states_goes_back_as_far_as_a_snapshot_reaches(tmp_path, prompt_of):
    make_hybrid("Qwen3_5", tmp_path, 0)
    model = load(tmp_path)
    bench = Bench(model)
    talk = Conversation(bench, "s", lambda length, seed: [token % 83 for token in prompt_of(length, seed)])
    talk.say(22, sampling=SAMPLED)
    said = talk.said
    assert len(said) == 31
    for cut, reused in ((31, 30), (26, 21), (12, 0)):
        other = Bench(model)
        again = Conversation(other, "s", prompt_of)
        again.say(0, prompt=said[:22], sampling=SAMPLED)
        back = [*said[:cut], 1, 2]
        again.say(0, prompt=back, max_tokens=12, sampling=SAMPLED)
        assert again.reused == reused, cut
        assert_fresh(other, model, {again.turn: back})
        other.close()
