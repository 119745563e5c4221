"""Row state that outlives its sequence, uploads at their bound, answers to commands, memory of ended requests."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from harness import Bench

from rollout.engine.kv.pool import PrefixKeys
from rollout.engine.messages import Cancel, Done, Pause, Prior, Rejected, Resume, Shutdown


def test_a_logit_bias_ends_with_its_sequence(model, prompt_of, greedy):
    """A plain row in the place of a biased one, next to another biased row, has no bias."""
    bench = Bench(model, max_rows=2)
    bench.submit("gone", prompt_of(6, 1), 3, sampling={"temperature": 0.0, "logit_bias": ((5, 100.0),)})
    bench.submit("biased", prompt_of(6, 2), 60, sampling={"temperature": 0.0, "logit_bias": ((7, 100.0),)})
    for _ in range(12):
        bench.engine.tick()
    bench.submit("plain", prompt_of(9, 3), 20)
    bench.run()
    assert bench.tokens("biased") == [7] * 60
    assert bench.tokens("plain") == greedy(prompt_of(9, 3), 20)
    bench.close()


def test_min_tokens_without_stop_tokens_bans_nothing(model, prompt_of):
    """A neighbour whose stop tokens are banned must not make a row without stop tokens lose any."""
    bench = Bench(model, max_rows=2)
    bench.submit("banned", prompt_of(6, 2), 60, stop={"token_ids": (3,), "min_tokens": 50})
    bias = {"temperature": 0.0, "logit_bias": ((0, 100.0),)}
    bench.submit("free", prompt_of(9, 3), 20, sampling=bias, stop={"min_tokens": 10})
    bench.run()
    assert bench.tokens("free") == [0] * 20
    bench.close()


@pytest.mark.parametrize("rows", [1, 8])
def test_the_longest_upload_fits_the_staging_buffer(model, prompt_of, rows):
    """A continued completion of nearly the whole context, with every list that a row can have, in large chunks."""
    model.spec = dataclasses.replace(model.spec, max_positions=1 << 14)
    bench = Bench(model, max_rows=rows, kv_pages=600, page_size=16, prefill_chunk_tokens=4096, max_context_tokens=8192)
    bench.submit(
        "a",
        prompt_of(2),
        8190,
        sampling={"repetition_penalty": 1.1, "logit_bias": tuple((i, 0.1) for i in range(97))},
        stop={"token_ids": (1,), "min_tokens": 8188},
        prior=Prior(np.array(prompt_of(8185), dtype=np.int32)),
    )
    bench.engine.tick()
    bench.engine.inbox.put(Cancel(("c", "a")))
    bench.run()
    bench.close()


def done_tokens(bench: Bench) -> list[int]:
    return [event.token for event in bench.events if isinstance(event, Done)]


def test_a_pause_that_is_resumed_at_once_is_still_answered(model, prompt_of):
    bench = Bench(model)
    bench.submit("a", prompt_of(9), 300)
    for _ in range(5):
        bench.engine.tick()
    bench.engine.inbox.put(Pause("keep", 1))
    bench.engine.inbox.put(Resume(2))
    for _ in range(50):
        bench.engine.tick()
    assert sorted(done_tokens(bench)) == [1, 2], "rows still run; a client waits for the answer to its pause"
    bench.run()
    bench.close()


def test_every_shutdown_is_answered(model, prompt_of):
    bench = Bench(model)
    bench.submit("a", prompt_of(9), 300)
    bench.engine.inbox.put(Shutdown("drain", 1))
    bench.engine.tick()
    bench.engine.inbox.put(Shutdown("now", 2))
    while not bench.engine.gate.stopped:
        bench.engine.tick()
    assert sorted(done_tokens(bench)) == [1, 2]
    bench.close()


def test_a_request_that_ended_is_not_kept_until_its_deadline(model, prompt_of):
    bench = Bench(model)
    for i in range(100):
        bench.submit(f"r{i}", prompt_of(9), 2, deadline_s=1e6)
        bench.run()
    assert len(bench.engine.scheduler._deadlines._heap) < 50
    bench.close()


def test_cancelled_requests_do_not_pile_up_behind_one_that_waits(model, prompt_of):
    bench = Bench(model, max_rows=1, max_queue=4)
    bench.submit("runs", prompt_of(9), 400)
    bench.submit("waits", prompt_of(9), 4)
    bench.engine.tick()
    for i in range(200):
        bench.submit(f"r{i}", prompt_of(9), 3)
        bench.engine.inbox.put(Cancel(("c", f"r{i}")))
        bench.engine.tick()
    assert len(bench.engine.scheduler.room.queue._plain._heap) < 50
    bench.run()
    bench.close()


def test_a_request_that_waits_for_pages_costs_nothing_at_each_step(model, prompt_of, monkeypatch):
    """Its cached prefix is not hashed again at every tick."""
    hashed = []
    next_key = PrefixKeys.next_key
    monkeypatch.setattr(PrefixKeys, "next_key", lambda self, page: hashed.append(1) or next_key(self, page))
    bench = Bench(model, max_rows=4, kv_pages=100)
    bench.submit("runs", prompt_of(200), 100)
    for _ in range(20):
        bench.engine.tick()
    bench.submit("waits", prompt_of(200) + prompt_of(180, 5), 8)
    bench.engine.tick()
    assert bench.engine.scheduler.waiting == 1
    del hashed[:]
    for _ in range(20):
        bench.engine.tick()
    assert len(hashed) < 100, "20 steps: at most the keys of the running row's new pages, and one look for the prefix"
    bench.run()
    bench.close()


def test_a_group_that_no_queue_can_hold_is_not_told_to_come_back(model, prompt_of):
    bench = Bench(model, max_queue=4)
    bench.submit("g", prompt_of(4), 3, n=8)
    bench.run()
    refusal = next(event for event in bench.events if isinstance(event, Rejected))
    assert refusal.code != "overloaded"
    bench.close()


def test_followers_share_one_prefill_after_a_swap_too(model, prompt_of):
    bench = Bench(model, max_rows=4, prefix_cache=False)
    bench.submit("g", prompt_of(60), 30, n=8)
    for _ in range(10):
        bench.engine.tick()
    sizes, launched = [], bench.engine.scheduler.launched
    bench.engine.scheduler.launched = lambda plan: (
        plan.kind == "prefill" and sizes.append(plan.tokens),
        launched(plan),
    )
    bench.engine.scheduler.weights_changed(1, recompute=False)
    bench.run()
    assert sum(sizes) <= 60 + 3, "four completions had not started: one prompt, and three last tokens"
    bench.close()


def test_logits_of_a_16_bit_model_are_not_rounded_to_16_bits(model):
    model = model.to(torch.bfloat16)
    hidden = torch.randn(3, model.spec.hidden).to(torch.bfloat16)
    expected = hidden.float() @ model.lm_head.float().t()
    assert torch.allclose(model.compute_logits(hidden), expected, atol=1e-4)
