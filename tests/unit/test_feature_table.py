"""The table in docs/reference/hooks.md that follows one feature through a step is what the code says."""

from inspect import isfunction

import pytest

from rollout.engine.features.scores.feature import ScoresFeature
from rollout.engine.features.scores.taker import ScoreTaker
from scripts.hooks_reference import trace_table


def test_the_table_has_each_hook_of_the_feature_with_a_caller() -> None:
    rows = [line.strip("|").split("|") for line in trace_table("scores").splitlines()[2:]]
    hooks = [hook.strip("`") for _, hook, _ in rows]
    own = [name for kind in (ScoresFeature, ScoreTaker) for name, value in vars(kind).items() if isfunction(value)]
    assert sorted(hooks) == sorted(name for name in own if not name.startswith("_"))
    assert all(callers.startswith("`") and told for callers, _, told in rows)


def test_a_step_meets_the_hooks_in_their_order() -> None:
    table = trace_table("scores")
    places = [table.index(f"`{hook}`") for hook in ("fit", "pack", "prefilled", "computed", "read", "commit")]
    assert places == sorted(places)


@pytest.mark.parametrize("name", ["adapters", "routing", "images", "drafts"])
def test_every_feature_has_such_a_table(name: str) -> None:
    assert "|`pack`|" in trace_table(name) or "|`commit`|" in trace_table(name)
