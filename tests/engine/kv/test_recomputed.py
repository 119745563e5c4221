"""What a completion reports of recomputed KV: enough to reproduce each of its tokens."""

import numpy as np

from rollout.engine.messages.requests import Prior
from tests.support.engine.harness import Bench
from tests.support.engine.replay import replayed
from tests.support.engine.updates import Mailbox, Update


def test_an_update_without_preemption_computes_nothing_again(model, other, prompt_of, hf_models):
    mailbox = Mailbox()
    bench = Bench(model, None, mailbox)
    bench.submit("a", prompt_of(13), 40)
    bench.ticks(20)
    mailbox.ready = Update(1, other, model)
    bench.run()
    completion = bench.completions["a", 0]
    assert completion.recomputed == () and set(completion.versions) == {0, 1}
    assert replayed(hf_models, prompt_of(13), completion) == completion.token_ids


def test_kv_that_a_preemption_lost_is_reported_with_its_position_and_version(model, other, prompt_of, hf_models):
    """Six rows where four fit, new weights in the middle: every token can be computed again, with the marks only."""
    mailbox = Mailbox()
    bench = Bench(model, None, mailbox, kv_pages=40, prefill_chunk_tokens=256)
    prompts = [prompt_of(10, i) for i in range(6)]
    for i, prompt in enumerate(prompts):
        bench.submit(f"r{i}", prompt, 60, stream_every=3)
    bench.ticks(30)
    mailbox.ready = Update(1, other, model)
    bench.run()
    assert bench.engine.roster.counters.preemptions > 0
    needed = 0
    for i, prompt in enumerate(prompts):
        completion = bench.completions[f"r{i}", 0]
        assert bool(completion.recomputed) == (bench.done[f"r{i}"].preemptions > 0)
        positions = [position for position, _ in completion.recomputed]
        assert positions == sorted(set(positions)) and all(0 < position < 60 for position in positions)
        assert replayed(hf_models, prompt, completion) == completion.token_ids
        told, completion.recomputed = completion.recomputed, ()
        needed += bool(told) and replayed(hf_models, prompt, completion) != completion.token_ids
    assert needed, "no row was preempted across the update: the marks prove nothing"


def test_recompute_at_an_update_is_reported_at_the_change_of_version(model, other, prompt_of, hf_models):
    mailbox = Mailbox()
    bench = Bench(model, None, mailbox, kv_on_swap="recompute")
    bench.submit("a", prompt_of(13), 50)
    bench.ticks(20)
    mailbox.ready = Update(1, other, model)
    bench.run()
    completion = bench.completions["a", 0]
    assert completion.recomputed == ((completion.versions.index(1), 1),)
    assert replayed(hf_models, prompt_of(13), completion) == completion.token_ids


def test_a_prefill_under_two_versions_reports_both(model, other, prompt_of):
    mailbox = Mailbox()
    bench = Bench(model, None, mailbox, prefill_chunk_tokens=8)
    old = np.array(prompt_of(30, 1), np.int32)
    bench.submit("a", prompt_of(4), 40, prior=Prior(old))
    bench.ticks(3)
    mailbox.ready = Update(1, other, model)
    bench.run()
    assert bench.completions["a", 0].recomputed == ((30, 0), (30, 1))


def test_a_prompt_half_way_through_its_first_prefill_reports_both_versions(model, other, prompt_of):
    """It goes on with the KV that it has, and its tokens are not what either version would have drawn."""
    mailbox = Mailbox()
    bench = Bench(model, None, mailbox, prefill_chunk_tokens=8)
    bench.submit("a", prompt_of(30), 20, stream_every=1)
    bench.submit("b", prompt_of(30, 1), 20)
    bench.ticks(2)
    mailbox.ready = Update(1, other, model)
    bench.run()
    assert bench.completions["a", 0].recomputed == ((0, 0), (0, 1)) and set(bench.completions["a", 0].versions) == {1}
    assert bench.completions["b", 0].recomputed == (), "all of it was computed by the second"


def test_an_interrupted_prefill_is_not_reported(model, other, prompt_of, hf_models):
    """Under `recompute` it begins again with each update; only the last one counts."""
    mailbox = Mailbox()
    bench = Bench(model, None, mailbox, prefill_chunk_tokens=8, kv_on_swap="recompute")
    bench.submit("first", prompt_of(30), 20)
    bench.submit("again", prompt_of(4), 40, prior=Prior(np.array(prompt_of(30, 1), np.int32)))
    bench.ticks(9)
    assert [seq.group.key[1] for seq in bench.engine.roster.prefilling] == ["again"]
    mailbox.ready = Update(1, other, model)
    bench.run()
    first, again = bench.completions["first", 0], bench.completions["again", 0]
    assert first.recomputed == ((first.versions.index(1), 1),) and again.recomputed == ((30, 1),)
    assert replayed(hf_models, prompt_of(30), first) == first.token_ids
