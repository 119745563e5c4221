"""Top tokens and prompt log-probs equal those of transformers; a step without such a request does no extra work."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rollout.constraints.matcher import AllowList
from rollout.engine.device.streams import CpuDevice
from rollout.engine.features.scores import buffers as scores_module
from rollout.engine.features.scores.buffers import SCORED_AT_ONCE
from rollout.engine.features.scores.feature import SCORED_WORDS, ScoresFeature, asked_scores
from rollout.engine.messages.requests import Prior
from rollout.engine.messages.to_engine import Cancel, StopAt
from rollout.engine.messages.to_service import Delta
from rollout.engine.schedule.step_feature import find_feature
from rollout.engine.step.pack import spare_words, upload_words
from tests.support.engine.harness import Bench, watch_headers, watch_plans
from tests.support.engine.scores import check_prompt, check_prompt_tops, log_softmax_after, watch_output_layer
from tests.support.engine.streams import random_delays
from tests.support.engine.updates import Mailbox, Update, boundary, swap_in_the_middle
from tests.support.kernels.grids import nightly

VOCAB = 97
#: One step for all prompts of a test, which has more positions than go through the output layer at once.
PIECES = {"prefill_chunk_tokens": 512, "kv_pages": 900}
SAMPLED = {"temperature": 0.7, "seed": 3}
#: What changes the logits before a draw; the scores are of the logits as they were.
CHANGED = [
    {"temperature": 0.0},
    {**SAMPLED, "top_p": 0.8, "top_k": 5},
    {**SAMPLED, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
    {**SAMPLED, "logit_bias": ((7, 30.0),)},
]


def scores_of(bench: Bench) -> ScoresFeature:
    return find_feature(bench.engine.roster.features, ScoresFeature)


def check_tops(done, prompt: list[int], k: int, hf_model) -> None:
    expected_NV = log_softmax_after(hf_model, prompt + done.token_ids)[len(prompt) - 1 : -1]
    check_rows(done, expected_NV, k)


def check_rows(done, expected_NV: torch.Tensor, k: int) -> None:
    ids, mine = torch.tensor(done.top_ids), torch.tensor(done.top_logprobs)
    assert ids.shape == mine.shape == (len(done.token_ids), k)
    assert torch.allclose(mine, expected_NV.topk(k).values, atol=1e-4), "the k largest, largest first"
    assert torch.allclose(mine, expected_NV.gather(1, ids.long()), atol=1e-4), "and of these tokens"
    assert all(len(set(row)) == k for row in done.top_ids)
    for at, (token, row) in enumerate(zip(done.token_ids, done.top_ids, strict=True)):
        if token in row:
            assert done.top_logprobs[at][row.index(token)] == pytest.approx(done.raw_logprobs[at], abs=1e-5)


@pytest.mark.parametrize("chunk", [7, *nightly(64)])
@pytest.mark.parametrize("depth", [2, *nightly(1)])
def test_tops_and_prompts_of_a_mixed_batch_are_transformers(model, prompt_of, hf_models, chunk, depth):
    bench = Bench(model, random_delays(chunk), prefill_chunk_tokens=chunk, pipeline_depth=depth, max_rows=4)
    wishes = [(5, 1, True), (40, 20, False), (17, 0, True), (1, 6, True), (90, 3, True), (30, 0, False), (33, 5, True)]
    ranked = [None, None, 0, 4, 20, None, 3]
    for i, (length, k, scored) in enumerate(wishes):
        sampling = CHANGED[i % len(CHANGED)]
        fields = {"logprobs": k, "prompt_logprobs": scored, "prompt_top_logprobs": ranked[i]}
        bench.submit(f"r{i}", prompt_of(length, i), 12 + 3 * i, sampling=sampling, **fields)
    bench.run()
    for i, (length, k, scored) in enumerate(wishes):
        done, prompt = bench.completions[f"r{i}", 0], prompt_of(length, i)
        if k:
            check_tops(done, prompt, k, hf_models[0])
        assert bool(done.top_ids) == bool(k)
        if scored:
            check_prompt(done.prompt_logprobs, prompt, hf_models[0])
            np.testing.assert_array_equal(bench.done[f"r{i}"].prompt_logprobs, done.prompt_logprobs)
        assert scored or done.prompt_logprobs is bench.done[f"r{i}"].prompt_logprobs is None
        for event in (done, bench.done[f"r{i}"]):
            assert (event.prompt_tops is None) == (ranked[i] is None)
            if event.prompt_tops is not None:
                check_prompt_tops(event.prompt_tops, prompt, ranked[i], hf_models[0])


def test_pieces_of_a_prompt_have_their_ranks_and_tops(model, prompt_of, hf_models):
    """As on a GPU, where pieces are filled up: what fills them up is nobody's."""
    bench = Bench(model, **PIECES)
    scores_of(bench).multiple = SCORED_AT_ONCE
    for i, length in enumerate((271, 10, 3)):
        bench.submit(f"r{i}", prompt_of(length, i), 1, prompt_logprobs=True, prompt_top_logprobs=(5, None, 1)[i])
    bench.run()
    for i, (length, k) in enumerate(((271, 5), (10, None), (3, 1))):
        done = bench.completions[f"r{i}", 0]
        check_prompt(done.prompt_logprobs, prompt_of(length, i), hf_models[0])
        if k is not None:
            check_prompt_tops(done.prompt_tops, prompt_of(length, i), k, hf_models[0])


def test_equal_logits_have_the_rank_of_the_first():
    scores = scores_module.ScoreBuffers(CpuDevice(), max_rows=1, chunk_tokens=4, vocab=6)
    logits_NV = torch.tensor([[1.0, 3.0, 3.0, 2.0, 0.0, 0.0]]).repeat(4, 1)
    at, targets = torch.arange(4), torch.tensor([1, 2, 3, 5])
    asked = scores_module.Scoring(4, ranked=True)
    scores.narrow.score(logits_NV, at, targets, None, torch.clone, asked)
    scores.narrow.copy(asked)
    found = scores.narrow.read(asked)
    assert found.ranks_N.tolist() == [1, 1, 3, 5] and not found.ids_NK.size


def test_only_steps_that_are_asked_for_them_tell_ranks_and_tops_of_prompts(model, prompt_of):
    bench = Bench(model)
    told = watch_headers(bench)
    for name, k in (("plain", None), ("ranks", 0), ("tops", 2)):
        bench.complete(name, prompt_of(9), 2, prompt_logprobs=True, prompt_top_logprobs=k)
    asked = [(scoring.ranked, scoring.tops) for header in told if (scoring := asked_scores(header).narrow).scored]
    assert asked == [(False, 0), (True, 0), (True, 20)]


def test_prompts_go_through_the_output_layer_in_pieces(model, prompt_of, hf_models):
    bench = Bench(model, **PIECES)
    sizes = watch_output_layer(model)
    lengths = (261, 100, 3)
    for i, length in enumerate(lengths):
        bench.submit(f"r{i}", prompt_of(length, i), 1, prompt_logprobs=True)
    bench.run()
    assert max(sizes) == SCORED_AT_ONCE and sum(sizes) == 260 + 99 + 2 + 3, "three prompts, three draws"
    for i, length in enumerate(lengths):
        check_prompt(bench.completions[f"r{i}", 0].prompt_logprobs, prompt_of(length, i), hf_models[0])


def test_pieces_are_filled_up_where_each_number_of_rows_is_a_kernel(model, prompt_of, hf_models):
    """As on a GPU."""
    bench = Bench(model, **PIECES)
    sizes = watch_output_layer(model)
    scores_of(bench).multiple = SCORED_AT_ONCE
    for i, length in enumerate((300, 121, 3)):
        bench.submit(f"r{i}", prompt_of(length, i), 1, prompt_logprobs=True, logprobs=2)
    bench.run()
    assert {size for size in sizes if size > 3} == {SCORED_AT_ONCE}
    for i, length in enumerate((300, 121, 3)):
        check_prompt(bench.completions[f"r{i}", 0].prompt_logprobs, prompt_of(length, i), hf_models[0])


def test_uploads_with_scores_stay_within_the_bound_that_steps_are_planned_by(model, prompt_of):
    """And a slot has room for a whole chunk of scored tokens, with all that a row can have to set up."""
    bench = Bench(model, prefill_chunk_tokens=512, kv_pages=900)
    limits, packer, used = bench.engine.scheduler.limits, bench.engine.parts.packer, []
    pack, spare = packer.pack, spare_words(limits.max_rows, SCORED_WORDS * SCORED_AT_ONCE)  # the padding of a list
    scores_of(bench).multiple = SCORED_AT_ONCE  # as on a GPU

    def measured(plan, staging):
        spans = [(span.seq, span.tokens_in) for span in plan.spans if span.prompt is not None]
        bound = sum(upload_words(*span, bench.engine.executor.step.features) for span in spans)
        assert bound <= limits.upload_words
        upload = pack(plan, staging)
        if bound:
            used.append((len(upload.words), bound + spare))
        return upload

    packer.pack = measured
    setup = {"stop": {"token_ids": (96,), "min_tokens": 1}}
    for i, length in enumerate((450, 300, 130, 2, 1, 400, limits.max_context - 2)):
        sampling = {**SAMPLED, "repetition_penalty": 1.1, "logit_bias": ((7, 1.0),)} if i % 2 == 0 else SAMPLED
        prompt = prompt_of(length, i)
        bench.submit(f"r{i}", prompt, 2, sampling=sampling, prompt_logprobs=True, logprobs=1, **setup)
    bench.run()
    assert len(used) > 4 and all(words <= bound for words, bound in used), used


def test_tops_and_prompts_survive_preemption_without_repetition(model, prompt_of, hf_models):
    bench = Bench(model, kv_pages=36, prefill_chunk_tokens=9, prefix_cache=False)
    for i in range(6):
        bench.submit(f"r{i}", prompt_of(20, i), 60, sampling=SAMPLED, logprobs=4, prompt_logprobs=True)
    bench.run()
    assert bench.engine.roster.counters.preemptions > 3
    for i in range(6):
        done = bench.completions[f"r{i}", 0]
        assert len(done.token_ids) == 60
        check_tops(done, prompt_of(20, i), 4, hf_models[0])
        check_prompt(done.prompt_logprobs, prompt_of(20, i), hf_models[0])


def test_a_prefill_that_is_preempted_half_way_scores_its_prompt_again(model, prompt_of, hf_models):
    bench = Bench(model, prefill_chunk_tokens=8)
    prompt = prompt_of(60)
    bench.submit("a", prompt, 5, prompt_logprobs=True, prompt_top_logprobs=3)
    bench.ticks(4)
    (seq,) = bench.engine.roster.prefilling
    assert 0 < seq.kv.length < 60 and seq.fresh_from == 0
    bench.engine.roster.preempt(seq)
    bench.run()
    check_prompt(bench.completions["a", 0].prompt_logprobs, prompt, hf_models[0])
    assert bench.done["a"].preemptions == 1
    check_prompt_tops(bench.done["a"].prompt_tops, prompt, 3, hf_models[0])


def test_a_prompt_that_is_scored_takes_no_cached_page_but_leaves_its_own(model, prompt_of, hf_models, greedy):
    bench = Bench(model)
    prompt = prompt_of(50)
    bench.complete("a", prompt, 8)
    bench.complete("b", prompt, 8, prompt_logprobs=True, logprobs=2)
    bench.submit("c", prompt[:41], 8, prompt_logprobs=True)
    bench.complete("d", prompt, 8)
    cached = {name: bench.done[name].cached_tokens for name in "abcd"}
    assert cached == {"a": 0, "b": 0, "c": 0, "d": 49}
    check_prompt(bench.completions["b", 0].prompt_logprobs, prompt, hf_models[0])
    check_prompt(bench.completions["c", 0].prompt_logprobs, prompt[:41], hf_models[0])
    check_tops(bench.completions["b", 0], prompt, 2, hf_models[0])
    assert bench.tokens("a") == bench.tokens("b") == bench.tokens("d") == greedy(prompt, 8)


def test_a_turn_that_scores_its_prompt_takes_nothing_from_its_session(model, prompt_of, hf_models):
    bench = Bench(model, prefix_cache=False)
    prompt, cached = prompt_of(30), []
    for name, scored in (("first", False), ("second", True), ("third", False)):
        bench.complete(
            name, prompt, 10, session=("c", "talk"), session_lease_s=60.0, prompt_logprobs=scored, logprobs=2
        )
        cached.append(bench.done[name].cached_tokens)
        check_tops(bench.completions[name, 0], prompt, 2, hf_models[0])
        if scored:
            check_prompt(bench.completions[name, 0].prompt_logprobs, prompt, hf_models[0])
        prompt = prompt + bench.tokens(name) + prompt_of(7, len(prompt))
    assert cached[:2] == [0, 0] and cached[2] > 40
    bench.close(check=False)


def test_pages_of_a_scored_prompt_are_found_by_others(model, prompt_of):
    bench = Bench(model)
    bench.complete("a", prompt_of(50), 8, prompt_logprobs=True)
    bench.complete("b", prompt_of(50), 8)
    assert bench.done["b"].cached_tokens == 49


def test_a_group_scores_its_prompt_once(model, prompt_of, hf_models):
    bench = Bench(model, max_rows=3, prefill_chunk_tokens=10)
    prompt, headers = prompt_of(33), watch_headers(bench)
    bench.complete("g", prompt, 14, n=5, sampling=SAMPLED, logprobs=3, prompt_logprobs=True)
    assert sum(span.scored for header in headers for span in asked_scores(header).spans) == 32
    for index in range(5):
        done = bench.completions["g", index]
        check_tops(done, prompt, 3, hf_models[0])
        assert (done.prompt_logprobs is not None) == (index == 0), "once, with completion 0"
    check_prompt(bench.done["g"].prompt_logprobs, prompt, hf_models[0])


@pytest.mark.parametrize("n", [2, 3])
def test_who_prefills_after_a_leader_that_ended_scores_the_prompt(model, prompt_of, hf_models, n):
    bench = Bench(model, prefill_chunk_tokens=8)
    prompt = prompt_of(40)
    bench.submit("g", prompt, 9, n=n, sampling=SAMPLED, prompt_logprobs=True, logprobs=2)
    bench.ticks(3)
    assert 0 < bench.engine.roster.prefilling[0].kv.length < 40
    bench.engine.inbox.put(StopAt(("c", "g"), 0, 0, "x"))
    bench.run()
    told = bench.completions["g", 0].prompt_logprobs
    assert len(told) == 40 and np.isnan(told[1:]).any(), "what was known when it ended"
    check_prompt(bench.done["g"].prompt_logprobs, prompt, hf_models[0])
    for index in range(1, n):
        check_tops(bench.completions["g", index], prompt, 2, hf_models[0])


def test_continued_completions_tell_of_new_tokens_and_of_the_prompt_alone(model, prompt_of, hf_models):
    bench = Bench(model, prefill_chunk_tokens=8)
    prompt = prompt_of(19)
    bench.complete("whole", prompt, 40, sampling=SAMPLED, logprobs=4, stream_every=5)
    whole = bench.completions["whole", 0]
    assert whole.deltas > 5 and not whole.drawn_logprobs, "telling more changes no draw"
    check_tops(whole, prompt, 4, hf_models[0])
    prior = Prior(np.array(whole.token_ids[:15], dtype=np.int32))
    sampling = {**SAMPLED, "seed": whole.seed}
    bench.complete("rest", prompt, 40, sampling=sampling, prior=prior, logprobs=4, prompt_logprobs=True)
    rest = bench.completions["rest", 0]
    assert rest.token_ids == whole.token_ids[15:] and rest.top_ids == whole.top_ids[15:]
    check_prompt(rest.prompt_logprobs, prompt, hf_models[0])


def test_the_first_delta_of_completion_0_alone_has_the_scores_of_the_prompt(model, prompt_of):
    bench = Bench(model)
    prior = Prior(np.array([3, 4, 5], dtype=np.int32))
    for name, fields in (("new", {"n": 2}), ("continued", {"prior": prior})):
        bench.complete(name, prompt_of(9), 12, stream_every=2, prompt_logprobs=True, prompt_top_logprobs=2, **fields)
        deltas = [event for event in bench.events if isinstance(event, Delta) and event.key == ("c", name)]
        first = [delta.index == 0 and delta.offset == 3 * (name == "continued") for delta in deltas]
        assert [delta.prompt_logprobs is not None for delta in deltas] == first
        assert [delta.prompt_tops is not None for delta in deltas] == first
        assert sum(first) == 1 and len(deltas) > 3


def test_tops_of_constrained_rows_are_the_models_own(model, prompt_of, hf_models):
    bench = Bench(model)
    stop = {"token_ids": (5,)}
    allowed = AllowList((5, 11, 12), VOCAB)
    bench.submit("a", prompt_of(12), 20, sampling=SAMPLED, constraint=allowed, stop=stop, logprobs=5)
    bench.complete("b", prompt_of(30, 1), 20, sampling=SAMPLED, logprobs=2)
    done = bench.completions["a", 0]
    assert set(done.token_ids) <= {5, 11, 12}
    assert not {token for row in done.top_ids for token in row} <= {5, 11, 12}
    check_tops(done, prompt_of(12), 5, hf_models[0])
    check_tops(bench.completions["b", 0], prompt_of(30, 1), 2, hf_models[0])


def test_tops_after_a_swap_are_of_the_new_weights(model, other, prompt_of, hf_models):
    mailbox = Mailbox()
    bench = Bench(model, None, mailbox, kv_on_swap="recompute")
    prompt = prompt_of(13)
    bench.submit("a", prompt, 50, logprobs=4)
    swap_in_the_middle(bench, mailbox, Update(1, other, model), 20)
    done, k = bench.completions["a", 0], boundary(bench, "a")
    rows = [log_softmax_after(hf_model, prompt + done.token_ids)[len(prompt) - 1 : -1] for hf_model in hf_models]
    check_rows(done, torch.cat([rows[0][:k], rows[1][k:]]), 4)


@pytest.mark.parametrize("kv_on_swap", ["keep", "recompute"])
def test_prompt_logprobs_are_of_the_version_of_the_first_token(model, other, prompt_of, hf_models, kv_on_swap):
    mailbox = Mailbox()
    bench = Bench(model, None, mailbox, kv_on_swap=kv_on_swap, prefill_chunk_tokens=8)
    prompt = prompt_of(60)
    bench.submit("a", prompt, 5, prompt_logprobs=True, prompt_top_logprobs=3)
    bench.ticks(4)
    assert 0 < bench.engine.roster.prefilling[0].kv.length < 60
    mailbox.ready = Update(1, other, model)
    bench.run()
    assert bench.completions["a", 0].versions[0] == 1
    check_prompt(bench.completions["a", 0].prompt_logprobs, prompt, hf_models[1])
    check_prompt_tops(bench.completions["a", 0].prompt_tops, prompt, 3, hf_models[1])


def test_members_of_a_group_that_prefill_again_after_a_swap_leave_its_prompts_logprobs(
    model, other, prompt_of, hf_models
):
    mailbox = Mailbox()
    bench = Bench(model, None, mailbox, max_rows=1)
    prompt = prompt_of(21)
    bench.submit("g", prompt, 12, n=3, sampling=SAMPLED, prompt_logprobs=True, logprobs=2)
    swap_in_the_middle(bench, mailbox, Update(1, other, model), 5)
    assert bench.completions["g", 0].versions[0] == 0 and bench.completions["g", 1].versions[0] == 1
    check_prompt(bench.done["g"].prompt_logprobs, prompt, hf_models[0])
    for index in (1, 2):
        check_tops(bench.completions["g", index], prompt, 2, hf_models[1])


def test_a_prompt_that_is_scored_again_and_not_to_the_end_tells_of_one_version(model, other, prompt_of, hf_models):
    mailbox = Mailbox()
    bench = Bench(model, None, mailbox, prefill_chunk_tokens=8)
    prompt = prompt_of(60)
    bench.submit("a", prompt, 5, prompt_logprobs=True, prompt_top_logprobs=2)
    bench.ticks(6)
    before = bench.engine.roster.prefilling[0].kv.length
    mailbox.ready = Update(1, other, model)
    while not (running := bench.engine.roster.prefilling) or not 16 <= running[0].kv.length < before:
        bench.engine.tick()
    bench.engine.inbox.put(Cancel(("c", "a")))
    bench.run()
    told = bench.done["a"].prompt_logprobs
    known = int((~np.isnan(told)).sum())
    assert 8 <= known < before - 8 and np.isnan(told[known + 1 :]).all()
    new = log_softmax_after(hf_models[1], prompt)[:known].gather(1, torch.tensor(prompt[1 : known + 1])[:, None])[:, 0]
    assert torch.allclose(torch.tensor(told[1 : known + 1]), new, atol=1e-4)
    tops = bench.done["a"].prompt_tops
    assert (tops.ranks > 0).tolist() == (tops.ids >= 0).all(1).tolist() == (~np.isnan(told)).tolist()
    assert not tops.ranks[known + 1 :].any() and np.isnan(tops.logprobs[known + 1 :]).all()
    expected = log_softmax_after(hf_models[1], prompt)[:known].topk(2).values
    assert torch.allclose(torch.tensor(tops.logprobs[1 : known + 1]), expected, atol=1e-4)


def test_a_request_that_ends_before_its_prompt_is_computed_says_so_with_nan(model, prompt_of):
    bench = Bench(model, prefill_chunk_tokens=8)
    bench.submit("a", prompt_of(60), 5, n=2, logprobs=3, prompt_logprobs=True)
    bench.engine.tick()
    bench.engine.inbox.put(Cancel(("c", "a")))
    bench.run()
    for index in range(2):
        done = bench.completions["a", index]
        assert done.finish.reason == "cancelled" and done.top_ids == [] == done.token_ids
    assert len(bench.done["a"].prompt_logprobs) == 60 and np.isnan(bench.done["a"].prompt_logprobs).any()


def test_completions_that_end_early_have_as_many_tops_as_tokens(model, prompt_of, greedy):
    """Steps in flight name rows that have ended: what these bring is dropped, tops and tokens alike."""
    bench = Bench(model)
    prompt = prompt_of(15)
    stop = greedy(prompt, 12)[-1]
    first = greedy(prompt, 12).index(stop)
    bench.submit("a", prompt, 40, stop={"token_ids": (stop,)}, logprobs=3)
    bench.submit("b", prompt_of(9, 2), 40, logprobs=2, sampling=SAMPLED)
    bench.ticks(8)
    bench.engine.inbox.put(Cancel(("c", "b")))
    bench.run()
    for name in ("a", "b"):
        done = bench.completions[name, 0]
        assert 0 < len(done.token_ids) == len(done.top_ids) == len(done.top_logprobs) < 40
    assert len(bench.tokens("a")) == first + 1
    assert bench.engine.roster.counters.zombie_rows > 0


def test_a_completion_that_has_ended_keeps_no_tops_while_its_group_goes_on(model, prompt_of):
    bench = Bench(model, max_rows=1)
    bench.submit("g", prompt_of(9), 5, n=3, sampling=SAMPLED, logprobs=20)
    bench.engine.tick()
    group = bench.engine.roster.groups["c", "g"]
    bench.tick_until(lambda: group.sequences[1].finalized)
    assert not scores_of(bench).tops.keys() & group.sequences[:2]
    bench.tick_until(lambda: len(group.sequences[2].tokens) > 0)
    assert list(scores_of(bench).tops) == group.sequences[2:]
    bench.run()
    assert all(len(bench.completions["g", index].top_ids) == 5 for index in range(3))


def test_logits_that_are_not_finite_leave_whole_tops(model, prompt_of):
    bench = Bench(model)
    bench.submit("a", prompt_of(9), 50, sampling={"temperature": 1.0, "seed": 1}, logprobs=3)
    bench.ticks(6)
    bench.engine.executor.compute.run(lambda: model.norm.weight.fill_(float("nan")))
    bench.run()
    done = bench.completions["a", 0]
    assert done.finish.reason == "error"
    assert 0 < len(done.token_ids) == len(done.top_ids) and np.isfinite(done.top_logprobs).all()


def test_after_a_fault_tokens_are_handed_back_with_their_tops(model, prompt_of, hf_models):
    bench = Bench(model)
    prompt = prompt_of(21)
    bench.submit("a", prompt, 50, sampling=SAMPLED, logprobs=3, prompt_logprobs=True)
    bench.ticks(9)
    seq = bench.engine.roster.decoding[0]
    # An entry of a token that was not taken any more.
    scores_of(bench).tops[seq].add(np.zeros(3, np.int32), np.zeros(3, np.float32))
    bench.engine.fail("broken")
    done = bench.completions["a", 0]
    assert done.finish.reason == "error" and 0 < len(done.token_ids) < 50
    check_tops(done, prompt, 3, hf_models[0])
    check_prompt(bench.done["a"].prompt_logprobs, prompt, hf_models[0])
    bench.close(check=False)


def test_steps_without_scores_have_one_upload_and_one_download(model, prompt_of):
    bench = Bench(model)
    d2h, downloads = bench.engine.executor.d2h, []
    run = d2h.run
    d2h.run = lambda work: (downloads.append(work), run(work))
    steps = watch_plans(bench)
    bench.complete("plain", prompt_of(20), 10)
    assert len(downloads) == len(steps) > 5
    bench.submit("asks", prompt_of(30, 1), 4, logprobs=1)
    bench.complete("plain again", prompt_of(20, 2), 30)
    assert len(downloads) == len(steps) + 4, "one more for each step of the row that asks"


@pytest.mark.parametrize("exact", [True, False])
def test_exact_sums_do_not_depend_on_the_order_of_additions(exact):
    """Which on a GPU is another one for another number of rows."""
    vocab, generator = 20_011, torch.Generator().manual_seed(0)
    narrow = scores_module.Scoring(4)
    wide = scores_module.Scoring(4, chosen=1, entropy=True)
    logits_SV = torch.randn(4, vocab, generator=generator) * 3
    order_V = torch.randperm(vocab, generator=generator)
    told = []
    for each_SV in (logits_SV, logits_SV[:, order_V]):
        scores = scores_module.ScoreBuffers(CpuDevice(), max_rows=4, chunk_tokens=4, vocab=vocab)
        at = torch.arange(4)
        scores.take_tops(each_SV, at, exact)
        targets_N = torch.full((4,), int((order_V == 0).nonzero()) if told else 0)
        scores.narrow.score(each_SV, at, targets_N, None, torch.clone, narrow, exact)
        scores.wide.score(each_SV, at, targets_N, targets_N[:, None].int(), torch.clone, wide, exact)
        scores.copy(4, narrow, wide)
        told.append(scores.read((0, 1, 2, 3), narrow, wide))
    expected_SV = logits_SV.double().log_softmax(1)
    off = 2e-6 if exact else 2e-5  # other CPUs add 20,011 numbers in another order
    for scores in told:
        np.testing.assert_allclose(scores.top_logprobs_CK, expected_SV.topk(20).values, atol=off)
        np.testing.assert_allclose(scores.narrow.logprobs_N, expected_SV[:, 0], atol=off)
        np.testing.assert_allclose(scores.wide.chosen_NM, expected_SV[:, :1], atol=off)
        np.testing.assert_allclose(scores.wide.entropy_N, -(expected_SV.exp() * expected_SV).sum(1), atol=off)
    if exact:
        assert told[0].top_logprobs_CK.tobytes() == told[1].top_logprobs_CK.tobytes()
        assert told[0].narrow.logprobs_N.tobytes() == told[1].narrow.logprobs_N.tobytes()
        assert told[0].wide.entropy_N.tobytes() == told[1].wide.entropy_N.tobytes()


class Copies(TorchDispatchMode):
    """Records for each copy whether both sides are contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.of_one_piece: list[bool] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default:
            self.of_one_piece.append(all(tensor.is_contiguous() for tensor in args[:2]))
        return function(*args, **(kwargs or {}))


def test_copies_to_the_host_are_contiguous():
    """CUDA takes a copy with gaps through memory that is not pinned: the launch would wait until the step is over."""
    scores = scores_module.ScoreBuffers(CpuDevice(), max_rows=8, chunk_tokens=64, vocab=VOCAB)
    scores.take_tops(torch.arange(6 * VOCAB).view(6, VOCAB) / 50, torch.tensor([0, 2, 5]))
    with Copies() as copies:
        scores.copy(3, scores_module.Scoring(10, True, 20), scores_module.Scoring(7, True, 97, 5, True))
    assert copies.of_one_piece == [True] * 9
    nothing = scores_module.Scoring()
    assert scores.read((0, 2, 5), nothing, nothing).top_ids_CK[:, 0].tolist() == [VOCAB - 1] * 3


def test_logits_of_a_16_bit_model_are_not_rounded_to_16_bits(model):
    model = model.to(torch.bfloat16)
    hidden = torch.randn(3, model.spec.hidden).to(torch.bfloat16)
    expected = hidden.float() @ model.lm_head.float().t()
    assert torch.allclose(model.compute_logits(hidden), expected, atol=1e-4)
