"""Weights written in place: no step runs during the update, rows go on after it, half an update is never served."""

import torch
from transformers import DynamicCache

from tests.support.engine.harness import Bench
from tests.support.engine.updates import InPlace, Mailbox, Update


def test_nothing_runs_while_weights_are_written_and_rows_go_on_with_the_new_ones(model, other, prompt_of, hf_models):
    mailbox, granted = Mailbox(), []
    bench = Bench(model, None, mailbox)
    engine = bench.engine
    prompt = prompt_of(13)
    bench.submit("a", prompt, 50)
    for _ in range(20):
        engine.tick()
    engine.gate.request_hold(lambda: granted.append(engine.pipeline.in_flight))
    while not granted:
        engine.tick()
    assert granted == [0] and not engine.busy
    held = len(bench.engine.roster.decoding[0].tokens)
    Update(1, other, model).copy_into()  # as the receiver's thread does
    for _ in range(5):
        engine.tick()
    assert engine.pipeline.in_flight == 0 and len(engine.roster.decoding[0].tokens) == held
    mailbox.ready = InPlace(1)
    bench.run()
    tokens = bench.tokens("a")
    k = bench.completions["a", 0].versions.index(1)
    assert k == held and engine.gate.hold == "free"
    ((version, pause_s),) = mailbox.done
    assert version == 1 and pause_s > 0
    cache, ids = DynamicCache(), torch.tensor([prompt + tokens])
    with torch.inference_mode():
        old = hf_models[0](ids[:, : len(prompt) + k - 1], past_key_values=cache, use_cache=True).logits[0]
        new = hf_models[1](ids[:, len(prompt) + k - 1 :], past_key_values=cache, use_cache=True).logits[0]
    assert tokens == torch.cat([old, new]).argmax(-1)[len(prompt) - 1 : -1].tolist()


def test_half_an_update_is_not_served_before_a_whole_one_came(model, other, prompt_of):
    mailbox = Mailbox()
    bench = Bench(model, None, mailbox)
    engine = bench.engine
    bench.submit("a", prompt_of(13), 30)
    for _ in range(5):
        engine.tick()
    engine.gate.request_hold(lambda: None)
    for _ in range(4):
        engine.tick()
    assert engine.gate.hold == "granted"
    engine.gate.fail_hold("version 1 came in part")
    bench.submit("late", prompt_of(9), 5, deadline_s=1e-9)
    for _ in range(5):
        engine.tick()
    assert bench.status().state == "stale" and bench.status().stale == "version 1 came in part"
    assert "a" not in bench.done and engine.pipeline.in_flight == 0
    assert bench.completions["late", 0].finish.reason == "deadline" and bench.tokens("late") == []
    mailbox.ready = Update(2, other, model)
    bench.run()
    assert bench.status().state == "serving" and len(bench.tokens("a")) == 30
    assert set(bench.completions["a", 0].versions) == {0, 2}


def test_a_hold_that_is_given_up_before_it_is_granted_is_not_granted_later(model, prompt_of):
    bench = Bench(model, None, Mailbox())
    granted = []
    bench.submit("a", prompt_of(13), 30)
    bench.ticks(5)
    bench.engine.gate.request_hold(lambda: granted.append(1))
    bench.engine.gate.clear_hold()
    bench.run()
    assert granted == [] and bench.engine.gate.hold != "granted" and len(bench.tokens("a")) == 30


def test_a_request_waits_for_the_version_that_it_asks_for(model, other, prompt_of, greedy):
    mailbox = Mailbox()
    bench = Bench(model, None, mailbox)
    engine = bench.engine
    bench.submit("new", prompt_of(13), 20, n=2, min_version=2)
    bench.complete("now", prompt_of(13, 1), 10)
    assert bench.tokens("now") == greedy(prompt_of(13, 1), 10) and "new" not in bench.done
    assert not engine.busy and engine.roster.waiting == 2  # it rests: a loop that waits costs nothing
    for version in (1, 2):
        mailbox.ready = Update(version, other, model)
        bench.run()
        assert ("new" in bench.done) == (version == 2)
    assert bench.tokens("new") == bench.tokens("new", 1) == greedy(prompt_of(13), 20, which=1)
    assert set(bench.completions["new", 1].versions) == {2}


def test_a_request_that_waits_for_a_version_ends_by_deadline_cancel_or_shutdown(model, prompt_of):
    from rollout.engine.messages.to_engine import Cancel, Shutdown

    bench = Bench(model, None, Mailbox())
    bench.submit("overdue", prompt_of(13), 20, n=3, min_version=1, deadline_s=1e-9)
    bench.submit("unwanted", prompt_of(13), 20, n=3, min_version=1)
    bench.complete("left", prompt_of(13), 20, n=3, min_version=1)
    bench.engine.inbox.put(Cancel(("c", "unwanted")))
    bench.run()
    bench.engine.inbox.put(Shutdown("drain"))
    bench.run()
    reasons = {name: {bench.completions[name, i].finish.reason for i in range(3)} for name in bench.done}
    assert reasons == {"overdue": {"deadline"}, "unwanted": {"cancelled"}, "left": {"cancelled"}}
    assert bench.engine.gate.stopped and bench.engine.roster.feed.early == {}


def test_a_version_that_can_never_come_is_refused(model, prompt_of):
    bench = Bench(model)
    bench.complete("a", prompt_of(13), 20, min_version=1)
    (rejected,) = bench.events
    assert (rejected.code, rejected.field) == ("unavailable", "min_version") and "never" in rejected.message
