"""Completions that repeat themselves end at the first token that completes the repetition."""

from array import array

import numpy as np
import pytest

from rollout.engine.messages.requests import Prior, RepetitionRule
from rollout.engine.sequence.drawn_tokens import Repetition
from rollout.engine.sequence.sequence import row_seed
from tests.support.engine.drafting import drafting
from tests.support.engine.harness import Bench
from tests.support.engine.streams import random_delays

RULES = [RepetitionRule(1, 1, 4), RepetitionRule(1, 3, 3), RepetitionRule(2, 6, 2), RepetitionRule(3, 40, 2)]
#: Few tokens are likely, so that completions repeat themselves.
BIAS = tuple((token, 9.0) for token in (3, 4, 5))


def repeats(tokens: list[int], rule: RepetitionRule) -> bool:
    """True if the tokens end with a repetition: the definition, word by word."""
    sizes = [size for size in range(rule.least, rule.most + 1) if size * rule.count <= len(tokens)]
    return any(tokens[-size * rule.count :] == tokens[-size:] * rule.count for size in sizes)


def ends_at(tokens: list[int], rule: RepetitionRule, first: int = 1, least: int = 0) -> int | None:
    return next((n for n in range(first, len(tokens) + 1) if n >= least and repeats(tokens[:n], rule)), None)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_counters_find_what_the_definition_finds(rule):
    random, found = np.random.default_rng(3), 0
    for _ in range(300):
        tokens = random.integers(0, 1 + random.integers(1, 4), 60).tolist()
        known = int(random.integers(0, 20))
        watch = Repetition(rule.least, rule.most, rule.count, 0, array("i", tokens[:known]))
        for n in range(known + 1, len(tokens) + 1):
            assert watch.found(array("i", tokens[:n])) == repeats(tokens[:n], rule)
            found += repeats(tokens[:n], rule)
    assert found > 100


def asked(prompt_of) -> dict[str, tuple]:
    """Prompt, sampling, and stop settings of each request, by name."""
    made = {}
    for i in range(24):
        sampling = {"temperature": 1.5 * (i % 6 > 0), "seed": i, "logit_bias": BIAS}
        stop = {"token_ids": (4,) if i % 8 == 7 else (), "min_tokens": 12 * (i % 3 == 1)}
        made[f"r{i}"] = prompt_of(5 + i % 4, i), sampling, stop, RULES[i % len(RULES)]
    return made


@pytest.fixture
def plain(model, prompt_of):
    """The tokens without detection, 48 of each request where no stop token comes."""
    bench = Bench(model, max_rows=16)
    for name, (prompt, sampling, stop, _) in asked(prompt_of).items():
        bench.submit(name, prompt, 48, sampling=sampling, stop=stop)
    bench.finish()
    return {name: done.token_ids for (name, _), done in bench.completions.items()}


def check(bench: Bench, plain: dict[str, list[int]], requests: dict[str, tuple]) -> int:
    """How many completions ended by repetition; all have the tokens up to there, and no more."""
    ended = 0
    for name, (_, _, stop, rule) in requests.items():
        done, whole = bench.completions[name, 0], plain[name]
        place = ends_at(whole, rule, least=stop["min_tokens"])
        others = done.finish.reason in ("stop", "length")
        assert done.token_ids == (whole if others else whole[:place])
        assert others == (place is None or place == len(whole)), "a stop token and the length come first"
        assert others or (done.finish.reason, done.finish.stop, done.finish.complete) == ("repetition", None, True)
        ended += not others
    return ended


@pytest.mark.parametrize(
    "engine",
    [
        {"pipeline_depth": 1},
        {"pipeline_depth": 2, "max_rows": 16},
        {"kv_pages": 30, "max_rows": 6, "prefill_chunk_tokens": 6},
        {"speculation": "ngram", "speculation_tokens": 4},
        {"speculation": "suffix", "speculation_tokens": 4},
    ],
    ids=str,
)
def test_a_completion_ends_where_its_tokens_first_repeat_themselves(model, prompt_of, plain, engine):
    bench, requests = Bench(model, random_delays(3), **engine), asked(prompt_of)
    for i, (name, (prompt, sampling, stop, rule)) in enumerate(requests.items()):
        every = 5 * (i % 2)
        bench.submit(name, prompt, 48, sampling=sampling, stop=stop | {"repetition": rule}, stream_every=every)
    bench.run()
    assert check(bench, plain, requests) >= 12


def test_drafts_after_the_repetition_are_dropped(model, prompt_of, plain):
    recorded = {(name, 0): tokens for name, tokens in plain.items()}
    bench, _ = drafting(model, recorded, 0.0, speculation_tokens=5, max_rows=16)
    requests = asked(prompt_of)
    for name, (prompt, sampling, stop, rule) in requests.items():
        bench.submit(name, prompt, 48, sampling=sampling, stop=stop | {"repetition": rule})
    bench.run()
    assert bench.drafts.accepted > 50 and check(bench, plain, requests) >= 12


def test_a_continued_completion_counts_the_tokens_that_it_has(model, prompt_of, plain):
    bench, requests, wanted = Bench(model, max_rows=16), asked(prompt_of), {}
    for name, (prompt, sampling, stop, rule) in requests.items():
        place = ends_at(plain[name], rule, least=stop["min_tokens"])
        if place is None or place == len(plain[name]):
            continue
        for count in {place // 2, place - 1}:
            wanted[f"{name}-{count}"] = plain[name][count:place]
            seed = row_seed(sampling["seed"], 0)
            prior = Prior(np.array(plain[name][:count], np.int32))
            bench.submit(
                f"{name}-{count}",
                prompt,
                48,
                sampling=sampling | {"seed": seed},
                prior=prior,
                stop=stop | {"repetition": rule},
            )
    bench.run()
    assert len(wanted) > 12 and {name: bench.tokens(name) for name in wanted} == wanted


def test_completions_of_a_group_end_on_their_own(model, prompt_of):
    """And those that ended by repetition count for `min_complete`."""
    bench = Bench(model, max_rows=16)
    sampling = {"temperature": 2.0, "seed": 1, "logit_bias": BIAS}
    bench.complete(
        "g", prompt_of(6), 200, n=6, sampling=sampling, stop={"repetition": RepetitionRule(1, 3, 3)}, min_complete=3
    )
    reasons = [bench.completions["g", i].finish.reason for i in range(6)]
    assert reasons.count("repetition") >= 3 and set(reasons) <= {"repetition", "cancelled"}
