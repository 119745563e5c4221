"""Scores of the last tokens of prompts: named tokens, likeliest ones, entropy; what is not asked for costs nothing."""

import numpy as np
import pytest
import torch

from rollout.engine.features.scores.feature import SCORED_WORDS, ScoresFeature, asked_scores
from rollout.engine.features.scores.taker import ScoreTaker
from rollout.engine.messages.to_engine import Cancel
from rollout.engine.messages.to_service import Delta
from rollout.engine.schedule.step_feature import find_feature
from rollout.engine.step.pack import spare_words, upload_words
from tests.support.engine.harness import VOCAB, Bench, load, prompt_of, watch_prefills
from tests.support.engine.scores import Wanted, watch_output_layer
from tests.support.engine.streams import random_delays
from tests.support.engine.updates import Mailbox, Update
from tests.support.kernels.grids import nightly
from tests.support.models.hybrids import make_hybrid

SAMPLED = {"temperature": 0.7, "seed": 3}


def chosen_of(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, shape).astype(np.int32)


def first_delta(bench: Bench, name: str) -> Delta:
    return next(event for event in bench.events if isinstance(event, Delta) and event.key == ("c", name))


#: What requests about a prompt of 40 tokens ask for.
WISHES = [
    Wanted(chosen=chosen_of(0, 40, 7)),
    Wanted(last=40, chosen=chosen_of(1, 3), entropy=True),
    Wanted(last=11, tops=97, chosen=chosen_of(2, 11, 256)),
    Wanted(last=1, tops=5),
    Wanted(last=1, entropy=True),
    Wanted(last=39, tops=0, chosen=chosen_of(3, 39, 1)),
    Wanted(last=23),
    Wanted(tops=60, entropy=True),
    Wanted(tops=4),
]


@pytest.fixture
def scored_rows(model) -> list[int]:
    """How many tokens went through the output layer, by call."""
    return watch_output_layer(model)


@pytest.mark.parametrize("chunk", [7, *nightly(16, 64)])
@pytest.mark.parametrize("max_tokens", [0, 9])
@pytest.mark.parametrize("prefix_cache", [True, *nightly(False)])
def test_scores_are_transformers_with_and_without_known_prefixes(model, hf_models, chunk, max_tokens, prefix_cache):
    bench = Bench(model, random_delays(chunk), prefill_chunk_tokens=chunk, prefix_cache=prefix_cache, max_rows=4)
    for turn in range(2):  # each prompt twice
        for i, wanted in enumerate(WISHES):
            bench.submit(f"{turn} {i}", prompt_of(40, i % 3), max_tokens, sampling=SAMPLED, **wanted.fields())
        bench.run()
    for turn in range(2):
        for i, wanted in enumerate(WISHES):
            name = f"{turn} {i}"
            wanted.check(bench.done[name], prompt_of(40, i % 3), hf_models[0])
            wanted.check(first_delta(bench, name), prompt_of(40, i % 3), hf_models[0])
            assert len(bench.tokens(name)) == max_tokens


def test_only_positions_that_are_asked_for_are_computed_again_and_go_through_the_output_layer(
    model, hf_models, scored_rows
):
    bench = Bench(model)
    sizes, prompt = watch_prefills(bench), prompt_of(60)
    bench.complete("first", prompt[:41], 0)
    assert scored_rows == []
    for name, wanted in (("a", Wanted(last=10, tops=200 % VOCAB)), ("b", Wanted(last=19, chosen=chosen_of(0, 2)))):
        bench.complete(name, prompt, 0, **wanted.fields())
        wanted.check(bench.done[name], prompt, hf_models[0])
    assert bench.done["a"].cached_tokens == 41 and bench.done["b"].cached_tokens == 40
    assert sum(sizes) == 41 + 19 + 20 and scored_rows == [10, 19]


def test_the_first_scored_token_may_stand_in_a_known_page(model, hf_models):
    """The page is copied: its KV before that token is known, and the rest is written again."""
    bench, prompt = Bench(model), prompt_of(33)
    bench.complete("generated", prompt[:27], 6)
    wanted = Wanted(last=6, chosen=chosen_of(0, 6, 4))
    bench.complete("scored", prompt, 0, **wanted.fields())
    assert bench.done["scored"].cached_tokens == 26
    wanted.check(bench.done["scored"], prompt, hf_models[0])


def test_a_batch_computes_each_prefix_once(model, hf_models):
    """Completions of four prompts, sent at once: each prompt is computed once."""
    bench, wanted = Bench(model, max_rows=8, kv_pages=512), Wanted(last=12, chosen=chosen_of(0, 12, 8))
    sizes = watch_prefills(bench)
    batch = {f"{p} {c}": prompt_of(48, p) + prompt_of(12, 100 + c) for p in range(4) for c in range(6)}
    for name, tokens in batch.items():
        bench.submit(name, tokens, 0, **wanted.fields())
    bench.run()
    for name, tokens in batch.items():
        wanted.check(bench.done[name], tokens, hf_models[0])
    assert sum(sizes) <= 4 * 48 + 24 * (12 + 4), "and of a completion at most a page more"


def test_a_batch_of_a_model_with_states_computes_each_prefix_once(tmp_path):
    hf_model = make_hybrid("Qwen3_5", tmp_path)
    model = load(tmp_path)
    vocab = model.spec.vocab
    chosen = np.arange(12 * 5, dtype=np.int32).reshape(12, 5) % vocab
    bench, wanted = Bench(model, max_rows=4, kv_pages=512), Wanted(last=12, chosen=chosen, entropy=True)
    sizes = watch_prefills(bench)
    batch = {
        f"{p} {c}": [token % vocab for token in prompt_of(45, p) + prompt_of(12, 100 + c)]
        for p in range(2)
        for c in range(4)
    }
    for name, tokens in batch.items():
        bench.submit(name, tokens, 0, **wanted.fields())
    bench.run()
    for name, tokens in batch.items():
        wanted.check(bench.done[name], tokens, hf_model)
    assert sum(sizes) <= 2 * 45 + 8 * 13


@pytest.mark.parametrize("n", [1, 3])
def test_a_group_scores_its_prompt_with_one_reading(model, hf_models, scored_rows, n):
    bench, wanted = Bench(model, max_rows=2), WISHES[2]
    sizes, prompt = watch_prefills(bench), prompt_of(40)
    bench.complete("g", prompt, 0, n=n, **wanted.fields())
    wanted.check(bench.done["g"], prompt, hf_models[0])
    assert scored_rows == [11] and sum(sizes) <= 40 + n - 1


def test_scores_survive_preemption_drafts_and_a_session(model, hf_models):
    bench = Bench(model, kv_pages=44, prefill_chunk_tokens=9, speculation="ngram", speculation_tokens=3)
    for i, wanted in enumerate(WISHES):
        session = {"session": ("c", f"s{i}"), "session_lease_s": 60.0} if i % 2 else {}
        bench.submit(f"r{i}", prompt_of(40, i), 20, sampling=SAMPLED, **wanted.fields(), **session)
    bench.run()
    assert bench.engine.roster.counters.preemptions > 0
    for i, wanted in enumerate(WISHES):
        wanted.check(bench.done[f"r{i}"], prompt_of(40, i), hf_models[0])
    bench.close(check=False)


def test_the_next_turn_of_a_session_is_scored_from_its_kv(model, hf_models):
    bench, turn = Bench(model, prefix_cache=False), {"session": ("c", "talk"), "session_lease_s": 60.0}
    prompt = prompt_of(30)
    bench.complete("first", prompt, 10, **turn)
    prompt, wanted = prompt + bench.tokens("first") + prompt_of(7, 1), Wanted(last=5, entropy=True)
    bench.complete("second", prompt, 2, **turn, **wanted.fields())
    assert bench.done["second"].cached_tokens == 39
    wanted.check(bench.done["second"], prompt, hf_models[0])
    bench.close(check=False)


@pytest.mark.parametrize("half_way", [True, False])
def test_a_prefill_that_begins_again_is_scored_again(model, hf_models, half_way):
    bench = Bench(model, prefill_chunk_tokens=8, prefix_cache=half_way)
    prompt, wanted = prompt_of(60), Wanted(last=40, tops=30, chosen=chosen_of(0, 40, 9), entropy=True)
    bench.submit("a", prompt, 3, **wanted.fields())
    bench.ticks(6)
    (seq,) = bench.engine.roster.prefilling
    assert 20 < seq.kv.length < 60
    bench.engine.roster.preempt(seq)
    bench.run()
    wanted.check(bench.done["a"], prompt, hf_models[0])


@pytest.mark.parametrize("max_kv_age", [0, 4])
def test_scores_are_of_one_version_although_older_kv_is_known(model, folders, hf_models, max_kv_age):
    mailbox = Mailbox()
    bench = Bench(model, None, mailbox, kv_on_swap="keep", prefill_chunk_tokens=4, max_kv_age=max_kv_age)
    prompt, wanted = prompt_of(60), Wanted(last=30, chosen=chosen_of(0, 30, 9))
    bench.complete("before", prompt, 0)
    bench.submit("a", prompt, 3, **wanted.fields())
    bench.ticks(3)
    assert 28 <= bench.engine.roster.prefilling[0].kv.length < 60
    mailbox.ready = Update(1, load(folders[1]), model)
    bench.run()
    assert bench.done["a"].prompt_version == 1
    wanted.check(bench.done["a"], prompt, hf_models[1])
    bench.complete("after", prompt, 0, **wanted.fields())
    wanted.check(bench.done["after"], prompt, hf_models[1])


def test_a_request_that_ends_early_tells_what_is_known_of_one_version(model, hf_models):
    bench = Bench(model, prefill_chunk_tokens=8)
    prompt, wanted = prompt_of(60), Wanted(last=40, tops=30, chosen=chosen_of(0, 40, 9), entropy=True)
    bench.submit("a", prompt, 3, **wanted.fields())
    bench.ticks(6)
    bench.engine.inbox.put(Cancel(("c", "a")))
    bench.run()
    told = bench.done["a"]
    known = ~np.isnan(told.prompt_logprobs)
    assert 0 < known.sum() < 40 and not known[known.sum() :].any()
    assert (np.isnan(told.prompt_entropy) == ~known).all() and (
        np.isnan(told.prompt_chosen_logprobs).all(1) == ~known
    ).all()
    bench.submit("b", prompt, 3, **wanted.fields())
    bench.submit("waits", prompt, 3, **wanted.fields())
    bench.engine.inbox.put(Cancel(("c", "b")))
    bench.engine.inbox.put(Cancel(("c", "waits")))
    bench.run()
    assert np.isnan(bench.done["waits"].prompt_chosen_logprobs).all() and bench.done[
        "waits"
    ].prompt_chosen_logprobs.shape == (40, 9)


def test_a_step_has_at_most_the_room_of_its_buffers(model, hf_models):
    """As with long chunks and many tokens at a position, on a GPU, where lists are padded."""
    bench = Bench(model, prefill_chunk_tokens=128, max_rows=6, kv_pages=512)
    scores = find_feature(bench.engine.roster.features, ScoresFeature)
    scores.multiple, scores.most_words = 8, 2048
    limits, packer, used, wide = bench.engine.scheduler.limits, bench.engine.parts.packer, [], []
    pack, padding = packer.pack, 2 * SCORED_WORDS * scores.multiple

    def measured(plan, staging):
        spans = [(span.seq, span.tokens_in) for span in plan.spans if span.prompt is not None]
        bound = sum(upload_words(*span, bench.engine.executor.step.features) for span in spans)
        upload = pack(plan, staging)
        if plan.kind == "prefill":
            asked = asked_scores(upload.header)
            named = sum(each.scored * each.chosen for each in (asked.narrow, asked.wide))
            assert named + padding <= ScoreTaker.spare_words
            used.append((len(upload.words), bound + spare_words(limits.max_rows, named + padding)))
            wide.append(asked.wide)
        return upload

    packer.pack = measured
    wishes = [Wanted(tops=97), Wanted(last=50, chosen=chosen_of(1, 256)), Wanted(entropy=True), Wanted(tops=3)]
    for i, wanted in enumerate(wishes * 2):
        bench.submit(f"r{i}", prompt_of(90, i), 2, **wanted.fields())
    bench.run()
    for i, wanted in enumerate(wishes * 2):
        wanted.check(bench.done[f"r{i}"], prompt_of(90, i), hf_models[0])
    assert all(words <= bound for words, bound in used), used
    assert all(each.scored * max(each.tops, each.chosen) <= 2048 for each in wide) and len(wide) > 8


def test_tokens_that_cannot_come_have_minus_infinity_and_a_finite_entropy(model, scored_rows):
    compute_logits = model.compute_logits

    def masked(hidden):
        logits = compute_logits(hidden)
        logits[:, 50:] = -torch.inf
        return logits

    model.compute_logits = masked
    bench, wanted = Bench(model), Wanted(last=3, chosen=np.array([1, 60], np.int32), entropy=True)
    bench.complete("a", [1, 2, 3, 4, 5, 6], 0, **wanted.fields())
    told = bench.done["a"]
    assert np.isfinite(told.prompt_chosen_logprobs[:, 0]).all() and (told.prompt_chosen_logprobs[:, 1] == -np.inf).all()
    assert ((told.prompt_entropy > 0) & (told.prompt_entropy <= np.log(50))).all()
