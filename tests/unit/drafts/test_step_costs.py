"""Rows draft only where the expected tokens are worth the step."""

import numpy as np
import pytest

from rollout.engine.features.drafts.row_drafts import Acceptance
from rollout.engine.features.drafts.step_costs import StepCosts, worthwhile


def chances(p: float, rows: int, most: int = 3) -> np.ndarray:
    return np.repeat((p ** np.arange(1, most + 1))[None], rows, 0)


FLAT = StepCosts({1: 4e-3, 64: 4e-3}, padded=False)
LINEAR = StepCosts({1: 1e-3, 64: 64e-3}, padded=False)


def test_all_rows_draft_where_a_draft_is_free_and_none_where_it_costs_a_row():
    assert worthwhile(chances(0.8, 8), 8, 0, FLAT, 64) == [3] * 8
    assert worthwhile(chances(0.8, 8), 8, 0, LINEAR, 64) == [0] * 8
    assert worthwhile(chances(0.001, 8), 8, 0, FLAT, 64) == [0] * 8, "less than the gain that is asked for"


def test_rows_with_better_drafts_get_more_of_them():
    mixed = np.concatenate([chances(0.9, 1), chances(0.2, 1), np.zeros((1, 3))])
    dear = StepCosts({1: 4.0e-3, 16: 7.0e-3}, padded=False)
    good, poor, none = worthwhile(mixed, 3, 0, dear, 64)
    assert good == 3 and poor < 3 and none == 0
    assert worthwhile(mixed, 3, 0, FLAT, 2) == [2, 0, 0]


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_the_choice_is_the_fastest_of_all_numbers_of_drafts(rows):
    costs = StepCosts({1: 4e-3, 4: 4.1e-3, 8: 6e-3, 16: 9e-3, 64: 30e-3}, padded=True)
    rng = np.random.default_rng(rows)
    chances_MK = rng.random((rows, 1)) ** np.arange(1, 4)
    best, speed = 0, 1.03 * rows / costs.plain_s(rows, 0)
    ordered = np.sort(chances_MK.reshape(-1))[::-1]
    for drafts in range(1, 3 * rows + 1):
        took_s = costs.verify_s(rows, 0.0, np.array([drafts]))[0]
        if (rows + ordered[:drafts].sum()) / took_s > speed:
            best, speed = drafts, (rows + ordered[:drafts].sum()) / took_s
    assert sum(worthwhile(chances_MK, rows, 0, costs, 64)) == best


def test_a_captured_size_costs_the_same_for_all_rows_that_it_holds():
    costs = StepCosts({1: 1.0, 4: 3.0, 8: 2.5}, padded=True)
    assert [costs.plain_s(rows, 0) for rows in (1, 2, 4, 5, 8)] == [1.0, 3.0, 3.0, 3.0, 3.0]


@pytest.mark.parametrize("shares", [False, True])
def test_costs_learn_what_contexts_and_drafts_add(shares):
    costs = StepCosts({1: 1e-3, 64: 1e-3}, padded=False, shares=shares)
    rng = np.random.default_rng(0)
    for context in rng.integers(1_000, 200_000, 300):
        costs.ran(8, context, 0, 1e-3 + 2e-8 * context)
        costs.ran(8, context, 8, 1.5e-3 + 3e-8 * context * (1 if shares else 2))
    assert costs.plain_s(8, 100_000) == pytest.approx(3e-3, rel=0.02)
    assert costs.verify_s(8, 50_000, np.array([8]))[0] == pytest.approx(3e-3 if shares else 4.5e-3, rel=0.03)


@pytest.mark.parametrize("shares", [False, True])
def test_verify_steps_are_assumed_to_cost_what_plain_ones_do_that_read_as_much(shares):
    costs = StepCosts({1: 1e-3, 64: 1e-3}, padded=False, shares=shares)
    for _ in range(200):
        costs.ran(8, 50_000, 0, 2e-3)
    assumed_s = costs.verify_s(8, 50_000, np.array([8]))[0]
    assert assumed_s == pytest.approx(costs.plain_s(8, 50_000 if shares else 100_000))


def test_what_verify_steps_of_many_rows_cost_is_forgotten_where_few_rows_run_plainly():
    costs = StepCosts({1: 1e-3, 64: 1e-3}, padded=False)
    for _ in range(100):
        costs.ran(32, 0, 32, 9e-3)
    assert worthwhile(chances(0.9, 1), 1, 0, costs, 64) == [0], "as dear as it was for 32 rows"
    for _ in range(500):
        costs.ran(1, 0, 0, 1e-3)
    assert costs.verify_s(1, 0, np.array([3]))[0] == pytest.approx(1e-3, rel=0.05)
    assert worthwhile(chances(0.9, 1), 1, 0, costs, 64) == [3]


def test_verify_steps_seem_dear_until_some_plain_ones_have_run():
    """Their contexts are in no table: who stops drafting for them asks again soon."""
    costs = StepCosts({1: 1e-3, 64: 2e-3}, padded=False, shares=True)
    for _ in range(4):
        costs.ran(8, 500_000, 24, 11e-3)
    assert not costs.knows_plain and worthwhile(chances(0.6, 8), 8, 500_000, costs, 64) == [0] * 8
    for _ in range(5):
        costs.ran(8, 500_000, 0, 10e-3)
    assert costs.knows_plain and worthwhile(chances(0.6, 8), 8, 500_000, costs, 64) == [3] * 8


def test_long_contexts_that_are_read_once_do_not_keep_rows_from_drafting():
    for shares in (False, True):
        costs = StepCosts({1: 1e-3, 64: 1e-3}, padded=False, shares=shares)
        for _ in range(200):
            costs.ran(8, 500_000, 0, 11e-3)
        assert worthwhile(chances(0.6, 8), 8, 500_000, costs, 64) == [3 * shares] * 8


def test_a_draft_is_compared_once_its_tokens_are_there():
    row = Acceptance(everything := Acceptance())
    assert row.chance == 0.5
    row.follow([1, 2], 3, [4, 5])
    row.follow([1, 2, 3, 4], 9, [0])
    assert row.chance == 0.5, "the second token is not known"
    row.follow([1, 2, 3, 4, 5], 5, [7, 7])
    assert 0.5 < everything.chance < row.chance
    for i in range(5, 40):
        row.follow([1, 2, 3, 4, 5] + [6] * (i - 4), i + 1, [7, 7])
    assert row.chance < 0.1


def test_what_has_come_of_a_draft_counts_when_its_row_ends():
    row, text = Acceptance(), [1, 2, 3]
    row.follow(text, 3, [4, 5, 6])
    row.settle([*text, 4, 5])
    assert row.chance == 0.5, "the third token may come"
    row.settle([*text, 4, 5], ended=True)
    assert row.chance == (2 + 4 * 0.5) / (2 + 4)
    row.settle([*text, 4, 5, 6], ended=True)
    assert row.chance == (2 + 4 * 0.5) / (2 + 4), "no guess counts twice"
