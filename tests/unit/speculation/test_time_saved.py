"""What verify steps save is counted against the costs of plain ones, as it was expected and as it was."""

from __future__ import annotations

import pytest

from rollout.engine.schedule.completion import Counters
from rollout.engine.schedule.plan import Plan, Span
from rollout.engine.schedule.speculation import Speculation
from rollout.engine.sequence.features import PLAIN
from rollout.engine.speculation.step_costs import StepCosts


class Noted(StepCosts):
    """Fixed costs that note what ran."""

    def ran(self, rows, context, drafts, seconds):
        self.noted = rows, context, drafts, seconds


def plan(rows: int, drafts: int, guesses: int) -> Plan:
    """Each row with its drafts, at position 99."""
    spans = [Span(None, 99, 1 + drafts, 1 + drafts) for _ in range(rows)]
    tokens = rows * (1 + drafts)
    return Plan(spans, 0, PLAIN, 100 + drafts, tokens, tokens, [], guesses=guesses)


@pytest.mark.parametrize(
    ("drafts", "guesses", "tokens", "saved_s", "expected_s"),
    [
        (3, -1, 6, 3.0 - 1.75, 3.0 - 2.0),
        (3, 3, 6, 3.0 - 1.75, 3.0 - 2.0 - 0.25),
        (3, 3, 2, 1.0 - 1.75, 1.0 - 2.0 - 0.25),
        (0, -1, 2, 0.0, 0.0),
        (0, 3, 2, 1.0 - 1.75, -0.25),
        (3, 3, 0, 0.0, 0.0),
    ],
)
def test_time_saved(drafts, guesses, tokens, saved_s, expected_s):
    """Two rows; plain steps take 1 s, verify steps of eight rows 2 s, guesses 0.25 s; this one took 1.75 s."""
    costs = Noted({2: 1.0, 8: 2.0}, padded=True, guesses={1: 0.25, 8: 0.25})
    counters, speculation = Counters(), Speculation(None, 3, 64, costs, guesser="heads")
    speculation.ran(plan(2, drafts, guesses), tokens, 1.75, counters)
    assert (counters.saved_s, counters.expected_saved_s) == pytest.approx((saved_s, expected_s))
    assert costs.noted == pytest.approx((2, 200.0, 2 * drafts, 1.5 if guesses > 0 else 1.75))
