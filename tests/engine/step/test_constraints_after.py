"""Constraints that begin after a marker: free rows run without masks, and every token is that of a row with masks."""

import random
import re
from itertools import pairwise

import numpy as np
import pytest

from rollout.constraints.marker import AfterMarker, IdMarker, TextMarker, TokenTexts
from rollout.engine.messages.requests import Prior
from rollout.engine.messages.to_engine import Cancel
from rollout.engine.upload import RowNeeds
from tests.support.engine.constraints import SIZE, AlwaysMasked, Cycle, X, Y
from tests.support.engine.drafting import drafting
from tests.support.engine.harness import VOCAB, Bench, load
from tests.support.engine.streams import random_delays
from tests.support.engine.updates import Mailbox, Update
from tests.support.kernels.grids import checkered, nightly
from tests.support.models.hybrids import make_hybrid

STOP, MARK, OTHER = 5, 7, 8
#: Makes markers and parts of them frequent.
BIAS = ((MARK, 3.0), (OTHER, 3.0), (STOP, -100.0))
#: Tokens 0 and 1 are "<" and "/>"; 2 and 3 reach beyond "</>", with a text that may follow it and one that may not.
TEXTS = TokenTexts([b"<", b"/>", b"/>x", b"/>q", *([b"-"] * (VOCAB - 4))])
TEXT_BIAS = ((0, 3.5), (1, 3.0), (2, 2.0), (3, 4.0), (STOP, -100.0))


class Begun(Cycle):
    """It may begin with a part of a token."""

    def start_after(self, rest: bytes, token: int):
        return self.start() if rest == b"x" else None


def made(kind: str, always: bool) -> AfterMarker:
    """A constraint after a marker: of one token, of two, or of a text."""
    after = AlwaysMasked if always else AfterMarker
    if kind == "text":
        return after(Begun([X, Y, SIZE], STOP), TextMarker(b"</>", TEXTS, lambda rest: rest == b"x", VOCAB))
    return after(Cycle([X, Y, SIZE], STOP), IdMarker((MARK,) if kind == "one" else (MARK, OTHER)))


def obeys(tokens: list[int], kind: str) -> bool:
    """True if the marker is there and what follows is of the cycle."""
    names = dict.fromkeys(X, "x") | dict.fromkeys(Y, "y") | dict.fromkeys(SIZE, "s") | {STOP: "."}
    if kind == "text":
        ends = [i for i, (a, b) in enumerate(pairwise(tokens)) if a == 0 and b in (1, 2, 3)]
        assert not any(tokens[i + 1] == 3 for i in ends), "it is barred"
    else:
        sought = [MARK] if kind == "one" else [MARK, OTHER]
        ends = [i + len(sought) - 2 for i in range(len(tokens)) if tokens[i : i + len(sought)] == sought]
    if not ends:
        return False
    assert re.fullmatch(r"(xys)*(xy?|\.)?", "".join(names.get(token, "?") for token in tokens[ends[0] + 2 :])), tokens
    return True


def submit_all(bench: Bench, prompt_of, always: bool, ticks: int = 0, **more) -> list[str]:
    """Requests of every kind, some with rules that keep state on the device, between rows without a constraint."""
    names = []
    for i in range(12):
        kind = ("one", "two", "text")[i % 3]
        bias = TEXT_BIAS if kind == "text" else BIAS
        sampling = {"temperature": 1.0, "seed": i, "logit_bias": bias}
        sampling |= {"repetition_penalty": 1.02, "frequency_penalty": 0.05} if i % 2 else {}
        fields: dict = {
            "stop": {"token_ids": (STOP,), "min_tokens": 8 * (i % 4 == 1)},
            "constraint": made(kind, always),
        }
        fields |= {"n": 2} if i == 4 else {}
        fields |= {"logprobs": 3} if i % 5 == 0 else {}
        fields |= {"stream_every": 3} if i % 4 == 2 else {}
        bench.submit(f"{kind}{i}", prompt_of(7 + i, i), 40, sampling=sampling, **fields, **more)
        bench.submit(f"plain{i}", prompt_of(7 + i, i), 12 + i, sampling={"temperature": 1.0, "seed": i})
        names += [f"{kind}{i}", f"plain{i}"]
        bench.ticks(ticks)
    return names


def outcome(bench: Bench) -> dict:
    return {
        key: (done.token_ids, done.finish.reason, done.finish.stop, done.top_ids)
        for key, done in bench.completions.items()
    }


def check_all(bench: Bench) -> int:
    """How many completions reached their constraint; all of these obey it."""
    begun = 0
    for (name, _), done in bench.completions.items():
        kind = name.rstrip("0123456789")
        if kind != "plain":
            begun += obeys(done.token_ids, kind)
            assert len(done.drawn_logprobs) == len(done.logprobs) == len(done.token_ids)
            assert np.isfinite(done.drawn_logprobs).all()
            assert len(done.top_ids) in (0, len(done.token_ids))
    return begun


@pytest.fixture
def reference(model, prompt_of):
    """What an engine gives that makes a mask for every token, one step at a time."""
    bench = Bench(model, pipeline_depth=1, max_rows=16)
    submit_all(bench, prompt_of, always=True)
    bench.run()
    assert check_all(bench) >= 9
    bench.close()
    return bench


def same_as(bench: Bench, reference: Bench) -> None:
    check_all(bench)
    assert outcome(bench) == outcome(reference)
    for key, done in bench.completions.items():
        for name in ("logprobs", "raw_logprobs", "drawn_logprobs"):
            ours, theirs = np.array(getattr(done, name)), np.array(getattr(reference.completions[key], name))
            np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize(
    "engine",
    [
        {"pipeline_depth": 2, "max_rows": 16},
        {"pipeline_depth": 1, "max_rows": 5, "prefill_chunk_tokens": 6},
        {"kv_pages": 30, "max_rows": 6, "host_kv_gib": 0.01, "host_kv_piece_mib": 0.01},
        {"speculation": "ngram", "speculation_tokens": 3},
        *nightly(
            {"pipeline_depth": 2, "max_rows": 5, "prefill_chunk_tokens": 6},
            {"kv_pages": 30, "max_rows": 6},
            {"prefix_cache": False, "max_rows": 7},
            {"group_attention": False, "max_rows": 7},
        ),
    ],
    ids=str,
)
def test_free_rows_have_the_tokens_of_rows_with_masks(model, prompt_of, reference, engine):
    bench = Bench(model, random_delays(3), **engine)
    submit_all(bench, prompt_of, always=False, ticks=2)
    bench.run()
    if "kv_pages" in engine:
        assert bench.engine.roster.counters.preemptions > 0
    same_as(bench, reference)
    assert not any(done.recomputed for done in bench.completions.values()) or "kv_pages" in engine


@pytest.mark.parametrize("wrong", [0.0, 0.3])
def test_a_marker_among_drafts_ends_what_counts_of_them(model, prompt_of, reference, wrong):
    recorded = {key: done.token_ids for key, done in reference.completions.items()}
    bench, _ = drafting(model, recorded, wrong, speculation_tokens=5, max_rows=16)
    submit_all(bench, prompt_of, always=False)
    bench.run()
    assert bench.drafts.accepted > 50
    same_as(bench, reference)


def watch_plans(bench: Bench) -> list[tuple[bool, bool]]:
    """A list that gets of each step: does its draw wait for masks, and is every constrained row of it free."""
    seen = []

    def watch(plan):
        rows = [span.seq for span in plan.spans if span.draws]
        seen.append((plan.draws_later, all(seq.constraint.free is not None for seq in rows)))

    bench.observer.at_launch.append(watch)
    return seen


def test_no_step_waits_for_masks_while_all_its_rows_are_free(model, prompt_of):
    bench = Bench(model)
    seen = watch_plans(bench)
    for i in range(4):
        fields = {"sampling": {"temperature": 1.0, "seed": i, "logit_bias": ((MARK, -100.0), (1, 2.0))}}
        kind = ("one", "two", "text", "one")[i]
        bench.submit(f"{kind}{i}", prompt_of(9, i), 40, constraint=made(kind, False), **fields)
    bench.run()
    later = [waits for waits, _ in seen]
    assert len(seen) >= 40 and sum(later) <= 4, "only where a token is barred"
    assert all(len(bench.tokens(name)) == 40 for name in ("one0", "two1", "text2", "one3"))


def test_where_a_token_is_barred_a_step_waits_and_the_row_is_free_again(model, prompt_of):
    """Each "<" may be the beginning of the marker; the token after it is never one that ends it."""
    bench = Bench(model)
    seen = watch_plans(bench)
    bias = ((0, 4.0), (1, -100.0), (2, -100.0), (STOP, -100.0))
    sampling = {"temperature": 1.0, "seed": 3, "logit_bias": bias}
    bench.complete("text", prompt_of(9), 60, sampling=sampling, constraint=made("text", False))
    tokens = bench.tokens("text")
    begun = tokens[:-1].count(0)
    assert 5 < begun < 50 and len(tokens) == 60 and 3 not in [b for a, b in pairwise(tokens) if a == 0]
    # The step that is launched before the token is known waits, too.
    assert begun <= sum(waits for waits, _ in seen) <= 2 * begun


def test_a_row_waits_for_masks_only_from_its_marker_on(model, prompt_of):
    bench = Bench(model)
    seen = watch_plans(bench)
    fields = {"sampling": {"temperature": 1.0, "seed": 3, "logit_bias": BIAS}, "stop": {"token_ids": (STOP,)}}
    bench.complete("one", prompt_of(9, 3), 60, constraint=made("one", False), **fields)
    tokens = bench.tokens("one")
    at = tokens.index(MARK)
    assert 2 < at < 50 and obeys(tokens, "one")
    later = [waits for waits, _ in seen]
    assert later == sorted(later) and later.count(True) == len(tokens) - at - 1
    assert bench.engine.roster.counters.zombie_rows >= 1, "the token drawn without a mask"


@pytest.mark.parametrize(
    ("kv_on_swap", "first", "every"),
    [("keep", 2, 10), ("recompute", 7, 10), *nightly(("keep", 2, 1), ("recompute", 2, 1))],
)
def test_weights_that_change_around_the_marker_leave_no_token_unmasked(folders, prompt_of, kv_on_swap, first, every):
    """An update at many ticks; versions are those of the steps that drew the tokens."""
    begun, ticks_of = 0, range(first, 30, every)
    for ticks in ticks_of:
        model, other, mailbox = load(folders[0]), load(folders[1]), Mailbox()
        bench = Bench(model, None, mailbox, kv_on_swap=kv_on_swap, max_rows=16)
        submit_all(bench, prompt_of, always=False)
        bench.ticks(ticks)
        mailbox.ready = Update(1, other, model)
        bench.run()
        begun += check_all(bench)
        for (name, _), done in bench.completions.items():
            assert done.versions == sorted(done.versions), name
            if kv_on_swap == "keep" and set(done.versions) == {0, 1}:
                assert done.recomputed == (), "it went on with its own KV"
        bench.close()
    assert begun > 6 * len(ticks_of)


@pytest.mark.parametrize("rules", [{}, {"frequency_penalty": 0.1}])
def test_an_update_between_the_marker_and_the_next_token_keeps_the_kv(folders, prompt_of, rules):
    """The row is about to be set up again, and its KV is its own."""
    model, other, mailbox = load(folders[0]), load(folders[1]), Mailbox()
    bench = Bench(model, None, mailbox)
    roster, draw_again = bench.engine.roster, bench.engine.roster.draw_again

    def with_an_update(seq):
        draw_again(seq)
        mailbox.ready = Update(1, other, model)

    roster.draw_again = with_an_update
    sampling = {"temperature": 1.0, "seed": 3, "logit_bias": BIAS, **rules}
    bench.complete("one", prompt_of(9, 3), 60, sampling=sampling, constraint=made("one", False))
    done = bench.completions["one", 0]
    at = done.token_ids.index(MARK)
    assert done.versions == [0] * (at + 1) + [1] * (len(done.token_ids) - at - 1)
    assert done.recomputed == () and bench.done["one"].preemptions == 0


@pytest.mark.parametrize(("host_kv_gib", "when"), checkered([0.0, 0.01], ["about to draw again", "in flight"]))
def test_a_row_is_preempted_where_it_draws_again(model, prompt_of, reference, host_kv_gib, when):
    bench = Bench(model, host_kv_gib=host_kv_gib, host_kv_piece_mib=0.01)
    submit_all(bench, prompt_of, always=False)
    hits = 0
    for _ in range(400):
        bench.engine.tick()
        roster = bench.engine.roster
        rows = [seq for seq in roster.prefilling if seq.kv.drawn_again]
        if when == "in flight":
            rows = [seq for seq in roster.decoding if seq.void]
        for seq in rows:
            roster.preempt(seq)
            hits += 1
    bench.run()
    assert hits > 0 or when == "in flight"
    same_as(bench, reference)


def test_a_row_ends_in_any_tick_and_gives_everything_back(model, prompt_of):
    for ticks in range(1, 40, 3):
        bench = Bench(model, max_rows=6, kv_pages=60)
        names = submit_all(bench, prompt_of, always=False)
        bench.ticks(ticks)
        for name in names:
            bench.engine.inbox.put(Cancel(("c", name)))
        bench.run()
        check_all(bench)
        bench.close()


@pytest.mark.parametrize("kind", ["one", "two", "text"])
def test_a_completion_is_continued_from_any_of_its_tokens(model, prompt_of, reference, kind):
    those = [(name, done) for (name, _), done in reference.completions.items() if name.startswith(kind)]
    name, done = next((name, done) for name, done in those if obeys(done.token_ids, kind))
    number = int(name.removeprefix(kind))
    bench, bias = Bench(model), TEXT_BIAS if kind == "text" else BIAS
    for count in range(0, len(done.token_ids) - 1, 3):
        sampling = {"temperature": 1.0, "seed": done.seed, "logit_bias": bias}
        sampling |= {"repetition_penalty": 1.02, "frequency_penalty": 0.05} if number % 2 else {}
        prior = done.token_ids[:count]
        constraint = made(kind, False)
        rest = next((r for i in range(count) if (r := constraint.marker.rest(prior[: i + 1])) is not None), None)
        if rest is not None:  # as the compiler does where the marker has come
            continue
        again = AfterMarker(constraint.inner, constraint.marker, tuple(prior))
        stop = {"token_ids": (STOP,), "min_tokens": 8 * (number % 4 == 1)}
        bench.submit(f"from{count}", prompt_of(7 + number, number), 40, sampling=sampling, stop=stop, constraint=again,
                     prior=Prior(np.array(prior, np.int32), 0, 0))  # fmt: skip
    bench.run()
    for (name, _), again in bench.completions.items():
        assert done.token_ids[: int(name[4:])] + again.token_ids == done.token_ids
    assert len(bench.completions) >= 2


@pytest.mark.parametrize("speculation", ["off", *nightly("ngram")])
def test_models_with_states_make_a_mask_for_every_token(tmp_path, prompt_of, speculation):
    """A state cannot go back by a token."""
    make_hybrid("Qwen3_5", tmp_path, 0, vocab_size=VOCAB)
    model = load(tmp_path)
    found = []
    for always in (False, True):
        bench = Bench(model, max_rows=16, speculation=speculation)
        submit_all(bench, prompt_of, always=always)
        bench.run()
        assert check_all(bench) > 4
        found.append(outcome(bench))
        bench.close()
    assert found[0] == found[1]


def test_turns_of_a_session_go_on_after_a_constraint(model, prompt_of):
    bench, fresh = Bench(model), Bench(model, prefix_cache=False)
    prompt, rng = prompt_of(11), random.Random(1)
    for turn in range(5):
        fields: dict = {
            "sampling": {"temperature": 1.0, "seed": turn, "logit_bias": BIAS},
            "stop": {"token_ids": (STOP,)},
        }
        fields["constraint"] = made("one", False)
        bench.submit(f"one{turn}", prompt, 30, session=("c", "talk"), session_lease_s=60.0, **fields)
        fresh.submit(f"one{turn}", prompt, 30, **fields)
        bench.run()
        fresh.run()
        assert bench.tokens(f"one{turn}") == fresh.tokens(f"one{turn}")
        obeys(bench.tokens(f"one{turn}"), "one")
        assert turn == 0 or bench.done[f"one{turn}"].cached_tokens > 0
        prompt = prompt + bench.tokens(f"one{turn}") + [rng.randrange(VOCAB) for _ in range(5)]


def test_a_row_draws_at_the_end_of_its_tokens_and_of_its_pages(model, prompt_of):
    """The marker at every place in a page, up to one token before the end."""
    for length in range(5, 14):
        bench = Bench(model, page_size=4)
        for most in (2, 3, 4, 5):
            bench.submit(f"m{most}", prompt_of(length), most, sampling={"temperature": 1.0, "seed": most,
                         "logit_bias": ((MARK, 100.0),)}, constraint=made("one", False))  # fmt: skip
        bench.run()
        for most in (2, 3, 4, 5):
            tokens = bench.tokens(f"m{most}")
            assert len(tokens) == most and tokens[0] == MARK and obeys(tokens, "one")
        bench.close()


def test_the_step_before_the_marker_has_no_feature_of_constraints(model, prompt_of):
    bench = Bench(model)
    bench.submit("one", prompt_of(9), 20, sampling={"temperature": 1.0, "seed": 1, "logit_bias": ((MARK, -100.0),)},
                 constraint=made("one", False))  # fmt: skip
    bench.engine.tick()
    (seq,) = bench.engine.roster.decoding
    assert not seq.need_bits & RowNeeds.CONSTRAIN.value and seq.group.needs & RowNeeds.CONSTRAIN
    bench.run()
    assert len(bench.completions["one", 0].drawn_logprobs) == 20
