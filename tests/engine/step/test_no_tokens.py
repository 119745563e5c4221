"""`max_tokens` 0: the prompt is computed and scored, and no token is drawn."""

import numpy as np
import pytest

from rollout.constraints.matcher import AllowList
from rollout.engine.messages.requests import Prior
from rollout.engine.messages.to_engine import Cancel
from tests.support.engine.drafting import drafting
from tests.support.engine.harness import VOCAB, Bench, load, watch_prefills
from tests.support.engine.scores import check_prompt, check_prompt_tops, log_softmax_after
from tests.support.engine.streams import random_delays
from tests.support.engine.updates import Mailbox, Update
from tests.support.kernels.grids import nightly
from tests.support.models.hybrids import make_hybrid

SAMPLED = {"temperature": 0.7, "seed": 3}
CONTEXT, PAGE = 49, 4  # the last position begins a page of its own


def watch_draws(bench: Bench) -> list[int]:
    """A list that gets the rows of every draw from now on."""
    seen, step = [], bench.engine.executor.step
    draw = step.sample

    def counted(logits_SV, rows_S, *more):
        seen.append(len(rows_S))
        draw(logits_SV, rows_S, *more)

    step.sample = counted
    return seen


def ended_empty(bench: Bench, name: str, n: int = 1) -> None:
    for index in range(n):
        done = bench.completions[name, index]
        assert done.finish is not None and done.finish.reason == "length" and done.token_ids == []
        assert done.versions == [] and done.drawn_logprobs == []


@pytest.mark.parametrize("depth", [2, *nightly(1)])
@pytest.mark.parametrize("chunk", [7, *nightly(16, 64)])
@pytest.mark.parametrize("prefix_cache", [True, *nightly(False)])
def test_scores_are_transformers_up_to_the_full_context(model, prompt_of, hf_models, depth, chunk, prefix_cache):
    bench = Bench(
        model,
        random_delays(chunk),
        **{"max_context_tokens": CONTEXT, "page_size": PAGE, "kv_pages": 64, "max_rows": 4},
        **{"prefill_chunk_tokens": chunk, "pipeline_depth": depth, "prefix_cache": prefix_cache},
    )
    draws = watch_draws(bench)
    lengths = (1, 2, 4, 5, 23, CONTEXT - 1, CONTEXT)
    for i, length in enumerate(lengths):
        fields = {"prompt_logprobs": True, "prompt_top_logprobs": i % 3}
        bench.submit(f"r{i}", prompt_of(length, i), 0, sampling=SAMPLED, **fields)
    bench.run()
    for i, length in enumerate(lengths):
        ended_empty(bench, f"r{i}")
        told = bench.done[f"r{i}"]
        check_prompt(told.prompt_logprobs, prompt_of(length, i), hf_models[0])
        check_prompt_tops(told.prompt_tops, prompt_of(length, i), i % 3, hf_models[0])
        np.testing.assert_array_equal(bench.completions[f"r{i}", 0].prompt_logprobs, told.prompt_logprobs)
        assert told.prompt_version == (0 if length > 1 else None) and told.decode_s == 0
    assert draws == [] and bench.status().tokens == 0


def test_scores_equal_those_of_a_request_that_draws_a_token_bit_for_bit(model, prompt_of):
    def scores(max_tokens: int) -> np.ndarray:
        bench = Bench(model, prefill_chunk_tokens=16)
        bench.complete("a", prompt_of(40), max_tokens, prompt_logprobs=True, prompt_top_logprobs=3)
        bench.close()
        return bench.done["a"].prompt_logprobs

    np.testing.assert_array_equal(scores(0), scores(1))


@pytest.mark.parametrize("length", [8, 9, 21])
def test_without_scores_it_fills_the_prefix_cache(model, prompt_of, greedy, length):
    bench = Bench(model)
    draws = watch_draws(bench)
    bench.complete("warm", prompt_of(length), 0)
    ended_empty(bench, "warm")
    assert draws == [] and bench.completions["warm", 0].prompt_logprobs is None
    bench.submit("again", prompt_of(length), 0)
    bench.complete("next", prompt_of(length) + [5, 6], 6)
    ended_empty(bench, "again")
    assert bench.done["again"].cached_tokens == length - 1
    assert bench.done["next"].cached_tokens == length
    assert bench.tokens("next") == greedy(prompt_of(length) + [5, 6], 6)


def test_it_runs_beside_rows_that_draw_and_with_constraints_and_drafts(model, prompt_of, greedy, hf_models):
    bench = Bench(model, prefill_chunk_tokens=9, max_rows=3, speculation="ngram", speculation_tokens=3)
    for i in range(4):
        bench.submit(f"d{i}", prompt_of(11 + i, i), 30)
        fields = {"stop": {"token_ids": (5,)}, "constraint": AllowList((5, 6), VOCAB), "stream_every": 2}
        bench.submit(f"s{i}", prompt_of(30 + i, i), 0, prompt_logprobs=True, logprobs=2, **fields)
    bench.run()
    for i in range(4):
        assert bench.tokens(f"d{i}") == greedy(prompt_of(11 + i, i), 30)
        ended_empty(bench, f"s{i}")
        check_prompt(bench.done[f"s{i}"].prompt_logprobs, prompt_of(30 + i, i), hf_models[0])


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_group_has_empty_completions_and_one_score(model, prompt_of, hf_models, rows):
    bench = Bench(model, max_rows=rows, prefill_chunk_tokens=10)
    draws = watch_draws(bench)
    sizes = watch_prefills(bench)
    bench.submit("g", prompt_of(33), 0, n=5, prompt_logprobs=True)
    bench.complete("k", prompt_of(20, 1), 0, n=4, min_complete=2)
    ended_empty(bench, "g", 5)
    check_prompt(bench.done["g"].prompt_logprobs, prompt_of(33), hf_models[0])
    reasons = sorted(bench.completions["k", index].finish.reason for index in range(4))
    assert reasons.count("length") >= 2 and set(reasons) <= {"length", "cancelled"}
    assert draws == [] and sum(sizes) <= 33 + 4 + 20 + 3


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_session_holds_the_prompt(model, prompt_of, greedy, prefix_cache):
    bench = Bench(model, prefix_cache=prefix_cache)
    prompt, turn = prompt_of(CONTEXT), {"session": ("c", "talk"), "session_lease_s": 60.0}
    bench.complete("first", prompt, 0, prompt_logprobs=True, **turn)
    ended_empty(bench, "first")
    bench.complete("second", prompt + [7], 8, **turn)
    assert bench.done["second"].cached_tokens == CONTEXT, "all of the prompt"
    assert bench.tokens("second") == greedy(prompt + [7], 8)


def test_a_completion_that_has_its_tokens_is_scored_with_them(model, prompt_of, hf_models):
    """`continue_from` with `max_tokens` tokens, up to the full context."""
    bench = Bench(model, max_context_tokens=CONTEXT, prefill_chunk_tokens=8)
    draws = watch_draws(bench)
    prompt, drawn = prompt_of(CONTEXT - 9), prompt_of(9, 1)
    prior = Prior(np.array(drawn, np.int32), 0, 0)
    bench.complete("a", prompt, 9, prior=prior, prompt_logprobs=True)
    ended_empty(bench, "a")
    check_prompt(bench.done["a"].prompt_logprobs, prompt, hf_models[0])
    assert draws == []


@pytest.mark.parametrize("host_kv_gib", [0.0, 0.01])
def test_it_is_preempted_and_scored_anew(model, prompt_of, hf_models, host_kv_gib):
    offload = {"host_kv_gib": host_kv_gib, "host_kv_piece_mib": 0.01}
    bench = Bench(model, prefill_chunk_tokens=8, **offload)
    for name, ticks in (("early", 3), ("late", 8)):
        prompt = prompt_of(60, len(name))
        bench.submit(name, prompt, 0, prompt_logprobs=True)
        bench.ticks(ticks)
        (seq,) = bench.engine.roster.prefilling + bench.engine.roster.decoding
        bench.engine.roster.preempt(seq)
        bench.run()
        ended_empty(bench, name)
        assert bench.done[name].preemptions == 1
        check_prompt(bench.done[name].prompt_logprobs, prompt, hf_models[0])


@pytest.mark.parametrize("recompute", [False, True])
def test_scores_are_of_one_version_and_say_which(model, other, prompt_of, hf_models, recompute):
    """An update at every step of a prefill: before its end the prompt is computed again, after it nothing is."""
    seen = set()
    for ticks in range(1, 12):
        mailbox = Mailbox()
        mine = load_first(model, hf_models)
        kv_on_swap = "recompute" if recompute else "keep"
        bench = Bench(mine, None, mailbox, kv_on_swap=kv_on_swap, prefill_chunk_tokens=8)
        bench.submit("a", prompt_of(60), 0, prompt_logprobs=True)
        bench.ticks(ticks)
        mailbox.ready = Update(1, other, mine)
        bench.run()
        ended_empty(bench, "a")
        version = bench.done["a"].prompt_version
        check_prompt(bench.done["a"].prompt_logprobs, prompt_of(60), hf_models[version])
        seen.add(version)
        bench.close()
    assert seen == {0, 1}


def load_first(model, hf_models):
    """The model with the first checkpoint's weights again."""
    for name, view in model.hf_views().items():
        view.copy_(hf_models[0].state_dict()[name])
    return model


@pytest.mark.parametrize("stem", ["Qwen3_5"])
def test_states_of_linear_attention_go_on_after_the_prompt(stem, tmp_path, prompt_of):
    reference = make_hybrid(stem, tmp_path, 0)
    model = load(tmp_path)
    bench = Bench(model, prefill_chunk_tokens=8)
    draws = watch_draws(bench)
    prompt, turn = [token % model.spec.vocab for token in prompt_of(30)], {"session": ("c", "t")}
    bench.submit("score", prompt, 0, prompt_logprobs=True, n=3)
    bench.complete("turn", prompt[:21], 0, session_lease_s=60.0, **turn)
    ended_empty(bench, "score", 3)
    assert draws == []
    check_prompt(bench.done["score"].prompt_logprobs, prompt, reference)
    bench.submit("same", prompt, 5)
    bench.complete("next", prompt[:21] + [3, 4], 5, session_lease_s=60.0, **turn)
    assert bench.done["same"].cached_tokens == 29 and bench.done["next"].cached_tokens == 21
    for name, text in (("same", prompt), ("next", [*prompt[:21], 3, 4])):
        tokens = bench.tokens(name)
        logits = log_softmax_after(reference, text + tokens)[len(text) - 1 : -1]
        assert tokens == logits.argmax(1).tolist()


def test_replayed_drafts_of_neighbours_are_as_ever(model, prompt_of, greedy):
    recorded = {("d", 0): greedy(prompt_of(9), 40)}
    bench, _ = drafting(model, recorded, wrong=0.2, speculation_tokens=4)
    bench.submit("d", prompt_of(9), 40)
    for i in range(6):
        bench.ticks(2)
        bench.submit(f"s{i}", prompt_of(20, i), 0, prompt_logprobs=True)
    bench.run()
    assert bench.tokens("d") == recorded["d", 0]
    for i in range(6):
        ended_empty(bench, f"s{i}")


def test_a_prompt_whose_pages_run_short_waits_and_is_scored(model, prompt_of, hf_models):
    bench = Bench(model, kv_pages=32, prefill_chunk_tokens=16, prefix_cache=False, max_rows=4)
    for i in range(3):
        bench.submit(f"d{i}", prompt_of(8, i), 60)
        bench.submit(f"s{i}", prompt_of(100, i), 0, prompt_logprobs=True)
    bench.run()
    for i in range(3):
        assert len(bench.tokens(f"d{i}")) == 60
        ended_empty(bench, f"s{i}")
        check_prompt(bench.done[f"s{i}"].prompt_logprobs, prompt_of(100, i), hf_models[0])


def test_a_cancel_in_its_middle_leaves_what_was_scored(model, prompt_of, hf_models):
    bench = Bench(model, prefill_chunk_tokens=8)
    bench.submit("a", prompt_of(60), 0, prompt_logprobs=True)
    bench.ticks(4)
    bench.engine.inbox.put(Cancel(("c", "a")))
    bench.run()
    done, told = bench.completions["a", 0], bench.done["a"].prompt_logprobs
    assert done.finish.reason == "cancelled" and bench.done["a"].prompt_version == 0
    known = int((~np.isnan(told)).sum())
    assert 8 <= known < 59
    check_prompt(told[: known + 1], prompt_of(60)[: known + 1], hf_models[0])
