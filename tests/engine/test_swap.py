"""Weights change between two steps: the right tokens on both sides, and the boundary in the right place."""

import pytest
import torch
from transformers import DynamicCache

from rollout.engine.schedule.preemption import change_weights
from tests.support.engine.harness import Bench, watch_prefills
from tests.support.engine.streams import LateDevice
from tests.support.engine.updates import Mailbox, Update, boundary, swap_in_the_middle


@pytest.mark.parametrize("device", [None, LateDevice({"compute": lambda: 0.001})], ids=["on time", "late"])
def test_kept_kv_and_new_weights_give_transformers_tokens(model, other, prompt_of, hf_models, device):
    mailbox = Mailbox()
    bench = Bench(model, device, mailbox)
    prompt = prompt_of(13)
    bench.submit("a", prompt, 50)
    swap_in_the_middle(bench, mailbox, Update(1, other, model), 20)
    tokens, k = bench.tokens("a"), boundary(bench, "a")
    assert 10 < k < 40
    assert mailbox.done and mailbox.done[0][0] == 1 and mailbox.done[0][1] > 0
    cache, ids = DynamicCache(), torch.tensor([prompt + tokens])
    with torch.inference_mode():
        old = hf_models[0](ids[:, : len(prompt) + k - 1], past_key_values=cache, use_cache=True).logits[0]
        new = hf_models[1](ids[:, len(prompt) + k - 1 :], past_key_values=cache, use_cache=True).logits[0]
    expected = torch.cat([old, new]).argmax(-1)[len(prompt) - 1 : -1]
    assert tokens == expected.tolist()


def test_a_boundary_one_token_off_would_be_seen(model, other, prompt_of, hf_models):
    """The reference above is sharp: moving the boundary by one gives other tokens."""
    mailbox = Mailbox()
    bench = Bench(model, None, mailbox)
    prompt = prompt_of(13)
    bench.submit("a", prompt, 50)
    swap_in_the_middle(bench, mailbox, Update(1, other, model), 20)
    tokens, k = bench.tokens("a"), boundary(bench, "a")
    ids = torch.tensor([prompt + tokens])
    with torch.inference_mode():
        old = hf_models[0](ids).logits[0].argmax(-1)[len(prompt) - 1 : -1].tolist()
    assert tokens[:k] == old[:k] and tokens[k] != old[k]


def test_recompute_gives_the_new_models_own_continuation(model, other, prompt_of, greedy):
    mailbox = Mailbox()
    bench = Bench(model, None, mailbox, kv_on_swap="recompute")
    for i in range(3):
        bench.submit(f"r{i}", prompt_of(13, i), 50)
    swap_in_the_middle(bench, mailbox, Update(1, other, model), 20)
    for i in range(3):
        tokens, k = bench.tokens(f"r{i}"), boundary(bench, f"r{i}")
        prompt = prompt_of(13, i)
        assert tokens[:k] == greedy(prompt, k)
        assert tokens[k:] == greedy(prompt + tokens[:k], 50 - k, which=1)


def test_a_cached_prompt_of_the_old_version_is_not_reused(model, other, prompt_of, greedy):
    mailbox = Mailbox()
    bench = Bench(model, None, mailbox)
    bench.complete("a", prompt_of(40), 5)
    mailbox.ready = Update(1, other, model)
    bench.engine.tick()
    bench.complete("b", prompt_of(40), 20)
    assert bench.tokens("b") == greedy(prompt_of(40), 20, which=1)
    assert set(bench.completions["b", 0].versions) == {1}


@pytest.mark.parametrize("ticks", range(1, 9))
def test_a_group_shares_a_prefill_of_one_version_only(model, other, prompt_of, greedy, ticks):
    """The swap falls on every moment of a chunked prefill; followers that start after it are all new model."""
    mailbox = Mailbox()
    bench = Bench(model, None, mailbox, prefill_chunk_tokens=8)
    prompt = prompt_of(30)
    bench.submit("g", prompt, 12, n=3)
    swap_in_the_middle(bench, mailbox, Update(1, other, model), ticks)
    for i in range(3):
        completion = bench.completions["g", i]
        if i > 0 and set(completion.versions) == {1}:
            assert completion.token_ids == greedy(prompt, 12, which=1)
        if set(completion.versions) == {0}:
            assert completion.token_ids == greedy(prompt, 12)


def test_a_fault_in_the_copy_ends_requests_with_an_error_not_in_silence(model, prompt_of):
    class Broken:
        version = 1
        nbytes = 0
        names = ()

        def copy_into(self) -> None:
            raise RuntimeError("no such memory")

    from rollout.engine.device.streams import DeviceError

    mailbox = Mailbox()
    bench = Bench(model, None, mailbox)
    bench.submit("a", prompt_of(9), 50)
    bench.ticks(5)
    mailbox.ready = Broken()
    with pytest.raises(DeviceError, match="no such memory") as fault:
        bench.run()
    bench.engine.fail(str(fault.value))
    finish = bench.completions["a", 0].finish
    assert finish.reason == "error" and "no such memory" in finish.error
    assert len(bench.tokens("a")) >= 3 and set(bench.completions["a", 0].versions) == {0}
    assert mailbox.failures == [(1, finish.error)] and bench.engine.gate.swapping
    bench.close(check=False)


def test_followers_share_one_prefill_after_a_swap_too(model, prompt_of):
    bench = Bench(model, max_rows=4, prefix_cache=False)
    bench.submit("g", prompt_of(60), 30, n=8)
    bench.ticks(10)
    sizes = watch_prefills(bench)
    change_weights(bench.engine.roster, 1, recompute=False)
    bench.run()
    assert sum(sizes) <= 60 + 3, "four completions had not started: one prompt, and three last tokens"
