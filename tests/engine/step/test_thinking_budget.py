"""Budgets for thoughts: ends are forced exactly where the budget is used up, whatever the engine does meanwhile."""

import numpy as np
import pytest

from rollout.config import EngineSettings
from rollout.constraints.marker import AfterMarker, IdMarker
from rollout.constraints.matcher import ANYTHING, AllowList
from rollout.constraints.thoughts import MOST_IN_FLIGHT, BudgetedConstraint, ThoughtRule, forced_places
from rollout.engine.messages.requests import Prior
from tests.support.engine.constraints import SIZE, AlwaysMaskedBudget, Cycle, X, Y
from tests.support.engine.drafting import drafting
from tests.support.engine.harness import VOCAB, Bench, load
from tests.support.engine.streams import random_delays
from tests.support.kernels.grids import nightly
from tests.support.models.hybrids import make_hybrid

STOP, OPEN, CLOSE, CLOSE_2 = 5, 7, 8, 9
#: Makes starts and ends frequent.
BIAS = ((OPEN, 4.0), (CLOSE, 3.0), (CLOSE_2, 3.0), (STOP, -100.0))
RULES = {"one": ((OPEN,), (CLOSE,)), "two": ((OPEN, 1), (CLOSE, CLOSE_2)), "same": ((OPEN,), (CLOSE, CLOSE, CLOSE_2))}
BUDGETS = (0, 1, 2, 3, 5, 8, 100)


def rule(kind: str, budget: int) -> ThoughtRule:
    return ThoughtRule(budget, *RULES[kind])


def expected_force(prompt: list[int], tokens: list[int], kind: str, budget: int) -> int | None:
    """The token that must follow, read off the whole text: an independent reading of the rule."""
    start, end = (list(mark) for mark in RULES[kind])
    text, opened, place = [*prompt, *tokens], None, 0
    while place < len(text):
        if opened is None and text[place : place + len(start)] == start:
            opened = place = place + len(start)
        elif opened is not None and place < len(prompt) and text[place : place + len(start)] == start:
            opened = place = place + len(start)  # a prompt may speak of starts; the last one counts
        elif opened is not None and text[place : place + len(end)] == end:
            opened, place = None, place + len(end)
        else:
            place += 1
    if opened is None or len(text) - opened < budget:
        return None
    thought = text[opened:]
    parts = [part for part in range(len(end)) if part <= len(thought) and thought[len(thought) - part :] == end[:part]]
    return end[max(parts)]


def submit_all(bench: Bench, prompt_of, always: bool, **more) -> dict[str, tuple]:
    """Requests of every kind and budget between rows without one; returns what was asked, by name."""
    made, asked = AlwaysMaskedBudget if always else BudgetedConstraint, {}
    for i, (kind, budget) in enumerate((kind, budget) for kind in RULES for budget in BUDGETS):
        name, prompt = f"{kind}{budget}", prompt_of(7 + i % 5, i)
        prompt += [(), RULES[kind][0], (*RULES[kind][0], 3, 4), RULES[kind][0][:1]][i % 4]
        sampling = {"temperature": float(i % 5 > 0), "seed": i, "logit_bias": BIAS}
        sampling |= {"repetition_penalty": 1.02, "frequency_penalty": 0.05} if i % 3 == 1 else {}
        fields: dict = {"stop": {"token_ids": (STOP,), "min_tokens": 8 * (i % 4 == 1)}}
        fields |= {"n": 2} if i % 6 == 4 else {}
        fields |= {"logprobs": 3} if i % 5 == 0 else {}
        fields |= {"stream_every": 3} if i % 4 == 2 else {}
        begin = rule(kind, budget).after(np.array(prompt, np.int32), (STOP,))
        bench.submit(name, prompt, 36, sampling=sampling, constraint=made(ANYTHING, begin), **fields, **more)
        bench.submit(f"plain{i}", prompt, 12 + i, sampling={"temperature": 1.0, "seed": i})
        asked[name] = prompt, kind, budget, sampling, fields
    return asked


def check_all(bench: Bench, asked: dict[str, tuple]) -> int:
    """How many tokens were forced; each is where it must be, and no other."""
    forced = 0
    for (name, _), done in bench.completions.items():
        if name.startswith("plain"):
            continue
        prompt, kind, budget, _, _ = asked[name]
        wanted = [expected_force(prompt, done.token_ids[:i], kind, budget) for i in range(len(done.token_ids))]
        places = [i for i, token in enumerate(wanted) if token is not None]
        assert [done.token_ids[i] for i in places] == [wanted[i] for i in places], name
        begin = rule(kind, budget).after(np.array(prompt, np.int32), (STOP,))
        assert forced_places(begin, done.token_ids) == places, name
        assert all(done.drawn_logprobs[i] == 0 for i in places), "nothing else could be drawn"
        assert np.isfinite(done.logprobs).all() and all(done.logprobs[i] < 0 for i in places)
        forced += len(places)
    return forced


def watch_draws(bench: Bench) -> list[bool]:
    """A list that gets of each step that draws: does it wait for masks."""
    seen: list[bool] = []
    bench.observer.at_launch.append(lambda plan: plan.draws and seen.append(plan.draws_later))
    return seen


def outcome(bench: Bench) -> dict:
    return {
        key: (done.token_ids, done.finish.reason, done.finish.stop, done.top_ids)
        for key, done in bench.completions.items()
    }


@pytest.fixture
def reference(model, prompt_of):
    """What an engine gives that makes a mask for every token, one step at a time; and what was asked."""
    bench = Bench(model, pipeline_depth=1, max_rows=16)
    asked = submit_all(bench, prompt_of, always=True)
    bench.run()
    assert check_all(bench, asked) > 80
    bench.close()
    return bench, asked


@pytest.mark.parametrize(
    "engine",
    [
        {"pipeline_depth": 2, "max_rows": 16},
        {"kv_pages": 30, "max_rows": 6, "prefill_chunk_tokens": 6},
        {"speculation": "ngram", "speculation_tokens": 3},
        *nightly({"pipeline_depth": 1, "max_rows": 5}, {"prefix_cache": False, "max_rows": 7}),
    ],
    ids=str,
)
def test_tokens_are_those_of_rows_with_masks(model, prompt_of, reference, engine):
    bench = Bench(model, random_delays(3), **engine)
    asked = submit_all(bench, prompt_of, always=False)
    bench.run()
    check_all(bench, asked)
    assert outcome(bench) == outcome(reference[0])
    assert "kv_pages" not in engine or bench.engine.roster.counters.preemptions > 0


@pytest.mark.parametrize("wrong", [0.0, 0.3])
def test_drafts_change_no_token(model, prompt_of, reference, wrong):
    recorded = {key: done.token_ids for key, done in reference[0].completions.items()}
    bench, _ = drafting(model, recorded, wrong, speculation_tokens=5, max_rows=16)
    submit_all(bench, prompt_of, always=False)
    bench.run()
    assert bench.drafts.accepted > 50
    assert outcome(bench) == outcome(reference[0])


def test_up_to_the_first_forced_token_all_tokens_are_those_without_a_budget(model, prompt_of, reference):
    bench, compared = Bench(model, max_rows=16), 0
    for name, (prompt, _, _, sampling, fields) in reference[1].items():
        bench.submit(name, prompt, 36, sampling=sampling, **fields)
    bench.run()
    for key, done in bench.completions.items():
        prompt, kind, budget, _, _ = reference[1][key[0]]
        theirs = reference[0].completions[key].token_ids
        places = forced_places(rule(kind, budget).after(np.array(prompt, np.int32), (STOP,)), theirs)
        first = places[0] if places else len(theirs)
        assert done.token_ids[:first] == theirs[:first]
        compared += first > 3
    assert compared > 10


def test_a_completion_is_continued_from_any_of_its_tokens(model, prompt_of, reference):
    bench, found = Bench(model, max_rows=16), 0
    for name in ("one3", "two2", "same3", "two100"):
        prompt, kind, budget, sampling, fields = reference[1][name]
        done = reference[0].completions[name, 0]
        for count in range(0, len(done.token_ids) - 1, 2 if kind == "one" else 1):
            prior = done.token_ids[:count]
            begin = rule(kind, budget).after(np.array(prompt, np.int32), (STOP,), prior)
            given = {name: value for name, value in fields.items() if name != "n"}
            bench.submit(
                f"{name}-{count}",
                prompt,
                36,
                sampling=sampling | {"seed": done.seed},
                **given,
                constraint=BudgetedConstraint(ANYTHING, begin),
                prior=Prior(np.array(prior, np.int32), 0, 0),
            )
    bench.run()
    for (name, _), again in bench.completions.items():
        of, count = name.split("-")
        whole = reference[0].completions[of, 0].token_ids
        assert whole[: int(count)] + again.token_ids == whole, name
        found += 1
    assert found > 40


@pytest.mark.parametrize("speculation", ["off", *nightly("ngram")])
@pytest.mark.parametrize("budget", [3, 34, 36])
def test_models_with_states_have_masks_only_near_the_end_of_a_budget(tmp_path, prompt_of, speculation, budget):
    """A state cannot go back by a token, so the masks begin before any token in flight could need one."""
    make_hybrid("Qwen3_5", tmp_path, 0, vocab_size=VOCAB)
    model, found = load(tmp_path), []
    bias = ((OPEN, -100.0), (CLOSE, -100.0), (STOP, -100.0))
    for always in (False, True):
        bench = Bench(model, speculation=speculation)
        waits = watch_draws(bench)
        made = AlwaysMaskedBudget if always else BudgetedConstraint
        for i in range(3):
            begin = rule("one", budget).after(np.array([3, OPEN], np.int32), ())
            sampling = {"temperature": 1.0, "seed": i, "logit_bias": bias}
            bench.submit(f"r{i}", [3, OPEN], 60, sampling=sampling, constraint=made(ANYTHING, begin))
        bench.run()
        tokens = [bench.tokens(f"r{i}") for i in range(3)]
        assert all(each.index(CLOSE) == budget and each.count(CLOSE) == 1 for each in tokens)
        assert all(waits) == (always or budget < 34)
        found.append(tokens)
        bench.close()
    assert found[0] == found[1]


def test_masks_begin_before_the_most_tokens_that_can_be_in_flight():
    limits = EngineSettings.model_fields["speculation_tokens"].metadata
    most_drafts = next(limit.le for limit in limits if hasattr(limit, "le"))
    assert MOST_IN_FLIGHT >= 2 * (1 + most_drafts)


def test_only_the_steps_at_the_end_of_a_budget_wait_for_masks(model, prompt_of):
    bench = Bench(model)
    waits = watch_draws(bench)
    bias = ((OPEN, -100.0), (CLOSE, -100.0), (STOP, -100.0))
    for i in range(4):
        begin = rule("one", 20).after(np.array([3, OPEN], np.int32), ())
        sampling = {"temperature": 1.0, "seed": i, "logit_bias": bias}
        bench.submit(f"r{i}", [3, OPEN], 40, sampling=sampling, constraint=BudgetedConstraint(ANYTHING, begin))
    bench.run()
    assert all(bench.tokens(f"r{i}").index(CLOSE) == 20 for i in range(4))
    assert 1 <= sum(waits) <= 3, "of 40"
    assert bench.engine.roster.counters.zombie_rows <= 4, "no token was drawn in vain, but after the ends"


@pytest.mark.parametrize("drafts", ["off", "ngram"])
def test_a_constraint_begins_after_a_forced_end(model, prompt_of, drafts):
    bench = Bench(model, speculation=drafts)
    for i in range(6):
        begin = rule("one", 4).after(np.array([3, OPEN], np.int32), ())
        inner = AfterMarker(Cycle([X, Y, SIZE], STOP), IdMarker((CLOSE,)))
        sampling = {"temperature": 1.0, "seed": i, "logit_bias": ((STOP, -100.0), (CLOSE, -100.0))}
        bench.submit(f"r{i}", [3, OPEN], 24, sampling=sampling, constraint=BudgetedConstraint(inner, begin))
    bench.run()
    for i in range(6):
        tokens = bench.tokens(f"r{i}")
        assert tokens[4] == CLOSE and CLOSE not in tokens[:4]
        names = dict.fromkeys(X, "x") | dict.fromkeys(Y, "y") | dict.fromkeys(SIZE, "s")
        assert "".join(names.get(token, "?") for token in tokens[5:]) == ("xys" * 10)[: len(tokens) - 5]


def test_a_constraint_that_forbids_the_end_is_stronger(model, prompt_of):
    """Nothing is forced where the constraint does not allow it, and its own tokens go on."""
    bench = Bench(model)
    for name, allowed in (("without", (10, 11, 12)), ("with", (10, 11, 12, CLOSE))):
        begin = rule("one", 4).after(np.array([3, OPEN], np.int32), ())
        constraint = BudgetedConstraint(AllowList(allowed, VOCAB), begin)
        bench.submit(
            name,
            [3, OPEN],
            12,
            sampling={"temperature": 1.0, "seed": 1, "logit_bias": ((CLOSE, -50.0),)},
            constraint=constraint,
        )
    bench.run()
    assert bench.completions["without", 0].finish.reason == "length" and set(bench.tokens("without")) <= {10, 11, 12}
    assert bench.tokens("with").index(CLOSE) == 4
    assert forced_places(rule("one", 4).after(np.array([3, OPEN], np.int32), ()), bench.tokens("without")) == []


def test_a_forced_end_that_is_a_stop_token_ends_the_completion(model, prompt_of):
    bench = Bench(model)
    for name, least in (("now", 0), ("early", 9)):
        begin = rule("one", 4).after(np.array([3, OPEN], np.int32), ())
        bench.submit(
            name,
            [3, OPEN],
            12,
            sampling={"temperature": 1.0, "logit_bias": ((CLOSE, -50.0),)},
            constraint=BudgetedConstraint(ANYTHING, begin),
            stop={"token_ids": (CLOSE,), "min_tokens": least},
        )
    bench.run()
    for name in ("now", "early"):
        assert bench.completions[name, 0].finish.stop == CLOSE and len(bench.tokens(name)) == 5
