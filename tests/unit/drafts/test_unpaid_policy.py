"""The drafter on the device while its drafts do not pay: it is asked now and then, and takes its share of the time."""

import math

import pytest

from rollout.engine.features.drafts.drafter import DraftAfter
from rollout.engine.features.drafts.planner import UnpaidPolicy


@pytest.mark.parametrize("idle", [DraftAfter.NOTHING, DraftAfter.READ])
@pytest.mark.parametrize(("share", "draft_s"), [(0.05, 0.1), (0.02, 0.5), (0.5, 0.01)])
def test_unpaid_drafts_take_their_share_of_the_time(idle: DraftAfter, share: float, draft_s: float) -> None:
    policy, drafted, decisions, plans = UnpaidPolicy(share), 0, 0, 4000
    for _ in range(plans):
        work = policy.between()
        if work is None:
            decisions, work = decisions + 1, policy.decide(idle, draft_s, 1.0)
        assert work in (idle, DraftAfter.DRAFT)
        drafted += work is DraftAfter.DRAFT
    assert policy.plans == plans and decisions == 1 + plans // 8
    assert drafted * draft_s <= share * plans
    every = 8 * math.ceil(draft_s / share / 8)  # it drafts at decisions only
    assert abs(drafted - plans / every) <= 1


def test_drafts_that_pay_are_decided_on_after_every_plan() -> None:
    policy = UnpaidPolicy(0.05)
    for _ in range(3):
        assert policy.between() is None
        policy.paid()
    assert policy.decide(DraftAfter.READ, 1.0, 1.0) is DraftAfter.READ
    assert policy.between() is DraftAfter.READ
    policy.paid()
    assert policy.between() is None and policy.plans == 0
