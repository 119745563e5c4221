"""Completions with drafts are the completions without, whatever was drafted and however much of it was accepted."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rollout.engine.messages import StopAt
from tests.engine.test_invariants import run_watched
from tests.support.engine.constraints import SIZE, X, Y, Cycle
from tests.support.engine.drafting import drafting, row_by_row
from tests.support.engine.harness import Bench, Completion, load
from tests.support.engine.offloading import PAGE
from tests.support.engine.updates import Mailbox, Update, swap_in_the_middle

SAMPLED = {"temperature": 1.0, "seed": 7}
RULES = [
    SAMPLED,
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"temperature": 1.0, "seed": 5, "logit_bias": ((5, 3.0), (9, -4.0))},
]


def submit_all(bench: Bench, prompt_of, stop: int = 31) -> None:
    """Groups, all kinds of sampling, stops, tops and a constraint."""
    for i, sampling in enumerate(RULES):
        bench.submit(f"rules{i}", prompt_of(5 + 3 * i, i), 18 + i, sampling=sampling, n=1 + i % 2)
    bench.submit("stops", prompt_of(9, 20), 60, sampling=SAMPLED, stop={"token_ids": (stop, 32), "min_tokens": 6}, n=3)
    bench.submit("tops", prompt_of(6, 21), 15, sampling=SAMPLED, top_logprobs=3, stream_every=2)
    bench.submit("one", prompt_of(6, 22), 1, sampling=SAMPLED)
    bench.submit("two", prompt_of(6, 22), 2, sampling=SAMPLED)
    bench.submit("cycle", prompt_of(8, 23), 12, sampling=SAMPLED, constraint=Cycle([X, Y, SIZE]))


def recorded(completions: dict[tuple[str, int], Completion]) -> dict[tuple[str, int], list[int]]:
    return {key: completion.token_ids for key, completion in completions.items()}


def assert_same(mine: Bench, theirs: Bench, exact: bool = False) -> None:
    assert mine.completions.keys() == theirs.completions.keys()
    for key, one in mine.completions.items():
        other = theirs.completions[key]
        assert one.token_ids == other.token_ids, key
        assert (one.finish.reason, one.finish.stop) == (other.finish.reason, other.finish.stop), key
        assert one.versions == other.versions
        for name in ("logprobs", "raw_logprobs", "drawn_logprobs", "top_logprobs"):
            ours, expected = np.array(getattr(one, name)), np.array(getattr(other, name))
            np.testing.assert_allclose(ours, expected, rtol=0, atol=0 if exact else 1e-5, err_msg=f"{key} {name}")
        assert one.top_ids == other.top_ids


@pytest.fixture
def plain(model, prompt_of) -> Bench:
    bench = Bench(model)
    submit_all(bench, prompt_of)
    bench.run()
    bench.close()
    return bench


@pytest.mark.parametrize(("wrong", "ragged"), [(0.0, False), (1.0, False), (0.3, True), (0.1, True)])
@pytest.mark.parametrize("depth", [1, 2])
def test_any_drafts_give_the_same_completions(model, prompt_of, monkeypatch, plain, wrong, ragged, depth):
    fields = {"speculation_tokens": 3 if ragged else 5, "pipeline_depth": depth}
    bench, drafter = drafting(monkeypatch, model, recorded(plain.completions), wrong, depth, ragged, **fields)
    submit_all(bench, prompt_of)
    run_watched(bench)
    bench.close()
    assert_same(bench, plain)
    counters = bench.engine.roster.counters
    assert counters.drafted > 50
    assert counters.accepted == 0 if wrong == 1.0 else counters.accepted > 20
