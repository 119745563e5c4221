"""Completions that end because enough others have, or because they would span too many versions of the weights."""

import numpy as np
import pytest

from rollout.engine.messages.requests import Prior
from rollout.engine.messages.to_service import RequestDone
from tests.support.engine.harness import Bench, load
from tests.support.engine.updates import Mailbox, Update

LENGTHS = {"temperature": 1.0, "seed": 4}
STOPS = tuple(range(0, 97, 12))  # one token in twelve ends a completion: they end far apart


def finished(bench: Bench, name: str, n: int) -> list[str]:
    return [bench.completions[name, i].finish.reason for i in range(n)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("enough", [1, 3, 8])
def test_once_enough_are_complete_the_rest_come_back_as_far_as_they_are(model, prompt_of, depth, enough):
    def run(**fields) -> Bench:
        bench = Bench(model, pipeline_depth=depth, max_rows=4)  # some of the eight wait for a row
        bench.complete("g", prompt_of(9), 60, n=8, sampling=LENGTHS, stop={"token_ids": STOPS}, **fields)
        bench.close()
        return bench

    bench, whole = run(min_complete=enough), run()
    reasons = finished(bench, "g", 8)
    assert sum(reason in ("stop", "length") for reason in reasons) == enough
    assert reasons.count("cancelled") == 8 - enough
    assert bench.engine.meter.totals()["completion/finish_reason/cancelled"] == 8 - enough
    for i in range(8):  # partials are the beginnings of what they would have been
        tokens = bench.tokens("g", i)
        assert tokens == whole.tokens("g", i)[: len(tokens)]
    assert [type(event) for event in bench.events].count(RequestDone) == 1 and isinstance(bench.events[-1], RequestDone)


def test_two_that_end_in_one_step_are_one_too_many_only_if_asked_for(model, prompt_of):
    """All eight end at one step, by length: the first in order counts, the others of that step are cancelled."""
    bench = Bench(model, max_rows=8)
    bench.complete("g", prompt_of(9), 12, n=8, sampling=LENGTHS, min_complete=2)
    assert sorted(finished(bench, "g", 8)) == ["cancelled"] * 6 + ["length"] * 2


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("span", [0, 1, None])
def test_a_completion_ends_before_its_versions_span_too_much(folders, model, prompt_of, depth, span):
    mailbox = Mailbox()
    bench = Bench(model, None, mailbox, pipeline_depth=depth)
    other = load(folders[1])
    bench.submit("r", prompt_of(9), 60, max_version_span=span)
    bench.submit("free", prompt_of(8, 1), 60)
    for version in (1, 2):
        bench.ticks(12)
        mailbox.ready = Update(version, other, model)
    bench.run()
    versions = bench.completions["r", 0].versions
    assert bench.completions["r", 0].finish.reason == ("length" if span is None else "stale")
    assert sorted(set(versions)) == list(range(3 if span is None else span + 1))
    ours, free = len(versions), bench.completions["free", 0].versions
    assert versions == free[:ours], "not a token of a version that fits is lost"
    assert ours == len(free) or free[ours] - versions[0] > span
    assert bench.completions["free", 0].finish.reason == "length"


def test_one_that_waits_when_it_becomes_too_old_takes_no_row_again(folders, model, prompt_of):
    mailbox = Mailbox()
    bench = Bench(model, None, mailbox, max_rows=1)
    prior = Prior(np.array([3, 4], dtype=np.int32), oldest_version=0, newest_version=0)
    bench.submit("first", prompt_of(9), 30)
    bench.submit("old", prompt_of(9, 1), 30, prior=prior, max_version_span=0)
    bench.submit("unknown", prompt_of(9, 1), 30, prior=Prior(prior.token_ids), max_version_span=0)
    bench.ticks(5)
    mailbox.ready = Update(1, load(folders[1]), model)
    bench.run()
    assert bench.completions["old", 0].finish.reason == "stale" and bench.tokens("old") == []
    assert bench.completions["unknown", 0].finish.reason == "length", "what is not known does not count"
    assert bench.engine.roster.counters.prompt_tokens == 18, "nothing was prefilled for it"


@pytest.mark.parametrize(("span", "reason"), [(1, "stale"), (5, "length")])
def test_a_completion_that_goes_on_with_older_weights_counts_them_too(model, prompt_of, span, reason):
    """As after a restart of the worker, which begins with the weights of its folder."""
    bench = Bench(model)
    bench.complete("r", prompt_of(9), 20, prior=Prior(np.array([3, 4], np.int32), 5, 5), max_version_span=span)
    assert bench.completions["r", 0].finish.reason == reason
    assert bool(bench.tokens("r")) == (reason == "length")


def test_one_that_waits_for_a_newer_version_is_not_too_old_for_those_before(folders, model, prompt_of):
    mailbox = Mailbox()
    bench = Bench(model, None, mailbox)
    prior = Prior(np.array([3, 4], np.int32), 2, 2)
    bench.submit("r", prompt_of(9), 20, prior=prior, max_version_span=0, min_version=2)
    for version in (1, 2):
        mailbox.ready = Update(version, load(folders[1]), model)
        bench.ticks(4)
    bench.run()
    assert bench.completions["r", 0].finish.reason == "length"
