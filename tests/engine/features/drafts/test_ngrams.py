"""Drafts by n-grams that the device finds: right for the text so far, and no completion changes."""

import random
from itertools import pairwise

import pytest

from rollout.engine.features.drafts.drafter import NAME
from rollout.engine.features.drafts.verifier import DraftVerifier
from rollout.engine.messages.to_engine import Cancel
from rollout.engine.schedule.step_feature import find_feature
from tests.engine.features.drafts.test_speculation import (
    SAMPLED,
    assert_same,
    submit_all,
    submit_free,
)
from tests.engine.test_invariants import run_watched
from tests.support.engine.constraints import Cycle
from tests.support.engine.drafting import drafting, fixed_costs, row_by_row
from tests.support.engine.harness import Bench, load, prompt_of, watch_headers
from tests.support.engine.offloading import PAGE
from tests.support.engine.replay import replayed
from tests.support.engine.updates import Mailbox, Update, swap_in_the_middle
from tests.support.ngrams import CheckedDrafts, texts_of

NGRAM = {"speculation": "ngram"}


@pytest.fixture(scope="module")
def plain(folders) -> Bench:
    bench = Bench(load(folders[0]))
    submit_all(bench)
    return bench.finish()


@pytest.mark.parametrize("depth", [1, 2])
def test_ngrams_change_nothing(model, plain, depth):
    bench = Bench(model, **NGRAM, pipeline_depth=depth)
    submit_all(bench)
    run_watched(bench)
    assert_same(bench, plain)
    drafts = bench.drafts
    assert drafts.drafted > 200 and drafts.accepted > 5
    assert drafts.by_drafter["ngram"] == (drafts.drafted, drafts.accepted)
    assert not any(map(any, drafts.by_age)), "they come from no weights"


@pytest.mark.nightly
def test_all_bits_are_equal_with_rows_computed_one_by_one(model, monkeypatch):
    row_by_row(monkeypatch)
    plain = Bench(model, max_rows=20)
    submit_free(plain)
    plain.finish()
    bench = Bench(model, **NGRAM, **fixed_costs(), max_rows=20, speculation_rows=16)
    submit_free(bench)
    bench.finish()
    assert_same(bench, plain, exact=True)
    assert bench.drafts.accepted > 5


def prompt(i: int) -> list[int]:
    """Of few different tokens, so that most n-grams came before."""
    rng = random.Random(i // 2)  # every two are the same
    return [rng.randrange(6) + 3 for _ in range(40)]


def submit_eight(bench: Bench) -> None:
    for i in range(8):
        sampling = {"temperature": 0.7, "seed": 100 + 10 * i, "logit_bias": tuple((t, 6.0) for t in range(3, 9))}
        bench.submit(f"r{i}", prompt(i), 50, sampling=sampling)


@pytest.fixture(scope="module")
def plain_eight(folders) -> Bench:
    bench = Bench(load(folders[0]), kv_pages=600)
    submit_eight(bench)
    return bench.finish()


@pytest.mark.parametrize(
    ("fields", "preempted"),
    [
        ({"pipeline_depth": 1}, False),
        ({"prefill_chunk_tokens": 16, "max_rows": 3}, False),
        ({"kv_pages": 40, "page_size": PAGE}, True),
        ({"kv_pages": 40, "page_size": PAGE, "host_kv_pages": 512}, True),
    ],
)
def test_drafts_are_those_of_the_whole_text(plain_eight, model, monkeypatch, fields, preempted):
    """With prompts from the prefix cache, in pieces, and after rows gave their pages up."""
    checked = CheckedDrafts(monkeypatch, texts_of(plain_eight, {f"r{i}": prompt(i) for i in range(8)}))
    fields = dict(fields)
    if host_pages := fields.pop("host_kv_pages", 0):
        page_bytes = (model.spec.kv_bytes_per_token(model.embed.dtype) + 4) * PAGE
        fields["host_kv_gib"] = host_pages * page_bytes / 2**30
    bench = Bench(model, **NGRAM, **{"kv_pages": 600, **fields})
    submit_eight(bench)
    run_watched(bench)
    bench.close()
    assert_same(bench, plain_eight)
    assert checked.count > 100 and checked.wrong == []
    counters = bench.engine.roster.counters
    drafts = bench.drafts
    assert (counters.preemptions > 0) is preempted
    assert drafts.accepted > 40, "such texts repeat"


@pytest.mark.parametrize("kv_on_swap", ["keep", "recompute"])
def test_a_swap_between_verify_steps(folders, hf_models, kv_on_swap):
    mailbox = Mailbox()
    bench = Bench(load(folders[0]), receiver=mailbox, kv_on_swap=kv_on_swap, recompute_fraction=1.0, **NGRAM)
    for i in range(3):
        bench.submit(f"r{i}", prompt(2 * i), 50, sampling={"temperature": 0.0, "seed": i})
    model = bench.engine.executor.step.model
    swap_in_the_middle(bench, mailbox, Update(1, load(folders[1]), model), 7)
    assert bench.drafts.drafted > 20
    for i in range(3):
        done = bench.completions[f"r{i}", 0]
        assert set(done.versions) == {0, 1}
        assert done.token_ids == replayed(hf_models, prompt(2 * i), done)


def test_auto_takes_both_and_leaves_the_worse_one(model, plain):
    bench = Bench(model, speculation="auto")
    submit_all(bench)
    run_watched(bench)
    bench.close()
    assert_same(bench, plain)
    verifier = find_feature(bench.engine.executor.step.features, DraftVerifier)
    assert verifier.on_device == "ngram"


@pytest.mark.parametrize("depth", [1, 2])
def test_masks_follow_the_drafts_of_rows_with_a_constraint(model, depth):
    """The host gets them with the tokens of their step."""
    rows = {}
    for speculation in ("off", "ngram"):
        bench = Bench(model, speculation=speculation, speculation_tokens=5, pipeline_depth=depth)
        bench.submit("a", prompt_of(9), 60, sampling=SAMPLED, constraint=Cycle([[10], [20], [30]]))
        run_watched(bench)
        bench.close()
        assert bench.tokens("a") == [10, 20, 30] * 20
        rows[speculation] = bench.engine.roster.counters.decode_rows
    assert rows["off"] == 59 and rows["ngram"] < 20


@pytest.mark.parametrize(("draft_s", "later"), [(0.01, True), (9.0, False)])
def test_auto_runs_plain_steps_while_drafts_do_not_pay(model, plain, draft_s, later):
    """Cheap drafts are made now and then, to be compared with the tokens; uploads have nothing of drafts."""
    bench = Bench(model, **fixed_costs({1: 1.0, 72: 72.0}, {1: draft_s, 8: draft_s}), speculation="auto")
    headers = watch_headers(bench)
    submit_all(bench)
    bench.finish()
    assert_same(bench, plain)
    drafting_steps = [i for i, header in enumerate(headers) if NAME in header.facts]
    assert 0 < len(drafting_steps) < len(headers) / 4
    assert all(headers[i].facts[NAME] == ["draft"] for i in drafting_steps)
    assert any(not headers[i].layout for i in drafting_steps) == later
    drafts = {"drafts", "pages", "verified", "paths", "bases"}
    of_drafts = [i for i, header in enumerate(headers) if drafts & header.sections.keys()]
    assert all(any(0 <= i - before <= 3 for before in drafting_steps) for i in of_drafts)


def test_drafts_that_do_not_pay_keep_no_drafter_from_being_asked(model):
    """The drafter rests for seven plans, the device drafts in one of them."""
    fields = {**fixed_costs({1: 1.0, 72: 72.0}, {1: 0.01, 8: 0.01}), "speculation": "auto"}
    bench, drafter = drafting(model, {}, 1.0, **fields)
    asked, path, speculation = [], drafter.path, bench.drafting.planner
    drafter.path = lambda *args: (asked.append(len(plans)), path(*args))[1]
    plans, choose = [], speculation.choose
    speculation.choose = lambda *args: (plans.append(1), choose(*args))[1]
    bench.complete("a", prompt_of(9), 100, sampling=SAMPLED)
    drafts = bench.drafts
    assert drafts.drafted < 20 and len(plans) > 90
    gaps = [later - earlier for earlier, later in pairwise(sorted(set(asked)))]
    assert len(gaps) > 8 and max(gaps) == 8


def test_a_text_that_repeats_takes_fewer_steps(model):
    """Also where the host would still be at the token before."""
    turn = {"temperature": 0.0, "seed": 1, "logit_bias": ((5, 100.0),)}
    steps = {}
    for speculation in ("off", "ngram", "suffix"):
        bench = Bench(model, speculation=speculation, speculation_tokens=4)
        bench.complete("a", prompt_of(9), 60, sampling=turn)
        assert bench.tokens("a") == [5] * 60
        steps[speculation] = bench.engine.roster.counters.decode_rows
        bench.close()
    assert steps["off"] == 59 and steps["suffix"] < 20
    assert steps["ngram"] == 12, "five tokens each, from the first step after the prompt on"


def test_cancels_leave_nothing_behind(model):
    bench = Bench(model, **NGRAM)
    for i in range(6):
        bench.submit(f"r{i}", prompt(i), 60, sampling=SAMPLED, n=2)
    for tick in range(40):
        bench.engine.tick()
        if tick % 6 == 3:
            bench.engine.inbox.put(Cancel(("c", f"r{tick // 6}")))
    run_watched(bench)


def test_the_ids_of_tokens_are_part_of_a_page(model):
    """What the pool of pages takes says so, and only where something reads them."""
    plain, drafted = Bench(model), Bench(model, **NGRAM)
    kv, theirs = drafted.engine.executor.step.kv, plain.engine.executor.step.kv
    assert theirs.tokens is None and kv.tokens is not None
    assert kv.tokens.shape == (kv.pages, kv.page_size) and kv.tensors[-1] is kv.tokens
