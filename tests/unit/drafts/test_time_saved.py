"""What verify steps save is counted against the costs of plain ones, as it was expected and as it was."""

import pytest

from rollout.engine.features.drafts.counts import DraftCounts
from rollout.engine.features.drafts.drafter import NO_HOST_DRAFTER, DraftAfter
from rollout.engine.features.drafts.planner import DraftPlanner
from rollout.engine.features.drafts.step_costs import StepCosts
from rollout.engine.schedule.plan import Plan, Span
from rollout.engine.upload import PLAIN


class Noted(StepCosts):
    """Fixed costs that note what ran."""

    def ran(self, rows, context, drafts, seconds):
        self.noted = rows, context, drafts, seconds


def plan(rows: int, drafts: int) -> Plan:
    """Each row with its drafts, at position 99."""
    spans = [Span(None, 99, 1 + drafts, 1 + drafts) for _ in range(rows)]
    tokens = rows * (1 + drafts)
    return Plan(spans, 0, PLAIN, 100 + drafts, tokens, tokens, [], [])


@pytest.mark.parametrize(
    ("drafts", "after", "tokens", "saved_s", "expected_s"),
    [
        (3, DraftAfter.NOTHING, 6, 3.0 - 1.75, 3.0 - 2.0),
        (3, DraftAfter.DRAFT, 6, 3.0 - 1.75, 3.0 - 2.0 - 0.25),
        (3, DraftAfter.DRAFT, 2, 1.0 - 1.75, 1.0 - 2.0 - 0.25),
        (0, DraftAfter.NOTHING, 2, 0.0, 0.0),
        (0, DraftAfter.DRAFT, 2, 1.0 - 1.75, -0.25),
        (3, DraftAfter.DRAFT, 0, 0.0, 0.0),
    ],
)
def test_time_saved(drafts, after, tokens, saved_s, expected_s):
    """Two rows; plain steps take 1 s, of eight rows 2 s, drafts of the device 0.25 s; this one took 1.75 s."""
    costs = Noted({2: 1.0, 8: 2.0}, padded=True, drafting={1: 0.25, 8: 0.25})
    counts, planner = DraftCounts(), DraftPlanner(NO_HOST_DRAFTER, 3, 64, costs, on_device="heads")
    planner.ran(plan(2, drafts), after, tokens, 1.75, counts)
    assert (counts.saved_s, counts.expected_saved_s) == pytest.approx((saved_s, expected_s))
    assert costs.noted == pytest.approx((2, 200.0, 2 * drafts, 1.5 if after is DraftAfter.DRAFT else 1.75))
