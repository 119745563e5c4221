"""The cost model: its formulas, its two regimes, and the figures that were published for it."""

import pytest

from scripts.bench.cost_model import StepParts, points, zombie_share


def test_a_blocking_step_pays_for_all_parts_and_a_pipelined_one_for_the_longer_side():
    parts = StepParts(forward_s=3.0, sampling_s=0.5, bookkeeping_s=0.7)
    assert parts.blocking_s == pytest.approx(4.2)
    assert parts.pipelined_s == parts.device_s == 3.5
    assert parts.idle_s == 0
    assert parts.speedup() == pytest.approx(1.2)


def test_bookkeeping_that_is_longer_than_the_step_is_hidden_only_in_part():
    parts = StepParts(forward_s=1.0, sampling_s=0.0, bookkeeping_s=3.0)
    assert parts.pipelined_s == 3.0
    assert parts.idle_s == 2.0
    assert parts.speedup() == pytest.approx(4 / 3)


def test_without_bookkeeping_there_is_nothing_to_win():
    assert StepParts(1.0, 0.2, 0.0).speedup() == 1.0


def test_zombies_cost_their_share_of_the_steps():
    parts = StepParts(1.0, 0.0, 0.25)
    assert parts.speedup(zombie_share(4)) == pytest.approx(1.25 * 4 / 5)
    assert zombie_share(99) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("blocking_ms", "pipelined_ms", "length", "published"),
    [(5.44, 5.10, 104, 5.7), (3.11, 2.63, 115, 17.2)],
)
def test_published_single_stream_predictions_come_out(blocking_ms, pipelined_ms, length, published):
    """The post's own rows of one stream: step times and lengths in, its prediction out."""
    parts = StepParts(pipelined_ms, 0.0, blocking_ms - pipelined_ms)
    assert points(parts.speedup(zombie_share(length))) == pytest.approx(published, abs=0.2)


@pytest.mark.parametrize("values", [(-1.0, 2.0, 0.0), (0.0, 0.0, 1.0), (1.0, 0.0, -0.1)])
def test_parts_that_are_no_times_are_refused(values):
    with pytest.raises(ValueError, match="times"):
        StepParts(*values)


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_outside_of_its_range_is_refused(share):
    with pytest.raises(ValueError, match="zombie_share"):
        StepParts(1.0, 0.0, 0.0).speedup(share)
    with pytest.raises(ValueError, match="at least one step"):
        zombie_share(0)
