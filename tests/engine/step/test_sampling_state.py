"""Sampling settings that live in the rows: penalties, bias, min_tokens, stops; through preemption and resumption."""

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from tests.support.engine.harness import Bench


def reference(hf_model, prompt, count, change):
    """Greedy decoding with transformers' logits and a change to them."""
    tokens = []
    with torch.inference_mode():
        for _ in range(count):
            logits = hf_model(torch.tensor([prompt + tokens])).logits[:, -1]
            tokens.append(int(change(torch.tensor([prompt + tokens]), logits).argmax()))
    return tokens


@pytest.mark.parametrize("tight", [False, True])
def test_a_repetition_penalty_sees_the_prompt_and_every_token_so_far(model, prompt_of, hf_models, tight):
    bench = Bench(model, kv_pages=22 if tight else 200)
    for i in range(3):
        bench.submit(f"r{i}", prompt_of(10, i), 40, sampling={"temperature": 0.0, "repetition_penalty": 1.4})
    bench.run()
    assert (bench.engine.roster.counters.preemptions > 0) == tight
    for i in range(3):
        expected = reference(hf_models[0], prompt_of(10, i), 40, RepetitionPenaltyLogitsProcessor(1.4))
        assert bench.tokens(f"r{i}") == expected


def test_penalties_of_one_row_leave_its_neighbours_alone(model, prompt_of, greedy):
    bench = Bench(model)
    bench.submit("plain", prompt_of(10), 30)
    bench.submit("penalized", prompt_of(10), 30, sampling={"temperature": 0.0, "frequency_penalty": 3.0})
    bench.complete("biased", prompt_of(10), 30, sampling={"temperature": 0.0, "logit_bias": ((5, 100.0),)})
    assert bench.tokens("plain") == greedy(prompt_of(10), 30)
    assert bench.tokens("biased") == [5] * 30
    assert bench.tokens("penalized") != bench.tokens("plain")
    assert bench.completions["plain", 0].drawn_logprobs == []
    assert len(bench.completions["biased", 0].drawn_logprobs) == 30


def test_a_row_that_is_used_again_has_forgotten_the_last_ones_state(model, prompt_of, greedy):
    bench = Bench(model, max_rows=1)
    bench.submit(
        "first",
        prompt_of(10),
        20,
        sampling={"temperature": 0.0, "repetition_penalty": 1.5, "logit_bias": ((5, 9.0),)},
        stop={"token_ids": (1, 2), "min_tokens": 15},
    )
    bench.submit("second", prompt_of(12, 1), 20)
    bench.complete("third", prompt_of(12, 2), 20, sampling={"temperature": 0.0, "repetition_penalty": 1.0001})
    assert bench.tokens("second") == greedy(prompt_of(12, 1), 20)
    assert bench.tokens("third") == greedy(prompt_of(12, 2), 20)


def test_stop_tokens_are_not_drawn_before_min_tokens(model, prompt_of):
    prompt = prompt_of(9)
    bench = Bench(model)
    bench.complete("free", prompt, 40, sampling={"temperature": 1.0, "seed": 2})
    stops = tuple(dict.fromkeys(bench.tokens("free")[:6]))
    bench.submit("none", prompt, 40, sampling={"temperature": 1.0, "seed": 2}, stop={"token_ids": stops})
    bench.complete(
        "some", prompt, 40, sampling={"temperature": 1.0, "seed": 2}, stop={"token_ids": stops, "min_tokens": 12}
    )
    assert len(bench.tokens("none")) == 1 and bench.completions["none", 0].finish.stop == bench.tokens("none")[0]
    some = bench.tokens("some")
    assert len(some) > 12 and not set(stops) & set(some[:12])
    assert bench.completions["some", 0].finish.reason in ("stop", "length")


def test_a_deadline_ends_a_request_with_its_tokens_so_far(model, prompt_of):
    now = [0.0]
    bench = Bench(model, clock=lambda: now[0])
    bench.submit("a", prompt_of(9), 200, deadline_s=5.0)
    bench.submit("b", prompt_of(9), 30, deadline_s=50.0)
    bench.ticks(10)
    now[0] = 6.0
    bench.run()
    assert bench.completions["a", 0].finish.reason == "deadline" and 0 < len(bench.tokens("a")) < 30
    assert bench.completions["b", 0].finish.reason == "length"
    now[0] = 60.0
    bench.submit("a", prompt_of(9), 5)  # the id of a request whose deadline is long gone
    bench.engine.tick()
    bench.completions.clear()
    bench.run()
    assert len(bench.tokens("a")) == 5


def test_deltas_come_every_so_many_tokens_and_add_up(model, prompt_of):
    bench = Bench(model)
    bench.submit("a", prompt_of(9), 50, stream_every=8)
    bench.complete("b", prompt_of(9), 50)
    assert bench.completions["a", 0].deltas == 7 and bench.completions["b", 0].deltas == 1
    assert bench.tokens("a") == bench.tokens("b")


def test_a_logit_bias_ends_with_its_sequence(model, prompt_of, greedy):
    """A plain row in the place of a biased one, next to another biased row, has no bias."""
    bench = Bench(model, max_rows=2)
    bench.submit("gone", prompt_of(6, 1), 3, sampling={"temperature": 0.0, "logit_bias": ((5, 100.0),)})
    bench.submit("biased", prompt_of(6, 2), 60, sampling={"temperature": 0.0, "logit_bias": ((7, 100.0),)})
    bench.ticks(12)
    bench.complete("plain", prompt_of(9, 3), 20)
    assert bench.tokens("biased") == [7] * 60
    assert bench.tokens("plain") == greedy(prompt_of(9, 3), 20)


def test_min_tokens_without_stop_tokens_bans_nothing(model, prompt_of):
    """A neighbour whose stop tokens are banned must not make a row without stop tokens lose any."""
    bench = Bench(model, max_rows=2)
    bench.submit("banned", prompt_of(6, 2), 60, stop={"token_ids": (3,), "min_tokens": 50})
    bias = {"temperature": 0.0, "logit_bias": ((0, 100.0),)}
    bench.complete("free", prompt_of(9, 3), 20, sampling=bias, stop={"min_tokens": 10})
    assert bench.tokens("free") == [0] * 20
